"""Layers that run another layer many times, written as one call of it.

A rewritten `call` computes what the layer computes, in one call of the layer
inside it, which is then captured by its own rule: the more rows an example
has, the less of this need be known there.
"""

import keras
import tensorflow as tf

from keras_fastclip import _keras


def time_distributed(layer, inputs, training=None, mask=None):
    """Folds the steps into the batch axis, rather than loop over them."""
    inner, kwargs = layer.layer, {}
    if _keras.has_mask_argument(inner) and mask is not None:
        kwargs["mask"] = _folded(tf.convert_to_tensor(mask))
    if _keras.has_training_argument(inner):
        kwargs["training"] = training
    outputs = inner.call(_folded(inputs), **kwargs)
    shape = tf.concat([tf.shape(inputs)[:2], tf.shape(outputs)[1:]], 0)
    unfolded = tf.reshape(outputs, shape)
    unfolded.set_shape([*inputs.shape[:2], *outputs.shape[1:]])
    return unfolded


def _folded(tensor):
    """(B, T, ...) -> (B·T, ...)."""
    folded = tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))
    folded.set_shape([None, *tensor.shape[2:]])
    return folded


def bidirectional(layer, *args, **kwargs):
    """Calls the two layers, where on GPUs Keras has one operation for both."""
    with _keras.fused_directions_off(layer):
        return type(layer).call(layer, *args, **kwargs)


_REWRITES = {
    keras.layers.Bidirectional: bidirectional,
    keras.layers.TimeDistributed: time_distributed,
}


def rewrite_of(layer: keras.Layer):
    """Another way to run a layer, or None."""
    if "call" in vars(layer) or _draws(layer):
        return None
    for base, rewrite in _REWRITES.items():
        if isinstance(layer, base) and type(layer).call is base.call:
            return rewrite
    return None


def _draws(layer):
    """Bidirectional layers with dropout; Keras does not fuse them."""
    directions = (
        getattr(layer, "forward_layer", None),
        getattr(layer, "backward_layer", None),
    )
    return any(
        getattr(cell, "dropout", 0) or getattr(cell, "recurrent_dropout", 0)
        for cell in (getattr(d, "cell", None) for d in directions)
    )
