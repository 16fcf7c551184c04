"""Seconds from a compiled model to the end of its first training step.

    python -m benchmarks.latency --workload gpt,resnet --out latency.txt

Of a private model: the check; the plan of how to serve each kernel, for which
ways are timed; and the first step, whose graph is traced and made ready to run.
Plain training has but the last of these. Each in a process of its own, plain
and private in turn; medians. A process that has trained a model before is
faster at the second one.
"""

import argparse
import statistics
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", metavar="FILE")
    arguments = parser.parse_args()
    console = rich.console.Console(width=80, record=True)
    console.print(machine.description(), highlight=False)
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    columns = "workload", "plain", *STAGES, "over plain", "all", "over plain"
    for column in columns:
        table.add_column(column, justify="right")
    for name in arguments.workload.split(","):
        plain, private = zip(
            *(
                [measured(latency, name, m)[0] for m in (run.PLAIN, "auto")]
                for _ in range(arguments.repeats)
            ),
            strict=True,
        )
        before = statistics.median(found["first step"] for found in plain)
        stages = [
            statistics.median(found[stage] for found in private)
            for stage in STAGES
        ]
        total = statistics.median(sum(found.values()) for found in private)
        table.add_row(
            name,
            *(f"{seconds:.1f}" for seconds in (before, *stages)),
            f"{stages[-1] / before:.1f}",
            f"{total:.1f}",
            f"{total / before:.1f}",
        )
    console.print(table)
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write(console.export_text())


if __name__ == "__main__":
    main()
