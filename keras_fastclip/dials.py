"""Noise multiplier and clip norm over the steps: constant, scheduled, adaptive.

Both are public: they are functions of the number of the step, or of a private
statistic (`AdaptiveNorm`).
"""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, _validate

Schedule = keras.optimizers.schedules.LearningRateSchedule

# The least clip norm. Of a squared norm in float32 up to 1.2e-38 is lost for
# each weight: for 10¹¹ of them, a billionth of the square of this.
LEAST = 1e-9

# Scheduled noise multipliers are rounded up to a grid of one percent, so that
# a run has some hundreds of them and not one for each step.
_LEAST, _RATIO, _POINTS = 0.01, 1.01, 1400
_GRID = tuple(_LEAST * _RATIO**k for k in range(_POINTS))
SLOTS = 1 + _POINTS


class Multiplier:
    """The noise multiplier σ of each step.

    A step's σ is one of a list, `values`; its place there is the slot in
    which the step is counted. So the accountant learns what was used. The
    first slot is for a constant σ, the others for those of schedules.

    Args:
        given: a number, a schedule of Keras, or None if it is yet to be set.
    """

    def __init__(self, given: Any):
        self.schedule = given if isinstance(given, Schedule) else None
        self._number: float | None = None
        # Not a constant of the graph, since loading may change it.
        self._constant = _keras.variable(np.float64(np.nan))
        if self.schedule is None and given is not None:
            self.set(given)

    @property
    def known(self) -> bool:
        """Whether there is a value."""
        return self.schedule is not None or self._number is not None

    @property
    def values(self) -> list[float]:
        """σ of each slot."""
        return [self._number, *_GRID]

    def set(self, value: float | None) -> None:
        """Sets a σ that does not follow a schedule; None forgets it."""
        self._number = None if value is None else float(value)
        self._constant.assign(np.nan if value is None else value)

    def at(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The slot and the σ of a step; works in a graph."""
        if self.schedule is None:
            return tf.zeros([], tf.int64), self._constant.read_value()
        wanted = tf.cast(self.schedule(step), tf.float64)
        wanted = tf.where(wanted > _LEAST, wanted, _LEAST)  # Not a number, too.
        above = tf.math.log(wanted / _LEAST)
        # A hair less than the point itself still is that point.
        point = tf.math.ceil(above / math.log(_RATIO) - 1e-9)
        point = tf.minimum(tf.cast(point, tf.int64), _POINTS - 1)
        return 1 + point, tf.gather(tf.constant(_GRID, tf.float64), point)


@keras.saving.register_keras_serializable("keras_fastclip")
class AdaptiveNorm:
    """A clip norm that follows a quantile of the gradients' norms, privately.

    After every step, C is multiplied by exp(-η(f - q)), where f is the
    fraction of the batch whose gradients were within C, with Gaussian noise
    (Andrew, Thakkar, McMahan & Ramaswamy, 2021).

    Formal guarantee: the count of gradients within C has sensitivity ½ (each
    example adds ±½) and noise of standard deviation s. Together with gradients
    noised by σ' = (σ⁻² - (2s)⁻²)^-½ it is one Gaussian mechanism of noise
    multiplier σ, which is what is accounted for. So the count costs nothing
    beside a little more noise on the gradients.

    Args:
        initial: the first C.
        quantile: q, the fraction of gradients that are to be within C.
        learning_rate: η.
        count_stddev: s; by default a twentieth of the batch size, and at
            least 2σ.

    Example:

    ```python
    model = keras_fastclip.DPSequential(
        [keras.layers.Dense(10)],
        l2_norm_clip=keras_fastclip.AdaptiveNorm(initial=1.0, quantile=0.5),
        noise_multiplier=1.1,
    )
    ```
    """

    def __init__(
        self,
        initial: float = 1.0,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
        count_stddev: float | None = None,
    ):
        _validate.positive(initial=initial, learning_rate=learning_rate)
        if not 0 <= quantile <= 1:
            raise ValueError(
                f"`quantile` must be between 0 and 1; received {quantile=!r}."
            )
        if count_stddev is not None:
            _validate.positive(count_stddev=count_stddev)
        self.initial = float(initial)
        self.quantile = float(quantile)
        self.learning_rate = float(learning_rate)
        self.count_stddev = count_stddev

    def get_config(self) -> dict[str, Any]:
        return {
            "initial": self.initial,
            "quantile": self.quantile,
            "learning_rate": self.learning_rate,
            "count_stddev": self.count_stddev,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AdaptiveNorm":
        return cls(**config)


class ClipNorm:
    """The clip norm C of each step.

    Args:
        given: a number, a schedule of Keras, or an `AdaptiveNorm`.
    """

    def __init__(self, given: Any):
        self.schedule = given if isinstance(given, Schedule) else None
        self.adaptive = given if isinstance(given, AdaptiveNorm) else None
        # Not a constant of the graph, since it may be changed.
        self._value = _keras.variable(np.float64(first_norm(given)))

    @property
    def value(self) -> float:
        """C at present, unless it follows a schedule."""
        return float(self._value)

    def set(self, value: float) -> None:
        """Sets a C that does not follow a schedule."""
        self._value.assign(float(value))

    def at(self, step: tf.Tensor) -> tf.Tensor:
        """C of a step, float64 and no less than `LEAST`; works in a graph."""
        if self.schedule is not None:
            value = tf.cast(self.schedule(step), tf.float64)
        else:
            value = self._value.read_value()
        return tf.maximum(value, tf.constant(LEAST, tf.float64))

    def count_stddev(self, sigma: tf.Tensor, batch_size: float) -> tf.Tensor:
        """The noise of the count; none if the gradients get none."""
        stddev = self.adaptive.count_stddev
        if stddev is None:
            least = tf.constant(batch_size / 20, sigma.dtype)
            stddev = tf.maximum(least, 2 * sigma)
        stddev = tf.cast(stddev, sigma.dtype)
        return tf.where(sigma > 0, stddev, tf.zeros_like(stddev))

    def gradient_sigma(self, sigma: tf.Tensor, count_stddev) -> tf.Tensor:
        """σ of the gradients if gradients and count together are to have σ."""
        share = tf.math.divide_no_nan(sigma, 2 * count_stddev)
        return sigma / tf.sqrt(1 - tf.square(share))

    def adapt(self, balance: tf.Tensor, batch_size: float) -> None:
        """Moves C.

        Args:
            balance: scalar, ½ for each gradient within C and -½ for each
                other one, with noise.
            batch_size: as expected.
        """
        adaptive = self.adaptive
        fraction = tf.cast(balance, tf.float64) / batch_size + 0.5
        rate = adaptive.learning_rate * (fraction - adaptive.quantile)
        # With a small batch the noise may take the fraction far out of [0, 1].
        rate = tf.maximum(tf.minimum(rate, 1), -1)
        self._value.assign(self._value * tf.exp(-rate))


def first_norm(given: Any) -> float:
    """The first of the clip norms."""
    if isinstance(given, AdaptiveNorm):
        return given.initial
    if isinstance(given, Schedule):
        return float(given(0))
    return given


def validate(l2_norm_clip: Any, noise_multiplier: Any) -> None:
    """Refuses what can be told to be wrong before training."""
    norm = first_norm(l2_norm_clip)
    _validate.positive(l2_norm_clip=norm)
    if norm < LEAST:
        raise ValueError(
            f"`l2_norm_clip` must be at least {LEAST:g}: the squares of "
            "gradients that are to be clipped to less may be lost to float32. "
            f"Received l2_norm_clip={norm!r}. Scale the loss instead."
        )
    if isinstance(noise_multiplier, Schedule):
        if isinstance(l2_norm_clip, AdaptiveNorm):
            raise ValueError(
                "An AdaptiveNorm needs a noise_multiplier that is a number; "
                "received a schedule."
            )
        return
    if noise_multiplier is None:
        return
    _validate.non_negative(noise_multiplier=noise_multiplier)
    stddev = getattr(l2_norm_clip, "count_stddev", None)
    if stddev is not None and 2 * stddev <= noise_multiplier:
        raise ValueError(
            "`count_stddev` must be larger than half of noise_multiplier; "
            f"received count_stddev={stddev!r}, {noise_multiplier=!r}."
        )
