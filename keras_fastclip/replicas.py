"""A step on several replicas, each of which has a part of the batch.

Formal guarantee: the update is the one that a single device would make of the
whole batch. Every replica clips the gradients of its own examples. Their sum
over all replicas of all workers gets noise of standard deviation σ·C, drawn
once and by one device, before anything else sees it, the optimizer included;
the step is counted once. No example is in two parts of a batch: parts carry the
tag of the draw that they are part of, and parts of different draws make no
step.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, losses, sampling, workers

STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)
DIFFERENT_STATES = (
    "Workers have made different numbers of steps, or have different budgets. "
    "Restart all of them from the same backup."
)


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """The strategy by which a model trains on replicas, if it does."""
    strategy = _keras.strategy_of(model)
    return strategy if isinstance(strategy, STRATEGIES) else None


def count(model: keras.Model) -> int:
    """The number of replicas among which batches are divided."""
    strategy = strategy_of(model)
    return 1 if strategy is None else strategy.num_replicas_in_sync


def has_workers(model: keras.Model) -> bool:
    """Whether the model trains on several workers."""
    strategy = strategy_of(model)
    return strategy is not None and workers.count(strategy) > 1


def is_first_worker(model: keras.Model) -> bool:
    """Whether this is the only worker, or the one that writes files."""
    strategy = strategy_of(model)
    return strategy is None or workers.is_first(strategy)


def require_supported(model: keras.Model) -> None:
    """Refuses what would not be one step of all replicas."""
    present, strategy = tf.distribute.get_strategy(), strategy_of(model)
    if strategy is None:
        servers = tf.distribute.ParameterServerStrategy
        for other in (present, model.distribute_strategy):
            if other.num_replicas_in_sync > 1 or isinstance(other, servers):
                raise ValueError(
                    "Training on several replicas takes a model that was made "
                    "under the `strategy.scope()` of a tf.distribute."
                    "MirroredStrategy or MultiWorkerMirroredStrategy; "
                    f"received {type(other).__name__}."
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
            and returns its clipped sums and its tally.
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
    rows, checked = _whole(strategy, data, privacy.state())
    use = privacy.cost(poisson, None, rows)

    def on_replica(data):
        batch, real, _ = sampling.unpack(_content(data))
        compiled = clipped_sum
        if model.jit_compile:
            compiled = tf.function(
                clipped_sum, jit_compile=True, autograph=False
            )
        return compiled(batch, real)

    def step():
        with privacy.step_at_hand():
            sums, tally = strategy.run(on_replica, (data,))
        device = strategy.extended.worker_devices[0]
        # In an order that is the same on all workers.
        keys = [id(v) for v in model.trainable_variables if id(v) in sums]
        with tf.device(device):
            *totals, tally = _totals(strategy, [sums[k] for k in keys], tally)
            means = privacy.noised_mean(
                dict(zip(keys, totals, strict=True)),
                use,
                tally,
                workers.is_first(strategy),
                functools.partial(_from_first, strategy),
            )

        # Optimizers may clip what they are given before it is added up, and
        # so bend it; the noise must be whole by then.
        def apply():
            context = tf.distribute.get_replica_context()
            number = tf.get_static_value(context.replica_id_in_sync_group)
            update(means if number == 0 else None)

        strategy.run(apply)
        return model.get_metrics_result()

    # All that follows, the count included, waits for the checks.
    with tf.control_dependencies(checked):
        return privacy.within_budget(use, step, model.get_metrics_result)


def _totals(strategy, *values):
    """Sums over all replicas of all workers, here."""
    device = strategy.extended.worker_devices[0]
    values = tf.nest.flatten(values)
    totals = strategy.extended.batch_reduce_to(
        "SUM", [(value, device) for value in values]
    )
    return [strategy.experimental_local_results(t)[0] for t in totals]


def _from_first(strategy, tensor):
    """The tensor that the first worker has."""
    if workers.count(strategy) == 1:
        return tensor
    if not workers.is_first(strategy):
        tensor = tf.zeros_like(tensor)
    return strategy.reduce("SUM", tensor, axis=None)


def _whole(strategy, data, state):
    """How many real rows the batch has, and that it is one for all."""

    def look(data):
        batch, real, _ = sampling.unpack(_content(data))
        rows = tf.shape(losses.first_tensor(batch[0]), tf.int64)[0]
        if real is not None:
            rows = tf.math.count_nonzero(real)
        tag = data.tag if isinstance(data, sampling.Part) else sampling.NO_TAG
        return tf.stack([rows, tag, *state])[None]

    seen = strategy.gather(strategy.run(look, (data,)), axis=0)
    rows, tags, *states = tf.unstack(seen, 2 + len(state), axis=1)
    checked = [
        tf.debugging.assert_equal(values, values[:1], message)
        for values, message in [
            (tags, "Replicas got parts of different batches."),
            *[(values, DIFFERENT_STATES) for values in states],
        ]
    ]
    checked = [check for check in checked if check is not None]
    return tf.reduce_sum(rows), checked


def _content(data):
    return data.data if isinstance(data, sampling.Part) else data


def _refuse_copies(strategy, data):
    """Data that is not divided goes to every replica: each would use it."""
    message = (
        "Every replica got the same batch, so every example would be used "
        "several times. Use `fit` or `train_on_batch`."
    )
    if workers.count(strategy) > 1 and not isinstance(data, sampling.Part):
        raise ValueError(message)
    several = len(strategy.extended.worker_devices) > 1
    for leaf in keras.tree.flatten(data):
        divided = isinstance(leaf, tf.distribute.DistributedValues)
        if several and not divided and leaf is not None:
            raise ValueError(message)


def test_step(model: keras.Model, data: Any) -> dict[str, Any]:
    """One step of evaluation, on all replicas of all workers."""
    model.distribute_strategy.run(model.test_step, (data,))
    return model.get_metrics_result()


def data(strategy: tf.distribute.Strategy, draw) -> Any:
    """Batches drawn here, of each of which every replica gets a part."""

    def parts(context):
        here = len(strategy.extended.worker_devices)
        first = here * context.input_pipeline_id
        wanted = slice(first, first + here)
        return draw(parts=sampling.Parts(strategy.num_replicas_in_sync, wanted))

    # Replicas take one element after the other in turn.
    return strategy.distribute_datasets_from_function(parts)


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
