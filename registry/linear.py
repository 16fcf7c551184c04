"""The generalized linear case: one object for a kernel applied to inputs.

A kernel W of shape (d, p) maps the input a (rows, T, d) to (rows, T, p). With
the cotangent g of the result, the gradient of one example is aᵀg. Its squared
norm has two forms:

- ghost: ⟨aaᵀ, ggᵀ⟩, time 2T²(p + d) and memory 2T² an example;
- instantiated: ‖aᵀg‖², time 2Tpd and memory pd an example.

Dense, EinsumDense and convolutions all reduce to it. A kernel that consists
of independent blocks (the groups of a convolution, an axis that an einsum
shares between input, kernel and output) has a block axis: a (rows, T, S, d)
and g (rows, T, S, p).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from keras_fastclip.planner import Sizes
from keras_fastclip.registry.terms import (
    Rows,
    Term,
    at_least_float32,
    itself,
    select_rows,
)


class Linear(Term):
    """A kernel applied to the input `a` of a call.

    Args:
        kernel: the weight.
        a: (rows, T, d), or (rows, T, S, d) for a kernel of S blocks.
        canonical: maps the cotangent of ζ to the form of `a`, with p for d.
        to_kernel: maps (..., d, p) or (..., S, d, p) to (..., *kernel shape);
            by default the kernel is the matrix itself.
    """

    has_omega = True

    def __init__(
        self,
        kernel,
        a: tf.Tensor,
        canonical: Callable[[tf.Tensor], tf.Tensor],
        to_kernel: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ):
        self.variables = (kernel,)
        self._canonical = canonical
        self._to_kernel = to_kernel or itself
        self.is_matrix = to_kernel is None
        if self.is_matrix:
            a = self._with_width(a)
        self._a = a
        self._positions = a.shape[1]
        self._blocks = a.shape[2] if a.shape.rank == 4 else 1

    def _with_width(self, a):
        """a with d known while tracing; a graph may have lost it."""
        if a.shape[-1] is not None:
            return a
        return tf.ensure_shape(a, [*a.shape[:-1], self.variables[0].shape[0]])

    def pair(self, g, rows: Rows):
        """a and g as (B, T, d) and (B, T, p), or with blocks (B, S, T, ·)."""
        a = at_least_float32(self._a)
        # In float32 before anything is done to it, as in the sum.
        g = self._canonical(at_least_float32(g))
        return by_example(a, rows), by_example(g, rows)

    def adjoint(self, g, keep):
        a = select_rows(keep, at_least_float32(self._a))
        g = self._canonical(at_least_float32(g))
        if a.shape.rank == 4:
            return self._weights(tf.einsum("btsd,btsp->sdp", a, g))
        # One 2-D product is faster than what autodiff makes of a 3-D one.
        a = tf.reshape(a, [-1, a.shape[-1]])
        g = tf.reshape(g, [-1, g.shape[-1]])
        return self._weights(tf.matmul(a, g, transpose_a=True))

    def _weights(self, matrices):
        return (self._to_kernel(matrices),)

    def per_example(self, g, rows):
        a, g = self.pair(g, rows)
        return self._weights(tf.matmul(a, g, transpose_a=True))

    def omega(self, g, rows):
        return ghost_norm(*self.pair(g, rows))

    def prefers_omega(self, rows):
        """2T² < pd, the rule of mixed ghost clipping (Bu et al., 2022)."""
        positions = self.positions(rows)
        if positions is None:
            return True
        return 2 * self._blocks * positions**2 < self.size

    @property
    def size(self) -> int:
        """The number of weights."""
        return sum(math.prod(variable.shape) for variable in self.variables)

    @property
    def form(self) -> tuple:
        """What must be alike in terms that are joined."""
        return self.is_matrix, self._blocks

    def sizes(self, rows):
        p = self.variables[0].shape[-1]
        return self.positions(rows), self.size // p, p

    def plan_sizes(self, rows):
        positions = self.positions(rows)
        if positions is None:
            return None
        p = self.variables[0].shape[-1] // self._blocks
        d = self.size // (p * self._blocks)
        return Sizes(positions, d, p, self._blocks)

    def positions(self, rows: Rows) -> int | None:
        """T of an example, if it is known while tracing."""
        if self._positions is None:
            return None
        return self._positions * rows.per_example


class Later(Linear):
    """A kernel whose input is known only after ζ, as in a loop.

    Args:
        kernel: the weight.
        a: returns the input in the form that `Linear` takes.
        canonical: as for `Linear`.
        to_kernel: as for `Linear`.
        positions: T, or None if it is not known while tracing.
        blocks: S.
    """

    def __init__(
        self, kernel, a, canonical, to_kernel=None, *, positions, blocks=1
    ):
        self.variables = (kernel,)
        self._later = a
        self._canonical = canonical
        self._to_kernel = to_kernel or itself
        self.is_matrix = to_kernel is None
        self._positions = positions
        self._blocks = blocks

    @property
    def _a(self):
        return self._later()


class Stacked(Later):
    """Kernels that meet the same cotangent, as one kernel of all their rows.

    One product over inputs side by side is faster than one for each, and the
    Gram matrix of g is used once.

    Args:
        kernels: the weights, matrices.
        a: returns their inputs side by side.
        canonical: as for `Linear`.
        positions: as for `Later`.
    """

    def __init__(self, kernels, a, canonical, *, positions):
        super().__init__(kernels[0], a, canonical, positions=positions)
        self.variables = tuple(kernels)

    def _weights(self, matrices):
        rows = [kernel.shape[0] for kernel in self.variables]
        return tuple(tf.split(matrices, rows, -2))


def join_blocks(matrices: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """(..., S, d, p) -> (..., *shape), for a kernel with S·p outputs."""
    axes = list(range(matrices.shape.rank))
    axes[-3], axes[-2] = axes[-2], axes[-3]
    matrices = tf.transpose(matrices, axes)
    leading = tf.shape(matrices)[: len(axes) - 3]
    return tf.reshape(matrices, tf.concat([leading, shape], 0))


def times_transposed(g: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    """g·Mᵀ along the last axis, in the type of g."""
    return tf.matmul(g, tf.cast(matrix, g.dtype), transpose_b=True)


def ghost_norm(a: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
    """⟨aaᵀ, ggᵀ⟩ of each example, rounded up."""
    if a.shape[-2] == 1:
        # |a|²·|g|²: nothing cancels.
        squares = _with_lost(tf.reduce_sum(a * a, -1), a)
        squares *= _with_lost(tf.reduce_sum(g * g, -1), g)
        return _sum_but_first(squares)
    norms, sizes = gram_product(a, g)
    return rounded_up(
        _sum_but_first(norms),
        _sum_but_first(tf.square(sizes)),
        a.shape[-1] + g.shape[-1],
    )


def gram_product(a: tf.Tensor, g: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """⟨aaᵀ, ggᵀ⟩ before rounding up, and Σ|aₜ||gₜ|, of each example.

    Kernels of several blocks have both for each block.
    """
    gram_a, gram_g = _gram(a), _gram(g)
    squares_a = _with_lost(tf.linalg.diag_part(gram_a), a)
    squares_g = _with_lost(tf.linalg.diag_part(gram_g), g)
    sizes = tf.reduce_sum(tf.sqrt(squares_a * squares_g), -1)
    norms = tf.reduce_sum(tf.reduce_sum(gram_a * gram_g, -1), -1)
    return norms + _lost_in_product(squares_a, squares_g, a, g), sizes


def _gram(tensor):
    return tf.matmul(tensor, tensor, transpose_b=True)


def _lost(tensor):
    """The most that an inner product loses to numbers too small to hold.

    What is below the least normal number becomes zero. That may count: 1e-19
    squared is zero in float32, yet 1e-19 times 1e19 is one.
    """
    least = np.finfo(tensor.dtype.as_numpy_dtype).tiny
    return tensor.shape[-1] * least


def _with_lost(squares, tensor):
    """Squared lengths of vectors, not below their true values."""
    return squares + _lost(tensor)


def _lost_in_product(squares_a, squares_g, a, g):
    """The most that ⟨aaᵀ, ggᵀ⟩ loses so: |aₛ·aₜ| is at most Σ|aₜ|²."""
    count = tf.cast(tf.shape(squares_a)[-1], a.dtype)
    lost_a = _lost(a) * tf.reduce_sum(squares_g, -1)
    lost_g = _lost(g) * tf.reduce_sum(squares_a, -1)
    return count * (lost_a + lost_g)


def rounded_up(norms: tf.Tensor, largest: tf.Tensor, width: int) -> tf.Tensor:
    """Squared norms that may have cancelled, not below their true values.

    A ghost norm sums products of either sign. Its error is a number of units
    of roundoff, times what the sum would be if nothing cancelled. That number
    grows with the length d of the inner products, when their terms are all
    rounded the same way, and stops growing where matrix products are blocked.
    Measured over constant and alternating inputs it is below 14 at
    d = p = 64, 55 at 256 and 73 at 1024; the margin is 21, 78 and 100.

    Args:
        norms: the sums.
        largest: what they would be if nothing cancelled.
        width: d + p.
    """
    unit = np.finfo(norms.dtype.as_numpy_dtype).eps
    margin = min(2 + 0.15 * width, 100) * unit
    return tf.maximum(norms, 0) + margin * largest


def by_example(tensor: tf.Tensor, rows: Rows) -> tf.Tensor:
    """(rows, T, ·) -> (B, T, ·); (rows, T, S, ·) -> (B, S, T, ·)."""
    if rows.per_example > 1:
        folded = rows.fold(tensor)
        shape = tf.shape(folded)
        merged = tf.concat([[shape[0], shape[1] * shape[2]], shape[3:]], 0)
        positions = tensor.shape[1]
        if positions is not None:
            positions *= rows.per_example
        tail = tensor.shape[2:].as_list()
        tensor = tf.ensure_shape(
            tf.reshape(folded, merged), [None, positions, *tail]
        )
    if tensor.shape.rank == 4:
        tensor = tf.transpose(tensor, [0, 2, 1, 3])
    return tensor


def _sum_but_first(tensor: tf.Tensor) -> tf.Tensor:
    # One axis after the other: short sums round less than one long sum.
    while tensor.shape.rank > 1:
        tensor = tf.reduce_sum(tensor, -1)
    return tensor
