"""Where the time of a private step goes: norms, noise, and the rest.

    python -m benchmarks.shares --workload gpt,cnn --out profile.txt

Four steps in turn, in one process: plain training; a private step; the same
without its noise; and without its norms as well, so that what is left are the
passes of plain training and a weighted sum of gradients. The last two protect
nothing, and exist here only. Medians; milliseconds.

Then the kernels of each model, as the planner timed them by themselves: in the
way that was chosen, and as plain training takes their gradients. What the one
takes more than the other, over all kernels of these sizes, is what bounds the
speed of a model that is not bound by noise.
"""

import argparse
import collections
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
from keras_fastclip import methods, timing
from keras_fastclip.noise import GaussianNoise
from keras_fastclip.parts import Part

squared_norms = Part.squared_norms
KINDS = ("plain", "private", "without noise", "nor norms")


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
    plain, private, without_noise, nor_norms = KINDS
    yield plain, Runner(ALL[name], "nonprivate")
    yield private, Runner(ALL[name], "auto")
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(GaussianNoise, "add", _without_noise))
        yield without_noise, Runner(ALL[name], "auto")
        stack.enter_context(replaced(Part, "squared_norms", _without_norms))
        yield nor_norms, Runner(ALL[name], "auto")


def shares(running, steps):
    """Median seconds, by what is left out."""
    times = {kind: [] for kind in running}
    for _ in range(steps):
        for kind, runner in running.items():
            times[kind].append(runner.step())
    return {kind: statistics.median(found) for kind, found in times.items()}


def kernels(model, batch):
    """Rows of sizes, number, way, and seconds in that way and in plain."""
    privacy = model._privacy
    plan = privacy.latest_plan
    chosen = methods.choose(
        plan.traits, plan.numbers, privacy.method, privacy.limits(model)
    )
    numbers = collections.Counter(
        (part.item.kernel, choice.way)
        for part, choice in zip(plan.traits, chosen, strict=True)
        if part.item is not None and part.item.kernel.positions > 1
    )
    for (kernel, way), number in numbers.items():
        (seconds,) = timing.clock(kernel, [way])
        plain = timing.plain_clock(kernel)
        yield kernel, number, way, batch * seconds, batch * plain


def table_of(*columns):
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", metavar="FILE")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    console = rich.console.Console(width=100, record=True)
    console.print(machine.description(), highlight=False)
    by_step = table_of("workload", *KINDS)
    by_kernel = table_of(
        "workload", "T", "d", "p", "number", "way", "ms", "plain", "more"
    )
    for name in arguments.workload.split(","):
        running = dict(runners(name))
        found = shares(running, arguments.steps)
        by_step.add_row(name, *(f"{1e3 * found[kind]:.1f}" for kind in KINDS))
        model, total = running[KINDS[1]].model, 0.0
        for kernel, number, way, own, plain in kernels(model, ALL[name].batch):
            sizes = kernel.positions, kernel.inputs, kernel.outputs, number
            times = own, plain, number * (own - plain)
            by_kernel.add_row(
                name,
                *map(str, (*sizes, way)),
                *(f"{1e3 * seconds:.1f}" for seconds in times),
            )
            total += times[-1]
        by_kernel.add_row(name, *[""] * 6, "in all", f"{1e3 * total:.1f}")
    console.print(by_step, by_kernel)
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write(console.export_text())


if __name__ == "__main__":
    main()
