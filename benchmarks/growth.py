"""How the time of a private step grows: batch, sequence, vocabulary.

    python -m benchmarks.growth [batch] [length] [vocabulary] [selected rows]

- By the batch: what a step takes is a constant (noise, update, the graph) and
  a multiple of the batch size; shown is how far each step is from that line.
- By the length T of a sequence: the norm of a kernel takes T² by ghost norms
  and T by building gradients, so the planner changes from the one to the other
  where T exceeds about dp/(d + p), and time grows no faster than T from there.
- By the vocabulary: rows that a batch does not hold get noise and nothing else;
  shown is a step beside the noise of all its weights.
- By the vocabulary with `SparseNoise`, where rows that are not selected get
  nothing; shown is a step without it.

Medians of interleaved steps, in one process.
"""

import statistics
import sys
import time

import keras
import numpy as np
import rich.box
import rich.console
import rich.table
import tensorflow as tf
from keras import layers

import keras_fastclip
from benchmarks import machine
from keras_fastclip.noise import GaussianNoise

STEPS, WARMUP = 9, 2


class Step:
    """Steps of a private model on random data."""

    def __init__(self, inputs, outputs, x, y, **settings):
        self.model = keras_fastclip.DPModel(
            inputs,
            outputs,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            expected_batch_size=len(x),
            **settings,
        )
        self.model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(True),
            jit_compile=False,
        )
        self.model._privacy.prepare(self.model, (x, y, None), len(x))
        self.model.make_train_function()
        self._data = iter(tf.data.Dataset.from_tensors((x, y)).repeat())

    def __call__(self):
        float(self.model.train_function(self._data)["loss"])


def medians(steps):
    """Seconds of each of the steps, made in turn."""
    times = {name: [] for name in steps}
    for _ in range(WARMUP + STEPS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t[WARMUP:]) for name, t in times.items()}


def encoder(length, batch, width=128):
    x = keras.Input((length, width))
    y = layers.LayerNormalization()(x)
    y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    y = layers.Dense(2)(layers.GlobalAveragePooling1D()(x + y))
    rng = np.random.default_rng(0)
    data = rng.normal(size=(batch, length, width)).astype("float32")
    return Step(x, y, data, rng.integers(0, 2, batch))


def by_batch(batches=(32, 64, 128, 256, 512)):
    found = medians({batch: encoder(64, batch) for batch in batches})
    # Relative errors count, so that small batches do too.
    weights = [1 / seconds for seconds in found.values()]
    slope, constant = np.polyfit(
        list(found), list(found.values()), 1, w=weights
    )
    for batch, seconds in found.items():
        line = constant + slope * batch
        yield batch, seconds, f"{100 * (seconds / line - 1):+.1f} %"


def by_length(lengths=(32, 64, 128, 256, 512, 1024)):
    steps = {length: encoder(length, 8) for length in lengths}
    found = medians(steps)
    before = None
    for length, seconds in found.items():
        grown = "" if before is None else f"{seconds / before:.2f}"
        yield length, seconds, grown
        before = seconds


def table_model(rows, batch=128, length=32, width=16, **settings):
    x = keras.Input((length,), dtype="int32")
    y = layers.GlobalAveragePooling1D()(layers.Embedding(rows, width)(x))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, (batch, length)).astype("int32")
    targets = rng.integers(0, 2, batch)
    return Step(x, layers.Dense(2)(y), ids, targets, **settings)


def noise_of(model):
    sums = [tf.zeros(v.shape) for v in model.trainable_variables]
    noise = GaussianNoise()

    @tf.function
    def add():
        step = tf.constant(0, tf.int64)
        found = noise.add(sums, tf.constant(1.0), step)
        for variable, mean in zip(
            model.trainable_variables, found, strict=True
        ):
            variable.value.assign_sub(0.01 * mean)

    return add


def by_vocabulary(sizes=(1_000, 10_000, 100_000, 1_000_000)):
    steps = {rows: table_model(rows) for rows in sizes}
    noises = {("noise", n): noise_of(s.model) for n, s in steps.items()}
    found = medians({**steps, **noises})
    for rows in sizes:
        beside = found[rows] - found["noise", rows]
        yield rows, found[rows], f"{1e3 * beside:.1f} ms"


def by_selected_rows(sizes=(1_000, 10_000, 100_000, 1_000_000)):
    option = keras_fastclip.SparseNoise()
    selected = {rows: table_model(rows, sparse_noise=option) for rows in sizes}
    everywhere = {("all", rows): table_model(rows) for rows in sizes}
    found = medians({**selected, **everywhere})
    for rows in sizes:
        yield rows, found[rows], f"{1e3 * found['all', rows]:.1f} ms"


SECTIONS = {
    "batch": ("from a line", by_batch),
    "length": ("times the one before", by_length),
    "vocabulary": ("beside noise", by_vocabulary),
    "selected rows": ("without the option", by_selected_rows),
}


def main():
    console = rich.console.Console(width=80)
    console.print(machine.description(), highlight=False)
    for name in sys.argv[1:] or SECTIONS:
        told, rows = SECTIONS[name]
        title = f"by the {name}"
        table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD)
        for column in ("", "ms a step", told):
            table.add_column(column, justify="right")
        for size, seconds, note in rows():
            table.add_row(f"{size:,}", f"{1e3 * seconds:.1f}", note)
        console.print(table)


if __name__ == "__main__":
    main()
