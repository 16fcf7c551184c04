"""The generalized linear case: one object for a kernel applied to inputs.

A kernel W of shape (d, p) maps the input a (rows, T, d) to (rows, T, p). With
the cotangent g of the result, the gradient of one example is aᵀg. Its squared
norm has two forms:

- ghost: ⟨aaᵀ, ggᵀ⟩, time 2T²(p + d) and memory 2T² an example;
- instantiated: ‖aᵀg‖², time 2Tpd and memory pd an example.

Either is taken "batched", for all examples at once, or in a "loop" over them;
where even T² numbers are many, the ghost norm is taken in "tiles", some rows
of the Gram matrices at a time.

Dense, EinsumDense and convolutions all reduce to it. A kernel that consists
of independent blocks (the groups of a convolution, an axis that an einsum
shares between input, kernel and output) has a block axis: a (rows, T, S, d)
and g (rows, T, S, p).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry.once import of_any_size, once
from keras_fastclip.registry.terms import (
    Factors,
    Rows,
    Term,
    at_least_float32,
    itself,
    long_sum,
    select_rows,
    sum_of_squares,
)
from keras_fastclip.registry.turns import norms_in_turns

# Rows of a Gram matrix in a tile.
TILE = 512

# Wider vectors are cut into chunks of so many numbers, and so many at most.
_WIDE, _CHUNK, _MOST_CHUNKS = 1024, 256, 64

_ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The sizes of a kernel in a call, on which the choice of a form depends.

    Attributes:
        positions: T, over all uses of the kernel.
        inputs: d.
        outputs: p.
        blocks: S, independent blocks of the kernel.
        copies: numbers of an example that are copied before anything else.
        rows: of an example in the call's tensors.
        forms: ways to build gradients, the usual one first.
        timed, timed_ghost: those among which a planner need choose, and the
            forms of ghost norms.
    """

    positions: int
    inputs: int
    outputs: int
    blocks: int = 1
    copies: int = 0

    rows: ClassVar = 1
    forms: ClassVar = ("batched", "loop")
    timed: ClassVar = ("batched", "loop")
    timed_ghost: ClassVar = ("batched", "loop")

    @property
    def built(self) -> int:
        """Numbers in the gradient of an example."""
        return self.blocks * self.inputs * self.outputs

    @property
    def cotangent(self) -> int:
        """Numbers in the cotangent of an example."""
        return self.blocks * self.positions * self.outputs

    @property
    def input(self) -> int:
        """Numbers in the input of an example."""
        return self.blocks * self.positions * self.inputs

    @property
    def gram(self) -> int:
        """Numbers in the two Gram matrices of an example."""
        return 2 * self.blocks * self.positions**2 if self.positions > 1 else 0

    @property
    def tile(self) -> int:
        """Numbers in a tile of them."""
        return min(self.gram, 2 * self.blocks * TILE * self.positions)

    @property
    def ghost_width(self) -> int:
        """Operations of a ghost norm for each pair of positions."""
        return self.inputs + self.outputs

    @property
    def block(self) -> int:
        """Examples at a time, for forms in blocks."""
        return 1

    @property
    def ghost_block(self) -> int:
        """The same for ghost norms."""
        return 1

    def copied(self, form: str) -> int:
        """Numbers of an example that are copied before the product."""
        return 0

    def copied_for_ghost(self, form: str | None) -> int:
        """The same for a ghost norm."""
        return 0

    def sample(self, examples: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Random inputs of these sizes, with a cotangent."""
        blocks = [self.blocks] if self.blocks > 1 else []
        shape = [examples, self.positions, *blocks]
        a = tf.random.stateless_normal([*shape, self.inputs], [1, 2])
        g = tf.random.stateless_normal([*shape, self.outputs], [3, 4])
        return a, g

    def on(self, a: tf.Tensor) -> Term:
        """A term of these sizes on such inputs."""
        blocks = [self.blocks] if self.blocks > 1 else []
        kernel = tf.zeros([*blocks, self.inputs, self.outputs])
        return Linear(kernel, a, itself, itself if blocks else None)


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
    _width = None

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
        self._width = a.shape[-1]
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
        return self._sum(a, self._canonical(at_least_float32(g)))

    def weighted_sum(self, g, factors):
        return self._sum(
            *scaled_pair(
                factors,
                at_least_float32(self._a),
                self._canonical(at_least_float32(g)),
            )
        )

    def _sum(self, a, g):
        """aᵀg over all rows."""
        if a.shape.rank == 4:
            return self.assembled([tf.einsum("btsd,btsp->sdp", a, g)])
        # One 2-D product is faster than what autodiff makes of a 3-D one.
        a = tf.reshape(a, [-1, a.shape[-1]])
        g = tf.reshape(g, [-1, g.shape[-1]])
        return self.assembled([tf.matmul(a, g, transpose_a=True)])

    def per_example(self, g, rows, form=None):
        return self.assembled(self.pieces(g, rows, form))

    def pieces(self, g, rows, form=None):
        return (_products(*self.pair(g, rows)),)

    def assembled(self, pieces):
        (matrices,) = pieces
        return (self._to_kernel(matrices),)

    def operands(self, g, rows):
        return list(self.pair(g, rows))

    def of_one(self, a, g):
        return self.assembled([_products(a, g)])

    def lengths(self, a, g):
        lengths = tf.norm(a, axis=-1) * tf.norm(g, axis=-1)
        return tf.norm(lengths, axis=1) if lengths.shape.rank == 3 else lengths

    def omega(self, g, rows, form=None):
        return ghost_norm(*self.pair(g, rows), form)

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
        d, p = self._widths()
        return self.positions(rows), d, p

    def _widths(self):
        """d and p of a block."""
        d = sum(variable.shape[0] for variable in self.variables)
        if self._width is not None:
            d = self._width
        return d, self.size // (d * self._blocks)

    def kernel(self, rows):
        positions = self.positions(rows)
        if positions is None:
            return None
        return Kernel(positions, *self._widths(), self._blocks)

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

    def kernel(self, rows):
        """Both a and g are brought from the order of steps to this one."""
        found = super().kernel(rows)
        if found is None:
            return None
        copies = found.input + found.cotangent
        return dataclasses.replace(found, copies=copies)


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

    def assembled(self, pieces):
        (matrices,) = pieces
        rows = [kernel.shape[0] for kernel in self.variables]
        return tuple(tf.split(matrices, rows, -2))


def _products(a, g):
    """aᵀg of each example."""
    return tf.matmul(a, g, transpose_a=True)


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


def ghost_norm(
    a: tf.Tensor, g: tf.Tensor, form: str | None = None
) -> tf.Tensor:
    """⟨aaᵀ, ggᵀ⟩ of each example, rounded up."""
    if a.shape[-2] == 1:
        # |a|²·|g|²: nothing cancels.
        squares = _with_lost(sum_of_squares(a, [-1]), a.shape[-1])
        squares *= _with_lost(sum_of_squares(g, [-1]), g.shape[-1])
        return _sum_but_first(squares)
    if form == "loop":
        return norms_in_turns(_norms_at_once, [a, g])
    if form == "tiles":
        return norms_in_turns(ghost_norm_by_tiles, [a, g])
    return once(_norms_at_once)(a, g)


def _norms_at_once(a, g):
    grams = gram(a), gram(g)
    return norms(measures(*grams), [own.kind for own in grams])


def ghost_norm_by_tiles(a: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
    """`ghost_norm` that holds few rows of the Gram matrices at a time."""
    return norms(_by_tiles(a, g), [Kind.of(each.shape[-1]) for each in (a, g)])


class Product(NamedTuple):
    """⟨aaᵀ, ggᵀ⟩ of each example, and of each block if there are several.

    Attributes:
        value: before rounding up.
        error: by how much it may be off.
        drift: how far aᵀg may be from what the sum of gradients takes for it.
    """

    value: tf.Tensor
    error: tf.Tensor
    drift: tf.Tensor


def gram_product(a: tf.Tensor, g: tf.Tensor) -> Product:
    """⟨aaᵀ, ggᵀ⟩ of a (..., T, d) and g (..., T, p)."""
    grams = gram(a), gram(g)
    return product(*measures(*grams), limits_of([own.kind for own in grams]))


def measures(a: "Gram", g: "Gram") -> list[tf.Tensor]:
    """All that the product of two Gram matrices depends on, in two arrays.

    (..., 5): its value; Σ|aₜ|² and Σ|gₜ|²; what `against` says of either.
    (..., 2, T): norms of the rows of aaᵀ, and of ggᵀ.
    """
    value = sum_of_products(a.matrix, g.matrix)
    pairs = (a, g), (g, a)
    # Without chunks, `limits_of` has no use for it.
    chunks = has_chunks(a.kind, g.kind)
    against = [own.against(other) if chunks else value for own, other in pairs]
    rows = [_norms_of_rows(own.matrix) for own in (a, g)]
    numbers = [value, a.trace, g.trace, *against]
    return [tf.stack(numbers, -1), tf.stack(rows, -2)]


def limits_of(kinds: Sequence["Kind"]) -> tf.Tensor:
    """How far Gram matrices of some kinds may be off, for `product`."""
    chunks = has_chunks(*kinds)
    found = [
        (
            kind.width,
            kind.additions * math.sqrt(kind.chunks),
            kind.additions + 1 if chunks else np.inf,
        )
        for kind in kinds
    ]
    return tf.constant(found, tf.float64)


def has_chunks(a: "Kind", g: "Kind") -> bool:
    """Whether lengths of chunks are known of any of two Gram matrices.

    Where they are not, errors are small anyway.
    """
    return a.lengths > 1 or g.lengths > 1


def norms(found: Sequence[tf.Tensor], kinds: Sequence["Kind"]) -> tf.Tensor:
    """Ω, rounded up, from what `measures` returned."""
    # Bounds on errors take many operations, the same for all sizes.
    return of_any_size(_norms)(*found, limits_of(kinds))


def _norms(numbers, rows, limits):
    return rounded_up(over_blocks(product(numbers, rows, limits)))


class Kind(NamedTuple):
    """How Gram matrices of vectors of width d are added up.

    Attributes:
        width: d.
        additions: how often ‖a꜀a꜀ᵀ‖ of a chunk may be lost to roundoff, within
            the chunk and where chunks are added up.
        chunks: how many.
        lengths: of how many the lengths of the vectors are known, or 1.
    """

    width: int
    additions: float
    chunks: int
    lengths: int

    @classmethod
    def of(cls, width: int) -> "Kind":
        """As `gram` does it."""
        step = chunk_width(width)
        chunks = -(-width // step)
        return cls(width, additions(step) + chunks - 1, chunks, chunks)

    def shifted(self, offsets: int, additions: int) -> "Kind":
        """Of vectors that are put together from others, at some offsets.

        The matrix is a sum of the matrix of the others, shifted by each of the
        offsets, which are as many more chunks: an addition in the matrix of
        the others is one in all of them.

        Args:
            offsets: how many there are.
            additions: that made it, one after the other.
        """
        return Kind(
            offsets * self.width,
            self.additions + additions,
            offsets * self.chunks,
            lengths=1,
        )


class Gram(NamedTuple):
    """aaᵀ of vectors aₜ, added up from those of chunks of them.

    Attributes:
        matrix: (..., T, T), or some of its rows.
        squares: (..., T, n), |aₜ|² of each chunk, or (..., T) of one.
        kind: how it was added up.
    """

    matrix: tf.Tensor
    squares: tf.Tensor
    kind: Kind

    @property
    def lengths(self) -> tf.Tensor:
        """(..., T, n), |aₜ| of each chunk."""
        lengths = tf.sqrt(self.squares)
        return lengths if self.kind.lengths > 1 else lengths[..., None]

    @property
    def trace(self) -> tf.Tensor:
        """Σ|aₜ|²."""
        total = tf.reduce_sum(self.squares, -1)
        return tf.reduce_sum(total, -1) if self.kind.lengths > 1 else total

    def against(self, other: "Gram", rows: slice = _ALL) -> tf.Tensor:
        """Σ|aₛ||aₜ||otherₛₜ| over all chunks, s and t, or some rows s."""
        lengths = self.lengths
        reach = tf.matmul(tf.abs(other.matrix), lengths)
        reach *= lengths[..., rows, :]
        return tf.reduce_sum(tf.reduce_sum(reach, -1), -1)

    def shifted(self, matrix: tf.Tensor, kind: Kind) -> "Gram":
        """Of vectors that are put together from others: see `Kind.shifted`.

        A sum of |xₛ||xₜ| over the chunks of two vectors is at most the product
        of their lengths.
        """
        squares = tf.linalg.diag_part(matrix)
        return Gram(matrix, _with_lost(squares, kind.width), kind)


def gram(tensor: tf.Tensor, rows: slice = _ALL) -> Gram:
    """The products of all pairs of vectors, (..., T, d) -> (..., T, T).

    Args:
        tensor: the vectors.
        rows: of the matrix, all by default.
    """
    width = tensor.shape[-1]
    step = chunk_width(width)

    def of_chunk(start, size):
        chunk = tensor
        if size < width:
            chunk = _columns(tensor, start, size)
        some = chunk if rows is _ALL else chunk[..., rows, :]
        own = tf.matmul(some, chunk, transpose_b=True)
        if rows is _ALL:
            squares = tf.linalg.diag_part(own)
        else:
            squares = sum_of_squares(chunk, [-1])
        return own, _with_lost(squares, size)

    others = (width - 1) // step
    total, last = of_chunk(others * step, width - others * step)
    if not others:
        return Gram(total, last, Kind.of(width))

    def body(i, total, squares):
        own, each = of_chunk(i * step, step)
        return i + 1, total + own, squares.write(i, each)

    array = tf.TensorArray(total.dtype, others, element_shape=last.shape)
    # Two chunks at a time: each is a copy.
    _, total, squares = tf.while_loop(
        lambda i, *_: i < others,
        body,
        (0, total, array),
        parallel_iterations=2,
    )
    squares = tf.concat([squares.stack(), last[None]], 0)
    first_to_last = [*range(1, squares.shape.rank), 0]
    return Gram(total, tf.transpose(squares, first_to_last), Kind.of(width))


def _columns(tensor, start, size):
    """So many of the last axis."""
    leading = tf.shape(tensor)[:-1]
    found = tf.slice(
        tensor,
        tf.concat([tf.zeros_like(leading), [start]], 0),
        tf.concat([leading, [size]], 0),
    )
    return tf.ensure_shape(found, [*tensor.shape[:-1], size])


def chunk_width(width: int) -> int:
    """Of nearly equal chunks: vectors of up to 1024 numbers are one."""
    if width <= _WIDE:
        return max(width, 1)
    count = min(-(-width // _CHUNK), _MOST_CHUNKS)
    return -(-width // count)


class _Size(NamedTuple):
    """The size of a Gram matrix of T vectors, not below its true value.

    Attributes:
        trace: Σ|aₜ|².
        rows: norms of the rows of aaᵀ; rows of zeros may follow.
        norm: ‖aaᵀ‖, of Frobenius.
        error: by how much it is off, at most, in norm.
        against: by how much its product with the other matrix is off for it,
            as far as lengths of vectors tell.
        width: d.
    """

    trace: tf.Tensor
    rows: tf.Tensor
    norm: tf.Tensor
    error: tf.Tensor
    against: tf.Tensor
    width: tf.Tensor

    @classmethod
    def of(
        cls,
        limits: tf.Tensor,
        trace: tf.Tensor,
        against: tf.Tensor,
        rows: tf.Tensor,
    ):
        """From what was computed.

        A square of an entry that is too small to hold, or too large, is no
        loss: the one is less than the root of the least number, and for the
        other the trace is there, which no norm exceeds.

        Args:
            limits: of the matrix.
            trace, against, rows: of it, as in `measures`.
        """
        dtype, count = rows.dtype, _count(rows, -1)
        width, units, additions = tf.unstack(tf.cast(limits, dtype), 3)
        least = np.finfo(dtype.as_numpy_dtype).tiny
        lost = count * width * least
        more = 1 + 2 * roundoff(dtype, units) + 2 * roundoff(dtype, count)
        trace = more * trace + lost
        small = count**0.5 * math.sqrt(least) + lost
        rows = more * long_sum(rows, None) + small
        rows = tf.minimum(rows, trace[..., None])
        norm = tf.minimum(more * tf.norm(rows, axis=-1), trace)
        error = roundoff(dtype, units) * norm + roundoff(dtype, 1) * trace
        # No chunks, no bound. What is left out is finite, too: the derivative
        # of an infinite number times a choice against it is none.
        bounded = tf.math.is_finite(additions)
        some = tf.where(bounded, additions, tf.zeros_like(additions))
        reach = 1.01 * more * roundoff(dtype, some) * against
        reach = tf.where(bounded, reach, additions)
        return cls(trace, rows, norm, error, reach, width)


def _count(tensor, axis):
    """The size of an axis; what follows from a number needs no operations."""
    known = tensor.shape[axis]
    if known:
        return float(known)
    return tf.cast(tf.shape(tensor)[axis], tensor.dtype)


def _norms_of_rows(gram):
    if _keras.on_cpu():
        # `_Size` makes up for what `sum_of_squares` would.
        return tf.math.reduce_euclidean_norm(gram, -1)
    return tf.sqrt(sum_of_squares(gram, [-1]))


def product(numbers: tf.Tensor, rows: tf.Tensor, limits: tf.Tensor) -> Product:
    """⟨aaᵀ, ggᵀ⟩ from what `measures` found, with a bound on its error.

    Computed are aaᵀ + E and ggᵀ + F. An entry of a Gram matrix is a sum of d
    products, and each addition is off by at most a unit of roundoff times its
    result. The results of one addition in all entries are the Gram matrix of
    some of the d columns of a. Such a matrix is at most aaᵀ in the order of
    positive semidefinite matrices, so its norm is at most ‖aaᵀ‖. In whatever
    order the products are added, the same in all entries, therefore,

        ‖E‖ ≤ d·u·‖aaᵀ‖ ,   u = 2⁻²⁴ in float32,

    and likewise ‖F‖ ≤ p·u·‖ggᵀ‖. What the products themselves are rounded by
    is at most u·Σ|aₜ|² in norm.

    Wide vectors are cut into n chunks a꜀ of w numbers. What is lost within a
    chunk is bounded by its own Gram matrix, and what is lost where these are
    added up by aaᵀ again. No two of the chunks' matrices have a negative
    product, so their squared norms add up to ‖aaᵀ‖² at most, and their norms,
    by Cauchy and Schwarz, to √n·‖aaᵀ‖:

        ‖E‖ ≤ (w + n)·u·Σ‖a꜀a꜀ᵀ‖ ≤ (w + n)·√n·u·‖aaᵀ‖ .

    Then ⟨aaᵀ, ggᵀ⟩ is off by ⟨E, ggᵀ + F⟩ + ⟨aaᵀ + E, F⟩ - ⟨E, F⟩. By Cauchy
    and Schwarz, ⟨E, ggᵀ + F⟩ is at most ‖E‖‖ggᵀ + F‖. The entries of E have a
    bound of their own, (w + n)·u·Σ|a꜀ₛ||a꜀ₜ| over the chunks, in any order of
    additions. With it the product is at most Σ|E|ₛₜ|ggᵀ + F|ₛₜ. Where positions
    have little to do with each other, that loses a factor of √T. But it is far
    less where ggᵀ is nearly diagonal, as it is where each position has a label
    of its own. The smaller one counts.

    In the same way the sum of gradients adds up aₜgₜᵀ over T positions. The
    squared norm of such a sum over some of the positions is a sum of entries
    of (aaᵀ)∘(ggᵀ), in the rows and columns of these positions. With |aaᵀ|ₛ the
    norm of a row, it is at most Σ|aaᵀ|ₛ|ggᵀ|ₛ over them. That is at most the
    sum of the k largest of these numbers, for k positions; and the sum over k
    of the roots of such sums at most the root of T times the sum of them.
    """
    value, *others = tf.unstack(numbers, 5, -1)
    # Traces, then what is against.
    a, g = (
        _Size.of(limits[i], *others[i::2], rows=own)
        for i, own in enumerate(tf.unstack(rows, 2, -2))
    )
    dtype, count = value.dtype, _count(rows, -1)
    unit, tiny = roundoff(dtype, 1), np.finfo(dtype.as_numpy_dtype).tiny
    error = tf.minimum(a.error * g.norm, a.against)
    error += tf.minimum(g.error * a.norm, g.against)
    error += a.error * g.error + sum_roundoff(dtype, count) * a.norm * g.norm
    # Inner products that are too small to hold: |aₛ·aₜ| is at most Σ|aₜ|².
    # And so are products of lengths.
    lost = 2 * (a.width * g.trace + g.width * a.trace + count)
    # Numbers are multiplied by their factors, and then by each other.
    sums = _sums_of_largest(a.rows * g.rows, count)
    drift = count**0.5 * tf.sqrt(sums)
    drift += 3 * tf.sqrt(a.trace) * tf.sqrt(g.trace)
    more = 1 + roundoff(dtype, count)
    return Product(value, error + count * tiny * lost, more * unit * drift)


def _sums_of_largest(numbers, count):
    """The sum of the k largest of T numbers, for all k together, or more.

    It is at most R(T + 1)/2 + √(Q - R²/T) · √(T(T² - 1)/12), where R is the sum
    of all and Q that of their squares: the first for equal numbers, the second
    by Cauchy and Schwarz for how they differ.

    Args:
        numbers: (..., T); zeros may follow.
        count: T.
    """
    total = tf.reduce_sum(numbers, -1)
    # In parts of the sum, whose squares are not too small to hold.
    parts = tf.math.divide_no_nan(numbers, total[..., None])
    apart = tf.norm(parts - 1 / count, axis=-1) * (count / 12) ** 0.5
    return 1.01 * total * tf.minimum((count + 1) / 2 + count * apart, count)


def over_blocks(product: Product) -> Product:
    """Of all blocks of a kernel together."""
    return Product(
        _sum_but_first(product.value),
        _sum_but_first(product.error),
        tf.sqrt(_sum_but_first(tf.square(product.drift))),
    )


def sum_of_products(a: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
    """Over the last two axes; off by `sum_roundoff` times ‖a‖‖g‖."""
    products = a * g
    if _keras.on_cpu():
        products = tf.reduce_sum(products, -1, keepdims=True)
    # XLA adds from one end to the other, which would lose too much.
    total = tf.reduce_sum(tf.cast(products, tf.float64), [-2, -1])
    return tf.cast(total, a.dtype)


def _by_tiles(a, g):
    """As `measures`, of some rows of aaᵀ and of ggᵀ at a time."""

    def tile(start):
        rows = slice(start, start + TILE)
        grams = gram(a, rows), gram(g, rows)
        found = [sum_of_products(*(each.matrix for each in grams))]
        for own, other in (grams, grams[::-1]):
            norms = _norms_of_rows(own.matrix)
            behind = [[0, 0]] * (norms.shape.rank - 1)
            behind += [[0, TILE - tf.shape(norms)[-1]]]
            chunks = has_chunks(own.kind, other.kind)
            against = own.against(other, rows) if chunks else found[0]
            found += [against, tf.pad(norms, behind)]
        return tuple(found)

    count = tf.shape(a)[-2]
    found = tf.map_fn(
        tile,
        tf.range(0, count, TILE),
        fn_output_signature=(a.dtype,) * 5,
        parallel_iterations=1,
    )
    value, *against = (
        tf.cast(tf.reduce_sum(tf.cast(each, tf.float64), 0), a.dtype)
        for each in (found[0], *found[1::2])
    )
    rows = tf.stack([_side_by_side(each) for each in found[2::2]], -2)
    traces = [gram(each, slice(0, 0)).trace for each in (a, g)]
    return [tf.stack([value, *traces, *against], -1), rows[..., :count]]


def _side_by_side(tiles):
    """(tiles, ..., TILE) -> (..., all)."""
    rank = tiles.shape.rank
    last = tf.transpose(tiles, [*range(1, rank - 1), 0, rank - 1])
    return tf.reshape(last, tf.concat([tf.shape(last)[:-2], [-1]], 0))


def _lost(like, width):
    """The most that an inner product loses to numbers too small to hold.

    What is below the least normal number becomes zero. That may count: 1e-19
    squared is zero in float32, yet 1e-19 times 1e19 is one.
    """
    return width * np.finfo(like.dtype.as_numpy_dtype).tiny


def _with_lost(squares, width):
    """Squared lengths of vectors, not below their true values."""
    return squares + _lost(squares, width)


def additions(width: int) -> float:
    """How often ‖aaᵀ‖ may be lost to roundoff, for vectors of up to 1024.

    As often as there are additions, in general. The matrix products of CPUs
    add up runs of terms, and then these sums. (Measured: runs of 512 with
    oneDNN, of 384 at most without.) The squared norms of the Gram matrices of
    runs add up to ‖aaᵀ‖² at most, and so, by Cauchy and Schwarz, their norms
    times the lengths of the runs to ‖aaᵀ‖ times the root of the sum of squared
    lengths.
    """
    if width <= 512 or not _keras.on_cpu():
        return width
    return math.hypot(512, width - 512) + 1


def roundoff(dtype: tf.DType, count: Any) -> Any:
    """(1 + u)ⁿ - 1, not below it; u is half the distance from 1 to the next."""
    first = count * np.finfo(dtype.as_numpy_dtype).eps / 2
    return first * (1 + first)


def sum_roundoff(dtype: tf.DType, count: float | tf.Tensor) -> Any:
    """By how much `sum_of_products` is off, over T positions and T again.

    CPUs add up a row in 16 lanes or more.
    """
    return roundoff(dtype, 8 + count / 16 if _keras.on_cpu() else 4.0)


def drift_of_sum(lengths: tf.Tensor) -> tf.Tensor:
    """How far rounding may move a sum of terms of known lengths, (B,).

    The sum of k terms, whichever are added first, is at most as long as the k
    longest of them together.

    Args:
        lengths: (B, T).
    """
    count = _count(lengths, 1)
    # Its terms are products, with factors.
    sums = _sums_of_largest(lengths, count) + 3 * tf.reduce_sum(lengths, 1)
    more = 1 + roundoff(lengths.dtype, count)
    return roundoff(lengths.dtype, 1) * more * sums


def rounded_up(product: Product) -> tf.Tensor:
    """Squared norms that may have cancelled, not below their true values.

    Nor below those of the gradients in the sum, which are sums over positions
    and rounded as such.
    """
    most = tf.sqrt(tf.maximum(product.value, 0) + product.error)
    more = 1 + roundoff(most.dtype, 8)
    return more * tf.square(most + product.drift)


def scaled_pair(
    factors: Factors, a: tf.Tensor, g: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """a and g for a product with c·g; the smaller of them is multiplied."""
    a, g = factors.without_others(a, g)
    sizes = [tensor.shape[1:].num_elements() or 0 for tensor in (a, g)]
    return (
        (factors.times(a), g) if sizes[0] < sizes[1] else (a, factors.times(g))
    )


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
    if tensor.shape.rank == 1:
        return tensor
    axes = range(1, tensor.shape.rank)
    total = tf.reduce_sum(tf.cast(tensor, tf.float64), list(axes))
    return tf.cast(total, tensor.dtype)
