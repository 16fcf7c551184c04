"""Rules for embeddings: ζ is the rows that were looked up, or the logits."""

import math

import keras
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry import lora
from keras_fastclip.registry.dense import positions
from keras_fastclip.registry.linear import (
    Linear,
    roundoff,
    times_transposed,
)
from keras_fastclip.registry.lookup import for_quantized, register
from keras_fastclip.registry.terms import (
    Term,
    at_least_float32,
    is_computed,
    itself,
    sum_of_squares,
)


@register(keras.layers.Embedding)
@for_quantized
def embedding(layer, inputs):
    computed = is_computed(layer, "embeddings")
    if computed or not isinstance(inputs, tf.Tensor):
        return NotImplemented
    ids = inputs
    if ids.dtype not in (tf.int32, tf.int64):
        ids = tf.cast(ids, tf.int32)
    # Negative ids count from the end of the table.
    ids = tf.where(ids < 0, ids + layer.input_dim, ids)
    plain = not layer.lora_enabled and layer.quantization_mode is None
    if plain and type(layer).call is keras.layers.Embedding.call:
        rows = _keras.rows_of(layer.embeddings, ids)
        zeta = tf.cast(rows, layer.compute_dtype)
    else:
        zeta = _keras.up_to_activation(layer, inputs)
    if layer.lora_enabled:
        a, b, scale = lora.factors(layer, zeta.dtype, "embeddings")
        low = positions(scale * tf.gather(a, ids))
        terms = [
            Lookup(
                layer.lora_embeddings_a,
                ids,
                lambda g: scale * times_transposed(g, b),
            ),
            Linear(layer.lora_embeddings_b, low, positions),
        ]
    elif layer.quantization_mode is None:
        terms = [Lookup(layer.embeddings, ids)]
    else:
        terms = []
    return zeta, terms, itself


@register(keras.layers.ReversibleEmbedding)
@for_quantized
def reversible_embedding(layer, inputs, reverse=False):
    """Forward a lookup; reversed, the table or its twin is a kernel."""
    if not reverse:
        return embedding(layer, inputs)
    if layer.quantization_mode is not None:
        # Keras leaves LoRA out here, so no trained weight is used.
        return _keras.up_to_activation(layer, inputs, reverse=True), [], itself
    if is_computed(layer, "embeddings"):
        return NotImplemented
    if layer.reverse_dtype is not None:
        inputs = keras.ops.cast(inputs, layer.reverse_dtype)
    dtype = inputs.dtype
    x = positions(inputs)
    if not layer.tie_weights:
        kernel = keras.ops.cast(layer.reverse_embeddings, dtype)
        terms = [Linear(layer.reverse_embeddings, x, positions)]
    else:
        kernel = keras.ops.transpose(keras.ops.cast(layer.embeddings, dtype))
        terms = [Projection(layer.embeddings, x, positions)]
    if layer.tie_weights and layer.lora_enabled:
        a, b, scale = lora.factors(layer, dtype, "embeddings")
        low = scale * times_transposed(x, b)
        terms = [
            Projection(layer.lora_embeddings_a, low, positions),
            Projection(
                layer.lora_embeddings_b,
                x,
                lambda g: scale * tf.matmul(positions(g), tf.cast(a, g.dtype)),
            ),
        ]
    zeta = keras.ops.matmul(inputs, kernel)

    def soft_cap(logits):
        if layer.logit_soft_cap is None:
            return logits
        cap = layer.logit_soft_cap
        return keras.ops.tanh(logits / cap) * cap

    return zeta, terms, soft_cap


class Projection(Linear):
    """A table of rows, (p, d), used as the transpose of a kernel.

    The gradient of an example is gᵀa: `Linear` with a and g exchanged.
    """

    def _with_width(self, a):
        return tf.ensure_shape(a, [*a.shape[:-1], self.variables[0].shape[1]])

    def pair(self, g, rows):
        a, g = super().pair(g, rows)
        return g, a

    def _sum(self, a, g):
        return super()._sum(g, a)


class Lookup(Term):
    """Rows of a table taken by the ids of a call.

    The gradient of an example has one row for each distinct id, the sum of the
    cotangents at all positions that hold the id. So the squared norm needs
    those sums only, never a table for each example: sort the ids of an
    example, add up the cotangents of equal neighbours, square.

    With ids [7, 3, 7] and cotangents [u, v, w] the gradient is v in row 3 and
    u + w in row 7, and its squared norm is ‖v‖² + ‖u + w‖².

    Args:
        table: the weight, (vocabulary, width).
        ids: (rows, ...).
        canonical: maps the cotangent of ζ to that of the rows looked up, if
            they are not the same.
    """

    has_omega = True

    def __init__(self, table, ids: tf.Tensor, canonical=None):
        self.variables = (table,)
        # Ids that the table does not have are an error on a CPU; elsewhere
        # TensorFlow takes some row or none, and lets their gradients go.
        self._known = None
        if not _keras.on_cpu():
            self._known = (ids >= 0) & (ids < table.shape[0])
            ids = tf.where(self._known, ids, tf.zeros_like(ids))
        self._ids = ids
        self._canonical = canonical or itself

    def _cotangent(self, g):
        """The cotangent of the rows looked up; zero for unknown ids."""
        g = self._canonical(at_least_float32(g))
        if self._known is None:
            return g
        return tf.where(self._known[..., None], g, tf.zeros([], g.dtype))

    @property
    def _width(self):
        return self.variables[0].shape[1]

    @property
    def _vocabulary(self):
        return self.variables[0].shape[0]

    def pair(self, g, rows):
        """ids (B, q) and cotangents (B, q, width)."""
        g = self._cotangent(g)
        examples = tf.shape(self._ids)[0] // rows.per_example
        ids = tf.reshape(rows.fold(self._ids), [examples, -1])
        g = tf.reshape(rows.fold(g), [examples, -1, self._width])
        return ids, g

    def adjoint(self, g, keep):
        del keep  # ids are always finite
        # A frequent id has many summands, too many for half precision.
        g = self._cotangent(g)
        flat = tf.reshape(g, [-1, self._width])
        ids = tf.reshape(self._ids, [-1])
        return (tf.math.unsorted_segment_sum(flat, ids, self._vocabulary),)

    def per_example(self, g, rows, form=None):
        ids, g = self.pair(g, rows)
        examples = tf.range(tf.shape(ids)[0], dtype=ids.dtype)[:, None]
        cells = examples * self._vocabulary + ids
        count = tf.shape(ids)[0] * self._vocabulary
        flat = tf.reshape(g, [-1, self._width])
        summed = tf.math.unsorted_segment_sum(
            flat, tf.reshape(cells, [-1]), count
        )
        return (tf.reshape(summed, [-1, self._vocabulary, self._width]),)

    def omega(self, g, rows, form=None):
        squares, drift = lookup_norm(*self.pair(g, rows))
        # Of this sum, and of the one of gradients, in another order.
        return tf.square(tf.sqrt(squares) + 2 * drift)

    def prefers_omega(self, rows):
        return True

    def sizes(self, rows):
        axes = self._ids.shape[1:]
        count = None if None in axes else math.prod(axes) * rows.per_example
        return count, self._vocabulary, self._width


def lookup_norm(ids: tf.Tensor, g: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Σ over the ids of an example of ‖sum of its cotangents‖².

    Args:
        ids: (B, q).
        g: (B, q, width).

    Returns:
        That, and how far rounding may move the gradient, whose norm is the
        root of it: where an id has n cotangents that are not zero, n units of
        roundoff times the sum of their lengths. Both have shape (B,).
    """
    shape = tf.shape(ids)
    order = tf.argsort(ids, axis=1)
    ids = tf.gather(ids, order, batch_dims=1)
    g = tf.gather(g, order, batch_dims=1)
    new = tf.cast(ids[:, 1:] != ids[:, :-1], tf.int32)
    # The first position of every example opens a segment; segments are
    # numbered within the example and then shifted by its position.
    within = tf.pad(tf.cumsum(new, axis=1), [[0, 0], [1, 0]])
    segments = within + tf.range(shape[0])[:, None] * shape[1]

    def summed(tensor):
        sums = tf.math.unsorted_segment_sum(
            tf.reshape(tensor, [-1, tensor.shape[-1]]),
            tf.reshape(segments, [-1]),
            shape[0] * shape[1],
        )
        return tf.reshape(sums, [shape[0], shape[1], tensor.shape[-1]])

    lengths = tf.norm(g, axis=-1)
    some = tf.cast(lengths > 0, g.dtype)
    sizes = summed(tf.stack([lengths, some], -1))
    moved = roundoff(g.dtype, sizes[..., 1] + 2) * sizes[..., 0]
    return sum_of_squares(summed(g), [1, 2]), tf.norm(moved, axis=-1)
