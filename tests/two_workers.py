"""Tests on two workers; `test_distribution.py` runs them in two processes.

Both run all tests in the same order, and wait for each other wherever
TensorFlow does.
"""

import functools
import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import _keras, sampling, workers
from tests import distribution, processes
from tests.distribution import assert_close, entries, scope

TWO = [tf.config.LogicalDeviceConfiguration()] * 2
(CPU,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(CPU, TWO)
STRATEGY = processes.strategy()
PAIRS = processes.strategy_of_pairs()
FIRST = workers.is_first(STRATEGY)
FOLDER = pathlib.Path(os.environ["SHARED_FOLDER"])

N = 41
X, Y = distribution.data(N, 4, 2)


def dense(strategy=STRATEGY, **settings):
    if strategy is None:  # There is nothing to be gained by tracing.
        settings = {**settings, "run_eagerly": True, "jit_compile": False}
    return distribution.dense(strategy, (4, 3, 2), regularizer="l2", **settings)


# Of a batch of one or two, a worker often has none.
SMALL = {
    "expected_batch_size": 2,
    "noise_multiplier": 1.0,
    "max_epsilon": 100.0,
    "delta": 1e-3,
    "seed": 0,
}


@functools.cache
def shared():
    """A model that most tests train further: to trace one takes long."""
    return dense(**SMALL)


def fit(model, steps, **arguments):
    arguments = {"x": X, "y": Y, "batch_size": 2, **arguments}
    return model.fit(steps_per_epoch=steps, verbose=0, **arguments)


def everywhere(*values):
    """Numbers of both workers, a row for each."""
    return workers.gathered(STRATEGY, [int(value) for value in values])


def assert_same_everywhere(model):
    """Weights, and the record of steps."""
    ledger = model._privacy.ledger(model).get_config()
    numbers = sampling.digest(model.get_weights()), sampling.digest(str(ledger))
    one, other = everywhere(*numbers, model.nonfinite_examples())
    np.testing.assert_array_equal(one, other)


@pytest.fixture
def parts(monkeypatch):
    """The parts of draws that this worker takes."""
    taken, pad = [], sampling.pad

    def spy(indices, rows):
        taken.append(list(indices))
        return pad(indices, rows)

    monkeypatch.setattr(sampling, "pad", spy)
    return taken


def draws(parts, steps, devices):
    """Parts of all replicas, of each of the first steps."""
    width = 1 + N
    own = np.full((steps * devices, width), -1)
    for row, part in zip(own, parts, strict=False):
        row[: len(part)] = part
    both = everywhere(*own.ravel()).reshape(2, steps, devices, width)
    return [
        [row[row >= 0].tolist() for row in step.reshape(-1, width)]
        for step in both.swapaxes(0, 1)
    ]


# -- equal to one device -----------------------------------------------------

# Batch size, strategy, settings.
ALIKE = {
    "small": (2, STRATEGY, SMALL),
    "all": (
        16,
        STRATEGY,
        {
            "optimizer": lambda: keras.optimizers.AdamW(0.05, clipvalue=1e-2),
            "l2_norm_clip": keras_fastclip.AdaptiveNorm(0.5, 0.5),
            "noise_multiplier": 1.0,
            "physical_batch_size": 4,
            "seed": 0,
        },
    ),
    "compiled": (2, STRATEGY, {"jit_compile": True, "seed": 0}),
    "pairs": (3, PAIRS, {"noise_multiplier": 1.0, "seed": 0}),
}


@pytest.mark.parametrize("case", ALIKE)
def test_weights_are_those_of_one_device(case, parts):
    steps, x = 8, X.copy()
    x[3] = np.nan
    size, strategy, settings = ALIKE[case]
    model = shared() if case == "small" else dense(strategy, **settings)
    fit(model, steps, x=x, batch_size=size)
    assert entries(model) == [("poisson_sampling", steps, steps)]
    assert model.optimizer.iterations.numpy() == steps
    assert_same_everywhere(model)
    devices = 2 if strategy is PAIRS else 1
    batches = draws(parts, steps, devices)
    for step in batches:
        rows, sizes = sum(step, []), [len(part) for part in step]
        assert len(step) == 2 * devices
        assert len(set(rows)) == len(rows)
        assert max(sizes) - min(sizes) <= 1
    if case != "all":
        assert {0, 1, 2} <= {sum(map(len, step)) for step in batches}
    logs = model.evaluate(X, Y, verbose=0) if strategy is PAIRS else None
    if FIRST:  # The other one has the same weights.
        one = dense(None, **settings)
        train_alone(one, x, batches, size)
        assert_close(one.get_weights(), model.get_weights())
        assert entries(one) == entries(model)
        assert one.nonfinite_examples() == model.nonfinite_examples()
        distribution.assert_same_clip_norm(one, model)
        if logs:
            assert logs == pytest.approx(one.evaluate(X, Y, verbose=0))


def train_alone(model, x, batches, size):
    """The same steps on one device."""
    for step in batches:
        rows = sum(step, [])
        real, rows = np.full(max(1, len(rows)), bool(rows)), rows or [0]
        batch = tf.constant(x[rows]), tf.constant(Y[rows]), None
        batch = sampling.PoissonBatch(batch, tf.constant(real))
        model.train_on_batch(sampling.DrawnBatch(batch, N, size))


# -- noise -------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
def test_noise_on_the_global_sum_is_drawn_once_and_anew(devices):
    """With the same seeds of Keras and TensorFlow on both workers."""
    model = distribution.wide(STRATEGY if devices == 1 else PAIRS)
    noises = distribution.noise_of_steps(model, 3)
    for values in noises:
        distribution.assert_standard_normal(values)
    distribution.assert_independent(noises)
    assert_same_everywhere(model)


# -- sampling ----------------------------------------------------------------


def test_draws_are_poisson_and_from_a_secret_of_all_workers():
    found = []
    for strategy in (STRATEGY, PAIRS):
        rng = workers.sampling_rng(strategy, None, 0)
        numbers = rng.integers(1 << 62, size=4)
        one, other = everywhere(*numbers)
        np.testing.assert_array_equal(one, other)
        found.append(numbers.tolist())
    assert found[0] != found[1]
    distribution.assert_poisson(
        [sampling.poisson_indices(40, 10, rng) for _ in range(400)]
    )


# -- the record --------------------------------------------------------------


def test_the_first_worker_saves_for_all():
    trained, path = shared(), FOLDER / "saved.keras"
    (before,) = entries(trained)
    fit(trained, 3)
    if FIRST:
        trained.save(path)
    everywhere(0)  # Not before it is there.
    with scope(STRATEGY):
        loaded = keras.models.load_model(path)
    trained.load_weights(path)  # The record of both, so nothing is added.
    steps = before[1] + 5
    for model in (loaded, trained):
        fit(model, 2)
        assert entries(model) == [("poisson_sampling", steps, steps)]
        assert_same_everywhere(model)


def test_passes_and_logs(parts):
    """In a pass, each example comes once and on one of the workers."""
    model, size = dense(noise_multiplier=1.0, sampling="shuffle"), 8
    monitor = keras_fastclip.GradientNormMonitor()
    history = model.fit(
        X,
        Y,
        batch_size=size,
        epochs=2,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[keras_fastclip.EpsilonTracker(1e-3), monitor],
    ).history
    assert entries(model) == [("passes", 12, 2)]
    batches = draws(parts, 12, devices=1)
    for six in (batches[:6], batches[6:]):
        rows = [row for both in six for part in both for row in part]
        assert sorted(rows) == list(range(N))
    assert int(monitor._histogram._counts.numpy().sum()) == N
    assert_same_everywhere(model)
    found = model.evaluate(X, Y, verbose=0)
    predicted = model.predict(X, verbose=0)
    if FIRST:
        alone = dense(None)
        alone.set_weights(model.get_weights())
        loss, mae = alone.evaluate(X, Y, verbose=0)
        assert history["val_loss"][-1] == pytest.approx(loss, rel=1e-5)
        assert history["val_mae"][-1] == pytest.approx(mae, rel=1e-5)
        assert found == pytest.approx([loss, mae])
        # Of numbers that cancel to next to nothing, rounding is left.
        np.testing.assert_allclose(predicted, alone(X), rtol=1e-5, atol=1e-6)


def test_training_stops_at_the_last_step_within_the_budget():
    model = shared()
    distribution.assert_stops_at_the_last_step(model, X, Y, 2)
    assert_same_everywhere(model)


# -- refused -----------------------------------------------------------------


def test_what_is_not_one_step_of_all_workers_is_refused():
    model, stream = shared(), tf.data.Dataset.from_tensors((X, Y))
    before, record = model.get_weights(), entries(model)
    with pytest.raises(ValueError, match="train_on_batch"):
        model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match="several workers"):
        model.fit(stream, num_examples=N)
    with pytest.raises(ValueError, match="several replicas"):
        model.train_step((X, Y))
    stock = keras.callbacks.BackupAndRestore(FOLDER / "backup")
    for callbacks in (stock, [stock], keras.callbacks.CallbackList([stock])):
        with pytest.raises(ValueError, match="keras_fastclip.BackupAndRest"):
            fit(model, 2, callbacks=callbacks)
    assert not (FOLDER / "backup").exists()
    model.make_train_function()
    with pytest.raises(ValueError, match="same batch"):
        model.train_function(iter([(tf.constant(X), tf.constant(Y))]))
    assert_close(before, model.get_weights())
    assert entries(model) == record


def test_workers_that_differ_are_refused():
    model = shared()
    privacy, before = model._privacy, model.get_weights()
    record = privacy.ledger(model)

    def refused(what, **arguments):
        with pytest.raises(ValueError, match=f"different .*{what}"):
            fit(model, **{"steps": 2, **({} if FIRST else arguments)})

    refused("data", x=X + 1)
    refused("drawn", batch_size=3)
    refused("steps", steps=3)
    if not FIRST:
        privacy._ledger = record.plus(record.entries[0].mechanism, 1)
    refused("records")
    privacy._ledger = record
    if not FIRST:
        model.set_privacy(noise_multiplier=2.0)
    refused("settings")
    model.set_privacy(noise_multiplier=1.0)
    assert_close(before, model.get_weights())
    assert_same_everywhere(model)
    fit(model, 2)  # if they do not differ


# -- what Keras does by itself; if these fail, `_keras.py` can do with less --


def plain():
    keras.utils.set_random_seed(1)
    with scope(STRATEGY):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        model.compile("sgd", "mse")
    return model


def test_keras_cannot_build_from_batches_of_workers():
    with pytest.raises(ValueError, match="PerReplica"):
        plain().fit(X, Y, batch_size=8, verbose=0)


def test_keras_cannot_average_logs_of_workers():
    model = plain()
    with _keras.built_already(model):
        with pytest.raises(ValueError, match="reduction dimension 0"):
            model.fit(X, Y, batch_size=8, verbose=0)


# -- last, since TensorFlow makes no more collective operations afterwards ---


def test_workers_that_are_not_at_the_same_step_make_none():
    model = shared()
    before = model._privacy.ledger(model).total_steps

    class Ahead(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1 and not FIRST:
                self.model._privacy.counter.total.assign_add(1)
            self.before = self.model.get_weights()

    ahead = Ahead()
    with pytest.raises(tf.errors.OpError, match="numbers of steps|abort"):
        fit(model, 3, callbacks=[ahead])
    assert_close(ahead.before, model.get_weights())
    assert model._privacy.ledger(model).total_steps == before + 1
