"""The rule for PReLU, whose slopes are weights: ζ is the output."""

import keras
import tensorflow as tf

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
