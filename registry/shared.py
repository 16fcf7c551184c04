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
    ghost_norm,
    gram_product,
    long_units,
    rounded_up,
    spread,
    units,
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
    if not kernels:
        return lookup_norm(*lookup)
    (a, g), (ids, u) = kernel, lookup
    at_ids = tf.gather(a, ids, axis=2, batch_dims=1)
    cross = at_ids * tf.matmul(g, u, transpose_b=True)
    total, error, reach = gram_product(a, g)
    total += lookup_norm(ids, u) + 2 * tf.reduce_sum(cross, [1, 2])
    # The lookup adds up to T rows of u to one, and squares that.
    positions = tf.cast(tf.shape(a)[-2] + tf.shape(u)[-2], total.dtype)
    lengths_g, lengths_u = tf.norm(g, axis=-1), tf.norm(u, axis=-1)
    looked_up, long = tf.reduce_sum(lengths_u, 1), long_units(positions)
    error += (units(positions) + long) * tf.square(looked_up)
    crossed = 2 * spread(at_ids, lengths_g, lengths_u)
    error += (units(u.shape[-1]) + long) * crossed
    return rounded_up(total, error, tf.square(reach + looked_up), positions)


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
