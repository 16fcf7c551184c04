"""Nanoseconds for a value of noise, by source.

    python -m benchmarks.noise

Noise is added to ten sums of a million values each, as in a step, by the
source that the library takes on CPUs, by the one that it takes under XLA, and
by TensorFlow's own; in turn, and what is shown are medians.
"""

import statistics
import time

import tensorflow as tf

from benchmarks import machine
from keras_fastclip.noise import GaussianNoise

SUMS, SIZE, RUNS = 10, 1_000_000, 15


def tensorflow_noise(sums, stddev, step, divisor):
    del step
    return [
        (s + tf.random.normal(s.shape, stddev=stddev)) / divisor for s in sums
    ]


def main():
    print(machine.description())
    sums = [tf.zeros([SIZE]) for _ in range(SUMS)]
    add = GaussianNoise().add
    sources = {
        "AES, compiled": tf.function(add),
        "Philox, in a step compiled by XLA": tf.function(add, jit_compile=True),
        "tf.random.normal": tf.function(tensorflow_noise),
    }
    times = {name: [] for name in sources}
    for run in range(RUNS + 2):
        for name, source in sources.items():
            start = time.perf_counter()
            noised = source(
                sums, tf.constant(1.0), tf.constant(run, tf.int64), 8.0
            )
            float(noised[-1][0])
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        median = statistics.median(seconds[2:])  # The first trace.
        print(f"{name}: {1e9 * median / (SUMS * SIZE):.1f} ns a value")


if __name__ == "__main__":
    main()
