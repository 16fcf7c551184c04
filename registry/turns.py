"""Examples one after the other: loops that hold a few gradients at a time.

TensorFlow multiplies one matrix for each example at a third of the speed of
one large product, where it runs without oneDNN. The same products written one
by one come close to it. With 32 examples, T = 128, d = 256 and p = 1024 on two
cores with AVX2, norms and weighted sum of kept gradients take 67 ms batched
and 25 ms in this way, and the one product of plain training 18 ms. A turn of
a loop has its own cost, so several examples share one.

A loop also bounds memory: gradients that only serve their norms are dropped at
the end of a turn.

With oneDNN, products of many matrices are fast, and what costs is to copy their
operands. So there are blocks as well: several examples at once, but no more
than stay in the caches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry.once import once
from keras_fastclip.registry.terms import (
    Factors,
    itself,
    long_sum,
    select_rows,
    squared_norm,
    with_leading,
)

AT_ONCE = 4
_PARALLEL = 2
# So many examples are worked on at a time.
IN_FLIGHT = AT_ONCE * _PARALLEL

Function = Callable[..., Sequence[tf.Tensor]]


class _Loop:
    """Turns, in each of which some of `count` examples are taken."""

    def run(self, body, carried):
        _, *carried = tf.while_loop(
            lambda turn, *_: turn < self.number,
            lambda turn, *carried: (turn + 1, *body(turn, *carried)),
            (0, *carried),
            parallel_iterations=_PARALLEL,
        )
        return carried

    def in_order(self, norms):
        norms = tf.reshape(norms.stack(), [-1])
        return tf.slice(norms, [0], tf.reshape(self.count, [1]))


class _Turns(_Loop):
    """The order in which examples are taken, and what is done to each."""

    def __init__(self, function, tensors):
        self.tensors = tensors
        self.function = function
        if not tf.executing_eagerly():
            # Traced once for all examples of a turn.
            self.function = tf.function(function, autograph=False)
        self.count = tf.shape(tensors[0])[0]
        self.number = (self.count + AT_ONCE - 1) // AT_ONCE

    def results(self, turn):
        """What comes of each example of a turn.

        In the last turn the last example may be taken again; what comes of it
        goes behind all others.
        """
        places = tf.minimum(self.places(turn), self.count - 1)
        return [
            self.function(*(_rows(tensor, row, 1) for tensor in self.tensors))
            for row in tf.unstack(places)
        ]

    def places(self, turn):
        """Where the results of a turn go."""
        return turn * AT_ONCE + np.arange(AT_ONCE, dtype=np.int32)

    def norms(self, dtype):
        """An array that takes the squared norms of a turn."""
        return tf.TensorArray(dtype, self.number, element_shape=[AT_ONCE])


def _rows(tensor, start, count):
    """So many rows from a given one, without a copy where that can be."""
    shape = tensor.shape[1:]
    sizes = [count, *shape]
    if not shape.is_fully_defined():
        sizes = tf.concat([[count], tf.shape(tensor)[1:]], 0)
    found = tf.slice(tensor, start * ([1] + [0] * shape.rank), sizes)
    known = count if isinstance(count, int) else None
    return tf.ensure_shape(found, [known, *shape])


def norms_in_turns(
    function: Callable[..., tf.Tensor], tensors: Sequence[tf.Tensor]
) -> tf.Tensor:
    """A squared norm for each example, (B,).

    Args:
        function: maps the tensors of one example, each with a leading axis of
            size one, to its squared norm, (1,).
        tensors: (B, ...) each, of one floating-point type.
    """
    turns = _Turns(function, tensors)

    def body(turn, norms):
        return [norms.write(turn, tf.concat(turns.results(turn), 0))]

    (norms,) = turns.run(body, [turns.norms(tensors[0].dtype)])
    return turns.in_order(norms)


class KeptInTurns:
    """The gradients of all examples, built one by one and kept.

    Args:
        function: maps the tensors of one example, each with a leading axis of
            size one, to its gradients, (1, *shape) each.
        tensors: (B, ...) each, of one floating-point type.
        shapes: of the gradients.

    Attributes:
        squared_norms: (B,).
    """

    def __init__(
        self,
        function: Function,
        tensors: Sequence[tf.Tensor],
        shapes: Sequence[Sequence[int]],
    ):
        self._turns = turns = _Turns(function, tensors)
        self._shapes, self._dtype = shapes, tensors[0].dtype
        arrays = [
            tf.TensorArray(
                self._dtype,
                turns.number,
                element_shape=[AT_ONCE, *shape],
                clear_after_read=False,
            )
            for shape in shapes
        ]

        def body(turn, norms, *arrays):
            results = turns.results(turn)
            found = tf.concat([norm_of_one(each) for each in results], 0)
            # Side by side, their sum is one product.
            written = [
                array.write(turn, tf.reshape(tf.concat(own, 0), [-1, *shape]))
                for array, shape, *own in zip(
                    arrays, shapes, *results, strict=True
                )
            ]
            return norms.write(turn, found), *written

        norms, *self._arrays = turns.run(
            body, [turns.norms(self._dtype), *arrays]
        )
        self.squared_norms = turns.in_order(norms)

    def weighted_sum(self, factors: Factors) -> list[tf.Tensor]:
        """Σᵢ cᵢ·gradientᵢ, without the examples of factor zero."""
        turns = self._turns
        behind = [[0, turns.number * AT_ONCE - turns.count]]
        values = tf.pad(tf.cast(factors.values, self._dtype), behind)
        return _weighted_sum(
            turns,
            self._arrays,
            self._shapes,
            tf.reshape(values, [-1, AT_ONCE]),
            factors.finite,
        )


def _weighted_sum(loop, arrays, shapes, values, finite):
    """Σᵢ cᵢ·gradientᵢ, turn by turn.

    Args:
        loop: the turns.
        arrays: gradients, (n, *shape) for each turn.
        shapes: of the gradients.
        values: the factors, (turns, n).
        finite: as in `Factors`.
    """

    def body(turn, *sums):
        own = Factors(values[turn], finite)
        gradients = [
            tf.ensure_shape(array.read(turn), [None, *shape])
            for array, shape in zip(arrays, shapes, strict=True)
        ]
        gradients = own.without_others(*gradients)
        return [
            total + own.total(each)
            for total, each in zip(sums, gradients, strict=True)
        ]

    return loop.run(body, [_zeros(loop, s, values.dtype) for s in shapes])


def _zeros(loop, shape, dtype):
    """For sums.

    Of a shape that it knows TensorFlow would make a constant, as large as the
    weight and held for as long as the graph. There is at least one turn, which
    it does not know.
    """
    sizes = tf.maximum(shape, tf.minimum(loop.number, 1))
    return tf.ensure_shape(tf.fill(sizes, tf.zeros([], dtype)), shape)


class _Blocks(_Loop):
    """Blocks of examples, equally many in each, of so many at the most.

    The last one begins early enough to be as large as the others, so its first
    examples may have been in the one before; what comes of these is dropped.
    Each is a slice of consecutive rows, of which TensorFlow makes no copy where
    the size of a row is a multiple of 64 bytes.

    Args:
        count: of examples.
        most: examples at a time.
    """

    def __init__(self, count, most):
        self.count = count
        self.number = tf.maximum(-(-self.count // most), 1)
        self.size = -(-self.count // self.number)
        # Where what comes of each example is, among what comes of all blocks.
        each = tf.range(count)
        again = self.number * self.size - count
        in_last = each >= (self.number - 1) * self.size
        self._places = each + tf.where(in_last, again, 0)

    def block(self, turn, tensors):
        """The tensors of a block."""
        start = tf.minimum(turn * self.size, self.count - self.size)
        return [_rows(tensor, start, self.size) for tensor in tensors]

    def in_order(self, array):
        """What came of the blocks, by example."""
        return tf.gather(with_leading(array.stack(), 2, [-1]), self._places)

    def by_block(self, values):
        """(B,) -> (number, size), with zeros for examples that come again."""
        places = self._places[:, None]
        found = tf.scatter_nd(places, values, [self.number * self.size])
        return tf.reshape(found, [self.number, self.size])

    def found(self, function, tensors, number):
        """Arrays of what comes of each block, so many; see `in_blocks`."""
        arrays = [
            tf.TensorArray(
                tensors[0].dtype, self.number, clear_after_read=False
            )
            for _ in range(number)
        ]

        def body(turn, *arrays):
            found = function(*self.block(turn, tensors))
            pairs = zip(arrays, found, strict=True)
            return [array.write(turn, own) for array, own in pairs]

        return self.run(body, arrays)


def in_blocks(
    function: Function, tensors: Sequence[tf.Tensor], most: int, number: int
) -> list[tf.Tensor]:
    """What comes of each example, (B, ...), some of them at a time.

    Args:
        function: maps the tensors of n examples to what comes of them, (n, ...)
            each.
        tensors: (B, ...) each, of one floating-point type.
        most: examples at a time.
        number: of tensors that the function returns.
    """
    blocks = _Blocks(tf.shape(tensors[0])[0], most)
    arrays = blocks.found(function, tensors, number)
    return [blocks.in_order(array) for array in arrays]


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """How the gradients of some examples are built.

    Attributes:
        function: maps the tensors of n examples to their gradients in pieces,
            (n, *shape) each.
        shapes: of the pieces.
        assembled: maps sums of the pieces to sums of gradients.
        has_neighbors: whether numbers of one example meet zeros of another,
            which are none where the numbers are not finite.
    """

    function: Function
    shapes: tuple[tuple[int, ...], ...]
    assembled: Callable[[list[tf.Tensor]], Any] = itself
    has_neighbors: bool = False

    def pieces(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Squared norms, (n,), and the pieces."""
        if not self.has_neighbors:
            return self._with_norms(*tensors)
        with_norms = self._with_norms
        if not tf.executing_eagerly():
            # Traced once for both cases.
            with_norms = tf.function(with_norms, autograph=False)
        found = with_norms(*tensors)
        return tf.cond(
            tf.reduce_all(tf.math.is_finite(found[0])),
            lambda: found,
            lambda: _of_finite(with_norms, tensors),
        )

    def _with_norms(self, *tensors):
        pieces = list(self.function(*tensors))
        return [tf.add_n([squared_norm(each) for each in pieces]), *pieces]


def _of_finite(with_norms, tensors):
    """The same, with zeros in the place of examples that are not finite."""
    finite = [
        tf.reduce_all(tf.math.is_finite(each), range(1, each.shape.rank))
        for each in tensors
    ]
    finite = tf.reduce_all(finite, 0)
    kept = [select_rows(finite, each) for each in tensors]
    norms, *pieces = with_norms(*kept)
    return [tf.where(finite, norms, tf.constant(np.inf, norms.dtype)), *pieces]


class KeptInBlocks:
    """The gradients of all examples, built some at a time and kept.

    What is copied for a block, such as the patches of an image, stays in the
    caches of the processor.

    Args:
        build: how.
        tensors: (B, ...) each, of one floating-point type.
        most: examples at a time.
        written: `once`, or `functools.partial` if the functions of `build` are
            those of a single layer.

    Attributes:
        squared_norms: (B,).
    """

    def __init__(
        self,
        build: Blockwise,
        tensors: Sequence[tf.Tensor],
        most: int,
        written: Callable[..., Function] = once,
    ):
        self._build, self._most = build, most
        self._dtype = tensors[0].dtype
        kept = written(_kept, build, most)
        self.squared_norms, *self._arrays = kept(*tensors)

    def weighted_sum(self, factors: Factors) -> list[tf.Tensor]:
        """Σᵢ cᵢ·gradientᵢ, without the examples of factor zero."""
        values = tf.cast(factors.values, self._dtype)
        total = once(_sum_of_kept, self._build.shapes, self._most)
        sums = total(values, factors.finite, *self._arrays)
        return self._build.assembled(sums)


def _kept(build, most, *tensors):
    """Squared norms, and arrays with the pieces of all blocks."""
    blocks = _Blocks(tf.shape(tensors[0])[0], most)
    number = 1 + len(build.shapes)
    norms, *arrays = blocks.found(build.pieces, tensors, number)
    return blocks.in_order(norms), *arrays


def _sum_of_kept(shapes, most, values, finite, *arrays):
    blocks = _Blocks(tf.shape(values)[0], most)
    arrays = [_as_array(array, values.dtype) for array in arrays]
    return _weighted_sum(
        blocks, arrays, shapes, blocks.by_block(values), finite
    )


def _as_array(array, dtype):
    """An array, of which a function returns but what holds its tensors."""
    if isinstance(array, tf.TensorArray):
        return array
    return tf.TensorArray(dtype, flow=array, clear_after_read=False)


def norm_of_one(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """The squared norm of the gradients of one example, (1,)."""
    if not _keras.on_cpu():
        return tf.add_n([squared_norm(gradient) for gradient in gradients])
    # l2_loss is half of it, in one pass.
    halves = [tf.nn.l2_loss(gradient) for gradient in gradients]
    return tf.reshape(long_sum(2 * tf.add_n(halves), None), [1])
