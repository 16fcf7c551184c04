"""Seconds that a way to serve a kernel takes on this machine.

The speeds of small products differ by a factor of four between machines, and
between TensorFlow with and without oneDNN; no formula from sizes tells which
way is the fastest. So each way is run on a few random examples of the very
sizes of the kernel, once in a process for each distinct kernel, while the
training step is traced. Time grows in proportion to the number of examples, so
a few are enough: a way takes about 50 ms to be written as a graph and 10 to be
timed. A model of ten distinct kernels takes about four seconds in all.
"""

import dataclasses
import functools
import time

import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.capture import Use
from keras_fastclip.parts import Part
from keras_fastclip.planner import Way, reference_clock
from keras_fastclip.registry.linear import Kernel
from keras_fastclip.registry.terms import Rows
from keras_fastclip.registry.turns import AT_ONCE

# Operations in a run, and the most numbers and examples in it.
_WORK, _NUMBERS, _EXAMPLES = 1e8, 4e6, 32
_RUNS = 3
# Kernels with more operations for an example are not timed but reckoned.
_TOO_MUCH = 5e9


def clock(kernel: Kernel, way: Way, jit_compile: bool = False) -> float:
    """Seconds for norm and clipped sum of one example, as measured here."""
    if 2 * kernel.positions * kernel.built > _TOO_MUCH:
        return reference_clock(kernel, way)
    if way.keep:
        return _measured(kernel, way, jit_compile)
    # The norm, and the sum as plain training takes it.
    norm = way if way.ghost else dataclasses.replace(way, keep=True)
    return _measured(kernel, norm, jit_compile) + plain_clock(
        kernel, jit_compile
    )


def plain_clock(kernel: Kernel, jit_compile: bool = False) -> float:
    """Seconds for the sum of gradients as plain training takes it."""
    return _measured(kernel, None, jit_compile)


@functools.cache
def _measured(kernel: Kernel, way: Way | None, jit_compile: bool) -> float:
    """Seconds for the norm, and for the sum of gradients that are kept.

    Without a way, for the sum of gradients that are not.
    """
    work = 2 * kernel.positions * kernel.built
    numbers = kernel.positions * kernel.blocks
    numbers *= kernel.inputs + kernel.outputs
    # To write the sum takes the same time for few examples and for many.
    most = _WORK if way is not None else 8 * _WORK
    examples = min(most / work, _NUMBERS / numbers, _EXAMPLES)
    examples = max(int(examples), AT_ONCE)
    if way is not None and way.form == "blocks":
        examples = kernel.ghost_block if way.ghost else kernel.block
    with _keras.eager_scope():
        term, g = kernel.sample(examples)
        # As in a step whose norms are finite: known when it runs, not before.
        finite = tf.Variable(True, trainable=False)

        def run():
            part = Part([Use(term, g, Rows(kernel.rows), None)])
            if way is None:
                sums = part.weighted_sum(tf.ones([examples]), finite)
                return list(sums.values())
            part.way = way
            norms = part.squared_norms()
            sums = part.weighted_sum(norms, finite) if way.keep else {}
            return [norms, *sums.values()]

        step = tf.function(run, jit_compile=jit_compile, autograph=False)
        return min(_seconds(step) for _ in range(_RUNS + 1)) / examples


def _seconds(step):
    start = time.perf_counter()
    # Devices run ahead of Python until a value is asked for.
    float(tf.reduce_sum(step()[0]))
    return time.perf_counter() - start
