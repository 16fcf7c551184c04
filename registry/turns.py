"""Examples a few at a time: loops that hold few gradients and are fast.

TensorFlow multiplies one matrix for each example at a third to a half of the
speed of one large product. XLA comes close to it, but compiles anew for every
batch size, and Poisson sampling gives another with every step. So a loop takes
blocks of as many examples, and products of a block are compiled once for each
distinct kernel. With 16 examples, T = 100, d = 256 and p = 1024 on two cores
with AVX2, ghost norms take 8 ms so, and 15 to 21 without XLA.

What is better left to TensorFlow, such as convolutions by oneDNN, is done to
one example after the other, several in a turn of the loop, since a turn has
its own cost.

A loop also bounds memory: gradients that only serve their norms are dropped at
the end of a turn.
"""

import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry.terms import squared_norm

# Examples in a block; or blocks of one, in a turn and in parallel turns.
TOGETHER = 8
_BLOCKS, _PARALLEL = 4, 2
# So many examples are worked on at a time, in either way.
IN_FLIGHT = TOGETHER

# Blocks of fewer numbers are not worth the time that XLA takes to compile.
_LEAST_TO_COMPILE = 2**16

Function = Callable[..., Sequence[tf.Tensor]]


class _Turns:
    """The order in which examples are taken, and what is done to them.

    Args:
        function: is given the tensors of the examples of a block.
        tensors: (B, ...) each, of one floating-point type.
        rows: examples in a block.
    """

    def __init__(self, function, tensors, rows):
        self.tensors, self.rows, self.function = tensors, rows, function
        self._blocks, self._parallel = 1, 1
        if rows == 1:
            self._blocks, self._parallel = _BLOCKS, _PARALLEL
            if not tf.executing_eagerly():
                # Traced once for all blocks of a turn.
                self.function = tf.function(function, autograph=False)
        self.count = tf.shape(tensors[0])[0]
        in_a_turn = rows * self._blocks
        self._number = (self.count + in_a_turn - 1) // in_a_turn
        self.number = self._number * self._blocks

    def blocks(self, turn):
        """The numbers of the blocks of a turn."""
        return [turn * self._blocks + i for i in range(self._blocks)]

    def result(self, block):
        """What comes of the examples of a block.

        Where there are fewer, the last is taken again; what comes of it goes
        behind all others.
        """
        first = block * self.rows
        return self.function(*(self._rows_of(t, first) for t in self.tensors))

    def _rows_of(self, tensor, first):
        if self.rows == 1:
            return _slice(tensor, tf.minimum(first, self.count - 1), 1)
        if tensor.shape[0] is not None and tensor.shape[0] % self.rows == 0:
            return _slice(tensor, first, self.rows)
        places = tf.minimum(first + tf.range(self.rows), self.count - 1)
        if not _keras.on_cpu():
            # XLA compiles both branches, and there may be no such slice.
            return tf.gather(tensor, places)
        found = tf.cond(
            first + self.rows <= self.count,
            lambda: _slice(tensor, first, self.rows),
            lambda: tf.gather(tensor, places),
        )
        return tf.ensure_shape(found, [self.rows, *tensor.shape[1:]])

    def run(self, body, carried):
        _, *carried = tf.while_loop(
            lambda turn, *_: turn < self._number,
            lambda turn, *carried: (turn + 1, *body(turn, *carried)),
            (0, *carried),
            parallel_iterations=self._parallel,
        )
        return carried

    def norms(self, dtype):
        """An array that takes the squared norms of a turn."""
        shape = [self.rows * self._blocks]
        return tf.TensorArray(dtype, self._number, element_shape=shape)

    def in_order(self, norms):
        return tf.reshape(norms.stack(), [-1])[: self.count]


def _slice(tensor, first, count):
    """Some rows, without a copy where TensorFlow can do so."""
    shape = tensor.shape[1:]
    sizes = shape if shape.is_fully_defined() else tf.shape(tensor)[1:]
    begin = tf.stack([first] + [0] * shape.rank)
    rows = tf.slice(tensor, begin, tf.concat([[count], sizes], 0))
    return tf.ensure_shape(rows, [count, *shape])


def fast(function: Callable) -> Callable:
    """The function, compiled by XLA where that is worth it.

    Args:
        function: of tensors of fixed shapes, such as a block's. It must be one
            of a module: it is held, and compiled once for equal shapes.
    """

    @functools.wraps(function)
    def call(*tensors):
        if _worth_compiling(tensors):
            return _compiled(function)(*tensors)
        return function(*tensors)

    return call


@functools.cache
def _compiled(function):
    return tf.function(function, jit_compile=True, autograph=False)


def _worth_compiling(tensors):
    # Where XLA compiles the whole step, or for a GPU, all is compiled or fast.
    if tf.executing_eagerly() or not _keras.on_cpu():
        return False
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        return False
    numbers = sum(math.prod(tensor.shape) for tensor in tensors)
    return numbers >= _LEAST_TO_COMPILE


def norms_in_turns(
    function: Callable[..., tf.Tensor],
    tensors: Sequence[tf.Tensor],
    rows: int = 1,
) -> tf.Tensor:
    """A squared norm for each example, (B,).

    Args:
        function: maps the tensors of some examples to their squared norms.
        tensors: (B, ...) each, of one floating-point type.
        rows: how many examples it is given, one or `TOGETHER`.
    """
    turns = _Turns(function, tensors, rows)

    def body(turn, norms):
        found = [turns.result(block) for block in turns.blocks(turn)]
        return [norms.write(turn, tf.concat(found, 0))]

    (norms,) = turns.run(body, [turns.norms(tensors[0].dtype)])
    return turns.in_order(norms)


class KeptInTurns:
    """The gradients of all examples, built a few at a time and kept.

    Args:
        function: maps the tensors of some examples to their gradients,
            (rows, *shape) each.
        tensors: (B, ...) each, of one floating-point type.
        shapes: of the gradients.
        rows: as for `norms_in_turns`.

    Attributes:
        squared_norms: (B,).
    """

    def __init__(
        self,
        function: Function,
        tensors: Sequence[tf.Tensor],
        shapes: Sequence[Sequence[int]],
        rows: int = 1,
    ):
        self._turns = turns = _Turns(function, tensors, rows)
        self._shapes, self._dtype = shapes, tensors[0].dtype
        arrays = [
            tf.TensorArray(
                self._dtype,
                turns.number,
                element_shape=[rows, *shape],
                clear_after_read=False,
            )
            for shape in shapes
        ]

        def body(turn, norms, *arrays):
            found = []
            for block in turns.blocks(turn):
                gradients = turns.result(block)
                found.append(norms_of(gradients))
                arrays = [
                    array.write(block, tf.reshape(gradient, [rows, *shape]))
                    for array, gradient, shape in zip(
                        arrays, gradients, shapes, strict=True
                    )
                ]
            return norms.write(turn, tf.concat(found, 0)), *arrays

        norms, *self._arrays = turns.run(
            body, [turns.norms(self._dtype), *arrays]
        )
        self.squared_norms = turns.in_order(norms)

    def weighted_sum(self, factors: tf.Tensor) -> list[tf.Tensor]:
        """Σᵢ cᵢ·gradientᵢ, without the examples of factor zero."""
        turns = self._turns
        behind = [[0, turns.number * turns.rows - turns.count]]
        factors = tf.pad(tf.cast(factors, self._dtype), behind)
        factors = tf.reshape(factors, [-1, turns.rows])

        def body(turn, *sums):
            blocks = turns.blocks(turn)
            each = [factors[block] for block in blocks]
            return [
                _plus(total, *each, *(array.read(block) for block in blocks))
                for total, array in zip(sums, self._arrays, strict=True)
            ]

        # Of `tf.zeros` TensorFlow would make a constant, as large as the
        # weight and held for as long as the graph.
        zeros = [
            tf.raw_ops.Empty(shape=shape, dtype=self._dtype, init=True)
            for shape in self._shapes
        ]
        return turns.run(body, zeros)


def _plus_weighted(total, *factors_and_blocks):
    """The total and Σᵢ cᵢ·gradientᵢ; zero where c is, whatever the gradient."""
    count = len(factors_and_blocks) // 2
    factors, blocks = factors_and_blocks[:count], factors_and_blocks[count:]
    shape = [-1] + [1] * total.shape.rank
    weighted = [
        tf.math.multiply_no_nan(block, tf.reshape(c, shape))
        for c, block in zip(factors, blocks, strict=True)
    ]
    return tf.add_n([total, *(tf.reduce_sum(each, 0) for each in weighted)])


_plus = fast(_plus_weighted)


def norms_of(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Squared norms of examples, (rows,), from their gradients."""
    if gradients[0].shape[0] == 1:
        # l2_loss is half of it, in one pass.
        halves = [tf.nn.l2_loss(gradient) for gradient in gradients]
        return tf.reshape(2 * tf.add_n(halves), [1])
    return tf.add_n([squared_norm(gradient) for gradient in gradients])
