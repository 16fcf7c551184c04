"""Where memory goes, from an empty process to a training step.

    python -m benchmarks.stages --workload resnet,gpt --out stages.txt

Megabytes that each stage adds to what the process holds once all that is free
has been given back to the system: the model; the check of a private model; the
plan of how to serve each kernel, for which ways are timed; the graph, as it is
traced, and as TensorFlow makes it ready to run; and at their peak the arrays of
three steps. Plain and private, each in a process of its own.

TensorFlow with oneDNN never gives back the memory of arrays, so what check and
plan took serves the step, and the step takes less anew. Then the column
"arrays" has what the arrays of a step take at their peak, weights left out, as
seen a thousand times a second: those in TensorFlow's pool, and those of less
than 256 KiB, which it leaves to the C library. What private training takes more
there than plain training is to be compared with the planner's `memory_budget`,
by default that of the last column, which does not count the sum itself and its
noise.
"""

import argparse
import ctypes
import threading
import time
import warnings

import numpy as np
import rich.box
import rich.console
import rich.table
import tensorflow as tf

from benchmarks import machine, run
from benchmarks.processes import measured
from benchmarks.soak import resident
from benchmarks.workloads import ALL, WORKLOADS
from keras_fastclip import _keras, heap, methods, planner, sampling

STAGES = ("model", "check", "plan", "graph", "ready", "step")


def _held():
    """Megabytes that are not free."""
    heap.give_back()
    return resident() / 2**20


def _peak():
    """Megabytes at the most, since `_forget_peak`."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class _Allocated(ctypes.Structure):
    """What `mallinfo2` of the GNU C library returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _of_arrays():
    """Megabytes in TensorFlow's pool, and of the C library."""
    tell = ctypes.CDLL(None).mallinfo2
    tell.restype = _Allocated
    pool = tf.config.experimental.get_memory_info("CPU:0")["current"]
    return (pool + tell().uordblks) / 2**20


def _peak_of_arrays(step):
    """Megabytes at the most while some steps are made, beyond those before."""
    before, seen, done = _of_arrays(), [0.0], threading.Event()

    def watch():
        while not done.is_set():
            seen.append(_of_arrays())
            time.sleep(3e-4)

    watching = threading.Thread(target=watch)
    watching.start()
    for _ in range(10):
        step()
    done.set()
    watching.join()
    return max(seen) - before


def stages(name: str, mode: str) -> tuple[dict[str, float], float, float]:
    """Megabytes by stage, of arrays in a step, and the budget of the plan."""
    warnings.simplefilter("ignore")
    workload, held = ALL[name], {"": _held()}
    x, y = workload.data(np.random.default_rng(0), workload.batch)
    model, budget = run.build(workload, mode), 0.0
    held["model"] = _held()
    if mode != run.PLAIN:
        privacy = model._privacy
        some = sampling.some((x, y, None))
        privacy.prepare(model, some, workload.batch)
        held["check"] = _held()
        plan, limits = privacy.latest_plan, privacy.limits(model)
        methods.choose(plan.traits, plan.numbers, privacy.method, limits)
        items = [part.item for part in plan.traits if part.item is not None]
        budget = planner.default_budget(items, *plan.numbers, workload.batch)
        held["plan"] = _held()

    def begin():
        if "ready" not in held:
            held["ready"] = _held()
            _forget_peak()
        return np.True_

    @tf.function
    def step(data):
        with tf.control_dependencies([tf.numpy_function(begin, [], tf.bool)]):
            data = tf.nest.map_structure(tf.identity, data)
        return model.train_step(data)["loss"]

    data = tf.constant(x), tf.constant(y)
    step.get_concrete_function(data)
    held["graph"] = _held()
    for _ in range(3):
        float(step(data))
    held["step"] = _peak()
    arrays = 0.0
    if _keras.uses_onednn():
        arrays = _peak_of_arrays(lambda: float(step(data)))
    found, before = {}, held[""]
    for stage in STAGES:
        if stage in held:
            found[stage] = held[stage] - before
            before = held[stage]
    return found, arrays, budget / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--out", metavar="FILE")
    arguments = parser.parse_args()
    console = rich.console.Console(width=100, record=True)
    console.print(machine.description(), highlight=False)
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for column in ("workload", "", *STAGES, "all", "arrays", "budget"):
        table.add_column(column, justify="right")
    for name in arguments.workload.split(","):
        for mode in (run.PLAIN, "auto"):
            (found, arrays, budget), _ = measured(stages, name, mode)
            table.add_row(
                name,
                mode,
                *(f"{found[s]:.0f}" if s in found else "" for s in STAGES),
                f"{sum(found.values()):.0f}",
                f"{arrays:.0f}" if arrays else "",
                f"{budget:.0f}" if budget else "",
            )
    console.print(table)
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write(console.export_text())


if __name__ == "__main__":
    main()
