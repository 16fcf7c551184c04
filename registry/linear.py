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
from keras_fastclip.registry.terms import (
    Factors,
    Rows,
    Term,
    at_least_float32,
    itself,
    select_rows,
    sum_of_squares,
)
from keras_fastclip.registry.turns import norms_in_turns

# Rows of a Gram matrix in a tile.
TILE = 512

# Units of roundoff by which a product of long vectors, and the sum of products
# over positions, may be off; see `units`.
GRAM_UNITS, SUM_UNITS = 135, 60


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The sizes of a kernel in a call, on which the choice of a form depends.

    Attributes:
        positions: T, over all uses of the kernel.
        inputs: d.
        outputs: p.
        blocks: S, independent blocks of the kernel.
        rows: of an example in the call's tensors.
        forms: ways to build gradients, the usual one first.
        timed, timed_ghost: those among which a planner need choose, and the
            forms of ghost norms.
    """

    positions: int
    inputs: int
    outputs: int
    blocks: int = 1

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

    def sample(self, examples: int) -> tuple[Term, tf.Tensor]:
        """A term of these sizes on random numbers, with a cotangent."""
        blocks = [self.blocks] if self.blocks > 1 else []
        shape = [examples, self.positions, *blocks]
        a = tf.random.stateless_normal([*shape, self.inputs], [1, 2])
        g = tf.random.stateless_normal([*shape, self.outputs], [3, 4])
        kernel = tf.zeros([*blocks, self.inputs, self.outputs])
        return Linear(kernel, a, itself, itself if blocks else None), g


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

    def reach(self, a, g):
        lengths = tf.norm(a, axis=-1) * tf.norm(g, axis=-1)
        sums = tf.reduce_sum(lengths, -1)
        return tf.norm(sums, axis=-1) if sums.shape.rank == 2 else sums

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
        return norms_in_turns(ghost_norm, [a, g])
    if form == "tiles":
        return norms_in_turns(ghost_norm_by_tiles, [a, g])
    return _without_blocks(a, g, gram_product(a, g))


def ghost_norm_by_tiles(a: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
    """`ghost_norm` that holds few rows of the Gram matrices at a time."""
    squares = tf.reduce_sum(a * a, -1), tf.reduce_sum(g * g, -1)
    sizes = _Sizes.of(*squares, a.shape[-1], g.shape[-1])
    return _without_blocks(a, g, sizes.product(*_sums_by_tiles(a, g, sizes)))


def _without_blocks(a, g, product):
    """The norm over all blocks of a kernel, rounded up."""
    return rounded_up(
        _sum_but_first(product.value),
        _sum_but_first(product.error),
        _sum_but_first(tf.square(product.reach)),
        tf.shape(a)[-2],
    )


class Product(NamedTuple):
    """⟨aaᵀ, ggᵀ⟩ of each example, and of each block if there are several.

    Attributes:
        value: before rounding up.
        error: by how many units of roundoff it may be off.
        reach: Σ|aₜ||gₜ|, what its root could be if nothing cancelled.
    """

    value: tf.Tensor
    error: tf.Tensor
    reach: tf.Tensor


def gram_product(a: tf.Tensor, g: tf.Tensor) -> Product:
    """⟨aaᵀ, ggᵀ⟩ of a (..., T, d) and g (..., T, p)."""
    return product_of_grams(gram(a), gram(g), a.shape[-1], g.shape[-1])


def product_of_grams(
    gram_a: tf.Tensor, gram_g: tf.Tensor, d: int, p: int
) -> Product:
    """`gram_product` of Gram matrices that are there already."""
    squares = tf.linalg.diag_part(gram_a), tf.linalg.diag_part(gram_g)
    sizes = _Sizes.of(*squares, d, p)
    sums = (
        _sum_of_products(gram_a, gram_g),
        spread(gram_a, sizes.g, sizes.g),
        spread(gram_g, sizes.a, sizes.a),
    )
    return sizes.product(*sums)


def gram(tensor: tf.Tensor) -> tf.Tensor:
    """(..., T, d) -> (..., T, T), the products of all pairs of vectors."""
    return tf.matmul(tensor, tensor, transpose_b=True)


class _Sizes(NamedTuple):
    """|aₜ| and |gₜ|, not below their true values, and d and p."""

    a: tf.Tensor
    g: tf.Tensor
    d: int
    p: int

    @classmethod
    def of(cls, squares_a, squares_g, d, p):
        return cls(
            tf.sqrt(_with_lost(squares_a, d)),
            tf.sqrt(_with_lost(squares_g, p)),
            d,
            p,
        )

    def product(self, value, spread_a, spread_g) -> Product:
        """With what was too small to be held, and a bound on the error.

        Computed are aaᵀ + E and ggᵀ + F, where |Eₛₜ| is at most units(d) of
        roundoff times |aₛ||aₜ|, and |Fₛₜ| likewise. So their product is off by
        ⟨|E|, |ggᵀ|⟩ + ⟨|aaᵀ|, |F|⟩ + ⟨|E|, |F|⟩, and by what the sum over T
        positions and T again adds.

        Args:
            value: ⟨aaᵀ, ggᵀ⟩ as computed.
            spread_a: Σ|gₛ||gₜ||aₛ·aₜ|.
            spread_g: Σ|aₛ||aₜ||gₛ·gₜ|.
        """
        # |aₛ·aₜ| is at most Σ|aₜ|².
        lost_a = _lost(value, self.d) * tf.reduce_sum(tf.square(self.g), -1)
        lost_g = _lost(value, self.p) * tf.reduce_sum(tf.square(self.a), -1)
        count = tf.cast(tf.shape(self.a)[-1], value.dtype)
        of_a, of_g = units(self.d), units(self.p)
        reach = tf.reduce_sum(self.a * self.g, -1)
        both = of_a * of_g * np.finfo(value.dtype.as_numpy_dtype).eps
        error = of_a * spread_g + (of_g + long_units(count)) * spread_a
        error += both * tf.square(reach)
        return Product(value + count * (lost_a + lost_g), error, reach)


def spread(gram: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Σ rowsₛ columnsₜ |gramₛₜ|."""
    return tf.reduce_sum(rows * tf.linalg.matvec(tf.abs(gram), columns), -1)


def _sum_of_products(a, g):
    """Over the last two axes."""
    products = a * g
    if _keras.on_cpu():
        return tf.reduce_sum(tf.reduce_sum(products, -1), -1)
    # XLA adds from one end to the other, which would lose too much.
    total = tf.reduce_sum(tf.cast(products, tf.float64), [-2, -1])
    return tf.cast(total, products.dtype)


def _sums_by_tiles(a, g, sizes):
    """The sums that `_Sizes.product` takes."""

    def tile(start):
        rows = slice(start, start + TILE)
        gram_a = tf.matmul(a[..., rows, :], a, transpose_b=True)
        gram_g = tf.matmul(g[..., rows, :], g, transpose_b=True)
        return (
            _sum_of_products(gram_a, gram_g),
            spread(gram_a, sizes.g[..., rows], sizes.g),
            spread(gram_g, sizes.a[..., rows], sizes.a),
        )

    sums = tf.map_fn(
        tile,
        tf.range(0, tf.shape(a)[-2], TILE),
        fn_output_signature=(a.dtype,) * 3,
        parallel_iterations=1,
    )
    return [tf.reduce_sum(each, 0) for each in sums]


def _lost(like, width):
    """The most that an inner product loses to numbers too small to hold.

    What is below the least normal number becomes zero. That may count: 1e-19
    squared is zero in float32, yet 1e-19 times 1e19 is one.
    """
    return width * np.finfo(like.dtype.as_numpy_dtype).tiny


def _with_lost(squares, width):
    """Squared lengths of vectors, not below their true values."""
    return squares + _lost(squares, width)


def units(length: Any, at_most: int = GRAM_UNITS) -> Any:
    """By how many units of roundoff products of vectors may be off.

    That is, times the product of their lengths. The number grows with the
    length of the sum, when its terms are all rounded the same way, and stops
    growing where matrix products are blocked. Measured over constant inputs it
    is below 8 at 64, 32 at 256, 58 at 1024 and 127 at any length for products
    of all pairs of vectors; and below 46 at any length for the one product
    that sums gradients, over positions.

    Args:
        length: of the vectors; a number or a scalar tensor.
        at_most: how far it grows.
    """
    if isinstance(length, tf.Tensor):
        return tf.minimum(1 + 0.15 * length, at_most)
    return min(1 + 0.15 * length, at_most)


def long_units(positions: tf.Tensor) -> tf.Tensor:
    """Units of roundoff that sums over T positions and T again add."""
    return 2 + 0.04 * positions


def rounded_up(
    norms: tf.Tensor,
    errors: tf.Tensor,
    reach_squared: tf.Tensor,
    positions: tf.Tensor,
) -> tf.Tensor:
    """Squared norms that may have cancelled, not below their true values.

    Nor below those of the gradients in the sum, which are sums over positions
    and rounded as such.

    Args:
        norms: the sums.
        errors: units of roundoff by which they may be off.
        reach_squared: what they would be if nothing cancelled.
        positions: T.
    """
    unit = np.finfo(norms.dtype.as_numpy_dtype).eps
    most = tf.sqrt(tf.maximum(norms, 0) + unit * errors)
    in_sum = units(tf.cast(positions, norms.dtype), SUM_UNITS) * unit
    return tf.square(most + in_sum * tf.sqrt(reach_squared))


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
    # One axis after the other: short sums round less than one long sum.
    while tensor.shape.rank > 1:
        tensor = tf.reduce_sum(tensor, -1)
    return tensor
