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
from keras_fastclip.registry.once import of_any_size, once
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
            self.function(*_rows(self.tensors, row, 1))
            for row in tf.unstack(places)
        ]

    def places(self, turn):
        """Where the results of a turn go."""
        return turn * AT_ONCE + np.arange(AT_ONCE, dtype=np.int32)

    def norms(self, dtype):
        """An array that takes the squared norms of a turn."""
        return tf.TensorArray(dtype, self.number, element_shape=[AT_ONCE])


def _rows(tensors, start, count):
    """So many rows of each, from a given one; no copies where that can be."""
    found, by_rank = [], {}
    for tensor in tensors:
        rank, shape = tensor.shape.rank, tensor.shape[1:]
        if rank not in by_rank:
            first = tf.constant([1] + [0] * (rank - 1))
            by_rank[rank] = start * first, count * first
        begin, size = by_rank[rank]
        if shape.is_fully_defined():
            size += tf.constant([0, *shape])
        else:
            size += tf.concat([[0], tf.shape(tensor)[1:]], 0)
        rows = tf.slice(tensor, begin, size)
        rows.set_shape([count if isinstance(count, int) else None, *shape])
        found.append(rows)
    return found


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
        values = tf.reshape(values, [-1, AT_ONCE])
        return _weighted_sums(
            _sum_of_turns, values, factors, self._arrays, self._shapes
        )


def _weighted_sums(function, values, factors, arrays, shapes, *sizes):
    """Σᵢ cᵢ·gradientᵢ.

    Args:
        function: of factors, whether all is finite, an array and sizes.
        values: the factors, as it takes them.
        factors: whether all is finite.
        arrays: gradients, (n, *shape) for each turn.
        shapes: of the gradients.
        sizes: for the function.
    """
    finite = factors.finite
    if finite is None:
        finite = tf.constant(False)  # Perhaps not.
    total = of_any_size(function)
    sums = [total(values, finite, _flow(each), *sizes) for each in arrays]
    return [
        tf.reshape(flat, shape)
        for flat, shape in zip(sums, shapes, strict=True)
    ]


def _sum_of_turns(values, finite, flow):
    """Turn by turn, with factors (turns, n); as a vector."""
    array = flow
    if not isinstance(flow, tf.TensorArray):
        array = tf.TensorArray(values.dtype, flow=flow, clear_after_read=False)

    # There is at least one turn.
    width = tf.reduce_prod(tf.shape(array.read(0))[1:])

    def body(turn, total):
        own = Factors(values[turn], finite)
        gradients = tf.reshape(array.read(turn), [-1, width])
        (kept,) = own.without_others(gradients)
        return turn + 1, total + tf.matmul(own.values[None], kept)[0]

    _, total = tf.while_loop(
        lambda turn, _: turn < tf.shape(values)[0],
        body,
        (0, tf.fill([width], tf.zeros([], values.dtype))),
        parallel_iterations=_PARALLEL,
    )
    return total


def _flow(array):
    """What holds the tensors of an array, for a function.

    It is all that a function returns of one, too.
    """
    whole = isinstance(array, tf.TensorArray) and not tf.executing_eagerly()
    return array.flow if whole else array


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
        return _rows(tensors, start, self.size)

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
        sums = _weighted_sums(
            _sum_of_blocks,
            tf.cast(factors.values, self._dtype),
            factors,
            self._arrays,
            self._build.shapes,
            tf.constant(self._most),
        )
        return self._build.assembled(sums)


def _kept(build, most, *tensors):
    """Squared norms, and arrays with the pieces of all blocks."""
    blocks = _Blocks(tf.shape(tensors[0])[0], most)
    number = 1 + len(build.shapes)
    norms, *arrays = blocks.found(build.pieces, tensors, number)
    return blocks.in_order(norms), *arrays


def _sum_of_blocks(values, finite, flow, most):
    blocks = _Blocks(tf.shape(values)[0], most)
    return _sum_of_turns(blocks.by_block(values), finite, flow)


def norm_of_one(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """The squared norm of the gradients of one example, (1,)."""
    if not _keras.on_cpu():
        return tf.add_n([squared_norm(gradient) for gradient in gradients])
    # l2_loss is half of it, in one pass.
    halves = [tf.nn.l2_loss(gradient) for gradient in gradients]
    return tf.reshape(long_sum(2 * tf.add_n(halves), None), [1])
