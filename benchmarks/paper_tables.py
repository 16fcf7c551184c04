"""The papers' tables, recomputed.

    python -m benchmarks.paper_tables

First the layerwise decisions of mixed ghost clipping (Bu, Mao & Xu, 2022,
table 3; Bu et al., 2023, tables 4 and 10) from the planner's own formulas,
for images of 224 x 224. Then time and peak memory of every method on three of
the workloads, each in a process of its own; progress goes to the standard
error. `--out FILE` writes the tables to a file as well, and with `--plot FILE`
and the `plots` extra there is a picture.
"""

import argparse
import math
import statistics
import sys

import rich.box
import rich.console
import rich.table
from keras import layers

from benchmarks import machine
from benchmarks.processes import measured
from keras_fastclip.methods import METHODS
from keras_fastclip.planner import Item
from keras_fastclip.registry.linear import Kernel

# -- layerwise decisions ------------------------------------------------------


def kernels(stack, shape=(None, 224, 224, 3)):
    """The kernels of layers that are applied one after the other."""
    found = []
    for layer in stack:
        width, shape = shape[-1], layer.compute_output_shape(shape)
        if isinstance(layer, layers.Conv2D):
            inputs = math.prod(layer.kernel_size) * width
            positions = math.prod(shape[1:-1])
            found.append(Kernel(positions, inputs, layer.filters))
        if isinstance(layer, layers.Dense):
            found.append(Kernel(1, width, layer.units))
    return found


def _conv(filters, size, stride=1):
    return layers.Conv2D(filters, size, stride, "same")


def vgg11():
    stack = []
    for filters, pool in zip(
        (64, 128, 256, 256, 512, 512, 512, 512),
        (True, True, False, True, False, True, False, True),
        strict=True,
    ):
        stack.append(_conv(filters, 3))
        if pool:
            stack.append(layers.MaxPooling2D(2))
    stack.append(layers.Flatten())
    return [*stack, *map(layers.Dense, (4096, 4096, 1000))]


def resnet(blocks, bottleneck=False):
    """Without its shortcuts, which the papers leave out."""
    stack = [_conv(64, 7, 2), layers.MaxPooling2D(3, 2, "same")]
    for stage, count in enumerate(blocks):
        filters = 64 * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            if bottleneck:
                stack += [_conv(filters, 1), _conv(filters, 3, stride)]
                stack += [_conv(4 * filters, 1)]
            else:
                stack += [_conv(filters, 3, stride), _conv(filters, 3)]
    return [*stack, layers.GlobalAveragePooling2D(), layers.Dense(1000)]


# Numbers an example: ghost norm, instantiated, mixed. Bu et al. give them.
PAPER = {
    "VGG-11": (vgg11, "5.34e9", "133M", "3.40e6 *"),
    "ResNet-18": (lambda: resnet((2, 2, 2, 2)), "399M", "11.5M", "1.0M"),
    "ResNet-34": (lambda: resnet((3, 4, 6, 3)), "444M", "21.6M", "2.3M"),
    "ResNet-50": (lambda: resnet((3, 4, 6, 3), True), "528M", "22.7M", "2.8M"),
}


def totals(found):
    """Numbers an example: ghost norm, instantiated, and the less of both."""
    return (
        sum(kernel.gram for kernel in found),
        sum(kernel.built for kernel in found),
        sum(min(kernel.gram, kernel.built) for kernel in found),
    )


def _short(number):
    if number >= 1e9:
        return f"{number / 1e9:.2f}G"
    return f"{number / 1e6:.1f}M" if number >= 1e5 else f"{number:,}"


def decisions(console):
    for name, (build, *_) in PAPER.items():
        table = _table(f"{name}, 224 x 224", "layer", "T", "2T²", "pd", "norm")
        found = kernels(build())
        for i, kernel in enumerate(found):
            table.add_row(
                f"{i + 1}",
                f"{kernel.positions:,}",
                _short(kernel.gram),
                _short(kernel.built),
                "ghost" if Item("", kernel).prefers_ghost else "instantiated",
            )
        console.print(table)
    table = _table(
        "Numbers for the norm of an example, here / in the papers",
        *("model", "ghost", "instantiated", "mixed"),
    )
    for name, (build, *paper) in PAPER.items():
        here = map(_short, totals(kernels(build())))
        pairs = zip(here, paper, strict=True)
        table.add_row(name, *(f"{ours} / {theirs}" for ours, theirs in pairs))
    console.print(table)
    console.print("* printed as 3.40e4; the sum of the table is 3.40e6\n")


# -- time and memory of every method -------------------------------------------

WORKLOADS = {"mlp": 32, "cnn": 64, "gpt": 8}


def step_seconds(workload, mode, batch, steps):
    """The median time of a step."""
    from benchmarks import run
    from benchmarks.workloads import WORKLOADS

    _, times = run.measure(WORKLOADS[workload], mode, batch, steps, warmup=1)
    return statistics.median(times)


def measure(console, steps):
    rows = []
    for workload, batch in WORKLOADS.items():
        table = _table(
            f"{workload}, batch {batch}",
            *("method", "ms a step", "of plain", "peak MB", "of plain"),
        )
        plain = None
        for mode in ("nonprivate", *METHODS):
            seconds, memory = measured(
                step_seconds, workload, mode, batch, steps
            )
            print(f"{workload} {mode}: {seconds:.2f} s", file=sys.stderr)
            plain = plain or (seconds, memory)
            rows.append((workload, mode, seconds, memory))
            table.add_row(
                mode,
                f"{1e3 * seconds:.0f}",
                f"{seconds / plain[0]:.2f}",
                f"{memory:.0f}",
                f"{memory / plain[1]:.2f}",
            )
        console.print(table)
    return rows


def plot(rows, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(WORKLOADS), 2, figsize=(10, 9), layout="constrained"
    )
    for pair, workload in zip(axes, WORKLOADS, strict=True):
        own = [row for row in rows if row[0] == workload]
        names = [mode for _, mode, _, _ in own]
        for axis, values, title in (
            (pair[0], [1e3 * row[2] for row in own], "milliseconds a step"),
            (pair[1], [row[3] for row in own], "peak memory, MB"),
        ):
            axis.barh(names, values, color=["gray", *["C0"] * len(METHODS)])
            axis.set(title=f"{workload}: {title}", xscale="log")
            axis.invert_yaxis()
    figure.savefig(path, dpi=120)


def _table(title, *columns):
    table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--decisions-only", action="store_true")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    console = rich.console.Console(width=100, record=True)
    console.print(machine.description(), highlight=False)
    decisions(console)
    if not arguments.decisions_only:
        rows = measure(console, arguments.steps)
        if arguments.plot:
            plot(rows, arguments.plot)
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write(console.export_text())


if __name__ == "__main__":
    main()
