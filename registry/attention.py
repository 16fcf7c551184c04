"""Rules for Attention and AdditiveAttention: ζ is the scores.

Multi-head attention has no weights but those of its sublayers, which have
their own rules. What it does between them is written here in another way.
"""

import keras
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry.lookup import register
from keras_fastclip.registry.terms import Small, at_least_float32


@register(keras.layers.Attention)
@register(keras.layers.AdditiveAttention)
def attention(layer, inputs, mask=None, training=False, **options):
    query, key = inputs[0], inputs[-1]
    zeta = _keras.attention_scores(layer, query, key)
    if isinstance(layer, keras.layers.AdditiveAttention):
        terms = _additive(layer, query, key)
    elif layer.score_mode == "dot":
        products = tf.matmul(query, key, transpose_b=True)
        terms = [_scalar(layer.scale, products)]
    else:
        terms = _concatenated(layer, query, key)

    def psi(zeta):
        return _keras.attention_from_scores(
            layer, zeta, inputs, mask=mask, training=training, **options
        )

    return zeta, terms, psi


def _additive(layer, query, key):
    """Σ scale · tanh(q + k) over features."""
    angles = at_least_float32(tf.tanh(_sums(query, key)))

    def per_row(g):
        inner = list(range(1, g.shape.rank))
        return tf.reduce_sum(g[..., None] * angles, inner)

    return [Small(layer.scale, per_row)]


def _concatenated(layer, query, key):
    """weight · Σ tanh(scale · (q + k)) over features."""
    weight = layer.concat_score_weight
    sums, scale = _sums(query, key), 1
    if layer.scale is not None:
        scale = tf.cast(tf.convert_to_tensor(layer.scale), sums.dtype)
    angles = tf.tanh(scale * sums)
    terms = [_scalar(weight, tf.reduce_sum(angles, -1))]
    if layer.scale is not None:
        slopes = tf.reduce_sum((1 - tf.square(angles)) * sums, -1)
        slopes *= tf.cast(tf.convert_to_tensor(weight), slopes.dtype)
        terms.append(_scalar(layer.scale, slopes))
    return terms


def _sums(query, key):
    """q + k of all pairs, (rows, Tq, Tv, d)."""
    return query[..., :, None, :] + key[..., None, :, :]


def _scalar(variable, slopes):
    """A single number, given the derivative of ζ by it."""
    slopes = at_least_float32(slopes)

    def per_row(g):
        return tf.reduce_sum(g * slopes, list(range(1, g.shape.rank)))

    return Small(variable, per_row)


@_keras.attention.by
def _multi_head(query, key, value, bias, mask, is_causal, scale):
    """Keras's attention, (B, T, heads, width) each, by products of matrices.

    Heads are brought to the front once. The einsums of Keras do so each by
    itself, and again in the backward pass.
    """
    own = query.dtype in (tf.float32, tf.float64) and _keras.on_cpu()
    shapes = {(t.shape[0], t.shape[2]) for t in (query, key, value)}
    # Products would repeat what has an axis of size one; Keras refuses it.
    if not own or len(shapes) > 1 or query.shape[2] is None:
        return _keras.attention.original(
            query, key, value, bias, mask, is_causal, scale
        )
    query *= tf.cast(scale, query.dtype)
    query, key, value = map(_heads_exchanged, (query, key, value))
    scores = tf.matmul(query, key, transpose_b=True)
    if bias is not None:
        scores += tf.cast(bias, scores.dtype)
    shares = tf.nn.softmax(_keras.masked_scores(scores, mask, is_causal))
    return _heads_exchanged(tf.matmul(shares, value))


def _heads_exchanged(tensor):
    """(B, T, heads, width) -> (B, heads, T, width), and back."""
    return tf.transpose(tensor, [0, 2, 1, 3])
