"""A step on several replicas, each of which has a part of the batch.

Formal guarantee: the update is the one that a single device would make of the
whole batch. Every replica clips the gradients of its own examples. Their sum
over all replicas gets noise of standard deviation σ·C, drawn once and by one
device, before anything else sees it, the optimizer included; the step is
counted once. No example is in two parts of a batch: parts carry the tag of
the draw that they are part of, and parts of different draws make no step.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, losses, sampling


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """The strategy by which a model trains on replicas, if it does."""
    strategy = _keras.strategy_of(model)
    known = isinstance(strategy, tf.distribute.MirroredStrategy)
    return strategy if known else None


def count(model: keras.Model) -> int:
    """The number of replicas among which batches are divided."""
    strategy = strategy_of(model)
    return 1 if strategy is None else strategy.num_replicas_in_sync


def require_supported(model: keras.Model) -> None:
    """Refuses what would not be one step of all replicas."""
    present, strategy = tf.distribute.get_strategy(), strategy_of(model)
    if strategy is None:
        workers = tf.distribute.ParameterServerStrategy
        for other in (present, model.distribute_strategy):
            if other.num_replicas_in_sync > 1 or isinstance(other, workers):
                raise ValueError(
                    "Training on several replicas takes a model that was made "
                    "under the `strategy.scope()` of a "
                    "tf.distribute.MirroredStrategy; received "
                    f"{type(other).__name__}."
                )
        return
    if tf.distribute.has_strategy() and present.extended is not (
        strategy.extended
    ):
        raise ValueError(
            "The model was made under another tf.distribute.Strategy than the "
            "present one. Train it under that one, or outside of all."
        )
    for variable in [*model.variables, model.optimizer.iterations]:
        if not _keras.is_mirrored(variable, strategy):
            raise ValueError(
                f"The variable {variable.path!r} was not made under "
                "`strategy.scope()`, as the model was: replicas would share "
                "it. Make layers and optimizer under `strategy.scope()` too."
            )
    if model.jit_compile:
        raise ValueError(
            "jit_compile=True is not supported on several replicas. Compile "
            "with jit_compile=False."
        )
    if model.steps_per_execution > 1:
        raise ValueError(
            f"steps_per_execution={model.steps_per_execution} is not supported "
            "on several replicas. Compile with steps_per_execution=1."
        )


def refuse_own_loops(model: keras.Model) -> None:
    """A train step on one replica knows nothing of the others."""
    several = tf.distribute.get_strategy().num_replicas_in_sync > 1
    if several or strategy_of(model) is not None:
        raise ValueError(
            "`train_step` on several replicas is not supported: each would "
            "add noise and be counted. Use `fit` or `train_on_batch`."
        )


def train_step(
    model: keras.Model, data: Any, clipped_sum, update
) -> dict[str, Any]:
    """One step of private training, seen from above the replicas.

    Args:
        model: the model.
        data: batches of the replicas.
        clipped_sum: takes (x, y, sample_weight) and real rows of a replica,
            and returns its clipped sums and a scalar.
        update: takes the mean of the noised gradients, or None for zero, and
            has the optimizer make a step, which adds up what it is given on
            all replicas.
    """
    strategy, privacy = model.distribute_strategy, model._privacy
    _refuse_copies(strategy, data)
    first = strategy.experimental_local_results(data)[0]
    batch, _, poisson = sampling.unpack(_content(first))
    privacy.plan(model, batch)  # Checks the model, which no replica can.
    privacy.own_weights(model)
    rows, checked = _whole(strategy, data)
    with tf.control_dependencies(checked):
        use = privacy.cost(poisson, None, rows)

    def on_replica(data):
        batch, real, _ = sampling.unpack(_content(data))
        return clipped_sum(batch, real)

    def step():
        sums, balance = strategy.run(on_replica, (data,))
        with tf.device(strategy.extended.worker_devices[0]):
            total = functools.partial(strategy.reduce, "SUM", axis=None)
            sums = {key: total(value) for key, value in sums.items()}
            means = privacy.noised_mean(sums, use, total(balance))

        # Optimizers may clip what they are given before it is added up, and
        # so bend it; the noise must be whole by then.
        def apply():
            context = tf.distribute.get_replica_context()
            number = tf.get_static_value(context.replica_id_in_sync_group)
            update(means if number == 0 else None)

        strategy.run(apply)
        return model.get_metrics_result()

    return privacy.within_budget(use, step, model.get_metrics_result)


def _whole(strategy, data):
    """How many real rows the batch has, and that it is a whole one."""

    def look(data):
        batch, real, _ = sampling.unpack(_content(data))
        rows = tf.shape(losses.first_tensor(batch[0]), tf.int64)[0]
        if real is not None:
            rows = tf.math.count_nonzero(real)
        tag = data.tag if isinstance(data, sampling.Part) else sampling.NO_TAG
        return rows, tf.convert_to_tensor(tag)

    rows, tags = strategy.run(look, (data,))
    total = strategy.reduce("SUM", tags, axis=None)
    checked = [
        tf.debugging.assert_equal(
            total,
            strategy.num_replicas_in_sync * tag,
            "Replicas got parts of different batches.",
        )
        for tag in strategy.experimental_local_results(tags)
    ]
    checked = [check for check in checked if check is not None]
    return strategy.reduce("SUM", rows, axis=None), checked


def _content(data):
    return data.data if isinstance(data, sampling.Part) else data


def _refuse_copies(strategy, data):
    """Data that is not divided goes to every replica: each would use it."""
    several = strategy.num_replicas_in_sync > 1
    for leaf in keras.tree.flatten(data):
        divided = isinstance(leaf, tf.distribute.DistributedValues)
        if several and not divided and leaf is not None:
            raise ValueError(
                "Every replica got the same batch, so every example would be "
                "used several times. Use `fit` or `train_on_batch`."
            )


def data(strategy: tf.distribute.Strategy, draw) -> Any:
    """Batches drawn here, of each of which every replica gets a part."""
    parts = draw(parts=strategy.num_replicas_in_sync)
    # Replicas take one element after the other in turn.
    return strategy.distribute_datasets_from_function(lambda context: parts)


def divided(strategy: tf.distribute.Strategy, data: Any) -> Any:
    """A batch as a part for each replica, for a single step.

    Args:
        strategy: of the model.
        data: what a train step takes.
    """
    if not isinstance(data, sampling.PoissonBatch):
        data = keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf),
            data,
        )
    batch, real, poisson = sampling.unpack(data)
    if real is None:
        real = tf.ones(tf.shape(losses.first_tensor(batch[0]))[:1], tf.bool)
    count = strategy.num_replicas_in_sync
    parts = [
        sampling.pad(rows, max(1, len(rows)))
        for rows in np.array_split(np.arange(len(real)), count)
    ]

    def on_replicas(function):
        return strategy.experimental_distribute_values_from_function(
            lambda context: function(*parts[context.replica_id_in_sync_group])
        )

    kind = sampling.PoissonBatch if poisson else sampling.PassBatch
    return kind(
        keras.tree.map_structure(
            lambda leaf: (
                leaf
                if leaf is None
                else on_replicas(lambda rows, _: tf.gather(leaf, rows))
            ),
            batch,
        ),
        on_replicas(lambda rows, mask: tf.gather(real, rows) & mask),
    )
