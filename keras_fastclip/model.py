"""Private models: DPModel, DPSequential and make_private.

`clip` and `train_step` are the whole algorithm: one forward pass that leaves a
record of the ζ's, one backward pass to them, norms, factors, the clipped sum,
noise, and the optimizer's step.
"""

import dataclasses
import functools
import os
import types
from typing import Any

import keras
import tensorflow as tf

from keras_fastclip import (
    _keras,
    accounting,
    feeding,
    heap,
    losses,
    methods,
    naive,
    physical,
    replicas,
    sampling,
    sparse,
    training_log,
    views,
)
from keras_fastclip import record as privacy_record
from keras_fastclip.capture import Recording
from keras_fastclip.parts import make_parts
from keras_fastclip.privacy import Privacy, Source, require_trainable
from keras_fastclip.settings import Settings


@dataclasses.dataclass(frozen=True)
class Clipped:
    """What a batch contributes before noise.

    Attributes:
        sums: by id of the weight, the clipped sum of the examples' gradients,
            for tables with `SparseNoise` by row; weights that the loss does
            not depend on are missing.
        squared_norms: (groups, batch), before clipping.
        factors: (groups, batch), zero for examples that were left out.
        y_pred: predictions, for all views of the examples.
        losses: (batch,), each the mean over the example's views.
    """

    sums: dict[int, tf.Tensor | sparse.Touched]
    squared_norms: tf.Tensor
    factors: tf.Tensor
    y_pred: Any
    losses: tf.Tensor

    def dense_sum(self, variable: keras.Variable) -> tf.Tensor:
        """The clipped sum of a weight; zero if the loss does not use it."""
        total = self.sums.get(id(variable))
        if total is None:
            return tf.zeros(variable.shape, variable.dtype)
        return total.dense() if isinstance(total, sparse.Touched) else total


@_keras.plain_addition()
def clip(
    model: keras.Model, batch: tuple, real: Any = None, training: bool = True
) -> Clipped:
    """Forward, backward to the ζ's, norms Ω, factors c, clipped sum 𝒜*(c·g).

    Args:
        model: a private model.
        batch: (x, y, sample_weight).
        real: (batch,), false for rows that only fill up the batch.
        training: the phase in which the layers run.
    """
    privacy = model._privacy
    plan, method = privacy.plan(model, batch), privacy.method
    clipping, scale = privacy.clipping_now(), privacy.loss_scale(model)
    if method.norm == "loop":
        return Clipped(
            *naive.clip(model, batch, plan, clipping, real, training, scale)
        )
    batch_size = tf.shape(losses.first_tensor(batch[0]))[0]
    count = privacy.settings.views
    # In half precision, a second pass would round what the first did not.
    twice = method.twice and not _keras.computes_in_half(model)
    with Recording(plan, batch_size * count, twice) as recording:
        y_pred, example_losses = views.forward(
            model, batch, count, training, real
        )
    uses, _ = recording.backward(example_losses, scale)
    parts = make_parts(uses)
    methods.set_ways(parts, method, privacy.limits(model, batch_size))
    again = functools.partial(recording.backward_again, example_losses)
    sums, squared_norms, factors = methods.clipped_sums(
        parts,
        clipping,
        [unit.path for unit in plan.units],
        batch_size,
        real,
        again if twice else None,
        scale,
        sparse.tables(model, privacy.sparse),
        privacy.sparse.map_norm if privacy.sparse else 1.0,
    )
    # In an order that tells which noise a weight gets from a seed.
    keys = [id(v) for v in model.trainable_variables if id(v) in sums]
    sums = {key: sums[key] for key in keys}
    return Clipped(sums, squared_norms, factors, y_pred, example_losses)


class PrivateTraining:
    """The methods that make a Keras model private; see `DPModel`."""

    _privacy: Privacy

    # As in `fit`: nothing here needs conversion, which would take long in a
    # `tf.function` of one's own.
    @tf.autograph.experimental.do_not_convert
    def train_step(self, data: Any) -> dict[str, Any]:
        """One step of differentially private training.

        The update is (Σᵢ cᵢgᵢ + noise) / expected batch size. The factors cᵢ
        bound the norm of each example's gradient gᵢ by the sensitivity of the
        clipping; the noise is Gaussian, of standard deviation
        `noise_multiplier` times that sensitivity on the sum.
        """
        privacy = self._privacy
        replicas.refuse_own_loops(self)
        batch, real, poisson = sampling.unpack(data)
        batch = heap.trimmed(batch)
        rows = tf.shape(losses.first_tensor(batch[0]))[0]
        privacy.own_weights(self)
        use = privacy.cost(poisson, real, rows)

        def step():
            sums, tally, logs = _clipped_sum(self, batch, real)
            _update(self, privacy.noised_mean(sums, use, tally))
            return logs

        return privacy.within_budget(use, step, self.get_metrics_result)

    def make_train_function(self, force=False):
        if replicas.strategy_of(self) is None:
            feeding.inherited(self, "make_train_function")(force)
        elif self.train_function is None or force:
            self.train_function = _keras.cross_replica_function(
                self,
                functools.partial(
                    replicas.train_step,
                    self,
                    clipped_sum=lambda *batch: _clipped_sum(self, *batch)[:2],
                    update=lambda means: _update(self, means),
                ),
            )
        return self.train_function

    def make_test_function(self, force=False):
        if not replicas.has_workers(self):
            feeding.inherited(self, "make_test_function")(force)
        elif self.test_function is None or force:
            self.test_function = _keras.cross_replica_function(
                self, functools.partial(replicas.test_step, self)
            )
        return self.test_function

    @tf.autograph.experimental.do_not_convert
    def clipped_gradients(
        self, x: Any, y: Any = None, sample_weight: Any = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The clipped sum of the examples' gradients. **Not private.**

        A diagnostic: there is no noise in it, no step is made and none is
        counted. It works eagerly and inside a `tf.function`.

        Args:
            x: inputs.
            y: targets.
            sample_weight: weights of the examples.

        Returns:
            `(sums, squared_norms)`: for each of `model.trainable_variables`
            the sum over the examples of their clipped gradients, and for each
            example the squared norm of its gradient before clipping, shape
            (batch,).
        """
        batch = keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf),
            (x, y, sample_weight),
        )
        rows = tf.shape(losses.first_tensor(batch[0]))[0]
        batch, real = sampling.never_empty(batch)
        clipped = clip(self, batch, real)
        sums = [clipped.dense_sum(v) for v in self.trainable_variables]
        return sums, tf.reduce_sum(clipped.squared_norms, 0)[:rows]

    @functools.wraps(keras.Model.fit)
    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        validation_split=0.0,
        validation_data=None,
        shuffle=True,
        class_weight=None,
        sample_weight=None,
        initial_epoch=0,
        steps_per_epoch=None,
        validation_steps=None,
        validation_batch_size=None,
        validation_freq=1,
        num_examples=None,
    ):
        privacy = self._privacy
        require_trainable(self)
        if isinstance(x, sampling.PoissonDataset) or sampling.is_arrays(x):
            if num_examples is not None:
                raise ValueError(
                    "`num_examples` is for data that `fit` cannot count: a "
                    f"tf.data.Dataset or generator; received {num_examples=}."
                )
            feed, validation_data = feeding.drawn_here(
                self,
                (x, y, sample_weight),
                batch_size,
                class_weight,
                validation_split,
                validation_data,
                steps_per_epoch,
            )
            batch_size = feed.batch_size
        else:
            feed = feeding.stream(
                self,
                (x, y, sample_weight),
                num_examples,
                steps_per_epoch,
                shuffle=shuffle,
                class_weight=class_weight,
                validation_split=validation_split,
            )
        validation_batch_size = validation_batch_size or batch_size
        with (
            privacy.fitting(self, feed.source),
            _keras.built_already(self),
            feeding.own_callbacks(self, callbacks, feed) as callbacks,
        ):
            privacy.prepare(self, feed.some, feed.batch_size)
            privacy.calibrate(epochs - initial_epoch, feed.steps_per_epoch)
            return feed.fit(
                feed.data,
                epochs=epochs,
                verbose=verbose,
                callbacks=callbacks,
                initial_epoch=initial_epoch,
                steps_per_epoch=feed.keras_steps,
                validation_data=feed.preprocessed(
                    validation_data, validation_batch_size
                ),
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size,
                validation_freq=validation_freq,
            )

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, *args, **kwargs):
        evaluate = feeding.inherited(self, "evaluate")
        if not replicas.has_workers(self):
            return evaluate(*args, **kwargs)
        with _keras.built_already(self):
            return evaluate(*args, **kwargs)

    @functools.wraps(keras.Model.train_on_batch)
    def train_on_batch(
        self,
        x,
        y=None,
        sample_weight=None,
        class_weight=None,
        return_dict=False,
    ):
        privacy, strategy = self._privacy, replicas.strategy_of(self)
        if replicas.has_workers(self):
            raise ValueError(
                "`train_on_batch` on several workers is not supported: it is "
                "not known that their batches have no example in common. Use "
                "`fit`."
            )
        transform = _keras.preprocessing_of(self)
        if isinstance(x, sampling.DrawnBatch):
            data, source = x.take(), Source(True, x.num_examples, x.batch_size)
            if transform is not None:
                data = data._replace(batch=transform(data.batch))
            batch, size = sampling.unpack(data).batch, x.batch_size
        else:
            batch, source = sampling.as_arrays((x, y, sample_weight)), None
            size = None
            if transform is not None:
                batch = transform(batch)
            data = batch
            if strategy is not None and class_weight is not None:
                data = feeding.with_class_weight(batch, class_weight)
        if strategy is not None:
            data = replicas.divided(strategy, data)
        if strategy is not None or source is not None:
            step = functools.partial(
                _keras.train_on, self, data, return_dict=return_dict
            )
        else:
            step = functools.partial(
                feeding.inherited(self, "train_on_batch"),
                x,
                y,
                sample_weight=sample_weight,
                class_weight=class_weight,
                return_dict=return_dict,
            )
        with privacy.batches_from(self, source):
            privacy.prepare(self, sampling.some(batch), size)
            privacy.require_room(self)
            return step()

    @functools.wraps(keras.Model.save_weights)
    def save_weights(self, filepath, overwrite=True, max_shard_size=None):
        _keras.save_weights(self, filepath, overwrite, max_shard_size)

    def set_privacy(self, **changes) -> None:
        """Changes privacy arguments, usually between two calls of `fit`.

        The steps so far keep what they were made with; ε composes.

        Args:
            **changes: `noise_multiplier`, `l2_norm_clip` (both as numbers),
                `sampling`, `max_epsilon`, `delta`, `expected_batch_size` or
                `physical_batch_size`, as for `DPModel`.
        """
        self._privacy.change(self, **changes)

    def privacy_spent(
        self, delta: float, accountant: str = "pld"
    ) -> accounting.Epsilon:
        """ε at the given δ for all steps that the model has made.

        Args:
            delta: δ, in (0, 1); usually well below one over the number of
                examples.
            accountant: "pld", the tightest, or "rdp", faster and a little
                larger. Both are upper bounds.

        Returns:
            ε, for data sets that differ by one example added or removed: a
            number, whose attribute `event` is what the accountant was given.
            It is `inf` if it is not known how some steps drew their batches,
            or if there was no noise; its attribute `reasons` tells why.
        """
        return self._privacy.ledger(self).spent(delta, accountant)

    def privacy_statement(self, delta: float) -> str:
        """The guarantee in plain English, with what it does not cover."""
        privacy = self._privacy
        return accounting.statement(
            privacy.ledger(self),
            delta,
            l2_norm_clip=privacy.the_clip_norm(),
            seeded=privacy.settings.seed is not None,
            secure=privacy.secure,
            notes=privacy.notes(),
        )

    def nonfinite_examples(self) -> int:
        """How many examples were left out since their gradient was not finite.

        Counted over all steps, every time an example was drawn. Not private.
        """
        return int(self._privacy.nonfinite.numpy())


def _clipped_sum(model, batch, real):
    """The clipped sum over a batch, chunk by chunk, each of which is logged."""
    privacy = model._privacy
    penalty, _ = losses.regularization(model)
    logs = {}

    def add(batch, real):
        clipped = clip(model, batch, real)
        logs.update(training_log.update(model, batch, real, clipped, penalty))
        return clipped.sums, privacy.tally(clipped.squared_norms, real)

    size = privacy.physical_batch_size(model)
    rows = losses.first_tensor(batch[0]).shape[0]
    if size is None or rows is not None and rows <= size:
        return *add(batch, real), logs
    privacy.plan(model, batch)  # Checks the model, which no loop can.
    totals = physical.in_chunks(
        model, batch, real, size, add, privacy.no_tally()
    )
    return *totals, model.get_metrics_result()


def _update(model, means):
    """Has the optimizer make a step.

    Args:
        model: the model.
        means: noised gradients by id of the weight, of some tables those of
            selected rows; None if another replica has them, whose gradients
            the optimizer adds up.
    """
    if means is None:
        gradients = [
            tf.zeros(v.shape, v.dtype) for v in model.trainable_variables
        ]
    else:
        gradients = _gradients(model, means, losses.regularization(model)[1])
    optimizer = losses.unscaled_optimizer(model)
    # No batch, no step.
    batch = tf.nest.flatten(gradients[:1], expand_composites=True)
    with tf.control_dependencies(batch):
        optimizer.apply(gradients, model.trainable_variables)


def _gradients(model, means, penalty_gradients):
    """What the optimizer gets for each of the trainable variables."""
    # The optimizer divides by its loss scale; these are not scaled any more.
    scale = losses.unscaled_optimizer(model).loss_scale_factor or 1
    gradients = []
    for variable in model.trainable_variables:
        # Weights that the loss does not depend on get no noise either.
        if id(variable) in means:
            gradient = tf.cast(means[id(variable)], variable.dtype)
        else:
            gradient = tf.zeros(variable.shape, variable.dtype)
        if id(variable) in penalty_gradients:
            gradient += penalty_gradients[id(variable)]
        gradients.append(gradient if scale == 1 else gradient * scale)
    return gradients


def _refuse_overrides(cls: type) -> None:
    """Refuses classes that replace what makes a model private."""
    for name, remedy in (
        ("train_step", "compute_metrics for own metrics, or a callback"),
        ("make_train_function", "compute_metrics, or use a callback"),
        (
            "compute_loss",
            "compute_per_example_loss, which returns the loss of "
            "each example, shape (batch,)",
        ),
    ):
        defined = next(base for base in cls.__mro__ if name in vars(base))
        known = defined.__module__.startswith("keras.src.")
        known |= defined is PrivateTraining
        has_own_loss = hasattr(cls, "compute_per_example_loss")
        if not known and not (name == "compute_loss" and has_own_loss):
            raise TypeError(
                f"{cls.__name__} overrides {name} (in {defined.__name__}), "
                "which private training replaces: what it does to the "
                f"gradients or the loss would be lost. Override {remedy}."
            )


class _PrivateModel(PrivateTraining):
    """Construction and saving, shared by the model classes."""

    def __init__(
        self,
        *args,
        l2_norm_clip,
        noise_multiplier=None,
        **kwargs,
    ):
        kwargs, settings = _split(kwargs)
        settings = Settings(
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            **settings,
        )
        self._init_plain(*args, **kwargs)
        _attach(self, Privacy(settings))

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        _refuse_overrides(cls)

    def _init_plain(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            **self._privacy.settings.get_config(),
            "record": self._privacy.record(self),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = Settings.deserialized(config, custom_objects)
        saved = config.pop("record", None)
        model = cls._from_plain_config(config, custom_objects)
        if saved is not None:
            model._privacy.continue_from(saved)
        return model

    @classmethod
    def _from_plain_config(cls, config, custom_objects):
        del custom_objects
        return cls(**config)


def _split(config):
    """Splits a config into that of the plain model and privacy settings."""
    names = Settings.names()
    plain = {k: v for k, v in config.items() if k not in names}
    return plain, {k: v for k, v in config.items() if k in names}


@keras.saving.register_keras_serializable("keras_fastclip")
class DPSequential(_PrivateModel, keras.Sequential):
    """`keras.Sequential` that trains with differential privacy.

    Use it as `keras.Sequential`; see `DPModel` for the privacy arguments.

    Example:

    ```python
    model = keras_fastclip.DPSequential(
        [keras.layers.Dense(64, "relu"), keras.layers.Dense(10)],
        l2_norm_clip=1.0,
        noise_multiplier=1.1,
    )
    ```
    """

    @classmethod
    def _from_plain_config(cls, config, custom_objects):
        plain, settings = _split(config)
        built = keras.Sequential.from_config(plain, custom_objects)
        return cls(_keras.layers_with_input(built), name=built.name, **settings)


@keras.saving.register_keras_serializable("keras_fastclip")
class DPModel(_PrivateModel, keras.Model):
    """`keras.Model` that trains with differential privacy.

    Use it as `keras.Model`: `DPModel(inputs, outputs, ...)` for functional
    models, or derive from it and define `call`. `compile`, `evaluate`,
    `predict` and `save` are Keras's own. `fit` on arrays draws every batch by
    Poisson sampling: each example with probability batch_size / examples,
    independently, so the size of a batch varies around `batch_size`.

    Formal guarantee: the weights after training are (ε, δ)-differentially
    private with respect to adding or removing one example of the training
    data (with passes over it: to replacing one by nothing), with
    ε = `model.privacy_spent(delta)`. Logged losses and metrics,
    validation and the choice of hyper-parameters are not covered.

    A model that cannot be clipped exactly is refused before its first update.

    Args:
        *args, **kwargs: as for `keras.Model`.
        l2_norm_clip: C, the most that the gradient of one example may have in
            norm. Longer ones are shortened. A number, a schedule of Keras, or
            an `AdaptiveNorm`; 10⁻⁹ at the least.
        noise_multiplier: σ. The noise on the sum of the clipped gradients has
            standard deviation σ·C. 0 switches privacy off. A number or a
            schedule of Keras.
        target_epsilon: in place of σ: the first `fit` finds the σ with which
            it reaches this ε at `delta`. No later step exceeds it.
        max_epsilon: a budget. `fit` stops before the step that would exceed
            this ε at `delta`; `train_on_batch` raises.
        delta: δ for both.
        sampling: "poisson", or "shuffle" for passes over the data in random
            order, for which no amplification by sampling is counted.
        physical_batch_size: how many examples go through the model at a time,
            or "auto". The batch is split inside the train step; the result is
            the same, to rounding.
        method: how norms and sums are computed: "auto", or by name "naive",
            "opacus", "fastgradclip", "ghost", "mixed_ghost", "bk",
            "bk_mixghost" or "bk_mixopt". All give the same result; see the
            README.
        sparse_noise: a `SparseNoise` for large tables of embeddings: noise and
            updates for privately selected rows only, rather than all.
        clipping: "flat" shortens gradients to C (Abadi et al., 2016);
            "automatic" normalizes them to about C (Bu et al., 2022); "global"
            drops those longer than C (Bu et al., 2021); a list or dict of
            norms clips each layer on its own; or a `Clipping`.
        expected_batch_size: what the noised sum is divided by. By default the
            batch size of `fit`. Needed for `train_on_batch` and own loops.
        registry: a `LayerRegistry`; by default the one that all models share.
        strict: refuse layers without a rule, rather than take the gradients
            of single examples in them.
        seed: makes noise and sampling repeatable, for experiments on public
            data. Noise that others can repeat protects nothing.
        noise: "fast", or "secure": sum and noise are rounded to a grid and
            added as integers, so that floating-point arithmetic leaves no
            trace of the sum in the result. Slower, and not with XLA.
        memory_budget: bytes that method "auto" may take for norms and clipped
            sums, beyond what plain training takes; the sum itself and its
            noise, each as large as the weights, are not counted. By default
            the least that will do, and 25 % of what plain training of the
            model takes (at least 32 MiB) to save time.
        views: how often each example goes through the model in a step, each
            time with random numbers of its own for augmentation layers and
            dropout. The gradient of an example is the mean over its views,
            and it is the mean that is clipped, so one example has no more
            influence than with one view (De et al., 2022).
        ways: by name or path of a layer, how method "auto" shall serve its
            kernels: "ghost", "build" or "keep", perhaps with a form behind a
            colon, as `clipping_summary` prints them.

    Example:

    ```python
    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(10)(inputs)
    model = keras_fastclip.DPModel(
        inputs, outputs, l2_norm_clip=1.0, noise_multiplier=1.1
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    model.fit(x, y, batch_size=256, epochs=5)
    print(model.privacy_statement(delta=1e-5))
    ```
    """

    def __new__(cls, *args, **kwargs):
        # Keras would turn DPModel itself into a functional class, for every
        # model of the process. A class of its own leaves DPModel as it is.
        if cls is DPModel and _keras.is_functional_call(args, kwargs):
            cls = DPFunctional
        return super().__new__(cls)

    def _init_plain(self, *args, **kwargs):
        if _keras.is_functional_call(args, kwargs):
            if not isinstance(self, _keras.Functional):
                self.__class__ = _functional_class(type(self))
            _keras.init_functional(self, *args, **kwargs)
        else:
            super()._init_plain(*args, **kwargs)


@keras.saving.register_keras_serializable("keras_fastclip")
class DPFunctional(DPModel, _keras.Functional):
    """What `DPModel(inputs, outputs, ...)` makes."""

    def get_config(self):
        if type(self) is not DPFunctional:
            return super().get_config()
        return {
            **_keras.functional_config(self),
            **self._privacy.settings.get_config(),
            "record": self._privacy.record(self),
        }

    @classmethod
    def _from_plain_config(cls, config, custom_objects):
        if cls is not DPFunctional:
            return super()._from_plain_config(config, custom_objects)
        plain, settings = _split(config)
        inputs, outputs, name = _keras.functional_from_config(
            plain, custom_objects
        )
        return DPModel(inputs, outputs, name=name, **settings)


@functools.cache
def _functional_class(cls: type) -> type:
    """A subclass of DPModel that is made from inputs and outputs."""
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    functional = type(cls.__name__, (cls, DPFunctional), namespace)
    _keras.save_as(functional, cls)
    return functional


def _attach(model, privacy):
    model._privacy = privacy
    setattr(model, privacy_record.ATTRIBUTE, privacy_record.Record(model))


def make_private(
    model: keras.Model,
    *,
    record: str | os.PathLike | None = None,
    **settings,
) -> keras.Model:
    """Makes an existing model private, in place.

    The model keeps its class, weights, layers and preprocessing, and is saved
    as what it was. Functional, Sequential and subclassed models and KerasHub
    tasks are accepted. The file also holds the record of private steps, which
    a plain model does not read: name the file as `record` when the model is
    made private again, or load its weights afterwards.

    Args:
        model: a Keras model. Compile it before or after.
        record: a `.keras` or weights file from which the model's weights come,
            if it was saved by a private model.
        **settings: the privacy arguments of `DPModel`; `l2_norm_clip` and
            `noise_multiplier` or `target_epsilon` are required.

    Returns:
        The model.

    Example:

    ```python
    model = keras.Sequential([keras.layers.Dense(10)])
    keras_fastclip.make_private(model, l2_norm_clip=1.0, noise_multiplier=0.8)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    model.fit(x, y, batch_size=64)
    ```
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            "make_private takes a keras.Model; received "
            f"{type(model).__name__}."
        )
    if getattr(model, "_privacy", None) is not None:
        raise ValueError(f"The model {model.name!r} is private already.")
    _refuse_overrides(type(model))
    privacy = Privacy(Settings(**settings))
    if record is not None:
        privacy.continue_from(privacy_record.read(record))
    _attach(model, privacy)
    for name, method in vars(PrivateTraining).items():
        if isinstance(method, types.FunctionType):
            setattr(model, name, types.MethodType(method, model))
    model.train_function = None
    return model
