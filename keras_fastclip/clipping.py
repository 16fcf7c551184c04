"""Norms to factors: how much of each example's gradient goes into the sum.

A clipping function sees the squared gradient norms of the examples and returns
the factors by which their gradients are multiplied. It states its sensitivity:
the largest norm that a gradient can have after multiplication. The noise is
scaled to it.

Formal guarantee: for every example, the norm of factor · gradient is at most
`sensitivity`, whatever the gradient.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_fastclip import _validate


class Clipping:
    """Base of the clipping functions.

    The weights are clipped in groups. Most functions have one, which holds
    all weights; per-layer clipping has one for each layer.

    To write one's own: derive from this class, set `sensitivity`, and define
    `factors`. The library multiplies by no more than keeps the gradient within
    `sensitivity`, so a slip in `factors` cannot break the guarantee.
    """

    sensitivity: float

    def groups(self, paths: Sequence[str]) -> list[int]:
        """The group of each of the weight-owning layers, by path."""
        return [0] * len(paths)

    def factors(self, squared_norms: tf.Tensor) -> tf.Tensor:
        """Maps squared norms (groups, batch) to factors (groups, batch)."""
        raise NotImplementedError

    def bounded_factors(self, squared_norms: tf.Tensor) -> tf.Tensor:
        """`factors`, held to the promise that `sensitivity` makes.

        Whatever `factors` returned, the gradient is within the sensitivity
        after multiplication, and zero if its norm is not finite.
        """
        factors = self.factors(squared_norms)
        after = tf.reduce_sum(tf.square(factors) * squared_norms, 0)
        factors *= _at_most(self.sensitivity, after)
        finite = tf.reduce_all(
            tf.math.is_finite(squared_norms) & tf.math.is_finite(factors), 0
        )
        return tf.where(finite, factors, tf.zeros_like(factors))

    def get_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Clipping":
        return cls(**config)


@keras.saving.register_keras_serializable("keras_fastclip")
class FlatClipping(Clipping):
    """min(1, C/‖g‖): shortens long gradients to C (Abadi et al., 2016).

    Args:
        l2_norm_clip: C.
    """

    def __init__(self, l2_norm_clip: float):
        _validate.positive(l2_norm_clip=l2_norm_clip)
        self.sensitivity = float(l2_norm_clip)

    def factors(self, squared_norms):
        return _at_most(self.sensitivity, squared_norms)

    def get_config(self):
        return {"l2_norm_clip": self.sensitivity}


@keras.saving.register_keras_serializable("keras_fastclip")
class AutomaticClipping(FlatClipping):
    """C/(‖g‖ + γ): brings all gradients to nearly C (Bu et al., 2022).

    Args:
        l2_norm_clip: C.
        gamma: γ, keeps very short gradients short.
    """

    def __init__(self, l2_norm_clip: float, gamma: float = 0.01):
        super().__init__(l2_norm_clip)
        _validate.positive(gamma=gamma)
        self.gamma = float(gamma)

    def factors(self, squared_norms):
        return self.sensitivity / (tf.sqrt(squared_norms) + self.gamma)

    def get_config(self):
        return {**super().get_config(), "gamma": self.gamma}


@keras.saving.register_keras_serializable("keras_fastclip")
class GlobalClipping(FlatClipping):
    """C/Z for gradients within Z, nothing of the others (Bu et al., 2021).

    Args:
        l2_norm_clip: C.
        threshold: Z; by default C.
    """

    def __init__(self, l2_norm_clip: float, threshold: float | None = None):
        super().__init__(l2_norm_clip)
        threshold = l2_norm_clip if threshold is None else threshold
        _validate.positive(threshold=threshold)
        self.threshold = float(threshold)

    def factors(self, squared_norms):
        within = squared_norms <= self.threshold**2
        factor = self.sensitivity / self.threshold
        return tf.where(within, factor, 0.0 * squared_norms)

    def get_config(self):
        return {**super().get_config(), "threshold": self.threshold}


@keras.saving.register_keras_serializable("keras_fastclip")
class PerLayerClipping(Clipping):
    """min(1, Cₖ/‖gₖ‖) for the part gₖ of the gradient in each layer.

    The sensitivity is (Σ Cₖ²)^½.

    Args:
        norms: the Cₖ: a list with one entry for each layer that owns trained
            weights, in the order of the model's layers; or a dict from the
            layers' names or paths.
    """

    def __init__(self, norms: Sequence[float] | Mapping[str, float]):
        named = isinstance(norms, Mapping)
        self.norms = dict(norms) if named else list(norms)
        values = list(self.norms.values()) if named else self.norms
        if not values:
            raise ValueError("Per-layer clipping needs at least one norm.")
        for index, value in enumerate(values):
            key = list(self.norms)[index] if named else index
            _validate.positive(**{f"clipping[{key!r}]": value})
        self._limits = [float(value) for value in values]
        self.sensitivity = math.sqrt(sum(v * v for v in self._limits))

    def groups(self, paths):
        if isinstance(self.norms, list):
            if len(paths) != len(self.norms):
                raise ValueError(
                    f"`clipping` lists {len(self.norms)} norms, but "
                    f"{len(paths)} layers own trained weights: {list(paths)}."
                )
            return list(range(len(paths)))
        keys = list(self.norms)
        found = [matching(keys, path) for path in paths]
        missing = [
            p for p, key in zip(paths, found, strict=True) if key is None
        ]
        unused = [key for key in keys if key not in found]
        if missing or unused:
            raise ValueError(
                "`clipping` must have one norm for each layer that owns "
                f"trained weights; missing: {missing}, not found: {unused}."
            )
        return [keys.index(key) for key in found]

    def factors(self, squared_norms):
        limits = tf.constant([[c] for c in self._limits], squared_norms.dtype)
        return _at_most(limits, squared_norms)

    def get_config(self):
        return {"norms": self.norms}


class Scaled(Clipping):
    """A clipping function at another clip norm than it was made for.

    Everything that is a norm is multiplied by `scale`, the sensitivity too.

    Args:
        clipping: the function.
        scale: scalar.
    """

    def __init__(self, clipping: Clipping, scale: tf.Tensor):
        self.clipping, self.scale = clipping, scale

    def groups(self, paths):
        return self.clipping.groups(paths)

    def factors(self, squared_norms):
        return self.clipping.factors(self._unscaled(squared_norms))

    def bounded_factors(self, squared_norms):
        return self.clipping.bounded_factors(self._unscaled(squared_norms))

    def _unscaled(self, squared_norms):
        return squared_norms / tf.square(
            tf.cast(self.scale, squared_norms.dtype)
        )


_NAMED = {
    "flat": FlatClipping,
    "automatic": AutomaticClipping,
    "global": GlobalClipping,
}


def get(identifier: Any, l2_norm_clip: float) -> Clipping:
    """Resolves what was given as `clipping`.

    Args:
        identifier: "flat", "automatic", "global", a list or dict of norms for
            per-layer clipping, or a `Clipping`.
        l2_norm_clip: C; must agree with the sensitivity of the result.
    """
    if isinstance(identifier, str):
        _validate.one_of(tuple(_NAMED), clipping=identifier)
        return _NAMED[identifier](l2_norm_clip)
    if isinstance(identifier, (list, tuple, Mapping)):
        identifier = PerLayerClipping(identifier)
    sensitivity = getattr(identifier, "sensitivity", None)
    if not isinstance(identifier, Clipping) or sensitivity is None:
        raise ValueError(
            "`clipping` must be 'flat', 'automatic', 'global', a list or dict "
            "of norms, or an instance of keras_fastclip.Clipping that states "
            f"its sensitivity; received clipping={identifier!r}."
        )
    _validate.positive(sensitivity=sensitivity)
    if not math.isclose(sensitivity, l2_norm_clip, rel_tol=1e-6):
        raise ValueError(
            f"The sensitivity of `clipping` is {sensitivity!r}, which must "
            f"also be given as l2_norm_clip; received {l2_norm_clip=!r}."
        )
    return identifier


def _at_most(limits, squared_norms):
    """min(1, C/‖g‖), also right for gradients of norm zero."""
    return limits * tf.math.rsqrt(tf.maximum(squared_norms, limits**2))


def matching(keys: Iterable[str], path: str) -> str | None:
    """The key that names a layer, by its path or its own name."""
    for key in keys:
        if path == key or path.rsplit("/", 1)[-1] == key:
            return key
    return None
