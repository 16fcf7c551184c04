"""Tests on two replicas; `test_distribution.py` runs them in a process.

TensorFlow divides its processor into devices before all else, or never.
"""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import DPModel, DPSequential, replicas, sampling
from tests import distribution
from tests.distribution import CLIP, assert_close, entries, scope

TWO = [tf.config.LogicalDeviceConfiguration()] * 2
(CPU,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(CPU, TWO)
STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

N, BATCH = 101, 16
X, Y = distribution.data(N, 6, 3)


def dense(strategy=STRATEGY, run_eagerly=True, **settings):
    """Without tracing, which would take most of the time."""
    return distribution.dense(
        strategy, (6, 7, 3), run_eagerly=run_eagerly, **settings
    )


@functools.cache
def shared():
    """A traced model that several tests train further."""
    return dense(noise_multiplier=1.0, run_eagerly=False)


def drawn(rows, x=X, y=Y, size=1):
    """A batch that holds these examples, as if they had been drawn.

    Args:
        rows: of the examples.
        x, y: the data.
        size: to which the batch is filled up.
    """
    rows, real = sampling.pad(np.array(rows, int), max(size, len(rows)))
    batch = tf.constant(x[rows]), tf.constant(y[rows]), None
    batch = sampling.PoissonBatch(batch, tf.constant(real))
    return sampling.DrawnBatch(batch, N, BATCH)


def trained(model, batches, x=X, y=Y):
    size = 32 if model.jit_compile else 1  # With XLA, `fit` does the like.
    logs = [
        model.train_on_batch(drawn(rows, x, y, size), return_dict=True)
        for rows in batches
    ]
    return model.get_weights(), logs


# Even, odd, one for one of the replicas, and none for both.
BATCHES = [list(range(n)) for n in (8, 13, 1, 0, 30)]


# -- equal to one device -----------------------------------------------------


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(1, 1, 0.5)


GRAPH = {"run_eagerly": False}
NOISE = {"noise_multiplier": 1.0, "seed": 2}
ALIKE = {
    "eager": {"regularizer": "l2"},
    "graph": {
        **GRAPH,
        **NOISE,
        "optimizer": lambda: keras.optimizers.AdamW(0.05, use_ema=True),
        "regularizer": "l2",
        "max_epsilon": 100.0,
        "delta": 1e-3,
    },
    "compiled": {**GRAPH, "jit_compile": True, "physical_batch_size": 4},
    # Bends gradients before the optimizer adds them up.
    "clipvalue": {
        **NOISE,
        "optimizer": lambda: keras.optimizers.SGD(1.0, clipvalue=1e-3),
    },
    "chunks": {"physical_batch_size": 4, "clipping": "automatic"},
    "by_layer": {
        "clipping": [0.1, 0.3],
        "l2_norm_clip": math.hypot(0.1, 0.3),
        "method": "ghost",
    },
    "schedules": {
        "l2_norm_clip": schedule(),
        "noise_multiplier": schedule(),
        "seed": 2,
    },
    "adaptive": {
        **NOISE,
        "l2_norm_clip": keras_fastclip.AdaptiveNorm(0.5, 0.5),
    },
}


@pytest.mark.parametrize("case", ALIKE)
def test_weights_and_logs_are_those_of_one_device(case):
    one, two = dense(None, **ALIKE[case]), dense(**ALIKE[case])
    expected, logs = trained(one, BATCHES)
    found, found_logs = trained(two, BATCHES)
    assert any(np.abs(w).max() > 0 for w in expected)
    assert_close(expected, found)
    for a, b in zip(logs, found_logs, strict=True):
        assert a.keys() == b.keys()
        assert_close(list(a.values()), list(b.values()))
    assert entries(one) == entries(two) == [("poisson_sampling", 5, 5)] or (
        case == "schedules" and entries(one) == entries(two)
    )
    assert two.optimizer.iterations.numpy() == len(BATCHES)
    distribution.assert_same_clip_norm(one, two)


@pytest.mark.parametrize("kind", ["convolution", "subclass"])
def test_other_models_are_as_on_one_device(kind):
    class Own(DPModel):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    def made(strategy):
        keras.utils.set_random_seed(1)
        settings = {"l2_norm_clip": CLIP, "noise_multiplier": 0.0}
        with scope(strategy):
            if kind == "subclass":
                model = Own(**settings)
            else:
                model = keras.Sequential(
                    [
                        keras.Input((6,)),
                        layers.Reshape((3, 2, 1)),
                        layers.Conv2D(4, 2, padding="same", activation="tanh"),
                        layers.GroupNormalization(2),
                        layers.GlobalAveragePooling2D(),
                        layers.Dense(3),
                    ]
                )
            if kind != "subclass":
                keras_fastclip.make_private(model, **settings)
            model.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=True)
        return model

    one, two = made(None), made(STRATEGY)
    expected, found = trained(one, BATCHES)[0], trained(two, BATCHES)[0]
    assert_close(expected, found)


def test_train_on_batch_divides_what_a_user_gives():
    one = dense(None, expected_batch_size=10)
    two = dense(expected_batch_size=10)
    for model in (one, two):
        for rows in (10, 1):
            model.train_on_batch(X[:rows], Y[:rows])
    assert_close(one.get_weights(), two.get_weights())
    assert [kind for kind, *_ in entries(two)] == ["unaccounted"]
    labels = np.eye(3, dtype="float32")[np.arange(9) % 3]
    for model in (one, two):
        model.train_on_batch(X[:9], labels, class_weight={0: 1.0, 1: 3.0})
    assert_close(one.get_weights(), two.get_weights())


# -- noise -------------------------------------------------------------------


# The seeds of Keras and TensorFlow are the same for all.
NOISES = {"fast": [{}, {}, {"seed": 7}], "secure": [{"noise": "secure"}]}


@pytest.mark.parametrize("kind", NOISES)
def test_noise_on_the_global_sum_is_drawn_once_and_anew(kind):
    draws = []
    for settings in NOISES[kind]:
        model = distribution.wide(STRATEGY, **settings)
        draws += distribution.noise_of_steps(model, 2)
    for values in draws:
        distribution.assert_standard_normal(values)
    distribution.assert_independent(draws)


# -- sampling ----------------------------------------------------------------


def parts_of(poisson=True, draws=400):
    numbers = np.arange(40)
    data = sampling.PoissonDataset(numbers, batch_size=10)
    draw = data.batches if poisson else data.passes

    def drawing(parts):
        return draw(np.random.default_rng(3), parts=parts)

    iterator = iter(replicas.data(STRATEGY, drawing))
    found = []
    for _ in range(draws):
        parts = STRATEGY.experimental_local_results(next(iterator))
        assert len({int(part.tag) for part in parts}) == 1
        found.append(
            [part.data.batch[0].numpy()[part.data.real.numpy()]]
            for part in parts
        )
    return [[rows[0] for rows in parts] for parts in found]


def test_parts_of_a_draw_are_disjoint_and_the_draw_is_poisson():
    draws = parts_of()
    sizes = [[len(part) for part in parts] for parts in draws]
    assert all(abs(a - b) <= 1 for a, b in sizes)
    distribution.assert_poisson([np.concatenate(parts) for parts in draws])


def test_parts_of_passes_make_passes():
    draws = parts_of(poisson=False, draws=8)
    for four in (draws[:4], draws[4:]):
        rows = np.concatenate([part for parts in four for part in parts])
        assert sorted(rows) == list(range(40))


# -- the ledger --------------------------------------------------------------


def test_a_global_step_is_counted_once():
    model = shared()
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
    assert entries(model) == [("poisson_sampling", 14, 14)]
    assert model.optimizer.iterations.numpy() == 14
    assert model._privacy.expected_batch_size == BATCH
    with scope(STRATEGY):  # That is where some call it.
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert entries(model) == [("poisson_sampling", 21, 21)]
    for variable in model.trainable_variables:
        one, two = STRATEGY.experimental_local_results(variable._value)
        np.testing.assert_array_equal(one.numpy(), two.numpy())


PASS = 40  # A pass has three of these batches.


def stream(kind):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    if kind == "fixed":
        return data.batch(PASS)
    if kind == "unknown":
        return data.ragged_batch(PASS).map(
            lambda x, y: (tf.reshape(x, [-1, 6]), tf.reshape(y, [-1, 3]))
        )

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-N // PASS)

        def __getitem__(self, i):
            rows = slice(i * PASS, (i + 1) * PASS)
            return X[rows], Y[rows]

    return Batches()


@pytest.mark.parametrize("kind", ["shuffle", "fixed", "unknown", "sequence"])
def test_passes_are_counted_as_on_one_device(kind):
    own = {"sampling": "shuffle"} if kind == "shuffle" else {}
    model = dense(noise_multiplier=1.0, expected_batch_size=PASS, **own)
    data = (X, Y) if own else (stream(kind),)
    options = {"batch_size": PASS} if own else {"num_examples": N}
    model.fit(*data, epochs=2, verbose=0, **options)
    assert entries(model) == [("passes", 6, 2)]


def test_training_stops_at_the_last_step_within_the_budget():
    distribution.assert_stops_at_the_last_step(shared(), X, Y, BATCH)


def test_a_step_beyond_the_budget_changes_nothing():
    model = dense(noise_multiplier=1.0, max_epsilon=3.0, delta=1e-3)
    with pytest.raises(keras_fastclip.BudgetExceededError):
        for _ in range(99):
            before = model.get_weights()
            trained(model, BATCHES[:1])
    assert_close(before, model.get_weights())
    # Even if nobody asked before.
    data = replicas.divided(STRATEGY, drawn(range(6)).take())
    with pytest.raises(tf.errors.InvalidArgumentError, match="budget"):
        model.train_function(iter([data]))
    assert_close(before, model.get_weights())


def test_not_a_number_is_left_out_by_itself():
    x = X.copy()
    x[3] = np.nan
    one, two = dense(None), dense()
    expected, found = [trained(m, BATCHES[:2], x)[0] for m in (one, two)]
    assert np.isfinite(found[0]).all()
    assert_close(expected, found)
    assert one.nonfinite_examples() == two.nonfinite_examples() == 2


def test_saved_and_loaded(tmp_path):
    model = dense(noise_multiplier=1.0)
    model.fit(X, Y, batch_size=BATCH, steps_per_epoch=2, verbose=0)
    model.save(tmp_path / "model.keras")
    for strategy in (STRATEGY, None):
        with scope(strategy):
            loaded = keras.models.load_model(tmp_path / "model.keras")
        assert_close(model.get_weights(), loaded.get_weights())
        loaded.fit(X, Y, batch_size=BATCH, steps_per_epoch=2, verbose=0)
        assert entries(loaded) == [("poisson_sampling", 4, 4)]


def test_callbacks_and_validation_work():
    model = dense(noise_multiplier=1.0, run_eagerly=False)
    history = model.fit(
        X,
        Y,
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        validation_split=0.2,
        callbacks=[
            keras_fastclip.EpsilonTracker(1e-3),
            keras_fastclip.GradientNormMonitor(),
        ],
    ).history
    assert all(np.isfinite(values).all() for values in history.values())
    assert {"val_mae", "epsilon"} < set(history)
    assert model.evaluate(X, Y, verbose=0)[0] > 0
    assert model.predict(X, verbose=0).shape == (N, 3)


def test_parts_of_different_draws_make_no_step():
    model = dense(noise_multiplier=1.0, run_eagerly=False)
    trained(model, BATCHES[:1])
    before, count = model.get_weights(), entries(model)

    def part(context):
        return tf.constant(context.replica_id_in_sync_group, tf.int64)

    data = replicas.divided(STRATEGY, drawn(range(6)).take())
    tags = STRATEGY.experimental_distribute_values_from_function(part)
    with pytest.raises(tf.errors.InvalidArgumentError, match="different"):
        model.train_function(iter([sampling.Part(data, tags)]))
    assert_close(before, model.get_weights())
    assert entries(model) == count
    same = STRATEGY.experimental_distribute_values_from_function(
        lambda context: tf.constant(5, tf.int64)
    )
    model.train_function(iter([sampling.Part(data, same)]))
    steps = [
        sum(steps for _, steps, _ in now) for now in (count, entries(model))
    ]
    assert steps[1] == steps[0] + 1


@pytest.mark.parametrize("kind", ["devices", "workers"])
def test_one_replica_counts_too(kind):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    if kind == "workers":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    budget = {"max_epsilon": 100.0, "delta": 1e-3, "seed": 2}
    settings = {"noise_multiplier": 1.0, **budget}
    one, same = dense(None, **settings), dense(strategy, **settings)
    assert_close(trained(one, BATCHES)[0], trained(same, BATCHES)[0])
    same.fit(X, Y, batch_size=BATCH, verbose=0)
    assert entries(same) == [("poisson_sampling", 12, 12)]


# -- refused -----------------------------------------------------------------


def refused(model, *words):
    before = model.get_weights()
    with pytest.raises(ValueError) as caught:
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    for word in words:
        assert word in str(caught.value)
    assert_close(before, model.get_weights())


def test_one_batch_for_all_replicas_is_refused():
    model = dense(noise_multiplier=1.0)
    trained(model, BATCHES[:1])
    before = model.get_weights()
    for data in ((X[:4], Y[:4]), sampling.PoissonBatch(*drawn([1, 2]).take())):
        data = tf.nest.map_structure(
            lambda leaf: leaf if leaf is None else tf.constant(leaf), data
        )
        with pytest.raises(ValueError, match="same batch"):
            model.train_function(iter([data]))
    assert_close(before, model.get_weights())


def test_own_loops_are_refused():
    data = tf.constant(X[:4]), tf.constant(Y[:4])
    model = dense(noise_multiplier=1.0)
    with pytest.raises(ValueError, match="several replicas"):
        STRATEGY.run(model.train_step, (data,))
    with pytest.raises(ValueError, match="several replicas"):
        model.train_step(data)
    alone = dense(None, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="several replicas"):
        STRATEGY.run(alone.train_step, (data,))


def test_what_was_made_outside_of_the_scope_is_refused():
    alone = dense(None, noise_multiplier=1.0)
    with STRATEGY.scope():
        refused(alone, "several replicas", "MirroredStrategy")
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0}
    layer = layers.Dense(3)
    layer.build((None, 6))
    with STRATEGY.scope():
        model = DPSequential([keras.Input((6,)), layer], **settings)
        model.compile("sgd", "mse")
    refused(model, "kernel", "strategy.scope()")
    optimizer = keras.optimizers.SGD()
    refused(dense(optimizer=lambda: optimizer), "iteration", "strategy.scope()")


def test_other_strategies_are_refused():
    other = tf.distribute.experimental.CentralStorageStrategy(
        ["CPU:0", "CPU:1"], "CPU:0"
    )
    model = dense(other, noise_multiplier=1.0)
    refused(model, "several replicas", "CentralStorageStrategy")
    model = dense(noise_multiplier=1.0)
    other = tf.distribute.MirroredStrategy(["CPU:1", "CPU:0"])
    with other.scope(), pytest.raises(ValueError, match="another tf.distri"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


def test_options_that_replicas_do_not_have_are_refused():
    model = dense(noise_multiplier=1.0)
    with STRATEGY.scope():
        model.compile("sgd", "mse", steps_per_execution=2)
    refused(model, "steps_per_execution")
