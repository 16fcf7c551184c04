"""A long run: memory and speed must stay as they are at its beginning.

    python -m benchmarks.soak --steps 10000 --examples 1000000

Trains a small model by Poisson sampling in physical batches, and prints the
resident memory of the process and the processor time of a step at ten moments.
Processor time, since others may use the machine or stop the process meanwhile.
Ends with an error if, after the first tenth of the steps, memory grew by more
than one per cent or a step came to take a tenth longer.
"""

import argparse
import statistics
import sys
import time

import keras
import numpy as np

import keras_fastclip
from benchmarks import machine

MEMORY, TIME = 1.01, 1.1


class Watch(keras.callbacks.Callback):
    """Resident bytes and processor seconds of a step at equal distances.

    Args:
        every: so many steps.
    """

    def __init__(self, every: int):
        super().__init__()
        self._every, self._steps = every, 0
        self.memory, self.seconds = [], []

    def on_train_begin(self, logs=None):
        self._start = time.process_time()

    def on_train_batch_end(self, batch, logs=None):
        self._steps += 1
        if self._steps % self._every:
            return
        now = time.process_time()
        self.memory.append(resident())
        self.seconds.append((now - self._start) / self._every)
        print(
            f"step {self._steps:,}: {self.memory[-1] / 2**20:,.0f} MiB, "
            f"{1e3 * self.seconds[-1]:.2f} ms a step",
            flush=True,
        )
        self._start = time.process_time()


def resident() -> int:
    """Bytes of memory that the process holds now."""
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith("VmRSS:"):
                return 1024 * int(line.split()[1])
    raise OSError("The resident memory is not in /proc/self/status.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--physical", type=int, default=64)
    options = parser.parse_args()
    print(machine.description())
    rng = np.random.default_rng(0)
    x = rng.standard_normal((options.examples, 32), dtype="float32")
    y = rng.integers(0, 10, options.examples)
    model = keras_fastclip.DPSequential(
        [keras.layers.Dense(64, "relu"), keras.layers.Dense(10)],
        l2_norm_clip=1.0,
        noise_multiplier=1.1,
        physical_batch_size=options.physical,
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    watch = Watch(max(1, options.steps // 10))
    model.fit(
        x,
        y,
        batch_size=options.batch,
        steps_per_epoch=options.steps,
        verbose=0,
        callbacks=[watch],
    )
    spent = model.privacy_spent(1e-7, "rdp")
    print(f"epsilon = {spent:.3f} at delta = 1e-07")
    grown = watch.memory[-1] / watch.memory[0]
    # The first steps trace, and others share the caches now and then.
    first, last = watch.seconds[1:4], watch.seconds[-3:]
    slower = statistics.median(last) / statistics.median(first)
    print(f"memory x {grown:.3f}, time of a step x {slower:.3f}")
    if grown > MEMORY or slower > TIME:
        sys.exit("Memory or speed did not stay as they were.")


if __name__ == "__main__":
    main()
