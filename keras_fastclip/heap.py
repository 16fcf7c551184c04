"""Memory that is free, but still held by the process, given back in time.

The check, the planner and TensorFlow's own work on the graph leave free pieces
between others, which the C library holds on to. Large arrays find no room in
them, so the first step would come on top: some 100 MB for a ResNet-18.
"""

import contextlib
import ctypes
import functools
import gc
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras


def trimmed(batch: Any) -> Any:
    """The same batch, in the first step once free memory was given back.

    That is the one moment at which the graph is ready and the arrays of the
    step are not there yet. Later steps find nothing to do. Only in graphs that
    run on CPUs; others know nothing of the C library.
    """
    if tf.executing_eagerly() or not _keras.on_cpu() or _trim() is None:
        return batch
    once = functools.cache(give_back)
    done = tf.numpy_function(once, [], tf.bool)
    with tf.control_dependencies([done]):
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.identity(leaf), batch
        )


@contextlib.contextmanager
def tidied() -> Iterator[None]:
    """Objects that are made inside and unused at the end go at the end.

    Graphs hold themselves, and are there until unused objects are looked for.
    To look among all that TensorFlow has made takes a fifth of a second, among
    the new ones next to nothing; so the others are put aside meanwhile.
    """
    if gc.get_freeze_count():  # Somebody else has put them aside, for good.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def give_back() -> np.bool_:
    """Gives free memory back, where the C library can; returns whether."""
    trim = _trim()
    if trim is not None:
        trim(0)
    return np.bool_(trim is not None)


@functools.cache
def _trim():
    """`malloc_trim` of the C library, where that is glibc."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
