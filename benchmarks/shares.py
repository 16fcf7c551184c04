"""Where the time of a private step goes: norms, noise, and the rest.

    python -m benchmarks.shares --workload gpt,cnn

Four steps in turn, in one process: plain training; a private step; the same
without its noise; and without its norms as well, so that what is left are the
passes of plain training and a weighted sum of gradients. The last two protect
nothing, and exist here only. Medians; milliseconds.
"""

import argparse
import contextlib
import statistics
import unittest.mock
import warnings

import rich.box
import rich.console
import rich.table
import tensorflow as tf

from benchmarks import machine
from benchmarks.compare import Runner
from benchmarks.workloads import ALL, WORKLOADS
from keras_fastclip.noise import GaussianNoise
from keras_fastclip.parts import Part

squared_norms = Part.squared_norms


def _without_noise(self, sums, stddev, step, divisor=1.0, **others):
    del self, stddev, step, others
    return [total / divisor for total in sums]


def _without_norms(self):
    if tf.executing_eagerly():  # The check of the model is as always.
        return squared_norms(self)
    use = self.uses[-1]
    rows = tf.shape(tf.nest.flatten(use.g)[0])[0]
    return tf.fill([rows // use.rows.per_example], 1e-9)


def runners(name):
    """By what they leave out."""
    replaced = unittest.mock.patch.object
    yield "plain", Runner(ALL[name], "nonprivate")
    yield "private", Runner(ALL[name], "auto")
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(GaussianNoise, "add", _without_noise))
        yield "without noise", Runner(ALL[name], "auto")
        stack.enter_context(replaced(Part, "squared_norms", _without_norms))
        yield "nor norms", Runner(ALL[name], "auto")


def shares(name, steps):
    """Median seconds, by what is left out."""
    running = dict(runners(name))
    times = {kind: [] for kind in running}
    for _ in range(steps):
        for kind, runner in running.items():
            times[kind].append(runner.step())
    return {kind: statistics.median(found) for kind, found in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    console = rich.console.Console(width=80)
    console.print(machine.description(), highlight=False)
    table = None
    for name in arguments.workload.split(","):
        found = shares(name, arguments.steps)
        if table is None:
            table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
            for column in ("workload", *found):
                table.add_column(column, justify="right")
        row = [f"{1e3 * seconds:.1f}" for seconds in found.values()]
        table.add_row(name, *row)
    console.print(table)


if __name__ == "__main__":
    main()
