"""Rules for normalizations whose scale and offset act by broadcasting.

ζ is the output x̂·γ + β, where x̂, the normalized input, depends on no weight.
The layer itself computes x̂, with γ = 1 and β = 0 in place of its weights.
"""

import keras
import tensorflow as tf

from keras_fastclip.registry.lookup import register
from keras_fastclip.registry.terms import Small, at_least_float32


@register(keras.layers.LayerNormalization)
def layer_normalization(layer, inputs):
    if layer.rms_scaling:
        return NotImplemented
    return _affine(layer, inputs, layer.gamma, layer.beta)


@register(keras.layers.RMSNormalization)
def rms_normalization(layer, x):
    # Keras aligns the scale with the last axes, whichever it normalizes.
    axes = _axes(layer.axis, x.shape.rank)
    if axes != list(range(x.shape.rank - len(axes), x.shape.rank)):
        return NotImplemented
    return _affine(layer, x, layer.scale, None)


@register(keras.layers.GroupNormalization)
def group_normalization(layer, inputs):
    return _affine(layer, inputs, layer.gamma, layer.beta)


def _affine(layer, inputs, gamma, beta):
    axes = _axes(layer.axis, inputs.shape.rank)
    if 0 in axes or axes != sorted(axes):
        return NotImplemented
    neutral = []
    if gamma is not None:
        neutral.append((gamma, tf.ones(gamma.shape, gamma.dtype)))
    if beta is not None:
        neutral.append((beta, tf.zeros(beta.shape, beta.dtype)))
    with keras.StatelessScope(neutral):
        normalized = type(layer).call(layer, inputs)

    others = [i for i in range(1, inputs.shape.rank) if i not in axes]

    def broadcast(weight):
        sizes = iter(weight.shape)
        shape = [
            next(sizes) if i in axes else 1 for i in range(inputs.shape.rank)
        ]
        return keras.ops.reshape(weight, shape)

    def to_weight(rows):
        return tf.reduce_sum(rows, others) if others else rows

    zeta, terms = normalized, []
    if gamma is not None:
        zeta = zeta * keras.ops.cast(broadcast(gamma), zeta.dtype)
        unscaled = at_least_float32(normalized)
        terms.append(Small(gamma, lambda g: to_weight(g * unscaled)))
    if beta is not None:
        zeta = zeta + keras.ops.cast(broadcast(beta), zeta.dtype)
        terms.append(Small(beta, to_weight))
    return zeta, terms


def _axes(axis, rank):
    axes = [axis] if isinstance(axis, int) else list(axis)
    return [a % rank for a in axes]
