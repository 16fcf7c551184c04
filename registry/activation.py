"""Activations: the rule for PReLU, and a derivative for GELU.

The slopes of PReLU are weights, and ζ is its output.
"""

import math
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry.lookup import register
from keras_fastclip.registry.terms import (
    Small,
    at_least_float32,
    sum_to_shape,
)


@register(keras.layers.PReLU)
def prelu(layer, inputs):
    negative = at_least_float32(tf.nn.relu(-inputs))
    shape = tuple(layer.alpha.shape)
    term = Small(layer.alpha, lambda g: sum_to_shape(-g * negative, shape))
    return type(layer).call(layer, inputs), [term]


def with_own_derivative(activation: Callable | None) -> Callable | None:
    """The same function, with a faster derivative where there is one."""
    return _gelu if activation is keras.activations.gelu else activation


def _gelu(z):
    """z·Φ(z), whose derivative is Φ(z) + z·φ(z).

    Until the backward pass, z and Φ(z) are all that is held; plain
    differentiation holds what each of its operations needs.
    """
    if z.dtype not in (tf.float32, tf.float64):
        return keras.activations.gelu(z)
    return _keras.custom_gradient(_gelu_and_derivative)(z)


def _gelu_and_derivative(z):
    # As in TensorFlow, where it has the precision of float32 in all types.
    root = tf.cast(math.sqrt(0.5), z.dtype)
    below = 0.5 * tf.math.erfc(-root * z)

    def backward(g):
        density = tf.exp(-tf.square(root * z)) * (root / math.sqrt(math.pi))
        return g * (below + z * density)

    return z * below, backward
