"""Ω of a weight that is used several times in a forward pass.

The gradient of an example is the sum over the uses, so the norm has cross
terms. Uses as a kernel are one use with the positions of all: a and g are
joined along T. Lookups in a table are one lookup with the ids of all. Between
a table's lookups (ids, u) and its use as a kernel (a, g), as when an embedding
is tied to the output projection, the cross term is

    Σₛₜ aₛ[idₜ] · ⟨gₛ, uₜ⟩,

since a lookup is a kernel applied to one-hot inputs.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_fastclip.registry.convolution import Convolution
from keras_fastclip.registry.embedding import Lookup, lookup_norm
from keras_fastclip.registry.linear import (
    Linear,
    Product,
    ghost_norm,
    gram_product,
    rounded_up,
    roundoff,
    sum_of_products,
    sum_roundoff,
)


def omega(uses: Sequence[Any], form: str | None = None) -> tf.Tensor | None:
    """The squared norm of each example, or None without a closed form.

    Args:
        uses: terms of one weight with their cotangents; each has `term`, `g`,
            `rows` and `unit`.
        form: of the ghost norm, for uses as a kernel only.
    """
    kernels = [use for use in uses if isinstance(use.term, Linear)]
    lookups = [use for use in uses if isinstance(use.term, Lookup)]
    if not can_join(uses):
        return None
    kernel = _joined(kernels, axis=-2)
    lookup = _joined(lookups, axis=1)
    if not lookups:
        return ghost_norm(*kernel, form)
    squares, drift = lookup_norm(*lookup)
    if not kernels:
        return tf.square(tf.sqrt(squares) + 2 * drift)
    product = gram_product(*kernel)
    cross, error = _cross_term(*kernel, *lookup)
    error += product.error + drift * (2 * tf.sqrt(squares) + drift)
    error += roundoff(cross.dtype, 4) * (
        tf.abs(product.value) + squares + tf.abs(cross)
    )
    total = product.value + squares + cross
    return rounded_up(Product(total, error, product.drift + drift))


def _cross_term(a, g, ids, u):
    """Twice the sum over s and t, and by how much it may be off."""
    at_ids = tf.gather(a, ids, axis=2, batch_dims=1)
    cross = sum_of_products(at_ids, tf.matmul(g, u, transpose_b=True))
    units = roundoff(g.dtype, u.shape[-1] + 4)
    units += sum_roundoff(g.dtype, tf.cast(tf.shape(u)[-2], g.dtype))
    lengths = tf.linalg.matvec(tf.abs(at_ids), tf.norm(u, axis=-1))
    reach = tf.reduce_sum(tf.norm(g, axis=-1) * lengths, -1)
    return 2 * cross, 2 * units * reach


def prefers_omega(uses: Sequence[Any]) -> bool:
    """Whether Ω takes less memory than the gradients of all examples."""
    if any(isinstance(use.term, Lookup) for use in uses):
        return True
    if not all(isinstance(use.term, Linear) for use in uses):
        return False
    positions = [use.term.positions(use.rows) for use in uses]
    if None in positions:
        return True
    return 2 * sum(positions) ** 2 < uses[0].term.size


def can_join(uses: Sequence[Any]) -> bool:
    """Whether there is a closed form for all uses together."""
    kernels = [use for use in uses if isinstance(use.term, Linear)]
    lookups = [use for use in uses if isinstance(use.term, Lookup)]
    if len(kernels) + len(lookups) < len(uses):
        return False
    if len({tuple(map(id, use.term.variables)) for use in uses}) > 1:
        return False
    if any(isinstance(use.term, Convolution) for use in kernels):
        return False
    if len({use.term.form for use in kernels}) > 1:
        return False
    # A weight that is not its own matrix must be turned into one alike.
    as_matrix = all(use.term.is_matrix for use in kernels)
    one_layer = len({id(use.unit.layer) for use in uses}) == 1
    return as_matrix or (one_layer and not lookups)


def _joined(uses, axis):
    if not uses:
        return None
    pairs = [use.term.pair(use.g, use.rows) for use in uses]
    firsts, seconds = zip(*pairs, strict=True)
    ids_or_a = [tf.cast(first, firsts[0].dtype) for first in firsts]
    return tf.concat(ids_or_a, axis), tf.concat(seconds, axis)
