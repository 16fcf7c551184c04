"""Functions that are written into a graph once, and called many times.

A model has many layers of few different sizes. Written out for each of them,
norms and sums would be most of the graph, and most of the time before the first
step: TensorFlow traces, optimizes and loads every operation anew. As a function
that is not inlined, they are there once for all layers of the same sizes.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_fastclip import _keras

# So many functions are kept for graphs to come.
_MOST = 256


def once(function: Callable[..., Any], *sizes: Any) -> Callable[..., Any]:
    """The function with its first arguments bound, as a node of the graph.

    It is traced once in a process for tensors of the same shapes but for the
    first axis, so that the planner and all models have it in common.

    Args:
        function: of the sizes and tensors, and of nothing else: what it would
            capture from one call is not there in another.
        sizes: its first arguments, which do not change.
    """
    return _as_node(
        function, sizes, lambda shape: [None, *shape[1:]] if shape.rank else []
    )


def of_any_size(function: Callable[..., Any], *fixed: Any) -> Callable:
    """The same for tensors of all sizes, of which it returns no sizes.

    It is traced once in a process for arguments of the same ranks and types.

    Args:
        function: of what is fixed and tensors, and of nothing else.
        fixed: its first arguments.
    """
    node = _as_node(function, fixed, lambda shape: [None] * shape.rank)
    return lambda *tensors: node(*map(_not_constant, tensors))


def _as_node(function, fixed, shape_of):
    # XLA compiles one program, in which there are no calls.
    if tf.executing_eagerly() or _keras.in_xla():
        return functools.partial(function, *fixed)

    def call(*tensors):
        signature = tuple(
            tf.TensorSpec(shape_of(tensor.shape), tensor.dtype)
            for tensor in tensors
        )
        return _written(function, fixed, signature)(*tensors)

    return call


@functools.lru_cache(maxsize=_MOST)
def _written(function, fixed, signature):
    written = tf.function(
        functools.partial(function, *fixed),
        signature,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )
    with _keras.short_tracebacks():
        written.get_concrete_function()
    return written


def _not_constant(tensor):
    """With a constant TensorFlow would write a function anew for each call."""
    if not tf.is_symbolic_tensor(tensor) or tensor.op.type != "Const":
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
