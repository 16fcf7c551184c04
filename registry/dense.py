"""Rules for Dense and EinsumDense: ζ is the pre-activation."""

import math
import re
import string
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry import lora
from keras_fastclip.registry.linear import Linear
from keras_fastclip.registry.lookup import for_quantized, register
from keras_fastclip.registry.terms import (
    Small,
    is_computed,
    size_of,
    sum_to_shape,
    with_rows,
)


@register(keras.layers.Dense)
@for_quantized
def dense(layer, inputs, training=None):
    """Dense on inputs of any rank: all axes but the last are positions."""
    if is_computed(layer, "kernel"):
        return NotImplemented
    zeta = _keras.up_to_activation(layer, inputs)
    a, terms = positions(inputs), []
    if layer.lora_enabled:
        terms = lora.terms(layer, a, positions)
    elif layer.quantization_mode is None:
        terms = [Linear(layer.kernel, a, positions)]
    if layer.bias is not None:
        terms.append(bias(layer.bias))
    return zeta, terms


@register(keras.layers.EinsumDense)
@for_quantized
def einsum_dense(layer, inputs, training=None):
    """EinsumDense for every equation in which the batch comes first.

    Each label of the equation has one role, told by where it stands:

    | input | kernel | output | role                       |
    |-------|--------|--------|----------------------------|
    | yes   | yes    | no     | d, contracted              |
    | no    | yes    | yes    | p, made by the kernel      |
    | yes   | no     | yes    | T, a position              |
    | yes   | yes    | yes    | S, a block of the kernel   |
    | yes   | no     | no     | summed before the kernel   |
    """
    labels = _labels(layer.equation, inputs.shape.rank)
    source, kernel, target = labels
    batch = source[0]
    repeated = any(len(set(part)) < len(part) for part in labels)
    if repeated or batch in kernel or target[0] != batch:
        return NotImplemented
    if is_computed(layer, "kernel"):
        return NotImplemented
    if layer.lora_enabled:
        terms = _einsum_lora(layer, inputs, labels)
        if terms is None:
            return NotImplemented
    elif layer.quantization_mode is None:
        terms = [_einsum_term(layer.kernel, inputs, labels)]
    else:
        terms = []
    zeta = _as_one_product(layer, inputs, labels)
    if zeta is None:
        zeta = _keras.up_to_activation(layer, inputs)
    if layer.bias is not None:
        if added_elsewhere(zeta, layer.bias.shape):
            return NotImplemented
        terms.append(bias(layer.bias))
    return zeta, terms


def _as_one_product(layer, inputs, labels):
    """The pre-activation by one product of two matrices, if it is one.

    Keras leaves such equations to a product for each example, which is
    slower, here and again in the backward pass. None if it must.
    """
    source, kernel, target = labels
    d = "".join(label for label in kernel if label in source)
    p = kernel[len(d) :]
    t = source[1 : len(source) - len(d)]
    if (source[1:], kernel, target[1:]) != (t + d, d + p, t + p):
        return None
    if layer.lora_enabled or layer.quantization_mode is not None:
        return None
    width = math.prod(layer.kernel.shape[: len(d)])
    matrix = tf.reshape(layer.kernel, [width, -1])
    if matrix.dtype != inputs.dtype:
        return None
    flat = tf.matmul(tf.reshape(inputs, [-1, width]), matrix)
    known = [*inputs.shape[: 1 + len(t)], *layer.kernel.shape[len(d) :]]
    if None in known[1:]:
        sizes = tf.shape(inputs)[: 1 + len(t)]
        sizes = tf.concat([sizes, known[1 + len(t) :]], 0)
        zeta = tf.ensure_shape(tf.reshape(flat, sizes), known)
    else:
        zeta = with_rows(flat, known[1:])
    return zeta if layer.bias is None else keras.ops.add(zeta, layer.bias)


def _einsum_term(variable, inputs, labels, cotangent=None):
    """The term of a kernel in an equation.

    Args:
        variable: the kernel.
        inputs: the other operand.
        labels: of inputs, kernel and output.
        cotangent: maps the cotangent of ζ to that of the equation's output,
            if they are not the same.
    """
    source, kernel, target = labels
    batch = source[0]

    def select(in_source, in_target):
        return "".join(
            label
            for label in kernel
            if (label in source) == in_source and (label in target) == in_target
        )

    d, p, s = select(True, False), select(False, True), select(True, True)
    t = "".join(c for c in source[1:] if c in target and c not in kernel)
    size = dict(zip(kernel, variable.shape, strict=True))

    def block_form(tensor, given, last):
        wanted = f"{batch}{t}{s}{last}"
        if given != wanted:
            tensor = tf.einsum(f"{given}->{wanted}", tensor)
        blocks = [_prod(size, s)] if s else []
        shape = [_positions_of(tensor, len(t)), *blocks, _prod(size, last)]
        return with_rows(tensor, shape)

    def to_kernel(matrices):
        lead = matrices.shape.rank - (3 if s else 2)
        tail = [size[c] for c in s + d + p]
        tensor = tf.reshape(matrices, [-1] * lead + tail)
        if s + d + p == kernel:
            return tensor
        order = [lead + (s + d + p).index(c) for c in kernel]
        return tf.transpose(tensor, [*range(lead), *order])

    return Linear(
        variable,
        block_form(inputs, source, d),
        lambda g: block_form(cotangent(g) if cotangent else g, target, p),
        to_kernel,
    )


def _einsum_lora(layer, inputs, labels):
    """LoRA, where the last axis of the kernel is one of the output.

    A stands in the kernel's place, with LoRA's rank for that axis, and B maps
    the one to the other. The fallback takes other equations.
    """
    source, kernel, target = labels
    last = kernel[-1]
    if last in source:
        return None
    if layer.quantization_mode is not None and target[-1] != last:
        return None  # Keras then applies B to another axis.
    a, b, scale = lora.factors(layer, inputs.dtype)
    rank = next(c for c in string.ascii_letters if c not in "".join(labels))
    reduced = target.replace(last, rank)

    def through_b(g):
        matrix = tf.cast(b, g.dtype)
        return scale * tf.einsum(f"{target},{rank}{last}->{reduced}", g, matrix)

    def last_axis(tensor, given, label):
        others = given.replace(label, "")
        return positions(tf.einsum(f"{given}->{others}{label}", tensor))

    to_rank = (source, kernel[:-1] + rank, reduced)
    low = tf.einsum("{},{}->{}".format(*to_rank), inputs, a)
    return [
        _einsum_term(layer.lora_kernel_a, inputs, to_rank, through_b),
        Linear(
            layer.lora_kernel_b,
            scale * last_axis(low, reduced, rank),
            lambda g: last_axis(g, target, last),
        ),
    ]


def bias(variable) -> Small:
    """A weight added to the pre-activation by broadcasting."""
    return Small(variable, lambda g: sum_to_shape(g, tuple(variable.shape)))


def added_elsewhere(zeta: tf.Tensor, shape: Sequence[int]) -> bool:
    """Whether `keras.ops.add` puts a bias on an axis that is not its own.

    It takes a bias of which one axis only is longer than one for a bias of the
    last axis of ζ, or else of the second, wherever the sizes are equal.
    """
    longer = [i for i, size in enumerate(shape) if size > 1]
    if len(longer) != 1:
        return False
    size, rank = shape[longer[0]], zeta.shape.rank
    own = rank - len(shape) + longer[0]
    equal = [axis for axis in (rank - 1, 1) if zeta.shape[axis] == size]
    return bool(equal) and equal[0] != own


def positions(tensor):
    """(rows, ..., d) -> (rows, T, d)."""
    if tensor.shape.rank == 2:
        return tensor[:, None, :]
    if tensor.shape.rank == 3:
        return tensor
    width = size_of(tensor, -1)
    count = _positions_of(tensor, tensor.shape.rank - 2)
    return with_rows(tensor, [count, width])


def _positions_of(tensor, axes):
    """The product of `axes` axes after the first, static where it is known."""
    sizes = tensor.shape[1 : 1 + axes].as_list()
    if None in sizes:
        return tf.reduce_prod(tf.shape(tensor)[1 : 1 + axes])
    return math.prod(sizes)


def _prod(size, labels):
    return math.prod(size[c] for c in labels)


def _labels(equation: str, rank: int) -> tuple[str, str, str]:
    """The equation's three parts, with letters in place of an ellipsis."""
    source, kernel, target = re.split(",|->", equation.replace(" ", ""))
    if "..." in source:
        elided = rank - len(source) + 3
        free = [c for c in string.ascii_letters if c not in equation]
        letters = "".join(free[:elided])
        source = source.replace("...", letters)
        target = target.replace("...", letters)
    return source, kernel, target
