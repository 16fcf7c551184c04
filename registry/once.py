"""Functions that are written into a graph once, and called many times.

A model has many layers of few different sizes. Written out for each of them,
norms and sums would be most of the graph, and most of the time before the first
step: TensorFlow traces, optimizes and loads every operation anew. As a function
that is not inlined, they are there once for all layers of the same sizes.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_fastclip import _keras

# By graph, so that functions go when it does.
_written: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def once(function: Callable[..., Any], *sizes: Any) -> Callable[..., Any]:
    """The function with its first arguments bound, as a node of the graph.

    Args:
        function: of the sizes and tensors, and of nothing else: what it would
            capture from one call is not there in another.
        sizes: its first arguments, which do not change.
    """
    bound = functools.partial(function, *sizes)
    # XLA compiles one program, in which there are no calls.
    if tf.executing_eagerly() or _keras.in_xla():
        return bound
    graph = tf.compat.v1.get_default_graph()
    written = _written.setdefault(graph, {})
    key = function, *sizes
    if key not in written:
        written[key] = _as_node(bound)
    return written[key]


def _as_node(function, signature=None):
    return tf.function(
        function,
        signature,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )


# By function, and rank and type of its arguments.
_of_any_size: dict[Any, Callable[..., Any]] = {}


def of_any_size(function: Callable[..., Any], *fixed: Any) -> Callable:
    """The same for tensors of all sizes, of which it returns no sizes.

    It is traced once in a process for arguments of the same ranks and types.

    Args:
        function: of what is fixed and tensors, and of nothing else.
        fixed: its first arguments.
    """
    bound = functools.partial(function, *fixed)

    def call(*tensors):
        if tf.executing_eagerly() or _keras.in_xla():
            return bound(*tensors)
        kinds = [(tensor.shape.rank, tensor.dtype) for tensor in tensors]
        key = function, *fixed, *kinds
        if key not in _of_any_size:
            signature = [
                tf.TensorSpec([None] * rank, dtype) for rank, dtype in kinds
            ]
            _of_any_size[key] = _as_node(bound, signature)
        return _of_any_size[key](*map(_not_constant, tensors))

    return call


def _not_constant(tensor):
    """With a constant TensorFlow would write a function anew for each call."""
    if not tf.is_tensor(tensor) or tensor.op.type != "Const":
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
