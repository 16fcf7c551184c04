"""Seconds that a way to serve a kernel takes on this machine.

The speeds of small products differ by a factor of four between machines, and
between TensorFlow with and without oneDNN; no formula from sizes tells which
way is the fastest. So each way is run on a few random examples of the very
sizes of the kernel, once in a process for each distinct kernel that the planner
asks for, while the training step is traced. Time grows in proportion to the
number of examples, so a few are enough: some 16 MB of numbers, or more where
two examples take more, and some milliseconds of work.
The ways of a kernel are run in turn, so that whatever else the machine does
meets all of them; but for loops, which are run after them, if at all.

What takes time is to write a way as a graph, most of all a loop, and to have
TensorFlow optimize it. So it runs as it is written.
With oneDNN no loop over single examples is timed, but taken to take a quarter
longer than all examples at once, or blocks of them: small products are fast
there, and several of them in one operation faster. Without oneDNN, none is
timed where all examples at once are near to the time of plain training, less
than which no way takes. Whether others pay depends on the machine rather than
on the kernel, but for the gradients of convolutions. So where they take a
quarter longer than all examples at once for one kernel, they are taken to do so
for others.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence

import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.capture import Use
from keras_fastclip.parts import Part
from keras_fastclip.planner import Way, reference_clocks
from keras_fastclip.registry.linear import Kernel
from keras_fastclip.registry.terms import Rows
from keras_fastclip.registry.turns import AT_ONCE

# Operations in a run, and the most numbers and examples in it. With fewer
# operations, what a call takes by itself would count for more than in a step.
_WORK, _NUMBERS, _EXAMPLES = 4e8, 4e6, 32
_RUNS = 4
# Kernels with more operations for an example are not timed but reckoned.
_TOO_MUCH = 5e9


def clock(
    kernel: Kernel, ways: Sequence[Way], jit_compile: bool = False
) -> list[float]:
    """Seconds for norm and clipped sum of one example, of each way."""
    if 2 * kernel.positions * kernel.built > _TOO_MUCH:
        return reference_clocks(kernel, ways)
    norms = [
        way if way.keep or way.ghost else dataclasses.replace(way, keep=True)
        for way in ways
    ]
    # Those that are timed in any case.
    plain = [] if all(way.keep for way in ways) else [None]
    usual = [_at_once(kernel, way) or way for way in norms]
    _time_in_turn(kernel, [*plain, *usual], jit_compile)
    found = [_measured(kernel, way, jit_compile) for way in norms]
    # The norm, and the sum as plain training takes it.
    return [
        norm if way.keep else norm + plain_clock(kernel, jit_compile)
        for way, norm in zip(ways, found, strict=True)
    ]


def plain_clock(kernel: Kernel, jit_compile: bool = False) -> float:
    """Seconds for the sum of gradients as plain training takes it."""
    return _measured(kernel, None, jit_compile)


def loops_pay(jit_compile: bool) -> bool:
    """Whether a loop over single examples may be the fastest form."""
    on_cpu = _keras.on_cpu() and not jit_compile
    return not (on_cpu and _keras.uses_onednn())


# By kind of kernel and norm, how much longer loops take.
_slower: dict[tuple, float] = {}
_CLEARLY = 1.25
# What is near to plain training, in its time.
_NEAR = 1.6


@functools.cache
def _measured(kernel: Kernel, way: Way | None, jit_compile: bool) -> float:
    """Seconds for the norm, and for the sum of gradients that are kept.

    Without a way, for the sum of gradients that are not.
    """
    usual = None if way is None else _at_once(kernel, way)
    if usual is None:
        return _timed(kernel, way, jit_compile)
    at_once = _measured(kernel, usual, jit_compile)
    if not loops_pay(jit_compile):
        return at_once * _CLEARLY
    if not jit_compile:  # With XLA a loop may take many times as long.
        plain = _measured(kernel, None, jit_compile)
        if at_once + plain * way.ghost < _NEAR * plain:
            return at_once * _CLEARLY
    kind = type(kernel), way.norm, jit_compile
    alike = way.ghost or type(kernel) is Kernel
    if alike and _slower.get(kind, 0) > _CLEARLY:
        return at_once * _slower[kind]
    seconds = _timed(kernel, way, jit_compile)
    _slower[kind] = seconds / at_once
    return seconds


def _at_once(kernel, way):
    """What a loop is compared with, if that is no more than can be timed."""
    forms = kernel.timed_ghost if way.ghost else kernel.timed
    if way.form != "loop" or forms[0] == "loop":
        return None
    usual = dataclasses.replace(way, form=forms[0])
    numbers = _numbers(kernel, usual) * _least(kernel, usual)
    return usual if numbers <= 2 * _NUMBERS else None


def _numbers(kernel, way):
    """That an example takes in a run."""
    numbers = kernel.positions * kernel.blocks
    numbers *= kernel.inputs + kernel.outputs
    if way is None:
        return numbers
    if way.ghost:
        return numbers + kernel.gram + kernel.copied_for_ghost(way.form)
    return numbers + kernel.built


def _least(kernel, way):
    """The fewest examples in a run."""
    if way is not None and way.form == "blocks":
        block = kernel.ghost_block if way.ghost else kernel.block
        return min(block, AT_ONCE)
    return 2 if way is not None and way.form == "batched" else AT_ONCE


# By kernel, way and whether XLA compiles it.
_known: dict[tuple, float] = {}


def _timed(kernel, way, jit_compile):
    _time_in_turn(kernel, [way], jit_compile)
    return _known[kernel, way, jit_compile]


def _time_in_turn(kernel, ways, jit_compile):
    """Runs those that are not known, one after the other, several times."""
    new = [
        w for w in dict.fromkeys(ways) if (kernel, w, jit_compile) not in _known
    ]
    with _keras.eager_scope(), _keras.as_written():
        sample = functools.cache(kernel.sample)
        steps = [_step(kernel, way, jit_compile, sample) for way in new]
        rounds = [[_seconds(*step) for step in steps] for _ in range(_RUNS + 1)]
    for way, *seconds in zip(new, *rounds, strict=True):
        _known[kernel, way, jit_compile] = min(seconds)


def _step(kernel, way, jit_compile, sample):
    """What is run for a way, and on how many examples."""
    work = 2 * kernel.positions * kernel.built
    # To write the sum takes the same time for few examples and for many.
    most = _WORK if way is not None else 2 * _WORK
    most = min(most / work, _EXAMPLES)
    if way is not None and way.form == "blocks":
        most = max(most, kernel.ghost_block if way.ghost else kernel.block)
    examples = int(min(most, _NUMBERS / _numbers(kernel, way)))
    examples = max(examples, _least(kernel, way))
    inputs, g = sample(examples)

    def run(inputs, g, finite):
        term = kernel.on(inputs)
        part = Part([Use(term, g, Rows(kernel.rows), None)])
        if way is None:
            sums = part.weighted_sum(tf.ones([examples]), finite)
            return list(sums.values())
        part.way = way
        norms = part.squared_norms()
        sums = part.weighted_sum(norms, finite) if way.keep else {}
        return [norms, *sums.values()]

    # Arguments all of them: what a graph holds stays for longer. And whether
    # norms are finite is known when a step runs, not before.
    step = tf.function(run, jit_compile=jit_compile, autograph=False)
    return functools.partial(step, inputs, g, tf.constant(True)), examples


def _seconds(step, examples):
    """For an example."""
    start = time.perf_counter()
    # Devices run ahead of Python until a value is asked for.
    float(tf.reduce_sum(step()[0]))
    return (time.perf_counter() - start) / examples
