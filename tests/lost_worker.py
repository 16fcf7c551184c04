"""One of two workers, either of which `test_distribution.py` kills."""

import keras

import keras_fastclip
from tests import counting_model, processes

STEPS = 60


class Progress(keras.callbacks.Callback):
    """Tells how many steps the weights and the record know of."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def tell(self, begin):
        made, recorded = counting_model.steps(self.model)
        with open(self.path, "a") as file:
            file.write(f"{made} {recorded} {begin}\n")
        self.model.stop_training = recorded >= STEPS

    def on_train_begin(self, logs=None):
        self.tell(begin=1)

    def on_train_batch_end(self, batch, logs=None):
        self.tell(begin=0)


def main(folder):
    strategy = processes.strategy(heartbeat=40)
    with strategy.scope():
        model = counting_model.make()
    index = strategy.cluster_resolver.task_id
    backup = keras_fastclip.BackupAndRestore(folder / "backup", save_freq=1)
    model.fit(
        counting_model.X,
        counting_model.Y,
        batch_size=8,
        steps_per_epoch=7,
        epochs=10**6,
        verbose=0,
        callbacks=[backup, Progress(folder / f"progress_{index}")],
    )
