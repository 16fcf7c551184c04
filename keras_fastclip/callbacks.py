"""Callbacks that report privacy during training."""

from typing import Any

import keras

from keras_fastclip import accounting


class EpsilonTracker(keras.callbacks.Callback):
    """Adds the privacy spent so far to the logs of each epoch.

    `logs["epsilon"]` appears in the progress bar, in `History` and in every
    callback that reads epoch logs. Keras runs callbacks in the order given
    and its own progress bar and `History` after them; put a `CSVLogger` or a
    `TensorBoard` *after* this callback in the list.

    The figure counts every step of the model's life, not only those of the
    present `fit`. It is `inf` when the steps cannot be accounted for.

    Args:
        delta: The delta at which epsilon is reported, in (0, 1).
        accountant: `"rdp"` (fast, a little larger) or `"pld"` (tight,
            seconds per epoch).

    Example:

    >>> model.fit(x, y, callbacks=[keras_fastclip.EpsilonTracker(1e-5)])
    """

    def __init__(self, delta: float, accountant: str = "rdp"):
        super().__init__()
        accounting.check_delta(delta)
        accounting.check_accountant(accountant)
        self.delta = delta
        self.accountant = accountant

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not callable(getattr(self.model, "privacy_spent", None)):
            raise TypeError(
                f"EpsilonTracker: model {self.model.name!r} of class "
                f"{type(self.model).__name__} is not a private model: use "
                "DPSequential, DPModel or make_private."
            )

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if logs is not None:
            logs["epsilon"] = float(
                self.model.privacy_spent(self.delta, accountant=self.accountant)
            )
