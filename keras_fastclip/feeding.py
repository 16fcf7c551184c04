"""What `fit` is given, turned into batches whose origin is known.

Data held in memory is sampled here. Streams are read as they come: each
example once in a pass, as their user says by giving `num_examples`.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, _validate, replicas, sampling, workers
from keras_fastclip.callbacks import (
    PassBegin,
    PassEnd,
    PrivacyBudget,
    refuse_stock_backups,
)
from keras_fastclip.privacy import Source

UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Feed:
    """Batches for a call of `fit`.

    Attributes:
        data: what Keras iterates over.
        source: how the batches are drawn; None if that is not known.
        some: (x, y, sample_weight) of some examples.
        batch_size: as expected; None if it varies.
        steps_per_epoch: None if that is not known.
        keras_steps: what Keras is told of it.
        fit: of the model if it were not private.
        preprocessed: turns validation data into what the model takes.
        restart: after how many batches Keras reads the data anew, at the end
            of that epoch; 0 for every epoch, None for never.
        aligned: whether passes are known to begin there.
        digest: of the data, which is to be the same on all workers.
    """

    data: Any
    source: Source | None
    some: tuple[Any, Any, Any]
    batch_size: int | None
    steps_per_epoch: int | None
    keras_steps: int | None
    fit: Callable
    preprocessed: Callable
    restart: int | None = None
    aligned: bool = True
    digest: int = 0


def drawn_here(
    model: keras.Model,
    data: tuple[Any, Any, Any],
    batch_size: int | None,
    class_weight: Any,
    validation_split: float,
    validation_data: Any,
    steps_per_epoch: int | None,
) -> tuple[Feed, Any]:
    """Batches drawn from data in memory or from a `PoissonDataset`.

    Returns:
        The feed, and the validation data.
    """
    privacy, transform = model._privacy, _keras.preprocessing_of(model)
    x, y, sample_weight = data
    if isinstance(x, sampling.PoissonDataset):
        _refuse(
            "a PoissonDataset, which has its own",
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            class_weight=class_weight,
            validation_split=validation_split or None,
        )
        source, poisson = x, True
        some, count, batch_size = x.some(), x.num_examples, x.batch_size
    else:
        arrays = sampling.without_lists(sampling.as_arrays(data))
        if validation_split and validation_data is None:
            arrays, validation_data = sampling.split(arrays, validation_split)
        if class_weight is not None:
            arrays = with_class_weight(arrays, class_weight)
        count = sampling.num_examples_of(arrays)
        batch_size = min(32, count) if batch_size is None else batch_size
        source = sampling.PoissonDataset(*arrays, batch_size=batch_size)
        some = source.some()
        poisson = privacy.settings.sampling == "poisson"
    if transform is not None:
        some, source = transform(some), source.transformed(transform)
    static_shapes = bool(model.jit_compile)
    strategy, rng = replicas.strategy_of(model), privacy.sampling_rng
    if replicas.has_workers(model):
        rng = workers.sampling_rng(
            strategy, privacy.settings.seed, int(privacy.steps)
        )
    draw = source.batches if poisson else source.passes
    draw = functools.partial(draw, rng, static_shapes)
    batches = draw() if strategy is None else replicas.data(strategy, draw)
    steps = steps_per_epoch or math.ceil(count / batch_size)
    keras_steps = steps
    if model.steps_per_execution > 1:
        # Keras would run on past the end of an epoch.
        batches, keras_steps = batches.take(steps), None
    feed = Feed(
        data=batches,
        source=Source(poisson, count, batch_size),
        some=some,
        batch_size=batch_size,
        steps_per_epoch=steps,
        keras_steps=keras_steps,
        # A KerasHub task would preprocess a second time.
        fit=(
            functools.partial(inherited(model, "fit"), shuffle=False)
            if transform is None
            else functools.partial(keras.Model.fit, model, shuffle=False)
        ),
        preprocessed=functools.partial(_keras.preprocessed, model),
        # With `take`, every epoch begins with a new shuffle.
        restart=0 if keras_steps is None else None,
        digest=source.digest() if replicas.has_workers(model) else 0,
    )
    return feed, validation_data


def stream(
    model: keras.Model,
    data: tuple[Any, Any, Any],
    num_examples: int | str | None,
    steps_per_epoch: int | None,
    **options,
) -> Feed:
    """Batches as they come from a `tf.data.Dataset`, PyDataset or generator."""
    x, y, sample_weight = data
    if replicas.has_workers(model):
        raise ValueError(
            f"A {type(x).__name__} on several workers is not supported: it is "
            "not known that they read different examples of it in every pass. "
            "Pass arrays or a keras_fastclip.PoissonDataset, which may load "
            "examples by a function; the same ones on all workers."
        )
    _refuse(
        f"a {type(x).__name__}, whose batches have them",
        y=y,
        sample_weight=sample_weight,
    )
    if num_examples is None:
        raise ValueError(
            f"How often `fit` uses each example of a {type(x).__name__} is not "
            "known, so no epsilon could be stated. Pass num_examples=, the "
            "number of distinct examples, if each comes at most once in every "
            "pass over the data (no amplification by sampling is then "
            "counted); or pass arrays or a keras_fastclip.PoissonDataset, "
            "which is sampled as the accountant assumes; or "
            "num_examples='unknown' to train with an infinite epsilon."
        )
    source, transform = None, _keras.preprocessing_of(model)
    batch_size = sampling.static_batch_size(x)
    if num_examples != UNKNOWN:
        _validate.positive_integer(num_examples=num_examples)
        expected = batch_size or model._privacy.settings.expected_batch_size
        source = Source(False, int(num_examples), expected)
    aligned = not model._privacy.has_read(x)
    some, x = sampling.peek(x)
    if isinstance(x, tf.data.Dataset):
        size = int(x.cardinality())
        endless = size == tf.data.INFINITE_CARDINALITY
    else:
        size = getattr(x, "num_batches", None)
        endless = size is None
    restart = None
    if not endless:
        restart = 0 if steps_per_epoch is None else size
    if not endless and steps_per_epoch and size < 0:
        # When the data runs out is not known beforehand.
        restart, aligned = 0, False
    return Feed(
        data=x,
        source=source,
        some=some if transform is None else transform(some),
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        keras_steps=steps_per_epoch,
        fit=functools.partial(inherited(model, "fit"), **options),
        preprocessed=lambda validation_data, batch_size: validation_data,
        restart=restart,
        aligned=aligned,
    )


@contextlib.contextmanager
def own_callbacks(model: keras.Model, callbacks: Any, feed: Feed):
    """Gives the user's callbacks and those that `fit` needs itself."""
    whole = isinstance(callbacks, keras.callbacks.CallbackList)
    if whole:
        users = list(callbacks.callbacks)
    elif isinstance(callbacks, keras.callbacks.Callback):
        users = [callbacks]
    else:
        users = list(callbacks or [])
    first, last, settings = [], [], model._privacy.settings
    if settings.budget is not None:
        last.append(PrivacyBudget(settings.budget, settings.delta))
    if feed.source is not None and not feed.source.poisson:
        first = [PassEnd()]
        last.append(PassBegin(feed.restart, feed.aligned))
    if replicas.has_workers(model):
        refuse_stock_backups(users)
        last.append(
            workers.Agreement(sampling.digest(feed.source, feed.digest))
        )
    if not whole:
        yield [*first, *users, *last]
        return
    for callback in [*first, *last]:
        callback.set_model(model)
        callback.set_params(callbacks.params or {})
    callbacks.callbacks[:] = [*first, *users, *last]
    try:
        yield callbacks
    finally:
        callbacks.callbacks[:] = users


def inherited(model: keras.Model, name: str) -> Callable:
    """The method that the model would have if it were not private."""
    for cls in type(model).__mro__:
        if name in vars(cls) and not hasattr(cls, "clipped_gradients"):
            return functools.partial(vars(cls)[name], model)
    raise AttributeError(name)


def _refuse(what, **arguments):
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"`{name}` cannot be given with {what}.")


def with_class_weight(arrays: tuple, class_weight: Any) -> tuple:
    """(x, y, sample_weight) with the weights of the classes of `y`."""
    x, y, sample_weight = arrays
    if sample_weight is not None:
        raise ValueError(
            "`class_weight` and `sample_weight` cannot be given together."
        )
    weights = _keras.class_weight_to_sample_weights(y, class_weight)
    return x, y, np.asarray(weights, keras.config.floatx())
