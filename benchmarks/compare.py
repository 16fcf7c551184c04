"""All methods on the same workload, their steps in turn.

    python -m benchmarks.compare --workload gpt --modes nonprivate,auto,bk

By default all workloads and all methods, which takes over half an hour. Each
mode has a process of its own, as a user would run it. The processes make one
step each in every round while the others wait, so that whatever else the
machine does meets all of them; what is compared are medians, and the most
memory that a process held. A mode that takes long makes fewer steps
(`--seconds`). What cannot run is left out with the reason.

The table has, for each mode, milliseconds a step and speed and memory relative
to plain training (compiled by XLA where it is there in that form only), and
for `auto` its time over that of the best named method.
`--out FILE` writes it to a file, which `benchmarks.picture` draws.
"""

import argparse
import multiprocessing
import random
import statistics
import time
import warnings

import numpy as np
import rich.box
import rich.console
import rich.table
import tensorflow as tf

from benchmarks import machine, run
from benchmarks.processes import peak
from benchmarks.run import PLAIN
from benchmarks.workloads import ALL, WORKLOADS
from keras_fastclip import methods, sampling

MODES = (PLAIN, *methods.METHODS)


class Runner:
    """A model that makes one step at a time."""

    def __init__(self, workload, mode):
        x, y = workload.data(np.random.default_rng(0), workload.batch)
        self.model = run.build(workload, mode)
        if mode.removesuffix("-xla") != PLAIN:
            some = sampling.some((x, y, None))
            self.model._privacy.prepare(self.model, some, workload.batch)
            _require_memory(self.model)
        self.model.make_train_function()
        self._data = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
        for _ in range(3):  # The first traces; memory settles.
            self.step()

    def step(self):
        start = time.perf_counter()
        float(self.model.train_function(self._data)["loss"])
        return time.perf_counter() - start


def _require_memory(model):
    """Refuses a method that would not fit, by the planner's account."""
    privacy = model._privacy
    plan, method = privacy.latest_plan, privacy.method
    if method.norm == "loop":
        return
    chosen = methods.choose(
        plan.traits, plan.numbers, method, privacy.limits(model)
    )
    # Passing tensors may be held for several layers, and copied once.
    needed = 2 * sum(choice.memory for choice in chosen)
    if needed > machine.free_memory():
        raise MemoryError(
            f"needs about {needed / 2**30:.0f} GiB, "
            f"{machine.free_memory() / 2**30:.0f} are free"
        )


def _serve(connection, name, mode):
    """What the process of a mode does: a step whenever it is told to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runner = Runner(ALL[name], mode)
            connection.send(None)
        except Exception as error:
            connection.send(str(error) or type(error).__name__)
            return
        while connection.recv():
            connection.send((runner.step(), peak()))


class Process:
    """The process of one mode."""

    def __init__(self, name, mode):
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, name, mode), daemon=True
        )
        self._process.start()
        other.close()
        self.times, self.memory = [], None

    def start(self):
        """Waits for the first steps; returns why there are none, if so."""
        try:
            return self._connection.recv()
        except EOFError:
            return "its process ended, probably for lack of memory"

    def step(self):
        self._connection.send(True)
        try:
            seconds, self.memory = self._connection.recv()
        except EOFError:
            raise RuntimeError(
                "A process ended in the midst of a step."
            ) from None
        self.times.append(seconds)

    def stop(self):
        if self._process.is_alive():
            self._connection.send(False)
            self._process.join(10)
        self._process.kill()
        self._connection.close()


def _groups(modes):
    """Modes that start together: pairs, but alone what then times kernels."""
    planned = [mode for mode in modes if mode.startswith("auto")]
    others = [mode for mode in modes if mode not in planned]
    pairs = [others[i : i + 2] for i in range(0, len(others), 2)]
    return [*pairs, *([mode] for mode in planned)]


def compare(name, modes, steps, seconds, report):
    """Median seconds, number of steps and memory by mode, if it can run."""
    running = {}
    for group in _groups(modes):
        begun = {mode: Process(name, mode) for mode in group}
        for mode, process in begun.items():
            if (problem := process.start()) is None:
                running[mode] = process
            else:
                report(f"{name} {mode}: left out, {problem.splitlines()[0]}")
                process.stop()
    running = {mode: running[mode] for mode in modes if mode in running}
    order = list(running.values())
    for number in range(steps):
        # None comes always behind the same other one.
        random.Random(number).shuffle(order)
        for process in order:
            # Those that take long have had enough, but never too few.
            if sum(process.times) < seconds or not process.times:
                process.step()
    for process in running.values():
        process.stop()
    return {
        mode: (statistics.median(p.times), len(p.times), p.memory)
        for mode, p in running.items()
    }


def best_named(found):
    """The fastest of the methods that are not planned."""
    return min(
        (
            (seconds, mode)
            for mode, (seconds, *_) in found.items()
            if mode.removesuffix("-xla") not in (PLAIN, "auto")
        ),
        default=None,
    )


def table(name, found):
    shown = rich.table.Table(
        title=f"{name}, batch {ALL[name].batch}", box=rich.box.SIMPLE_HEAD
    )
    for column in ("method", "ms a step", "speed", "steps", "MB", "memory"):
        shown.add_column(column, justify="right")
    compiled = found.get(f"{PLAIN}-xla", (None, None, None))
    plain, _, most = found.get(PLAIN, compiled)
    for mode, (seconds, steps, memory) in found.items():
        shown.add_row(
            mode,
            f"{1e3 * seconds:.1f}",
            f"{plain / seconds:.2f}" if plain else "",
            f"{steps}",
            f"{memory:.0f}",
            f"{memory / most:.2f}" if most else "",
        )
    best = best_named(found)
    if best and "auto" in found:
        ratio = found["auto"][0] / best[0]
        shown.caption = f"auto takes {ratio:.2f} of the time of {best[1]}"
    return shown


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--out", metavar="FILE")
    arguments = parser.parse_args()
    names = arguments.workload.split(",")
    modes = arguments.modes.split(",")
    unknown = [name for name in names if name not in ALL]
    unknown += [
        mode for mode in modes if mode.removesuffix("-xla") not in MODES
    ]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    console = rich.console.Console(width=80, record=True)
    console.print(machine.description(), highlight=False)
    results = {}
    for name in names:
        results[name] = compare(
            name, modes, arguments.steps, arguments.seconds, console.print
        )
        console.print(table(name, results[name]))
        if arguments.out:
            with open(arguments.out, "w") as file:
                file.write(console.export_text(clear=False))


if __name__ == "__main__":
    main()
