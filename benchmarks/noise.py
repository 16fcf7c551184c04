"""Nanoseconds for a value of noise, by source.

    python -m benchmarks.noise

Noise is added to ten sums of a million values each, as in a step, by the two
sources that the library takes on CPUs, compiled and by NumPy, by the one under
XLA, by `noise="secure"` and by TensorFlow's own; in turn, and what is shown are
medians of the time that passes and of that of all processors.
"""

import functools
import statistics
import time
import unittest.mock

import tensorflow as tf

from benchmarks import machine
from keras_fastclip import noise
from keras_fastclip.noise import GaussianNoise, SecureNoise

SUMS, SIZE, RUNS = 10, 1_000_000, 15


def tensorflow_noise(sums, stddev, step, divisor):
    del step
    return [
        (s + tf.random.normal(s.shape, stddev=stddev)) / divisor for s in sums
    ]


@unittest.mock.patch.object(noise, "COMPILED_FROM", SUMS * SIZE + 1)
def numpy_noise(sums, stddev, step, divisor):
    return GaussianNoise().add(sums, stddev, step, divisor)


def main():
    print(machine.description())
    sums = [tf.zeros([SIZE]) for _ in range(SUMS)]
    add = GaussianNoise().add
    secure = functools.partial(SecureNoise().add, sensitivity=tf.constant(1.0))
    sources = {
        "AES, compiled": tf.function(add),
        "AES, by NumPy": tf.function(numpy_noise, autograph=False),
        "Philox, in a step compiled by XLA": tf.function(add, jit_compile=True),
        'noise="secure"': tf.function(secure),
        "tf.random.normal": tf.function(tensorflow_noise),
    }
    times = {name: [] for name in sources}
    for run in range(RUNS + 2):
        for name, source in sources.items():
            start = time.perf_counter(), time.process_time()
            noised = source(
                sums, tf.constant(1.0), tf.constant(run, tf.int64), 8.0
            )
            float(noised[-1][0])
            end = time.perf_counter(), time.process_time()
            times[name].append([b - a for a, b in zip(start, end, strict=True)])
    for name, seconds in times.items():
        passed, used = (
            1e9 * statistics.median(column) / (SUMS * SIZE)
            for column in zip(*seconds[2:], strict=True)  # The first trace.
        )
        print(f"{name}: {passed:.1f} ns a value, processors {used:.1f} ns")


if __name__ == "__main__":
    main()
