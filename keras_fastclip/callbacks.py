"""Callbacks that report privacy during training, and that stop it."""

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, _validate, accounting, replicas
from keras_fastclip.privacy import Budget, BudgetExceededError


class _PrivateCallback(keras.callbacks.Callback):
    """A callback for private models only."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not callable(getattr(self.model, "privacy_spent", None)):
            raise TypeError(
                f"{type(self).__name__}: model {self.model.name!r} of class "
                f"{type(self.model).__name__} is not a private model: use "
                "DPSequential, DPModel or make_private."
            )


class EpsilonTracker(_PrivateCallback):
    """Adds the privacy spent so far to the logs.

    `logs["epsilon"]` appears in the progress bar, in `History` and in every
    callback that reads logs. Keras runs callbacks in the order given and its
    own progress bar and `History` after them; put a `CSVLogger` or a
    `TensorBoard` *after* this callback in the list.

    The figure counts every step of the model's life, not only those of the
    present `fit`. It is `inf` when the steps cannot be accounted for.

    Args:
        delta: The delta at which epsilon is reported, in (0, 1).
        every: `"epoch"`, or a number of batches after which the figure is
            computed anew; it is then in the logs of batches too.
        accountant: `"pld"`, by which `privacy_spent` and the statement report
            (tight, about a tenth of a second for each figure), or `"rdp"` (a
            little larger, at once; for figures after few batches).

    Example:

    ```python
    model.fit(x, y, callbacks=[keras_fastclip.EpsilonTracker(1e-5)])
    ```
    """

    def __init__(
        self,
        delta: float,
        every: int | str = "epoch",
        accountant: str = "pld",
    ):
        super().__init__()
        accounting.check_delta(delta)
        accounting.check_accountant(accountant)
        if every != "epoch":
            _validate.positive_integer(every=every)
        self.delta = delta
        self.accountant = accountant
        self.every = every
        self._latest: float | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        # Keras hands the same dict to `History`, so that whoever has the
        # history knows of which delta its epsilon is.
        self.params["epsilon"] = {
            "delta": self.delta,
            "accountant": self.accountant,
        }

    def _spent(self) -> float:
        spent = self.model.privacy_spent(self.delta, accountant=self.accountant)
        self._latest = float(spent)
        return self._latest

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if logs is None or self.every == "epoch":
            return
        if self._latest is None or (batch + 1) % self.every == 0:
            self._spent()
        logs["epsilon"] = self._latest

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if logs is not None:
            logs["epsilon"] = self._spent()


class PrivacyBudget(_PrivateCallback):
    """Stops training before the step that would exceed a privacy budget.

    All steps of the model's life count, also those of earlier fits and of a
    run that was interrupted and resumed. The limit is kept inside the train
    step, so it holds to the step, whatever `steps_per_execution` is.

    Args:
        epsilon: The largest epsilon that may be reached.
        delta: The delta at which it is measured, in (0, 1).
        accountant: `"pld"`, by which `privacy_spent` reports, or `"rdp"`.

    Example:

    ```python
    budget = keras_fastclip.PrivacyBudget(3.0, 1e-5)
    model.fit(x, y, epochs=100, callbacks=[budget])
    ```
    """

    def __init__(self, epsilon: float, delta: float, accountant: str = "pld"):
        super().__init__()
        _validate.positive(epsilon=epsilon)
        accounting.check_delta(delta)
        accounting.check_accountant(accountant)
        self.epsilon = epsilon
        self.delta = delta
        self.accountant = accountant

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._active = False
        self._stopped = False
        self._steps_before = 0
        self._last = None

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        # Not before: on_train_begin of another callback may restore a run.
        if not self._active:
            self._active = True
            steps = self.params.get("steps") or 0
            budget = Budget(
                self.epsilon,
                self.delta,
                steps * self.params.get("epochs", 0),
                self.accountant,
            )
            self.model._privacy.add_budget(self.model, budget)
            if self.model._privacy.counter.allowed < 1:
                raise BudgetExceededError(
                    "Nothing is left to train on: a further step would exceed "
                    f"epsilon = {self.epsilon:g} at delta = {self.delta:g}; "
                    f"see model.privacy_statement({self.delta:g})."
                )
        self._steps_before = int(self.model._privacy.counter.total)
        planned = epoch == self.params.get("epochs", 0) - 1
        steps = self.params.get("steps") if planned else None
        self._last = steps and self._steps_before + steps

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        counter = self.model._privacy.counter
        steps, spent = int(counter.total), counter.allowed < 1
        refused = steps == self._steps_before
        self._steps_before = steps
        # With passes over the data, the pass at hand costs nothing more.
        if refused or spent and not self.model._privacy.in_passes:
            self._stopped = self.model.stop_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._steps_before == self._last:
            return  # All steps were made, and none was missing.
        if self._stopped and self.params.get("verbose", 0):
            print(
                f"Training stopped after {self._steps_before:,} steps: the "
                f"next one would exceed epsilon = {self.epsilon:g} at "
                f"delta = {self.delta:g}."
            )


class GradientNormMonitor(_PrivateCallback):
    """Adds norms of gradients before clipping to the logs. **Not private.**

    For choosing the clip norm on public data. What it logs is computed from
    the data without noise, and its names in the logs begin with "nonprivate_":
    the fraction of gradients longer than the clip norm, and quantiles of the
    norms (to 2.5 percent), over each epoch.

    Args:
        quantiles: numbers between 0 and 1.

    Example:

    ```python
    model.fit(x, y, callbacks=[keras_fastclip.GradientNormMonitor()])
    ```
    """

    def __init__(self, quantiles: tuple[float, ...] = (0.5, 0.9)):
        super().__init__()
        for quantile in quantiles:
            if not 0 <= quantile <= 1:
                raise ValueError(
                    "`quantiles` must be between 0 and 1; received "
                    f"{quantiles=!r}."
                )
        self.quantiles = tuple(quantiles)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._histogram = Histogram()
        self.model._privacy.monitor = self._histogram
        self.model.make_train_function(force=True)

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self._histogram.reset()

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if logs is None:
            return
        clipped, *norms = self._histogram.report(self.quantiles)
        logs["nonprivate_clipped_fraction"] = clipped
        for quantile, norm in zip(self.quantiles, norms, strict=True):
            logs[f"nonprivate_norm_p{100 * quantile:g}"] = norm


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """`keras.callbacks.BackupAndRestore` with files that are always whole.

    Keras writes over the files that it has, and a process that is killed
    meanwhile cannot resume. Here new files take the place of the old ones only
    when they are written, so that training resumes after a crash at any
    moment. Weights and the record of private steps are one file.

    On several workers (`tf.distribute.MultiWorkerMirroredStrategy`) the first
    one writes the files and all of them resume from these, so `backup_dir`
    must be one folder that all can read. If a worker is lost the others end
    with an error; start all of them again.

    Args:
        backup_dir, save_freq, double_checkpoint, delete_checkpoint: as there.

    Example:

    ```python
    backup = keras_fastclip.BackupAndRestore("backup", save_freq=100)
    model.fit(x, y, epochs=10, callbacks=[backup])
    ```
    """

    def _save_model(self) -> None:
        if not self._writes():
            return
        final = self._weights_path, self._training_metadata_path
        new = [
            os.path.join(os.path.dirname(path), "new-" + os.path.basename(path))
            for path in final
        ]
        self._weights_path, self._training_metadata_path = new
        try:
            super()._save_model()
        finally:
            self._weights_path, self._training_metadata_path = final
        for written, path in zip(new, final, strict=True):
            os.replace(written, path)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._writes():
            super().on_train_end(logs)

    def _writes(self):
        return replicas.is_first_worker(self.model)


def refuse_stock_backups(callbacks: list[keras.callbacks.Callback]) -> None:
    """Of several workers, each would write over the files of the others.

    One that is killed meanwhile leaves files of different steps, or none that
    can be read.
    """
    stock, own = keras.callbacks.BackupAndRestore, BackupAndRestore
    for callback in callbacks:
        if isinstance(callback, stock) and not isinstance(callback, own):
            raise ValueError(
                "keras.callbacks.BackupAndRestore has all workers write over "
                "the same files. On several workers use "
                "keras_fastclip.BackupAndRestore, with a folder that all of "
                "them can read: the first one writes, and all resume from it."
            )


class Histogram:
    """Counts norms inside the train step, by bins of five percent."""

    _LEAST, _RATIO, _BINS = 1e-10, 1.05, 1000
    SIZE = 1 + _BINS  # of what is counted in a step

    def __init__(self):
        self._counts = _keras.variable(np.zeros(self._BINS, np.int64))
        self._clipped = _keras.variable(np.int64(0))

    def counts(self, squared_norms, real, clip_norm) -> tf.Tensor:
        """Numbers of examples: of those that are longer, and by bin.

        Args:
            squared_norms: (groups, batch).
            real: (batch,).
            clip_norm: scalar.
        """
        norms = tf.sqrt(tf.reduce_sum(squared_norms, 0))
        counted = tf.math.is_finite(norms) & real
        norms = tf.where(counted, norms, tf.zeros_like(norms))
        above = tf.math.log(tf.maximum(norms, self._LEAST) / self._LEAST)
        bins = tf.cast(
            above / tf.math.log(tf.cast(self._RATIO, above.dtype)), tf.int32
        )
        bins = tf.clip_by_value(bins, 0, self._BINS - 1)
        ones = tf.cast(counted, tf.float32)
        longer = tf.cast(norms > tf.cast(clip_norm, norms.dtype), tf.float32)
        by_bin = tf.math.unsorted_segment_sum(ones, bins, self._BINS)
        return tf.concat([tf.reduce_sum(longer * ones)[None], by_bin], 0)

    def add(self, counts: tf.Tensor) -> None:
        """Takes in the numbers of a step."""
        counts = tf.cast(counts, tf.int64)
        self._clipped.assign_add(counts[0])
        self._counts.assign_add(counts[1:])

    def reset(self) -> None:
        self._counts.assign(tf.zeros_like(self._counts))
        self._clipped.assign(0)

    def report(self, quantiles) -> list[float]:
        """The fraction of longer ones, and the quantiles."""
        counts = self._counts.numpy()
        total = int(counts.sum())
        if total == 0:
            return [float("nan")] * (1 + len(quantiles))
        up_to, report = counts.cumsum(), [int(self._clipped) / total]
        for quantile in quantiles:
            place = int((up_to < max(1.0, quantile * total)).sum())
            report.append(self._LEAST * self._RATIO ** (place + 0.5))
        return report


class PassBegin(keras.callbacks.Callback):
    """The last of the callbacks: what follows is a step of `fit`.

    Args:
        restart: after how many batches Keras begins with the data anew, at
            the end of that epoch; 0 for every epoch, None for never.
        aligned: whether it then begins with a pass.
    """

    def __init__(self, restart: int | None, aligned: bool):
        super().__init__()
        self.restart, self.aligned = restart, aligned
        self._batches = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.model._privacy.counter.new_pass(self.aligned)

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if self.restart is not None and self._batches >= self.restart:
            self.model._privacy.counter.new_pass(self.aligned)
            self._batches = 0

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self.model._privacy.pass_goes_on(True)
        self._batches += self.model.steps_per_execution


class PassEnd(keras.callbacks.Callback):
    """The first of the callbacks: what follows are callbacks."""

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self.model._privacy.pass_goes_on(False)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # A stream that runs out ends an epoch without the end of a batch.
        self.model._privacy.pass_goes_on(False)

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self.model._privacy.pass_goes_on(False)
