"""What a private model carries beside its layers: settings, noise, ledger."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, _validate, clipping, methods
from keras_fastclip.accounting import Ledger, PoissonSampling, Unaccounted
from keras_fastclip.capture import Plan
from keras_fastclip.noise import GaussianNoise
from keras_fastclip.probe import probe
from keras_fastclip.registry.lookup import LayerRegistry, default_registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The privacy arguments of a model; see `DPModel`."""

    l2_norm_clip: float
    noise_multiplier: float
    method: str = "auto"
    clipping: Any = "flat"
    expected_batch_size: int | None = None
    registry: LayerRegistry | None = None
    strict: bool = False
    seed: int | None = None
    memory_budget: int | None = None
    ways: dict[str, str] | None = None

    def __post_init__(self):
        _validate.positive(l2_norm_clip=self.l2_norm_clip)
        _validate.non_negative(noise_multiplier=self.noise_multiplier)
        _validate.one_of(tuple(methods.METHODS), method=self.method)
        if self.expected_batch_size is not None:
            _validate.positive_integer(
                expected_batch_size=self.expected_batch_size
            )
        if self.seed is not None:
            _validate.non_negative_integer(seed=self.seed)
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
        clipping.get(self.clipping, self.l2_norm_clip)

    def get_config(self) -> dict[str, Any]:
        """All but the registry, which holds functions, and the seed."""
        config = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("registry", "seed")
        }
        if isinstance(self.clipping, clipping.Clipping):
            config["clipping"] = keras.saving.serialize_keras_object(
                self.clipping
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


UNKNOWN_BATCHES = Unaccounted(
    "steps were made outside `fit`, or by `fit` on data that the library does "
    "not sample itself; how their batches were drawn is not known"
)
LOST_STEPS = Unaccounted(
    "the optimizer has made more steps than the model has a record of: its "
    "state was loaded without the record, or it was used otherwise (after "
    "training on public data, compile the model anew)"
)


class Privacy:
    """The state of a private model.

    A plain object, so that Keras does not take it for a part of the model:
    neither the key of the noise nor anything else here is saved with weights.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.clipping = clipping.get(settings.clipping, settings.l2_norm_clip)
        self.method = methods.METHODS[settings.method]
        self.noise = GaussianNoise(settings.seed)
        self.registry = settings.registry or default_registry()
        self.expected_batch_size = settings.expected_batch_size
        with tf.init_scope():
            # Counted in the graph of the step itself, so no step is missed:
            # those on batches that the library drew, and all others.
            self.drawn_steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.other_steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.nonfinite = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._ledger = Ledger()
        self._recorded = 0, 0
        self._mechanism: PoissonSampling | None = None
        self.sampling_rng = np.random.default_rng(settings.seed)
        self._plan: Plan | None = None
        self._signature: tuple | None = None

    @property
    def noise_stddev(self) -> float:
        """On the sum of the clipped gradients."""
        return self.settings.noise_multiplier * self.clipping.sensitivity

    @property
    def steps(self) -> tf.Tensor:
        """The number of steps made with this object."""
        return self.drawn_steps + self.other_steps

    # -- the ledger ---------------------------------------------------------

    def ledger(self, model: keras.Model) -> Ledger:
        """All steps so far, each with how its batch was drawn."""
        drawn = int(self.drawn_steps.numpy())
        others = int(self.other_steps.numpy())
        mechanism = self._mechanism or UNKNOWN_BATCHES
        self._ledger.record(mechanism, drawn - self._recorded[0])
        self._ledger.record(UNKNOWN_BATCHES, others - self._recorded[1])
        self._recorded = drawn, others
        # A ledger that knows of all steps has at least as many as the
        # optimizer of the moment has made.
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            made = int(optimizer.iterations.numpy())
            missing = max(0, made - self._ledger.total_steps)
            self._ledger.record(LOST_STEPS, missing)
        return self._ledger

    def continue_from(self, ledger: Ledger) -> None:
        """Takes over the ledger of a saved model."""
        self._ledger = ledger

    @contextlib.contextmanager
    def batches_drawn_by(self, model: keras.Model, mechanism: PoissonSampling):
        """Steps on batches drawn inside are entered with this mechanism."""
        self.ledger(model)  # enters what came before
        before, self._mechanism = self._mechanism, mechanism
        try:
            yield
        finally:
            self.ledger(model)
            self._mechanism = before

    # -- a step -------------------------------------------------------------

    def add_noise(
        self, sums: dict[int, tf.Tensor], drawn: bool
    ) -> dict[int, tf.Tensor]:
        """Adds noise to the clipped sums, once, and counts the step.

        Args:
            sums: by id of the weight.
            drawn: whether the library drew the batch.
        """
        self.denominator()  # If it is not known, there is no step.
        noise = self.noise.draw(
            list(sums.values()), self.noise_stddev, self.steps
        )
        (self.drawn_steps if drawn else self.other_steps).assign_add(1)
        return {
            key: total + random
            for (key, total), random in zip(sums.items(), noise, strict=True)
        }

    def denominator(self) -> float:
        """The expected batch size: a public constant, not the realised one."""
        if self.expected_batch_size is None:
            raise ValueError(
                "The gradient is divided by the expected batch size, which "
                "must not depend on the data: pass expected_batch_size= to "
                "the model, give batches of a fixed size (tf.data: "
                ".batch(n, drop_remainder=True)), or let `fit` draw the "
                "batches from arrays."
            )
        return float(self.expected_batch_size)

    def limits(
        self, model: keras.Model, batch_size: tf.Tensor | None = None
    ) -> methods.Limits:
        """What a plan depends on beside the kernels."""
        known = None
        if batch_size is not None:
            known = tf.get_static_value(batch_size)
        return methods.Limits(
            batch=int(self.expected_batch_size or known or 32),
            budget=self.settings.memory_budget,
            # With a seed, runs are to be the same everywhere.
            measured=self.settings.seed is None,
            jit_compile=bool(model.jit_compile),
            ways=self.settings.ways,
        )

    # -- the plan -----------------------------------------------------------

    def prepare(
        self, model: keras.Model, batch: tuple, batch_size: int | None
    ) -> None:
        """Before training: checks the model and fixes what is traced."""
        plan, size = self._plan, self.expected_batch_size
        if self.settings.expected_batch_size is None and batch_size is not None:
            self.expected_batch_size = batch_size
        new_size = self.denominator() != size
        if self.plan(model, batch) is not plan or new_size:
            model.train_function = None

    def plan(self, model: keras.Model, batch: tuple[Any, Any, Any]) -> Plan:
        """The plan for the model as it is now; checks it if it is new.

        Args:
            model: the model.
            batch: (x, y, sample_weight), eager or symbolic.
        """
        require_trainable(model)
        signature = self._signature_of(model, batch)
        if self._plan is None or not _fits(signature, self._signature):
            plan = probe(
                model,
                _eager(batch),
                self.registry,
                strict=self.settings.strict,
            )
            # Per-layer norms must fit the layers.
            self.clipping.groups([unit.path for unit in plan.units])
            items = [part.item for part in plan.traits if part.item]
            methods.with_ways(items, self.settings.ways)
            # A model that was not built yet has its variables only now.
            self._signature = self._signature_of(model, batch)
            self._plan = plan
        return self._plan

    @property
    def latest_plan(self) -> Plan | None:
        """The plan of the latest check, if there was one."""
        return self._plan

    def _signature_of(self, model, batch):
        # The library's own losses are right whatever the sample weights are.
        custom = getattr(model, "compute_per_example_loss", None)
        seen = batch[:2] if custom is None else batch
        shapes = [
            None if leaf is None else tuple(leaf.shape)[1:]
            for leaf in keras.tree.flatten(seen)
        ]
        return (
            [id(v) for v in model.trainable_variables],
            # BatchNormalization need not have weights to be frozen.
            [layer.trainable for layer in _keras.layers_of(model)],
            # Held here, so that no other loss gets its id.
            model._compile_loss,
            shapes,
        )


def _fits(signature: Any, checked: Any) -> bool:
    """Whether a model and batch are as they were checked.

    While tracing, sizes may be unknown; those that are known must agree.
    """
    *model, shapes = signature
    *checked_model, checked_shapes = checked
    if model != checked_model or len(shapes) != len(checked_shapes):
        return False
    return all(
        mine == right
        or None not in (mine, right)
        and len(mine) == len(right)
        and all(
            None in pair or pair[0] == pair[1]
            for pair in zip(mine, right, strict=True)
        )
        for mine, right in zip(shapes, checked_shapes, strict=True)
    )


def require_trainable(model: keras.Model) -> None:
    """Refuses what is known to be wrong before anything is run."""
    if not model.compiled:
        raise ValueError("Call `compile` before training the model.")
    custom = getattr(model, "compute_per_example_loss", None)
    if model._compile_loss is None and custom is None:
        raise ValueError(
            "Private training needs a loss: pass `loss=` to `compile`. Losses "
            "made with add_loss alone are not enough."
        )
    # The strategy under which the model was made, or else the present one.
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "Training on several replicas is not supported yet: make and train "
            "the model outside `strategy.scope()`."
        )
    optimizer = model.optimizer
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "The optimizer has gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}, which would add noise "
            "at every partial step. Use a larger batch_size instead."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Loss scaling (mixed_float16) is not supported: it would skip "
            "steps depending on the data. Use mixed_bfloat16 or float32."
        )
    for layer in _keras.layers_of(model):
        if isinstance(layer, (keras.layers.MixUp, keras.layers.CutMix)):
            raise ValueError(
                f"Layer {layer.path!r} ({type(layer).__name__}) mixes "
                "examples: it blends examples with each other. Remove it."
            )
        if getattr(layer, "quantization_mode", None) == "float8":
            raise ValueError(
                f"Layer {layer.path!r} is quantized to float8, whose scales "
                "are raw statistics of the data. Use int8 or int4 with LoRA."
            )
        if getattr(layer, "stateful", False) and isinstance(
            layer, keras.layers.RNN
        ):
            raise ValueError(
                f"Layer {layer.path!r} is stateful: it carries data from one "
                "batch to the next. Use stateful=False."
            )


def _eager(batch):
    """The batch itself, or while tracing a made-up one of the same shapes."""

    def value(leaf):
        if leaf is None or not tf.is_symbolic_tensor(leaf):
            return leaf
        shape = [4] + [8 if n is None else n for n in leaf.shape[1:]]
        with tf.init_scope():
            if leaf.dtype.is_floating:
                return tf.random.stateless_uniform(
                    shape, [1, 2], dtype=leaf.dtype
                )
            ones = tf.random.stateless_uniform(shape, [3, 4]) < 0.5
            return tf.cast(ones, leaf.dtype)

    return keras.tree.map_structure(value, batch)
