"""Seconds from a compiled model to the end of its first training step.

    python -m benchmarks.latency --workload gpt,resnet --out latency.txt

Of a private model: the check; the plan of how to serve each kernel, for which
ways are timed; and the first step, whose graph is traced and made ready to run.
Plain training has but the last of these. Each in a process of its own, one
after the other. A process that has trained a model before is faster at the
second one.
"""

import argparse
import time
import warnings

import numpy as np
import rich.box
import rich.console
import rich.table
import tensorflow as tf

from benchmarks import machine, run
from benchmarks.processes import measured
from benchmarks.workloads import ALL, WORKLOADS
from keras_fastclip import methods, sampling

STAGES = ("check", "plan", "first step")


def latency(name: str, mode: str) -> dict[str, float]:
    """Seconds by stage."""
    warnings.simplefilter("ignore")
    workload = ALL[name]
    x, y = workload.data(np.random.default_rng(0), workload.batch)
    model = run.build(workload, mode)
    data = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
    found, before = {}, time.perf_counter()

    def done(stage):
        nonlocal before
        now = time.perf_counter()
        found[stage], before = now - before, now

    if mode != run.PLAIN:
        privacy = model._privacy
        some = sampling.some((x, y, None))
        privacy.prepare(model, some, workload.batch)
        done("check")
        plan, limits = privacy.latest_plan, privacy.limits(model)
        methods.choose(plan.traits, plan.numbers, privacy.method, limits)
        done("plan")
    model.make_train_function()
    float(model.train_function(data)["loss"])
    done("first step")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--out", metavar="FILE")
    arguments = parser.parse_args()
    console = rich.console.Console(width=80, record=True)
    console.print(machine.description(), highlight=False)
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for column in ("workload", "plain", *STAGES, "all", "over plain"):
        table.add_column(column, justify="right")
    for name in arguments.workload.split(","):
        plain, found = (
            measured(latency, name, mode)[0] for mode in (run.PLAIN, "auto")
        )
        first, total = plain["first step"], sum(found.values())
        seconds = first, *(found[stage] for stage in STAGES), total
        table.add_row(
            name, *(f"{s:.1f}" for s in seconds), f"{total / first:.1f}"
        )
    console.print(table)
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write(console.export_text())


if __name__ == "__main__":
    main()
