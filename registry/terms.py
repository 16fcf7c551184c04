"""What a rule knows about the weights of one call.

A captured call is ζ = Z(w), and g is the cotangent of ζ. A `Term` stands for
the linear map 𝒜 = DZ(w) of some of the call's weights and offers

- `adjoint(g, keep)`: 𝒜*g, the gradient summed over the rows to keep, and
  `weighted_sum(g, factors)`, the same of c·g;
- `per_example(g, rows)`: the gradient of every example, built in memory;
- `pieces(g, rows)`: the same before it is put together;
- `omega(g, rows)`: Ω, the squared norm of every example's gradient, without
  building it, where there is such a form;
- `operands(g, rows)` and `of_one(...)`: what is needed to build the gradient
  of one example after the other.

The last three may offer several forms that differ in time and memory, by name.

Row `r` of a captured tensor usually is example `r`, but some layers run with
other axes folded into the first one (windows, frames, experts). `Rows` says
which rows belong to which example.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry.once import of_any_size


@dataclasses.dataclass(frozen=True)
class Rows:
    """How the rows of a call's tensors are spread over the examples.

    Attributes:
        per_example: k, the number of rows of each example.
        example_major: rows of example i are [i·k, (i+1)·k) if true, and
            i, i + B, i + 2B, ... otherwise.
    """

    per_example: int = 1
    example_major: bool = True

    def fold(self, tensor: tf.Tensor) -> tf.Tensor:
        """(B·k, ...) -> (B, k, ...)."""
        k = self.per_example
        leading = [-1, k] if self.example_major else [k, -1]
        folded = with_leading(tensor, 1, leading)
        if not self.example_major:
            axes = [1, 0, *range(2, folded.shape.rank)]
            folded = tf.transpose(folded, axes)
        return folded

    def unfold(self, tensor: tf.Tensor) -> tf.Tensor:
        """(B, k, ...) -> (B·k, ...), the inverse of `fold`."""
        if not self.example_major:
            axes = [1, 0, *range(2, tensor.shape.rank)]
            tensor = tf.transpose(tensor, axes)
        return with_leading(tensor, 2, [-1])

    def spread(self, values: tf.Tensor) -> tf.Tensor:
        """One value an example (B,) -> one value a row (B·k,)."""
        if self.per_example == 1:
            return values
        if self.example_major:
            return tf.repeat(values, self.per_example)
        return tf.tile(values, [self.per_example])


ONE_ROW = Rows()

# Rows of fewer numbers may be copied.
_SMALL = 2**12


@dataclasses.dataclass(frozen=True)
class Factors:
    """What the gradient of every example, or every row, is multiplied by.

    Rows of factor zero are left out of sums, but 0·inf is NaN, so where they
    are not finite they have to be made zero. That takes a copy, for a case
    that is rare.

    Attributes:
        values: (rows,).
        finite: scalar, whether all that the factors multiply is finite; None
            if that is not known.
    """

    values: tf.Tensor
    finite: tf.Tensor | None = None

    def spread(self, rows: Rows) -> "Factors":
        """From examples to rows."""
        return dataclasses.replace(self, values=rows.spread(self.values))

    @property
    def keep(self) -> tf.Tensor:
        return self.values != 0

    def times(self, tensor: tf.Tensor) -> tf.Tensor:
        """Each row times its factor."""
        shape = [-1] + [1] * (tensor.shape.rank - 1)
        return tensor * tf.reshape(tf.cast(self.values, tensor.dtype), shape)

    def scaled(self, tensor: tf.Tensor) -> tf.Tensor:
        """The same, and zero where the factor is, whatever is there."""
        tensor = at_least_float32(tensor)
        shape = [-1] + [1] * (tensor.shape.rank - 1)
        column = tf.reshape(tf.cast(self.values, tensor.dtype), shape)
        return tf.math.multiply_no_nan(tensor, column)

    def total(self, tensor: tf.Tensor) -> tf.Tensor:
        """Σᵢ cᵢ·tensorᵢ, of rows that are finite where c is zero."""
        values, shape = tf.cast(self.values, tensor.dtype), tensor.shape[1:]
        if not shape.is_fully_defined():
            return tf.tensordot(values, tensor, 1)
        flat = with_rows(tensor, [shape.num_elements()])
        return tf.reshape(tf.matmul(tf.expand_dims(values, 0), flat), shape)

    def without_others(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Zeros in rows of factor zero, if any row is not finite."""

        sizes = [tensor.shape[1:].num_elements() for tensor in tensors]
        small = None not in sizes and sum(sizes) < _SMALL
        if self.finite is None or small:
            return [select_rows(self.keep, tensor) for tensor in tensors]
        kept = of_any_size(_without_others)(self.finite, self.values, *tensors)
        for tensor, known in zip(kept, tensors, strict=True):
            tensor.set_shape(known.shape)
        return kept


def _without_others(finite, values, *tensors):
    return tf.cond(
        finite,
        lambda: list(tensors),
        lambda: [select_rows(values != 0, tensor) for tensor in tensors],
    )


class Term:
    """How a call uses some of its weights; see the module's docstring.

    Attributes:
        variables: the weights, in the order of the tuples that `adjoint` and
            `per_example` return.
        has_omega: whether there is a form of Ω that builds no gradients.
    """

    variables: tuple[Any, ...]
    has_omega = False

    def adjoint(self, g: Any, keep: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """𝒜*g over the rows where `keep`, (rows,), is true.

        g is zero in the other rows, but what it is multiplied with need not
        be finite there, and 0·inf is NaN. So those rows are left out.
        """
        raise NotImplementedError

    def weighted_sum(self, g: Any, factors: Factors) -> tuple[tf.Tensor, ...]:
        """𝒜*(c·g), where c has a factor for every row."""
        return self.adjoint(factors.scaled(g), factors.keep)

    def per_example(
        self, g: Any, rows: Rows, form: str | None = None
    ) -> tuple[tf.Tensor, ...]:
        raise NotImplementedError

    def pieces(
        self, g: Any, rows: Rows, form: str | None = None
    ) -> tuple[tf.Tensor, ...]:
        """The numbers of `per_example` in another order, (B, ...) each.

        For norms and sums any order will do, and that of the weights may cost
        a copy of all gradients.
        """
        return self.per_example(g, rows, form)

    def assembled(self, pieces: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """From pieces, or sums of them, to the order of the weights."""
        return tuple(pieces)

    def has_adjoint_for(self, g: Any) -> bool:
        """Whether `adjoint` sums such cotangents in float32 or better.

        The sum of many gradients must not be rounded to half precision, or
        one example could move it by more than its own gradient.
        """
        return True

    def omega(self, g: Any, rows: Rows, form: str | None = None) -> tf.Tensor:
        raise NotImplementedError

    def prefers_omega(self, rows: Rows) -> bool:
        """Whether `omega` takes less memory than `per_example`."""
        return False

    def operands(self, g: Any, rows: Rows) -> list[tf.Tensor] | None:
        """Tensors (B, ...) of which `of_one` takes the part of an example."""
        return None

    def of_one(self, *operands: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """The gradients of one example, (1, ...), from its operands."""
        raise NotImplementedError

    def lengths(self, *operands: tf.Tensor) -> tf.Tensor:
        """Norms of what each position adds to the gradients, (B, T).

        By these is bounded how much two ways to compute a gradient differ.
        """
        raise NotImplementedError

    def kernel(self, rows: Rows) -> Any:
        """What the choice between forms depends on; None without a choice.

        See `linear.Kernel`.
        """
        return None

    def sizes(self, rows: Rows) -> tuple[int | None, int, int] | None:
        """T, d and p, for terms that have them."""
        return None


class Small(Term):
    """Weights so few that the gradients of all examples fit beside them.

    Biases, scales, offsets and tables that are added or multiplied by
    broadcasting: their gradient for a row is a sum over other axes.

    Args:
        variable: the weight.
        per_row: maps g to the gradient of every row, (rows, *weight shape).
    """

    def __init__(self, variable, per_row: Callable[[tf.Tensor], tf.Tensor]):
        self.variables = (variable,)
        self._per_row = per_row

    def _rows(self, g):
        return self._per_row(at_least_float32(g))

    def adjoint(self, g, keep):
        return (tf.reduce_sum(select_rows(keep, self._rows(g)), 0),)

    def per_example(self, g, rows, form=None):
        per_row = self._rows(g)
        if rows.per_example == 1:
            return (per_row,)
        return (tf.reduce_sum(rows.fold(per_row), 1),)


def itself(tensor: tf.Tensor) -> tf.Tensor:
    """For places that take a function and need none."""
    return tensor


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """Norms are never taken in half precision."""
    if tensor.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(tensor, tf.float32)
    return tensor


def select_rows(keep: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Zeros in the rows that are not kept, whatever they hold."""
    shape = [-1] + [1] * (tensor.shape.rank - 1)
    return tf.where(tf.reshape(keep, shape), tensor, tf.zeros([], tensor.dtype))


def size_of(tensor: tf.Tensor, axis: int) -> int | tf.Tensor:
    """Of an axis: a number where it is known while tracing."""
    known = tensor.shape[axis]
    return tf.shape(tensor)[axis] if known is None else known


def with_rows(tensor: tf.Tensor, shape: Sequence[Any]) -> tf.Tensor:
    """(rows, ...) -> (rows, *shape), in few operations where it is known."""
    if all(isinstance(size, int) and size for size in shape):
        return tf.reshape(tensor, [-1, *shape])
    return tf.reshape(tensor, [tf.shape(tensor)[0], *shape])


def with_leading(
    tensor: tf.Tensor, axes: int, sizes: Sequence[int]
) -> tf.Tensor:
    """With sizes, one of them -1, in place of the first so many axes."""
    rest = tensor.shape[axes:]
    if rest.is_fully_defined() and 0 not in rest:
        return tf.reshape(tensor, [*sizes, *rest])
    shape = tf.shape(tensor)
    known = -math.prod(sizes)
    sizes = [
        tf.reduce_prod(shape[:axes]) // known if n < 0 else n for n in sizes
    ]
    result = tf.reshape(tensor, tf.concat([sizes, shape[axes:]], 0))
    static = [n if isinstance(n, int) else None for n in sizes]
    return tf.ensure_shape(result, [*static, *rest])


def shaped_as(tensor: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """The other's numbers in the shape of a tensor, in few operations."""
    shape = tensor.shape
    if not shape.is_fully_defined():
        return tf.ensure_shape(tf.reshape(other, tf.shape(tensor)), shape)
    return other if other.shape == shape else tf.reshape(other, shape)


def long_sum(squares: tf.Tensor, count: int | None) -> tf.Tensor:
    """A sum of so many squares by a CPU, not below its true value.

    TensorFlow adds in 16 lanes or more, up to 256 numbers in a lane, and adds
    up what it has of these in pairs (measured: 32 lanes). Each addition may
    lose a unit of roundoff of its result.
    """
    most = 256 + 64
    additions = most if count is None else min(8 + count / 16, most)
    unit = np.finfo(squares.dtype.as_numpy_dtype).eps / 2
    return squares * (1 + additions * unit)


def sum_of_squares(tensor: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Over some axes, and not below the true value."""
    if _keras.on_cpu():
        # The one reduction of squares that needs no array for them.
        norms = tf.math.reduce_euclidean_norm(tensor, axes)
        sizes = [tensor.shape[axis] for axis in axes]
        count = None if None in sizes else math.prod(sizes)
        return long_sum(tf.square(norms), count)
    # XLA adds from one end to the other, which would lose too much.
    wide = tf.cast(tf.square(tensor), tf.float64)
    return tf.cast(tf.reduce_sum(wide, axes), tensor.dtype)


def squared_norm(per_example: tf.Tensor) -> tf.Tensor:
    """(B, ...) -> (B,), the squared norm of each example's part."""
    axes = list(range(1, per_example.shape.rank))
    return sum_of_squares(per_example, axes)


def sum_to_shape(g: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Undoes broadcasting of a weight of `shape` to rows of g.

    Args:
        g: (rows, ...), cotangent of a tensor to which a weight was added with
            NumPy's broadcasting, aligned on the right.
        shape: of the weight; has no row axis.

    Returns:
        (rows, *shape).
    """
    first = g.shape.rank - len(shape)
    lost = list(range(1, first))
    ones = [first + i for i, size in enumerate(shape) if size == 1]
    summed = tf.reduce_sum(g, lost + ones) if lost + ones else g
    if summed.shape[1:] == shape:
        return summed
    return tf.reshape(summed, [-1, *shape])


def is_computed(layer: keras.Layer, name: str) -> bool:
    """Whether a subclass computes a weight that its base class holds.

    Keras itself does so for LoRA and for quantized weights, which the rules
    know of.
    """
    known = layer.lora_enabled or _keras.is_quantized(layer)
    return not known and not isinstance(getattr(layer, name), keras.Variable)
