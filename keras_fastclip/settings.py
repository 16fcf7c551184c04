"""The privacy arguments of a model, checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import keras

from keras_fastclip import _validate, accounting, clipping, dials, methods
from keras_fastclip.registry.lookup import LayerRegistry
from keras_fastclip.sparse import SparseNoise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The privacy arguments of a model; see `DPModel`."""

    # Arguments that may be objects with a config.
    OBJECTS: ClassVar[tuple[str, ...]] = (
        "clipping",
        "l2_norm_clip",
        "noise_multiplier",
        "sparse_noise",
    )

    l2_norm_clip: Any
    noise_multiplier: Any = None
    method: str = "auto"
    sparse_noise: SparseNoise | None = None
    clipping: Any = "flat"
    expected_batch_size: int | None = None
    registry: LayerRegistry | None = None
    strict: bool = False
    seed: int | None = None
    memory_budget: int | None = None
    ways: dict[str, str] | None = None
    sampling: str = "poisson"
    physical_batch_size: int | str | None = None
    target_epsilon: float | None = None
    max_epsilon: float | None = None
    delta: float | None = None
    noise: str = "fast"
    views: int = 1

    def __post_init__(self):
        dials.validate(self.l2_norm_clip, self.noise_multiplier)
        self._validate_budget()
        _validate.one_of(tuple(methods.METHODS), method=self.method)
        _validate.one_of(("poisson", "shuffle"), sampling=self.sampling)
        if self.physical_batch_size not in (None, "auto"):
            _validate.positive_integer(
                physical_batch_size=self.physical_batch_size
            )
        _validate.positive_integer(views=self.views)
        if self.expected_batch_size is not None:
            _validate.positive_integer(
                expected_batch_size=self.expected_batch_size
            )
        if self.seed is not None:
            _validate.non_negative_integer(seed=self.seed)
        _validate.one_of(("fast", "secure"), noise=self.noise)
        if self.noise == "secure" and self.seed is not None:
            raise ValueError(
                "noise='secure' cannot be repeated. Leave out `seed`, or use "
                f"noise='fast'; received seed={self.seed!r}."
            )
        if self.memory_budget is not None:
            _validate.non_negative_integer(memory_budget=self.memory_budget)
        if self.ways is not None:
            _validate_ways(self.ways, self.method)
        if self.registry is not None and not isinstance(
            self.registry, LayerRegistry
        ):
            raise ValueError(
                "`registry` must be a keras_fastclip.LayerRegistry; received "
                f"registry={self.registry!r}."
            )
        if self.sparse_noise is not None:
            self._validate_sparse_noise()
        clipping.get(self.clipping, dials.first_norm(self.l2_norm_clip))

    def _validate_sparse_noise(self):
        if not isinstance(self.sparse_noise, SparseNoise):
            raise ValueError(
                "`sparse_noise` must be a keras_fastclip.SparseNoise; received "
                f"sparse_noise={self.sparse_noise!r}."
            )
        if self.noise == "secure":
            raise ValueError(
                "`sparse_noise` and noise='secure' cannot be combined: use "
                "noise='fast', or leave out `sparse_noise`."
            )
        if self.method == "naive":
            raise ValueError(
                "`sparse_noise` needs another method than 'naive', which "
                "builds whole tables."
            )
        if self.physical_batch_size is not None:
            raise ValueError(
                "`sparse_noise` and physical_batch_size cannot be combined; "
                f"received physical_batch_size={self.physical_batch_size!r}."
            )

    def _validate_budget(self):
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError(
                "Give either noise_multiplier, or target_epsilon with delta "
                "to have it calibrated by `fit`; received "
                f"noise_multiplier={self.noise_multiplier!r}, "
                f"target_epsilon={self.target_epsilon!r}."
            )
        for name in ("target_epsilon", "max_epsilon"):
            value = getattr(self, name)
            if value is not None:
                _validate.positive(**{name: value})
                if self.delta is None:
                    raise ValueError(f"`{name}` needs `delta` beside it.")
        if self.delta is not None:
            accounting.check_delta(self.delta)

    @property
    def budget(self) -> float | None:
        """ε that must not be exceeded at `delta`."""
        given = [self.target_epsilon, self.max_epsilon]
        return min((e for e in given if e is not None), default=None)

    def get_config(self) -> dict[str, Any]:
        """All but the registry, which holds functions, and the seed."""
        config = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("registry", "seed")
        }
        for name in self.OBJECTS:
            if hasattr(config[name], "get_config"):
                config[name] = keras.saving.serialize_keras_object(config[name])
        return config

    @classmethod
    def deserialized(cls, config: dict[str, Any], custom_objects=None) -> dict:
        """A config, of a model or of settings, with objects made again."""
        config = dict(config)
        for name in cls.OBJECTS:
            value = config.get(name)
            if isinstance(value, dict) and "class_name" in value:
                config[name] = keras.saving.deserialize_keras_object(
                    value, custom_objects
                )
        return config

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]


def _validate_ways(ways, method):
    """What can be told without the model."""
    if not isinstance(ways, Mapping) or not all(
        isinstance(text, str) for pair in ways.items() for text in pair
    ):
        raise ValueError(
            "`ways` must be a dict from names of layers to ways such as "
            f"'ghost' or 'keep:loop'; received ways={ways!r}."
        )
    if not methods.METHODS[method].planned:
        raise ValueError(
            f"`ways` overrides what method='auto' plans; received {method=!r}."
        )
