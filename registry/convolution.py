"""Rules for Conv1D, Conv2D and Conv3D: ζ is the pre-activation.

A convolution is linear in its kernel, with a = the patches of the input. The
patches are shifted slices of the padded input, one for each offset within the
kernel, so the instantiated form takes one small product for each offset and
never holds all patches at once.
"""

import functools
import itertools
import math

import keras
import tensorflow as tf

from keras_fastclip.registry.dense import added_elsewhere, bias
from keras_fastclip.registry.linear import Linear, by_example
from keras_fastclip.registry.lookup import register
from keras_fastclip.registry.terms import (
    Small,
    at_least_float32,
    is_variable,
    select_rows,
)


@register(keras.layers.Conv1D)
@register(keras.layers.Conv2D)
@register(keras.layers.Conv3D)
def convolution(layer, inputs):
    if not is_variable(layer.kernel):
        return NotImplemented
    zeta = _convolve(layer, inputs, layer.kernel)

    def adjoint(g, keep):
        # The convolution is written again for the sake of its gradient; its
        # own result is not used, so a graph does not compute it.
        kept = select_rows(keep, at_least_float32(inputs))
        kernel = tf.cast(tf.convert_to_tensor(layer.kernel), kept.dtype)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(kernel)
            again = _convolve(layer, kept, kernel)
        return tape.gradient(again, kernel, output_gradients=g)

    channels_first = layer.data_format == "channels_first"

    def channels_last(tensor):
        if not channels_first:
            return tensor
        return tf.transpose(tensor, [0, *range(2, tensor.shape.rank), 1])

    terms = [Convolution(layer, channels_last(inputs), channels_last, adjoint)]
    if layer.use_bias:
        shape = [1] * (layer.rank + 2)
        shape[1 if channels_first else -1] = layer.filters
        if added_elsewhere(zeta, shape):
            return NotImplemented
        zeta = keras.ops.add(zeta, keras.ops.reshape(layer.bias, shape))
        offset = bias(layer.bias)
        if channels_first:
            spatial = list(range(2, layer.rank + 2))
            offset = Small(layer.bias, lambda g: tf.reduce_sum(g, spatial))
        terms.append(offset)
    return zeta, terms


def _convolve(layer, inputs, kernel):
    padding = layer.padding
    if padding == "causal":
        before = layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
        widths = [[0, 0], [before, 0], [0, 0]]
        if layer.data_format == "channels_first":
            widths = [[0, 0], [0, 0], [before, 0]]
        inputs, padding = tf.pad(inputs, widths), "valid"
    return keras.ops.conv(
        inputs,
        kernel,
        strides=list(layer.strides),
        padding=padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


class Convolution(Linear):
    """The kernel of a convolution; `Linear` with a = patches, built late.

    Args:
        layer: the convolution.
        inputs: (rows, *spatial, channels).
        channels_last: brings a cotangent of ζ into that order of axes.
        adjoint: 𝒜*, the kernel gradient of the convolution itself.
    """

    def __init__(self, layer, inputs, channels_last, adjoint):
        self.variables = (layer.kernel,)
        self._adjoint = adjoint
        self._channels_last = channels_last
        self._groups = layer.groups
        self._slices = functools.partial(_shifted_slices, layer, inputs)
        sizes = [
            _output_size(layer, axis, size)
            for axis, size in enumerate(inputs.shape[1:-1])
        ]
        self._positions = None if None in sizes else math.prod(sizes)
        self._blocks = layer.groups

    def _block_form(self, tensor):
        """(rows, *spatial, channels) -> (rows, T, channels), or by groups."""
        width = tensor.shape[-1]
        shape = [width]
        if self._groups > 1:
            shape = [self._groups, width // self._groups]
        positions = -1 if self._positions is None else self._positions
        return tf.reshape(tensor, [tf.shape(tensor)[0], positions, *shape])

    def _canonical(self, g):
        return self._block_form(self._channels_last(g))

    @property
    def _a(self):
        return tf.concat([self._block_form(s) for s in self._slices()], -1)

    def _to_kernel(self, matrices):
        """(..., [groups,] offsets·channels, filters) -> (..., *kernel)."""
        shape = tuple(self.variables[0].shape)
        if self._groups > 1:
            axes = list(range(matrices.shape.rank))
            axes[-3], axes[-2] = axes[-2], axes[-3]
            matrices = tf.transpose(matrices, axes)
        leading = tf.shape(matrices)[: matrices.shape.rank - 1]
        leading = leading[: -2 if self._groups > 1 else -1]
        return tf.reshape(matrices, tf.concat([leading, shape], 0))

    def adjoint(self, g, keep):
        return (self._adjoint(g, keep),)

    def per_example(self, g, rows):
        g = by_example(at_least_float32(self._canonical(g)), rows)
        products = []
        for part in self._slices():
            a = by_example(at_least_float32(self._block_form(part)), rows)
            products.append(tf.matmul(a, g, transpose_a=True))
        return (self._to_kernel(tf.concat(products, -2)),)


def _shifted_slices(layer, inputs):
    """Yields the part of the padded input that each kernel offset meets."""
    spatial = range(layer.rank)
    static = inputs.shape[1:-1].as_list()
    dynamic = tf.shape(inputs)
    sizes = [
        dynamic[1 + i] if static[i] is None else static[i] for i in spatial
    ]
    outputs = [_output_size(layer, i, sizes[i]) for i in spatial]
    reach = [
        (outputs[i] - 1) * layer.strides[i]
        + (layer.kernel_size[i] - 1) * layer.dilation_rate[i]
        + 1
        for i in spatial
    ]
    padding = [
        [0, 0],
        *map(list, zip(*_padding(layer, sizes, reach), strict=True)),
        [0, 0],
    ]
    padded = tf.pad(inputs, padding)
    for offset in itertools.product(*map(range, layer.kernel_size)):
        starts = [
            o * d for o, d in zip(offset, layer.dilation_rate, strict=True)
        ]
        window = tuple(
            slice(
                starts[i],
                starts[i] + (outputs[i] - 1) * layer.strides[i] + 1,
                layer.strides[i],
            )
            for i in spatial
        )
        yield padded[(slice(None), *window)]


def _padding(layer, sizes, reach):
    """Zeros before and after each spatial axis."""
    if layer.padding == "valid":
        return [0] * layer.rank, [0] * layer.rank
    if layer.padding == "causal":
        return [layer.dilation_rate[0] * (layer.kernel_size[0] - 1)], [0]
    missing = [
        tf.maximum(r - s, 0) if tf.is_tensor(s) else max(r - s, 0)
        for r, s in zip(reach, sizes, strict=True)
    ]
    before = [m // 2 for m in missing]
    return before, [m - b for m, b in zip(missing, before, strict=True)]


def _output_size(layer, axis, size):
    """Positions along one axis; None if the input's size is None."""
    if size is None:
        return None
    stride = layer.strides[axis]
    if layer.padding == "valid":
        extent = (layer.kernel_size[axis] - 1) * layer.dilation_rate[axis] + 1
        return (size - extent) // stride + 1
    return (size + stride - 1) // stride
