"""One of two workers, either of which `test_distribution.py` kills."""

import pathlib
import sys

import keras
import numpy as np
from keras import layers

import keras_fastclip
from tests import processes

STEPS = 60


class Idle(keras.Layer):
    """A weight that the loss does not depend on."""

    def build(self, shape):
        self.idle = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x


class Progress(keras.callbacks.Callback):
    """Tells how many steps the weights and the record know of."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def tell(self, begin):
        # Every step makes it smaller by a hundredth.
        weight = float(self.model.layers[0].idle.numpy())
        made = round(np.log(weight) / np.log(0.99))
        recorded = self.model._privacy.ledger(self.model).total_steps
        with open(self.path, "a") as file:
            file.write(f"{made} {recorded} {begin}\n")
        self.model.stop_training = recorded >= STEPS

    def on_train_begin(self, logs=None):
        self.tell(begin=1)

    def on_train_batch_end(self, batch, logs=None):
        self.tell(begin=0)


def main(folder):
    strategy = processes.strategy()
    with strategy.scope():
        model = keras_fastclip.DPSequential(
            [keras.Input((5,)), Idle(), layers.Dense(3)],
            l2_norm_clip=1e-9,  # hence next to no noise
            noise_multiplier=1.0,
        )
        model.compile(keras.optimizers.SGD(1e-3, weight_decay=10.0), "mse")
    index = strategy.cluster_resolver.task_id
    backup = keras_fastclip.BackupAndRestore(folder / "backup", save_freq=1)
    model.fit(
        np.ones((40, 5)),
        np.ones((40, 3)),
        batch_size=8,
        steps_per_epoch=7,
        epochs=10**6,
        verbose=0,
        callbacks=[backup, Progress(folder / f"progress_{index}")],
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
