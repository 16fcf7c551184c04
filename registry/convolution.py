"""Rules for convolutions of all kinds: ζ is the pre-activation.

A convolution is linear in its kernel, with a = the patches of the input. The
patches are shifted slices of the padded input, one for each offset within the
kernel. So there are several forms to build the gradients of the examples:

- "offsets": one product for each offset, never all patches at once;
- "blocks": for some examples at a time, so that what is copied stays in the
  caches. Where a patch is a pixel further than the one before, images are laid
  one behind the other with zeros between them. Then each row of offsets is a
  slice of consecutive numbers, which is no copy;
- "rows": one for each row of offsets, with the input unfolded along its width;
- "patches": one for all offsets, with the input unfolded as a whole;
- "loop": the convolution's own derivative by its kernel, for one example after
  the other.

Which is the fastest depends on the machine. Milliseconds for the norms of 32
examples, 3x3, on two cores with AVX2, where TensorFlow runs without oneDNN:

| side, in, out | plain sum | offsets | rows | patches | loop |
|---------------|-----------|---------|------|---------|------|
| 32, 3, 32     |       5.5 |     9.9 |  8.1 |    15.8 |  6.1 |
| 32, 32, 32    |      18.3 |    28.0 | 30.1 |    60.2 | 13.9 |
| 16, 64, 64    |       8.7 |    19.6 | 23.3 |    24.5 | 10.7 |
| 8, 128, 128   |       8.4 |    13.9 | 17.7 |    19.6 | 12.4 |

With oneDNN, "offsets" and "rows" take half the time of "loop" and are within
a tenth of each other, and "blocks" takes less. So the planner tries "blocks"
and "loop".

- A depthwise convolution is one with as many groups as channels.
- A separable convolution is a depthwise one, whose result is the input of a
  kernel that acts on channels; the cotangent of the former is g times that
  kernel, transposed.
- A transposed convolution is the derivative of a convolution by its input, so
  input and cotangent change places: patches of g meet the input.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import keras
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry import lora
from keras_fastclip.registry.dense import added_elsewhere, bias, positions
from keras_fastclip.registry.linear import (
    Kernel,
    Kind,
    Linear,
    by_example,
    ghost_norm,
    ghost_norm_by_tiles,
    gram,
    join_blocks,
    measures,
    norms,
    scaled_pair,
    times_transposed,
)
from keras_fastclip.registry.lookup import register
from keras_fastclip.registry.once import once
from keras_fastclip.registry.terms import (
    ONE_ROW,
    Rows,
    Small,
    at_least_float32,
    is_computed,
    select_rows,
    with_rows,
)
from keras_fastclip.registry.turns import (
    Blockwise,
    in_blocks,
    norms_in_turns,
)

# Numbers that stay in the caches of a processor: 2 MiB, and 6 where they are
# used one after the other.
_IN_CACHE, _IN_ALL_CACHES = 2**19, 3 * 2**19
# TensorFlow with oneDNN takes smaller arrays from the C library, which finds no
# other use for the memory; larger ones share theirs with all of the step.
_IN_POOL = 2**16

# As many pixels, zeros included, as this times the positions are not too many.
_FEW_ZEROS = 1.2
# Slices that begin at multiples of so many numbers are no copies.
_ALIGNED = 16


@register(keras.layers.Conv1D)
@register(keras.layers.Conv2D)
@register(keras.layers.Conv3D)
def convolution(layer, inputs):
    if is_computed(layer, "kernel"):
        return NotImplemented
    if layer.lora_enabled:
        return _convolution_with_lora(layer, inputs)
    geometry = Geometry.of(layer, layer.groups)
    convolve = functools.partial(_convolve, geometry)
    return _with_kernel(layer, inputs, geometry, convolve)


@register(keras.layers.DepthwiseConv1D)
@register(keras.layers.DepthwiseConv2D)
def depthwise_convolution(layer, inputs):
    geometry = Geometry.of(layer, groups=layer.kernel.shape[-2])
    return _with_kernel(layer, inputs, geometry, _depthwise(geometry))


@register(keras.layers.SeparableConv1D)
@register(keras.layers.SeparableConv2D)
def separable_convolution(layer, inputs):
    geometry = Geometry.of(layer, groups=layer.depthwise_kernel.shape[-2])
    depthwise = _depthwise(geometry)
    middle = depthwise(inputs, layer.depthwise_kernel)
    pointwise = tf.convert_to_tensor(layer.pointwise_kernel)
    matrix = tf.squeeze(pointwise, list(range(layer.rank)))
    zeta = tf.matmul(geometry.channels_last(middle), matrix)
    zeta = geometry.as_given(zeta)

    def by_position(tensor):
        return positions(geometry.channels_last(tensor))

    def through_pointwise(g):
        return times_transposed(geometry.channels_last(g), matrix)

    terms = [
        Convolution(
            layer.depthwise_kernel,
            geometry,
            inputs,
            depthwise,
            through_pointwise,
        ),
        Linear(
            layer.pointwise_kernel,
            by_position(middle),
            by_position,
            lambda m: _reshaped(m, layer.pointwise_kernel.shape),
        ),
    ]
    return _with_bias(layer, zeta, terms)


@register(keras.layers.Conv1DTranspose)
@register(keras.layers.Conv2DTranspose)
@register(keras.layers.Conv3DTranspose)
def transposed_convolution(layer, inputs):
    geometry = Geometry.of(layer)
    convolve = functools.partial(
        keras.ops.conv_transpose,
        strides=list(layer.strides),
        padding=layer.padding,
        output_padding=layer.output_padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )
    return _with_kernel(
        layer, inputs, geometry, convolve, TransposedConvolution
    )


def _convolution_with_lora(layer, inputs):
    """A convolution with A, which all groups share, then B on its channels."""
    groups, rank = layer.groups, layer.lora_rank
    geometry = Geometry.of(layer, groups)
    a, b, scale = lora.factors(layer, inputs.dtype)

    def convolve(inputs, kernel):
        each_group = [1] * (kernel.shape.rank - 1) + [groups]
        return _convolve(geometry, inputs, tf.tile(kernel, each_group))

    def by_group(tensor):
        """(rows, *spatial, c) -> (rows, T, groups, c/groups)."""
        tensor = positions(geometry.channels_last(tensor))
        width = tensor.shape[-1] // groups
        shape = tf.concat([tf.shape(tensor)[:2], [groups, width]], 0)
        return tf.ensure_shape(
            tf.reshape(tensor, shape), [*tensor.shape[:2], groups, width]
        )

    def through_b(g):
        g = geometry.channels_last(g)
        blocks = tf.split(tf.cast(b, g.dtype), groups, -1)
        parts = zip(tf.split(g, groups, -1), blocks, strict=True)
        products = [times_transposed(part, block) for part, block in parts]
        return scale * tf.concat(products, -1)

    low = scale * by_group(convolve(inputs, a))
    terms = [
        SharedByGroups(
            layer.lora_kernel_a, geometry, inputs, convolve, through_b
        ),
        Linear(
            layer.lora_kernel_b,
            low,
            by_group,
            lambda m: join_blocks(m, (rank, layer.filters)),
        ),
    ]
    return _with_bias(layer, _convolve(geometry, inputs, layer.kernel), terms)


def _with_kernel(layer, inputs, geometry, convolve, term=None):
    """The rule of a layer with one kernel and perhaps a bias."""
    zeta = convolve(inputs, layer.kernel)
    term = term or Convolution
    terms = [term(layer.kernel, geometry, inputs, convolve)]
    return _with_bias(layer, zeta, terms)


def _with_bias(layer, zeta, terms):
    if not layer.use_bias:
        return zeta, terms
    rank = zeta.shape.rank
    channels_first = layer.data_format == "channels_first"
    shape = [1] * rank
    shape[1 if channels_first else -1] = layer.bias.shape[0]
    if added_elsewhere(zeta, shape):
        return NotImplemented
    zeta = keras.ops.add(zeta, keras.ops.reshape(layer.bias, shape))
    offset = bias(layer.bias)
    if channels_first:
        spatial = list(range(2, rank))
        offset = Small(layer.bias, lambda g: tf.reduce_sum(g, spatial))
    return zeta, [*terms, offset]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Which inputs a kernel meets at each position."""

    kernel_size: tuple[int, ...]
    strides: tuple[int, ...]
    dilation_rate: tuple[int, ...]
    padding: str
    data_format: str
    groups: int

    @classmethod
    def of(cls, layer, groups: int = 1) -> "Geometry":
        return cls(
            tuple(layer.kernel_size),
            tuple(layer.strides),
            tuple(layer.dilation_rate),
            layer.padding,
            layer.data_format,
            groups,
        )

    @property
    def rank(self) -> int:
        return len(self.kernel_size)

    def channels_last(self, tensor: tf.Tensor) -> tf.Tensor:
        if self.data_format == "channels_last":
            return tensor
        return tf.transpose(tensor, [0, *range(2, tensor.shape.rank), 1])

    def as_given(self, tensor: tf.Tensor) -> tf.Tensor:
        """The inverse of `channels_last`."""
        if self.data_format == "channels_last":
            return tensor
        last = tensor.shape.rank - 1
        return tf.transpose(tensor, [0, last, *range(1, last)])


def _convolve(geometry, inputs, kernel):
    if _is_depthwise(geometry, kernel):
        # Others are compiled by XLA in Keras, in every call.
        channels = geometry.groups
        kernel = keras.ops.reshape(
            kernel, [*geometry.kernel_size, channels, -1]
        )
        return _depthwise(geometry)(inputs, kernel)
    padding = geometry.padding
    if padding == "causal":
        before = geometry.dilation_rate[0] * (geometry.kernel_size[0] - 1)
        widths = [[0, 0], [before, 0], [0, 0]]
        if geometry.data_format == "channels_first":
            widths = [[0, 0], [0, 0], [before, 0]]
        inputs, padding = tf.pad(inputs, widths), "valid"
    return keras.ops.conv(
        inputs,
        kernel,
        strides=list(geometry.strides),
        padding=padding,
        dilation_rate=geometry.dilation_rate,
        data_format=geometry.data_format,
    )


def _is_depthwise(geometry, kernel):
    """Whether each channel is a group, in a form that Keras has an op for."""
    return (
        geometry.groups > 1
        and kernel.shape[-2] == 1
        and geometry.rank < 3
        and geometry.padding != "causal"
        and len(set(geometry.strides)) == 1
    )


def _depthwise(geometry):
    return functools.partial(
        keras.ops.depthwise_conv,
        strides=geometry.strides,
        padding=geometry.padding,
        dilation_rate=geometry.dilation_rate,
        data_format=geometry.data_format,
    )


class Convolution(Linear):
    """The kernel of a convolution; `Linear` with a = patches, built late.

    Args:
        kernel: the weight.
        geometry: which inputs it meets.
        inputs: of the call.
        convolve: the convolution, a function of inputs and kernel.
        canonical: maps the cotangent of ζ to that of the convolution's
            result, channels last; by default they are the same.
    """

    is_matrix = False

    @property
    def _blocks(self):
        return self._geometry.groups

    def __init__(self, kernel, geometry, inputs, convolve, canonical=None):
        self.variables = (kernel,)
        self._geometry = geometry
        self._inputs = inputs
        self._convolve = convolve
        self._to_result = canonical or geometry.channels_last
        self._positions = self._count_positions()

    def _widths(self):
        geometry = self._geometry
        channels = self._image_channels() // geometry.groups
        d = math.prod(geometry.kernel_size) * channels
        return d, self.size // (d * self._blocks)

    def _image_channels(self):
        """Of what is cut into patches."""
        return self._geometry.channels_last(self._inputs).shape[-1]

    def kernel(self, rows):
        shape = tuple(self._inputs.shape[1:])
        if self._positions is None or None in shape:
            return None
        return ConvolutionKernel(
            self.positions(rows),
            *self._widths(),
            self._blocks,
            rows=rows.per_example,
            image=shape,
            weights=tuple(self.variables[0].shape),
            geometry=self._geometry,
            term=type(self),
            convolve=self._convolve,
            has_loop=self._has_loop(),
        )

    def _has_loop(self):
        """Whether the convolution can run in a loop."""
        # Keras has XLA compile every call of a grouped convolution.
        return (
            not self._in_groups()
            or self._has_depthwise_op()
            or _is_depthwise(self._geometry, self.variables[0])
        )

    def _in_groups(self):
        return self._geometry.groups > 1 or self._has_depthwise_op()

    def _has_depthwise_op(self):
        own_op = getattr(self._convolve, "func", None)
        return own_op is keras.ops.depthwise_conv

    def _count_positions(self):
        spatial = self._geometry.channels_last(self._inputs).shape[1:-1]
        sizes = [
            _output_size(self._geometry, axis, size)
            for axis, size in enumerate(spatial)
        ]
        return None if None in sizes else math.prod(sizes)

    def _operands(self, g):
        """What is cut into patches, and what the patches meet."""
        g = self._to_result(at_least_float32(g))
        return self._geometry.channels_last(self._inputs), g

    def _block_form(self, tensor, rows):
        """(rows, *spatial, c) -> (B, T, c), or (B, groups, T, c/groups)."""
        width, groups = tensor.shape[-1], self._geometry.groups
        shape = [width] if groups == 1 else [groups, width // groups]
        if self._positions is None:
            shape = [tf.shape(tensor)[0], -1, *shape]
            tensor = tf.reshape(tensor, shape)
        else:
            tensor = with_rows(tensor, [self._positions, *shape])
        return by_example(at_least_float32(tensor), rows)

    def _patches(self, image, rows, together=1):
        """The patches' values at so many offsets within the kernel a time."""
        found = []
        for part in _shifted_slices(self._geometry, image):
            found.append(self._block_form(part, rows))
            if len(found) == together:
                yield tf.concat(found, -1) if together > 1 else found[0]
                found = []

    def pair(self, g, rows):
        image, other = self._operands(g)
        together = math.prod(self._geometry.kernel_size)
        (patches,) = self._patches(image, rows, together)
        return patches, self._block_form(other, rows)

    def _to_kernel(self, matrices):
        """(..., [groups,] offsets·channels, filters) -> (..., *kernel)."""
        shape = tuple(self.variables[0].shape)
        if self._geometry.groups > 1:
            return join_blocks(matrices, shape)
        return _reshaped(matrices, shape)

    def adjoint(self, g, keep):
        kept = select_rows(keep, at_least_float32(self._inputs))
        return (self._derivative(kept, self._cotangent(g)),)

    def weighted_sum(self, g, factors):
        inputs = at_least_float32(self._inputs)
        pair = scaled_pair(factors, inputs, self._cotangent(g))
        return (self._derivative(*pair),)

    def _cotangent(self, g):
        """Of the convolution's result."""
        g = self._to_result(at_least_float32(g))
        return self._geometry.as_given(g)

    def _derivative(self, inputs, g):
        """By the kernel, summed over all rows."""
        # The convolution is written again for the sake of its gradient; its
        # own result is not used, so a graph does not compute it.
        kernel = tf.convert_to_tensor(self.variables[0])
        # Inside a loop, a tensor of the loop.
        kernel = tf.identity(tf.cast(kernel, inputs.dtype))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(kernel)
            again = self._convolve(inputs, kernel)
        g = tf.cast(g, again.dtype)
        gradient = tape.gradient(again, kernel, output_gradients=g)
        if not self._in_groups():
            return gradient
        # TensorFlow leaves that of a depthwise convolution of nothing unset.
        some = tf.shape(inputs)[0] > 0
        return tf.where(some, gradient, tf.zeros_like(gradient))

    def pieces(self, g, rows, form=None):
        image, other = self._operands(g)
        other = self._block_form(other, rows)
        together = _offsets_together(form, self._geometry)
        return tuple(
            tf.matmul(patch, other, transpose_a=True)
            for patch in self._patches(image, rows, together)
        )

    def assembled(self, pieces):
        return super().assembled([tf.concat(pieces, -2)])

    def of_some(self, inputs, g):
        """The gradients of some examples, from their operands."""
        rows = Rows(inputs.shape[1])
        some = self._on(rows.unfold(inputs))
        return some.per_example(rows.unfold(g), rows)

    def blockwise(self) -> Blockwise:
        """How the gradients of some examples are built, from operands."""
        return _blockwise(self.kernel(ONE_ROW))

    def by_line(self, g, rows):
        """gᵀa of each example, for each row of offsets."""
        image, other = self._operands(g)
        line = self.kernel(rows).line
        other = by_example(line.padded(other), rows)
        return [
            tf.matmul(other, by_example(patches, rows), transpose_a=True)
            for patches in line.patches(at_least_float32(image))
        ]

    def operands(self, g, rows):
        inputs = at_least_float32(self._inputs)
        g = tf.cast(self._cotangent(g), inputs.dtype)
        return [rows.fold(inputs), rows.fold(g)]

    def of_one(self, inputs, g):
        return (self._derivative(inputs[0], g[0])[None],)

    def _on(self, inputs):
        """The same on other inputs, without what comes before g."""
        kernel = self.variables[0]
        return type(self)(kernel, self._geometry, inputs, self._convolve)

    def lengths(self, inputs, g):
        rows = Rows(inputs.shape[1])
        one_axis = self._on(rows.unfold(inputs))
        image, other = one_axis._operands(rows.unfold(g))
        squares = self._squares(image)
        patches = tf.add_n(list(_shifted_slices(self._geometry, squares)))
        by_group = tf.sqrt(patches * self._squares(other))
        if self._blocks == 1:
            lengths = tf.reduce_sum(by_group, -1)
        else:
            lengths = tf.norm(by_group, axis=-1)
        return tf.reshape(lengths, [tf.shape(inputs)[0], -1])

    def _squares(self, tensor):
        """(rows, *spatial, c) -> (rows, *spatial, groups), sums of squares."""
        groups = self._geometry.groups
        shape = tf.concat([tf.shape(tensor)[:-1], [groups, -1]], 0)
        squares = tf.reduce_sum(tf.reshape(tf.square(tensor), shape), -1)
        return tf.ensure_shape(squares, [*tensor.shape[:-1], groups])

    def omega(self, g, rows, form=None):
        shifted = self._has_shifted_grams(rows)
        if form == "blocks" and rows.per_example > 1:
            form = "loop"
        at_once = form in (None, "batched")
        if at_once and not shifted:
            return super().omega(g, rows)
        if at_once or form == "blocks":
            found = _norms_at_once if at_once else _norms_in_blocks
            return once(found, self.kernel(rows))(*self.operands(g, rows))

        # Patches take more than the image, so they are cut in the loop.
        def of_one(inputs, g):
            one = self._on(inputs[0])
            if shifted and form == "loop":
                return norms(one.measures(g[0]), one.kinds())
            norm = ghost_norm_by_tiles if form == "tiles" else ghost_norm
            return norm(*one.pair(g[0], Rows(rows.per_example)))

        return norms_in_turns(of_one, self.operands(g, rows))

    def measures(self, g):
        """Of the Gram matrices of all patches and of g."""
        if self._has_shifted_grams(ONE_ROW):
            return measures(*self._shifted_grams(*self._operands(g)))
        return measures(*map(gram, self.pair(g, ONE_ROW)))

    def kinds(self):
        """How these Gram matrices are added up."""
        of_patches, of_g = map(Kind.of, self._widths())
        if self._has_shifted_grams(ONE_ROW):
            of_patches = self._shifted_kind()
        return of_patches, of_g

    def _has_shifted_grams(self, rows):
        kernel = self.kernel(rows)
        return kernel is not None and kernel.has_shifted_grams

    def _shifted_kind(self):
        """How the Gram matrix of patches is added up."""
        sizes = self._geometry.kernel_size
        one_by_one = sum(size - 1 for size in sizes)
        pixels = Kind.of(self._image_channels())
        return pixels.shifted(math.prod(sizes), one_by_one)

    def _shifted_grams(self, image, other):
        """Both Gram matrices, that of patches from one of pixels.

        The product of two patches is the sum over the offsets o within the
        kernel of products of two pixels: (aaᵀ)ₛₜ = Σₒ (xxᵀ)ₛ₊ₒ,ₜ₊ₒ. With the
        pixels of the padded image in one row, an offset is a number, and the
        sum one of shifted slices of xxᵀ, axis by axis of the kernel. But for
        the padding, xxᵀ takes a ninth of the operations of aaᵀ with a kernel
        of 3 x 3. Where a row of pixels ends, there are patches that are none;
        their g is zero.
        """
        geometry = self._geometry
        image, other = at_least_float32(image), at_least_float32(other)
        outputs, image = other.shape[1:-1].as_list(), _padded(geometry, image)
        sizes = image.shape[1:-1].as_list()
        pixels = tf.reshape(image, [-1, math.prod(sizes), image.shape[-1]])
        of_pixels = gram(pixels)
        gram_a = of_pixels.matrix
        for axis, count in enumerate(geometry.kernel_size):
            step = geometry.dilation_rate[axis] * math.prod(sizes[axis + 1 :])
            length = gram_a.shape[-1] - (count - 1) * step
            size = tf.constant([-1, length, length])
            starts = [[0, i * step, i * step] for i in range(count)]
            gram_a = tf.add_n([tf.slice(gram_a, s, size) for s in starts])
        behind = [[0, s - o] for s, o in zip(sizes, outputs, strict=True)]
        padded_g = tf.pad(other, [[0, 0], *behind, [0, 0]])
        g = tf.reshape(padded_g, [-1, math.prod(sizes), other.shape[-1]])
        return (
            of_pixels.shifted(gram_a, self._shifted_kind()),
            gram(g[:, : gram_a.shape[-1]]),
        )


@functools.cache
def _blockwise(kernel):
    """How the gradients of some examples are built.

    Cached, since only the same functions are written `once`.
    """

    def by(method):
        def gradients(inputs, g):
            rows = Rows(inputs.shape[1])
            some = kernel.bare(rows.unfold(inputs))
            return method(some, rows.unfold(g), rows)

        return gradients

    def from_rows(sums):
        matrix = tf.transpose(tf.concat(sums, -1))
        return [tf.reshape(matrix, kernel.weights)]

    if kernel.line is None:
        return Blockwise(by(kernel.term.per_example), (kernel.weights,))
    number = kernel.line.rows
    return Blockwise(
        by(kernel.term.by_line),
        ((kernel.outputs, kernel.inputs // number),) * number,
        from_rows,
        has_neighbors=True,
    )


def _norms_at_once(kernel, inputs, g):
    """Ghost norms of all examples, with one row each."""
    found = kernel.bare(tf.squeeze(inputs, 1))
    return norms(found.measures(tf.squeeze(g, 1)), found.kinds())


def _norms_in_blocks(kernel, inputs, g):
    """The same, some examples at a time."""
    inputs, g = tf.squeeze(inputs, 1), tf.squeeze(g, 1)
    # Bounds on errors take as many operations for all examples as for a few.
    found = in_blocks(
        lambda inputs, g: kernel.bare(inputs).measures(g),
        [inputs, g],
        kernel.ghost_block,
        number=2,
    )
    return norms(found, kernel.bare(inputs).kinds())


def _examples_in(numbers, each):
    """How many examples of so many numbers make a block."""
    return max(min(numbers // each, 64), 4)


def _offsets_together(form, geometry):
    """How many offsets within the kernel share a product."""
    if form == "patches":
        return math.prod(geometry.kernel_size)
    return geometry.kernel_size[-1] if form == "rows" else 1


@dataclasses.dataclass(frozen=True)
class ConvolutionKernel(Kernel):
    """`Kernel` of a convolution.

    Attributes:
        rows: of an example in the inputs.
        image: shape of a row of the inputs.
        weights: shape of the weight.
        geometry: which inputs the kernel meets.
        term: the class of the term.
        convolve: the convolution, a function of inputs and kernel.
        has_loop: whether it can run in a loop.
    """

    rows: int = 1
    image: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    geometry: Geometry | None = None
    term: type | None = None
    convolve: Any = dataclasses.field(default=None, compare=False)
    has_loop: bool = True

    @property
    def input(self):
        # Each pixel once, rather than in all patches that hold it.
        return self.rows * math.prod(self.image)

    @property
    def forms(self):
        loop = ("loop",) if self.has_loop else ()
        return ("offsets", "blocks", *loop, "rows", "patches")

    @property
    def timed(self):
        at_once = "blocks" if _keras.on_cpu() else "offsets"
        return (at_once, "loop") if self.has_loop else (at_once,)

    @property
    def timed_ghost(self):
        if _keras.on_cpu() and self.rows == 1:
            return ("blocks", "loop")
        # Patches of all examples at once take too much.
        return ("batched", "loop") if self.has_shifted_grams else ("loop",)

    @property
    def block(self):
        room = _IN_CACHE if self.line is None else _IN_ALL_CACHES
        copied = _examples_in(room, self.copied("blocks"))
        # What is built may be put together from pieces.
        most = min(copied, _examples_in(_IN_ALL_CACHES, self.built))
        if self.line is None:
            return most
        in_pool = -(-_IN_POOL // (self.built // self.line.rows))
        return in_pool if most < in_pool <= 1.5 * most else most

    @functools.cached_property
    def line(self) -> "_Line | None":
        """For "blocks", if a patch is a pixel further than the one before.

        Unless zeros would be too many, or slices copies.
        """
        geometry = self.geometry
        if geometry.groups > 1 or set(geometry.strides) != {1}:
            return None
        if issubclass(self.term, TransposedConvolution):
            return None
        last = geometry.data_format == "channels_last"
        *sizes, channels = (
            self.image if last else (*self.image[1:], self.image[0])
        )
        line = _Line(geometry, sizes)
        aligned = channels * geometry.kernel_size[-1] % _ALIGNED == 0
        few = line.pixels < _FEW_ZEROS * self.positions / self.rows
        return line if aligned and few else None

    @property
    def ghost_block(self):
        each = self.gram + self.copied_for_ghost("blocks")
        return _examples_in(_IN_CACHE, each)

    @property
    def ghost_width(self):
        if not self.has_shifted_grams:
            return super().ghost_width
        offsets = math.prod(self.geometry.kernel_size)
        return self.inputs // offsets + offsets + self.outputs

    @property
    def has_shifted_grams(self):
        """Whether the Gram matrix of patches is taken from that of pixels.

        If the next patch is shifted by a pixel, and it takes less.
        """
        geometry = self.geometry
        one_image = self.rows == 1 and geometry.groups == 1
        # Those of a transposed convolution would be of its cotangent.
        one_image &= self.term is Convolution
        if not one_image or set(geometry.strides) != {1}:
            return False
        patches = self.positions**2 * math.prod(geometry.kernel_size)
        return self._padded_pixels**2 < patches

    @property
    def _padded_pixels(self):
        """How many there are, if the next patch is shifted by one."""
        last = self.geometry.data_format == "channels_last"
        sizes = self.image[:-1] if last else self.image[1:]
        return math.prod(_reach(self.geometry, sizes))

    def copied_for_ghost(self, form):
        if form == "tiles" or not self.has_shifted_grams:
            return self.copied("patches")
        # The one of pixels, and a slice of it for each offset along an axis.
        slices = 2 + max(self.geometry.kernel_size)
        return slices * self._padded_pixels**2

    def copied(self, form):
        if form == "blocks" and self.line is not None:
            offsets = math.prod(self.geometry.kernel_size)
            channels = self.inputs // offsets
            width = channels * (1 + self.geometry.kernel_size[-1])
            return self.rows * self.line.pixels * (width + self.outputs)
        together = _offsets_together(form, self.geometry)
        at_an_offset = self.inputs // math.prod(self.geometry.kernel_size)
        return self.positions * self.blocks * at_an_offset * together

    def sample(self, examples):
        shape = [examples * self.rows, *self.image]
        inputs = tf.random.stateless_normal(shape, [1, 2])
        outputs = self.convolve(inputs, tf.zeros(self.weights))
        return inputs, tf.random.stateless_normal(outputs.shape, [3, 4])

    def on(self, inputs):
        return self._on(inputs, tf.zeros(self.weights))

    def bare(self, inputs):
        """The same without a weight, of which most need but the shape."""
        return self._on(inputs, tf.TensorSpec(self.weights))

    def _on(self, inputs, kernel):
        return self.term(kernel, self.geometry, inputs, self.convolve)


class SharedByGroups(Convolution):
    """A kernel that all groups of a convolution have in common.

    Its groups are so many more positions.
    """

    _blocks = 1

    def _count_positions(self):
        in_group = super()._count_positions()
        return in_group and in_group * self._geometry.groups

    def _block_form(self, tensor, rows):
        width = tensor.shape[-1] // self._geometry.groups
        shape = [tf.shape(tensor)[0], self._positions or -1, width]
        return by_example(at_least_float32(tf.reshape(tensor, shape)), rows)

    def _to_kernel(self, matrices):
        return _reshaped(matrices, self.variables[0].shape)


class TransposedConvolution(Convolution):
    """The kernel of a transposed convolution: patches of g meet the input."""

    def _image_channels(self):
        return self.variables[0].shape[-2]

    def _count_positions(self):
        sizes = self._geometry.channels_last(self._inputs).shape[1:-1]
        return None if None in sizes else math.prod(sizes)

    def _operands(self, g):
        g = self._to_result(at_least_float32(g))
        return g, self._geometry.channels_last(self._inputs)


class _Line:
    """The pixels of several images in one line, zeros between them.

    Behind the pixels of each axis are as many zeros as patches reach beyond
    either end of it: those before a row are those behind the row before. So
    the pixel at an offset from a position is the same number of places away,
    for all positions of all images. What is cut out for positions behind the
    end of an axis may be pixels of another row, or of another image; g is zero
    there.

    Args:
        geometry: of a convolution whose strides are 1.
        sizes: of an image.

    Attributes:
        sizes: the same with zeros.
        pixels: how many there are in all.
        rows: of offsets, how many a kernel has.
    """

    def __init__(self, geometry, sizes):
        before, _ = _padding(geometry, sizes, _reach(geometry, sizes))
        self.sizes, self._shifts, pixels = [], [], 1
        for axis in reversed(range(geometry.rank)):
            count, size = geometry.kernel_size[axis], sizes[axis]
            shifts = [
                geometry.dilation_rate[axis] * i - before[axis]
                for i in range(count)
            ]
            behind = _output_size(geometry, axis, size) + shifts[-1] - size
            self.sizes.insert(0, size + max(before[axis], behind))
            self._shifts.insert(0, [pixels * shift for shift in shifts])
            pixels *= self.sizes[0]
        self.pixels = pixels
        self.rows = math.prod(geometry.kernel_size[:-1])

    def padded(self, tensor: tf.Tensor) -> tf.Tensor:
        """(rows, *spatial, c) -> (rows, pixels, c), with zeros behind."""
        return self._padded(tensor, 0)

    def _padded(self, tensor, around):
        spatial = zip(tensor.shape[1:-1], self.sizes, strict=True)
        widths = [[0, all_of_it - size] for size, all_of_it in spatial]
        padded = tf.pad(tensor, [[around, around], *widths, [0, 0]])
        return with_rows(padded, [self.pixels, tensor.shape[-1]])

    def patches(self, image: tf.Tensor) -> list[tf.Tensor]:
        """For each row of offsets, what all positions meet there.

        (rows, pixels, offsets·c) each. The offsets along the last axis are
        copied side by side; the others are shifts of these.
        """
        channels, count = image.shape[-1], tf.shape(image)[0] * self.pixels
        flat = tf.reshape(self._padded(image, 1), [-1, channels])
        *others, last = self._shifts
        shifts = [sum(each) for each in itertools.product(*others)]
        first, reach = shifts[0], shifts[-1] - shifts[0]
        wide = tf.concat(
            [
                tf.slice(
                    flat,
                    [self.pixels + first + shift, 0],
                    [count + reach, channels],
                )
                for shift in last
            ],
            1,
        )
        width = len(last) * channels
        return [
            tf.reshape(
                tf.slice(wide, [shift - first, 0], [count, width]),
                [-1, self.pixels, width],
            )
            for shift in shifts
        ]


def _reshaped(matrices, shape):
    """(..., d, p) -> (..., *shape)."""
    leading = tf.shape(matrices)[: matrices.shape.rank - 2]
    return tf.reshape(matrices, tf.concat([leading, tuple(shape)], 0))


def _shifted_slices(geometry, inputs):
    """Yields the part of the padded input that each kernel offset meets."""
    sizes, strides = _spatial_sizes(geometry, inputs), geometry.strides
    outputs = [_output_size(geometry, i, size) for i, size in enumerate(sizes)]
    period = (1,) * geometry.rank
    known = not any(map(tf.is_tensor, sizes))
    if known and math.prod(geometry.kernel_size) > 1:
        period, strides = strides, period
    phases = _phases(_padded(geometry, inputs, period), period)
    for offset in itertools.product(*map(range, geometry.kernel_size)):
        rates = zip(offset, geometry.dilation_rate, period, strict=True)
        starts, phase = zip(
            *(divmod(o * d, p) for o, d, p in rates), strict=True
        )
        window = tuple(
            slice(start, start + (output - 1) * stride + 1, stride)
            for start, output, stride in zip(
                starts, outputs, strides, strict=True
            )
        )
        yield phases[phase][(slice(None), *window)]


def _phases(padded, period):
    """By remainder, the pixels whose places leave it, side by side.

    TensorFlow is slow at slices that leave out pixels; to move all of them
    once takes less time.
    """
    remainders = list(itertools.product(*map(range, period)))
    if len(remainders) == 1:
        return {remainders[0]: padded}
    *sizes, channels = padded.shape[1:]
    pairs = list(zip(sizes, period, strict=True))
    shape = [n for size, p in pairs for n in (size // p, p)]
    inner = list(range(2, 2 + len(shape), 2))
    axes = [*inner, 0, *(axis - 1 for axis in inner), 1 + len(shape)]
    apart = tf.transpose(with_rows(padded, [*shape, channels]), axes)
    rest = [size // p for size, p in pairs]
    apart = tf.reshape(apart, [len(remainders), -1, *rest, channels])
    return dict(zip(remainders, tf.unstack(apart), strict=True))


def _spatial_sizes(geometry, inputs):
    """Numbers where they are known, else tensors."""
    static = inputs.shape[1:-1].as_list()
    dynamic = tf.shape(inputs)
    return [
        dynamic[1 + i] if static[i] is None else static[i]
        for i in range(geometry.rank)
    ]


def _padded(geometry, inputs, period=None):
    """The input with the zeros that patches at its border hold.

    Args:
        geometry: which inputs a kernel meets.
        inputs: channels last.
        period: numbers of which the padded sizes are to be multiples.
    """
    sizes = _spatial_sizes(geometry, inputs)
    before, after = _padding(geometry, sizes, _reach(geometry, sizes))
    period = period or (1,) * geometry.rank
    widths = [
        [b, a + -(b + size + a) % p]
        for b, size, a, p in zip(before, sizes, after, period, strict=True)
    ]
    return tf.pad(inputs, [[0, 0], *widths, [0, 0]])


def _reach(geometry, sizes):
    """From the first pixel of the first patch to the last of the last."""
    return [
        (_output_size(geometry, i, size) - 1) * geometry.strides[i]
        + (geometry.kernel_size[i] - 1) * geometry.dilation_rate[i]
        + 1
        for i, size in enumerate(sizes)
    ]


def _padding(geometry, sizes, reach):
    """Zeros before and after each spatial axis."""
    if geometry.padding == "valid":
        return [0] * geometry.rank, [0] * geometry.rank
    if geometry.padding == "causal":
        return [geometry.dilation_rate[0] * (geometry.kernel_size[0] - 1)], [0]
    missing = [
        tf.maximum(r - s, 0) if tf.is_tensor(s) else max(r - s, 0)
        for r, s in zip(reach, sizes, strict=True)
    ]
    before = [m // 2 for m in missing]
    return before, [m - b for m, b in zip(missing, before, strict=True)]


def _output_size(geometry, axis, size):
    """Positions along one axis; None if the input's size is None."""
    if size is None:
        return None
    stride = geometry.strides[axis]
    if geometry.padding == "valid":
        extent = (geometry.kernel_size[axis] - 1) * geometry.dilation_rate[
            axis
        ] + 1
        return (size - extent) // stride + 1
    return (size + stride - 1) // stride
