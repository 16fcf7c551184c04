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
        written[key] = tf.function(
            bound,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )
    return written[key]
