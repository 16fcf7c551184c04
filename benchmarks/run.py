"""Times one training step of one workload by one method.

    python -m benchmarks.run --workload cnn --mode auto

Modes are `nonprivate` and the names of the methods, each also with `-xla`
behind it. Prints one line of JSON; run each measurement in a process of its
own, plain and private in turn, and compare ratios rather than seconds.
"""

import argparse
import json
import statistics
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

import keras_fastclip
from benchmarks.processes import peak
from benchmarks.workloads import ALL

PLAIN = "nonprivate"


def build(workload, mode):
    """A compiled model; plain or private."""
    name, _, suffix = mode.partition("-")
    inputs, outputs = workload.build()
    if name == PLAIN:
        model = keras.Model(inputs, outputs)
    else:
        model = keras_fastclip.DPModel(
            inputs,
            outputs,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            method=name,
            expected_batch_size=workload.batch,
        )
    model.compile(
        keras.optimizers.SGD(0.01),
        workload.loss(),
        jit_compile=suffix == "xla",
    )
    return model


def measure(workload, mode, batch, steps, warmup):
    """Seconds of each step of Keras's own train function."""
    model = build(workload, mode)
    x, y = workload.data(np.random.default_rng(0), batch)
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    if mode.removesuffix("-xla") != PLAIN:
        model._privacy.prepare(model, (x, y, None), batch)
    model.make_train_function()
    iterator = iter(data)
    times = []
    for step in range(warmup + steps):
        start = time.perf_counter()
        logs = model.train_function(iterator)
        float(logs["loss"])
        if step >= warmup:
            times.append(time.perf_counter() - start)
    return model, times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=ALL, required=True)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch", type=int)
    arguments = parser.parse_args()
    workload = ALL[arguments.workload]
    batch = arguments.batch or workload.batch
    row = {
        "peer": "keras-fastclip",
        "version": keras_fastclip.__version__,
        "mode": arguments.mode,
        "workload": arguments.workload,
        "batch": batch,
        "base_rss_mb": round(peak(), 1),
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, times = measure(
                workload,
                arguments.mode,
                batch,
                arguments.steps,
                arguments.warmup,
            )
        row["params"] = model.count_params()
        row["sec_per_step"] = statistics.median(times)
        row["sec_min"] = min(times)
        row["peak_rss_mb"] = round(peak(), 1)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps(row))


if __name__ == "__main__":
    main()
