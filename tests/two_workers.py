"""Tests on two workers; `test_distribution.py` runs them in two processes.

Both run all tests in the same order, and wait for each other wherever
TensorFlow does.
"""

import contextlib
import math
import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import DPSequential, _keras, sampling, workers
from tests import processes

STRATEGY = processes.strategy()
FIRST = workers.is_first(STRATEGY)
FOLDER = pathlib.Path(os.environ["SHARED_FOLDER"])

N, CLIP = 41, 0.5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype("float32")
Y = RNG.normal(size=(N, 2)).astype("float32")


def scope(strategy=STRATEGY):
    return strategy.scope() if strategy else contextlib.nullcontext()


def dense(strategy=STRATEGY, optimizer=None, jit_compile=False, **settings):
    """The same weights every time."""
    settings = {"l2_norm_clip": CLIP, "noise_multiplier": 0.0, **settings}
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = DPSequential(
            [
                keras.Input((4,)),
                layers.Dense(3, "tanh", kernel_regularizer="l2"),
                layers.Dense(2),
            ],
            **settings,
        )
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(1.0),
            "mse",
            metrics=["mae"],
            jit_compile=jit_compile and strategy is not None,
            run_eagerly=strategy is None,  # which saves time
        )
    return model


def everywhere(*values):
    """Numbers of both workers, a row for each."""
    return workers.gathered(STRATEGY, [int(value) for value in values])


def assert_same_everywhere(model):
    """Weights, and the record of steps."""
    ledger = model._privacy.ledger(model).get_config()
    numbers = sampling.digest(model.get_weights()), sampling.digest(str(ledger))
    one, other = everywhere(*numbers, model.nonfinite_examples())
    np.testing.assert_array_equal(one, other)


def entries(model):
    return [
        (entry.mechanism.kind, entry.steps, entry.uses)
        for entry in model._privacy.ledger(model).entries
    ]


def assert_close(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.fixture
def parts(monkeypatch):
    """The parts of draws that this worker takes."""
    taken, pad = [], sampling.pad

    def spy(indices, rows):
        taken.append(list(indices))
        return pad(indices, rows)

    monkeypatch.setattr(sampling, "pad", spy)
    return taken


def draws(parts, steps):
    """Parts of both workers, of each of the first steps."""
    width = 1 + N
    own = np.full((steps, width), -1)
    for row, part in zip(own, parts, strict=False):
        row[: len(part)] = part
    both = everywhere(*own.ravel()).reshape(2, steps, width)
    return [
        [row[row >= 0].tolist() for row in step]
        for step in zip(*both, strict=True)
    ]


# -- equal to one device -----------------------------------------------------

ALIKE = {
    # Of a batch of one or two, a worker often has none.
    "small": {"batch_size": 2},
    "all": {
        "batch_size": 16,
        "optimizer": lambda: keras.optimizers.AdamW(0.05, clipvalue=1e-2),
        "l2_norm_clip": keras_fastclip.AdaptiveNorm(0.5, 0.5),
        "noise_multiplier": 1.0,
        "physical_batch_size": 4,
        "max_epsilon": 100.0,
        "delta": 1e-3,
    },
    "compiled": {"batch_size": 8, "jit_compile": True},
}


@pytest.mark.parametrize("case", ALIKE)
def test_weights_are_those_of_one_device(case, parts):
    steps, x = 6, X.copy()
    x[3] = np.nan
    settings = {"seed": 0, **ALIKE[case]}
    size = settings.pop("batch_size")
    two = dense(**settings)
    two.fit(x, Y, batch_size=size, steps_per_epoch=steps, verbose=0)
    batches = draws(parts, steps)
    if case == "small":
        assert {0, 1, 2} <= {sum(map(len, both)) for both in batches}
    one = dense(None, **settings)
    for mine, others in batches:
        rows = mine + others
        assert len(set(rows)) == len(rows)
        assert 0 <= len(mine) - len(others) <= 1
        real, rows = np.ones(max(1, len(rows)), bool), rows or [0]
        real[0] = bool(mine)
        batch = tf.constant(x[rows]), tf.constant(Y[rows]), None
        batch = sampling.PoissonBatch(batch, tf.constant(real))
        one.train_on_batch(sampling.DrawnBatch(batch, N, size))
    assert_close(one.get_weights(), two.get_weights())
    assert entries(one) == entries(two) == [("poisson_sampling", steps, steps)]
    assert two.optimizer.iterations.numpy() == steps
    assert one.nonfinite_examples() == two.nonfinite_examples()
    norms = [model._privacy.clip_norm.value for model in (one, two)]
    assert norms[0] == pytest.approx(norms[1])
    assert_same_everywhere(two)


# -- noise -------------------------------------------------------------------


def noise_of_steps(steps, **settings):
    """Noise on the sum of each step: the examples have no gradient."""
    keras.utils.set_random_seed(1)  # The same on both workers.
    with scope():
        model = DPSequential(
            [keras.Input((400,)), layers.Dense(300, use_bias=False)],
            l2_norm_clip=CLIP,
            noise_multiplier=3.0,
            **settings,
        )
        model.compile(keras.optimizers.SGD(1.0), "mse")
    x, y = np.zeros((32, 400), "float32"), np.ones((32, 300), "float32")
    values, before = [], model.get_weights()[0].astype("float64")
    for _ in range(steps):
        model.fit(x, y, batch_size=8, steps_per_epoch=1, verbose=0)
        after = model.get_weights()[0].astype("float64")
        values.append(8 * (before - after).ravel())
        before = after
    assert_same_everywhere(model)
    return values


def test_noise_on_the_global_sum_is_drawn_once_and_anew():
    """The mean of n squares is within 6.5 of its deviations, √(2/n).

    Beyond that it is with probability below 10⁻⁹; so is a correlation beyond
    6.5/√n.
    """
    values = noise_of_steps(2) + noise_of_steps(2, seed=7)
    for i, one in enumerate(values):
        mean_square = np.mean(np.square(one / (3.0 * CLIP)))
        assert abs(mean_square - 1) < 6.5 * math.sqrt(2 / one.size)
        for other in values[:i]:
            correlation = np.corrcoef(one, other)[0, 1]
            assert abs(correlation) < 6.5 / math.sqrt(one.size)


# -- sampling ----------------------------------------------------------------


def test_draws_are_poisson_and_from_a_secret_of_all_workers():
    found = []
    for _ in range(2):
        rng = workers.sampling_rng(STRATEGY, None, 0)
        numbers = rng.integers(1 << 62, size=4)
        one, other = everywhere(*numbers)
        np.testing.assert_array_equal(one, other)
        found.append(numbers.tolist())
    assert found[0] != found[1]
    rng = workers.sampling_rng(STRATEGY, None, 0)
    times, sizes = np.zeros(40), []
    for _ in range(400):
        rows = sampling.poisson_indices(40, 10, rng)
        times[rows] += 1
        sizes.append(len(rows))
    # Each of 40 is in each of 400 draws with probability ¼.
    assert np.abs(times - 100).max() < 6.5 * math.sqrt(400 * 3 / 16)
    assert abs(np.var(sizes) / 7.5 - 1) < 6.5 * math.sqrt(2 / 400)


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
    batches = draws(parts, 12)
    for six in (batches[:6], batches[6:]):
        rows = [row for both in six for part in both for row in part]
        assert sorted(rows) == list(range(N))
    assert int(monitor._histogram._counts.numpy().sum()) == N
    alone = dense(None)
    alone.set_weights(model.get_weights())
    loss, mae = alone.evaluate(X, Y, verbose=0)
    assert history["val_loss"][-1] == pytest.approx(loss, rel=1e-5)
    assert history["val_mae"][-1] == pytest.approx(mae, rel=1e-5)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx([loss, mae])
    np.testing.assert_allclose(
        model.predict(X, verbose=0), alone.predict(X, verbose=0), rtol=1e-5
    )
    assert_same_everywhere(model)


# -- the record --------------------------------------------------------------


def test_the_first_worker_saves_for_all():
    trained, path = dense(noise_multiplier=1.0), FOLDER / "saved.keras"
    trained.fit(X, Y, batch_size=8, steps_per_epoch=3, verbose=0)
    if FIRST:
        trained.save(path)
    everywhere(0)  # Not before it is there.
    with scope():
        loaded = keras.models.load_model(path)
    trained.load_weights(path)  # The record of both, so nothing is added.
    for model in (loaded, trained):
        model.fit(X, Y, batch_size=8, steps_per_epoch=2, verbose=0)
        assert entries(model) == [("poisson_sampling", 5, 5)]
        assert_same_everywhere(model)


def test_training_stops_at_the_last_step_within_the_budget():
    model = dense(noise_multiplier=1.0)
    stop = keras_fastclip.PrivacyBudget(5.0, 1e-3)
    model.fit(X, Y, 8, epochs=9, verbose=0, callbacks=[stop])
    ledger = model._privacy.ledger(model)
    (entry,) = ledger.entries
    assert entry.steps == model.optimizer.iterations.numpy() < 54
    assert ledger.epsilon(1e-3, "pld") <= 5.0
    assert ledger.plus(entry.mechanism, 1).epsilon(1e-3, "pld") > 5.0
    assert_same_everywhere(model)


# -- refused -----------------------------------------------------------------


def test_what_is_not_one_step_of_all_workers_is_refused():
    model = dense(noise_multiplier=1.0, expected_batch_size=8)
    before, stream = model.get_weights(), tf.data.Dataset.from_tensors((X, Y))
    with pytest.raises(ValueError, match="train_on_batch"):
        model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match="several workers"):
        model.fit(stream, num_examples=N)
    with pytest.raises(ValueError, match="several replicas"):
        model.train_step((X, Y))
    model.make_train_function()
    with pytest.raises(ValueError, match="same batch"):
        model.train_function(iter([(tf.constant(X), tf.constant(Y))]))
    assert_close(before, model.get_weights())
    assert entries(model) == []


DIFFERENT = {
    "data": lambda model: {"x": X + 1},
    "drawn": lambda model: {"batch_size": 9},
    "steps": lambda model: {"steps_per_epoch": 3},
    "records": lambda model: model._privacy._ledger.record(
        keras_fastclip.privacy.LOST_STEPS, 1
    ),
    "settings": lambda model: model.set_privacy(noise_multiplier=2.0),
}


def test_workers_that_differ_are_refused():
    model = dense(noise_multiplier=1.0, expected_batch_size=8)
    before = model.get_weights()
    for word, change in DIFFERENT.items():
        arguments = {"x": X, "y": Y, "batch_size": 8, "steps_per_epoch": 2}
        if not FIRST:
            arguments.update(change(model) or {})
        with pytest.raises(ValueError, match=f"different .*{word}"):
            model.fit(**arguments, verbose=0)
        assert_close(before, model.get_weights())
        model = dense(noise_multiplier=1.0, expected_batch_size=8)


# -- what Keras does by itself; if these fail, `_keras.py` can do with less --


def plain():
    keras.utils.set_random_seed(1)
    with scope():
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
    model = dense(noise_multiplier=1.0)

    class Ahead(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1 and not FIRST:
                self.model._privacy.counter.total.assign_add(1)
            self.before = self.model.get_weights()

    ahead = Ahead()
    with pytest.raises(tf.errors.OpError, match="numbers of steps|abort"):
        model.fit(
            X,
            Y,
            batch_size=8,
            steps_per_epoch=3,
            verbose=0,
            callbacks=[ahead],
        )
    assert_close(ahead.before, model.get_weights())
    assert sum(steps for _, steps, _ in entries(model)) == 1
