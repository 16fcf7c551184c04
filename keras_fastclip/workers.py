"""Several processes that train one model, each with replicas of its own.

Every worker runs the same program on the same data, in the same order, as
`tf.distribute.MultiWorkerMirroredStrategy` has it. All of them make the same
draws, from secrets of all of them, and each takes its own part of every draw.
The first worker draws the noise. Each counts every step, so all have the same
record; one of them is to be saved.

Formal guarantee: workers that would not make one step together make none.
Before the first step they compare what they are about to do, and in each step
the tag of the draw that their parts are of, the number of steps so far and
what their budgets leave.
"""

import json
import secrets
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip.sampling import digest


def count(strategy: tf.distribute.Strategy) -> int:
    """The number of workers; each has as many replicas as the others."""
    here = len(strategy.extended.worker_devices)
    return strategy.num_replicas_in_sync // here


def is_first(strategy: tf.distribute.Strategy) -> bool:
    """Whether this is the worker that draws noise and writes files."""
    return strategy.extended.should_checkpoint


def gathered(
    strategy: tf.distribute.Strategy, numbers: list[int]
) -> np.ndarray:
    """What each worker has, (workers, numbers); waits for all of them."""

    @tf.function(autograph=False)
    def gather():
        own = strategy.run(lambda: tf.constant([numbers], tf.int64))
        return strategy.gather(own, axis=0)

    return gather().numpy()[:: len(strategy.extended.worker_devices)]


def sampling_rng(
    strategy: tf.distribute.Strategy, seed: int | None, steps: int
) -> np.random.Generator:
    """A source of draws that is the same on all workers.

    It is made anew for each `fit`: how many draws were prepared by the one
    before and never used is not the same on all of them.

    Args:
        strategy: of several workers.
        seed: of the model; None for a secret, 128 bits of each worker.
        steps: of the model so far.
    """
    if seed is not None:
        return np.random.default_rng([seed, steps])
    own = [secrets.randbits(32) for _ in range(4)]
    shared = gathered(strategy, own)
    return np.random.default_rng(shared.ravel().tolist())


def _rounded(number):
    """As text; what was calibrated may differ in its last digits."""
    return number if number is None else f"{number:.9g}"


def _text(config):
    """A config as text, the same in every process."""
    return json.dumps(
        config, sort_keys=True, default=lambda value: type(value).__name__
    )


class Agreement(keras.callbacks.Callback):
    """Refuses to train if workers do not go about it in the same way.

    Args:
        data: a digest of the data, and of how batches are drawn from it.
    """

    def __init__(self, data: int):
        super().__init__()
        self.data = data

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._agreed = False

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        # Not before: on_train_begin of another callback may restore a run.
        if self._agreed:
            return
        model, self._agreed = self.model, True
        privacy = model._privacy
        record = privacy.record(model)
        weights = [f"{v.shape} {v.dtype}" for v in model.trainable_variables]
        strategy = model.distribute_strategy
        topics = {
            "data, or batches drawn from it": self.data,
            "epochs or steps": digest(
                epoch, self.params.get("epochs"), self.params.get("steps")
            ),
            "records of private steps (are all restored from one backup?)": (
                digest(_text(record["ledger"]))
            ),
            "privacy settings": digest(
                _text(privacy.settings.get_config()),
                privacy.settings.seed,
                privacy.denominator(),
                _rounded(record["clip_norm"]),
                _rounded(record["noise_multiplier"]),
            ),
            "models or numbers of devices": digest(
                weights, strategy.num_replicas_in_sync
            ),
        }
        run = int(record["run"], 16)
        own = [*topics.values(), run >> 32, run & 0xFFFFFFFF]
        rows = gathered(strategy, own)
        for topic, column in zip(topics, rows.T, strict=False):
            if len(set(column.tolist())) > 1:
                raise ValueError(
                    f"Workers have different {topic}. All must run the same "
                    "program on the same data, in the same order."
                )
        # Equal records are from now on one.
        high, low = rows[0, -2:].tolist()
        privacy.take_run(f"{high << 32 | low:016x}")
