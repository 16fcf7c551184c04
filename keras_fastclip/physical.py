"""Logical batches of any size in the memory of a physical batch.

The sum over a logical batch is the sum over its chunks, so a loop takes one
chunk after the other through the model and adds up. Noise and the optimizer's
step come once, afterwards.
"""

import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_fastclip.losses import first_tensor
from keras_fastclip.registry.terms import at_least_float32

# For "auto": of the memory that is free, and where that is not known.
_SHARE_OF_FREE_MEMORY = 0.25
_ASSUMED_FREE_MEMORY = 8 * 2**30


def in_chunks(
    model: keras.Model,
    batch: tuple,
    real: Any,
    size: int,
    add: Callable,
    zero: Any = 0.0,
):
    """Adds up what `add` makes of the chunks of a batch.

    Args:
        model: the model.
        batch: (x, y, sample_weight).
        real: (batch,), or None if all rows are.
        size: of a chunk.
        add: takes the batch and the real rows of a chunk, and returns its
            clipped sums by id of the weight, and another tensor.
        zero: of the shape and type of that tensor.

    Returns:
        The total of the sums, and of the other tensors.
    """
    first = first_tensor(batch[0])
    rows = first.shape[0] or tf.shape(first)[0]
    if real is None:
        real = tf.ones([rows], tf.bool)
    # Rows that are not real come last, and chunks of such rows are left out,
    # but for the first one, which tells what weights there are.
    ends = tf.where(real, tf.range(1, rows + 1), 1)
    needed = tf.reduce_max(tf.concat([ends, [0]], 0))
    missing = -rows % size
    batch, real = _map(lambda leaf: _padded(leaf, missing), (batch, real))
    # Those appended are not real, whatever the first row is.
    real &= tf.range(rows + missing) < rows
    variables = model.trainable_variables
    present = set()

    def body(start, sums, other):
        part, rows = _map(lambda leaf: _chunk(leaf, start, size), (batch, real))
        added, more = add(part, rows)
        present.update(added)
        sums = [
            total + tf.cast(added[id(v)], total.dtype)
            if id(v) in added
            else total
            for v, total in zip(variables, sums, strict=True)
        ]
        return start + size, sums, other + more

    zeros = [at_least_float32(tf.zeros(v.shape, v.dtype)) for v in variables]
    _, sums, other = tf.while_loop(
        lambda start, *_: start < needed,
        body,
        (0, zeros, tf.convert_to_tensor(zero)),
        parallel_iterations=1,
    )
    totals = {
        id(v): total
        for v, total in zip(variables, sums, strict=True)
        if id(v) in present
    }
    return totals, other


def _map(function, structure):
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else function(leaf), structure
    )


def _padded(leaf, missing):
    """Appends copies of the first row."""
    first = leaf[:1]
    if isinstance(missing, int):
        # XLA repeats by constants only.
        return tf.concat([leaf] + [first] * missing, 0)
    return tf.concat([leaf, tf.repeat(first, missing, axis=0)], 0)


def _chunk(leaf, start, size):
    # XLA takes slices of constant sizes only.
    sizes = [-1 if n is None else n for n in leaf.shape[1:]]
    begin = [start] + [0] * len(sizes)
    return tf.slice(leaf, begin, [size, *sizes])


def auto_size(numbers: tuple[int, int], batch_size: int) -> int:
    """The physical batch size "auto".

    The largest power of two for which activations, their gradients and the
    gradients of examples, counted as large as the activations, fit a quarter
    of the memory that is free.

    Args:
        numbers: of weights, and of activations of an example.
        batch_size: of logical batches.
    """
    each = 4 * 3 * max(1, numbers[1])
    fitting = int(_SHARE_OF_FREE_MEMORY * _free_memory() / each)
    return min(batch_size, 1 << max(0, fitting.bit_length() - 1))


def _free_memory() -> int:
    if tf.config.list_logical_devices("GPU"):
        return _ASSUMED_FREE_MEMORY
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return 1024 * int(line.split()[1])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return _ASSUMED_FREE_MEMORY
