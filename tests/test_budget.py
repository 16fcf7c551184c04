"""ε is reported, kept within budgets and calibrated to targets."""

import csv
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import (
    BudgetExceededError,
    DPSequential,
    EpsilonTracker,
    GradientNormMonitor,
    PoissonDataset,
    PrivacyBudget,
    accounting,
)
from keras_fastclip.accounting import Ledger, Passes, PoissonSampling
from tests.zoo import cross_entropy, labels, random

N, BATCH, DELTA = 64, 8, 1e-3
SIGMA = 1.5


def data():
    return random(N, 5), labels(N)


def model(steps_per_execution=1, jit_compile=False, **kwargs):
    settings = {"l2_norm_clip": 0.5, "noise_multiplier": SIGMA, **kwargs}
    private = DPSequential([layers.Input((5,)), layers.Dense(3)], **settings)
    private.compile(
        "sgd",
        cross_entropy(),
        steps_per_execution=steps_per_execution,
        jit_compile=jit_compile,
    )
    return private


def entries(private):
    return list(private._privacy.ledger(private).entries)


def steps_within(epsilon, accountant="pld"):
    """By trying one number of steps after the other."""
    steps = 0
    while True:
        ledger = Ledger()
        ledger.record(PoissonSampling(N, BATCH, SIGMA), steps + 1)
        if ledger.epsilon(DELTA, accountant) > epsilon:
            return steps
        steps += 1


@pytest.fixture(scope="module")
def right():
    """The steps that an epsilon of one allows: less than two epochs."""
    steps = steps_within(1.0)
    assert 8 < steps < 16
    return steps


# -- budgets -----------------------------------------------------------------


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("on", ["model", "callback"])
def test_training_stops_at_the_exact_step(
    on, steps_per_execution, jit_compile, right, capsys
):
    x, y = data()
    options, callbacks = {}, []
    if on == "model":
        options = {"max_epsilon": 1.0, "delta": DELTA}
    else:
        callbacks = [PrivacyBudget(1.0, DELTA)]
    private = model(steps_per_execution, jit_compile, **options)
    history = private.fit(
        x, y, batch_size=BATCH, epochs=9, verbose=2, callbacks=callbacks
    )
    assert len(history.epoch) == 2
    assert [e.steps for e in entries(private)] == [right]
    assert int(private.optimizer.iterations) == right
    assert private.privacy_spent(DELTA) <= 1.0
    assert f"stopped after {right} steps" in capsys.readouterr().out
    with pytest.raises(BudgetExceededError, match="Nothing is left"):
        private.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    assert int(private.optimizer.iterations) == right


def test_a_budget_of_a_callback_ends_with_its_fit():
    x, y = data()
    private = model()
    private.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=9,
        verbose=0,
        callbacks=[PrivacyBudget(0.9, DELTA, "rdp")],
    )
    assert sum(e.steps for e in entries(private)) == steps_within(0.9, "rdp")
    private.fit(x, y, batch_size=BATCH, verbose=0)
    assert private.privacy_spent(DELTA, "rdp") > 0.9


def test_a_crash_leaves_no_budget_behind():
    x, y = data()
    private = model()

    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        private.fit(
            x,
            y,
            batch_size=BATCH,
            verbose=0,
            callbacks=[PrivacyBudget(1.0, DELTA), Crash()],
        )
    private.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    assert sum(e.steps for e in entries(private)) == 25


def test_several_fits_and_callbacks_share_one_budget(right, tmp_path):
    x, y = data()
    private = model(max_epsilon=1.0, delta=DELTA)
    private.fit(
        x,
        y,
        batch_size=BATCH,
        steps_per_epoch=5,
        verbose=0,
        callbacks=[PrivacyBudget(50.0, DELTA)],
    )
    private.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=9,
        verbose=0,
        validation_data=(x, y),
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", patience=20),
            keras.callbacks.ModelCheckpoint(tmp_path / "best.keras"),
        ],
    )
    assert [e.steps for e in entries(private)] == [right]
    again = keras.models.load_model(tmp_path / "best.keras")
    assert entries(again) == entries(private)


def test_a_resumed_run_stops_at_the_same_step(right, tmp_path):
    x, y = data()

    class Crash(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    def callbacks():
        # The budget comes first: it must wait for what is restored.
        return [
            PrivacyBudget(1.0, DELTA),
            keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        ]

    options = {"batch_size": BATCH, "epochs": 9, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        model().fit(x, y, callbacks=[*callbacks(), Crash()], **options)
    private = model()
    history = private.fit(x, y, callbacks=callbacks(), **options)
    assert history.epoch == [1]
    assert [e.steps for e in entries(private)] == [right]


def test_passes_stop_before_the_pass_that_is_too_many():
    x, y = data()
    passes = 0
    while True:
        ledger = Ledger()
        ledger.record(Passes(N, SIGMA), passes + 1)
        if ledger.epsilon(DELTA) > 4.0:
            break
        passes += 1
    private = model(sampling="shuffle", max_epsilon=4.0, delta=DELTA)
    private.fit(x, y, batch_size=BATCH, epochs=50, verbose=0)
    assert [(e.steps, e.uses) for e in entries(private)] == [
        (8 * passes, passes)
    ]
    stream = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, True)
    private = model(max_epsilon=4.0, delta=DELTA)
    private.fit(stream, num_examples=N, epochs=50, verbose=0)
    assert [(e.steps, e.uses) for e in entries(private)] == [
        (8 * passes, passes)
    ]


def test_a_budget_with_a_schedule_is_exact():
    x, y = data()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [4], [4.0, 1.5]
    )
    private = model(noise_multiplier=schedule, max_epsilon=1.0, delta=DELTA)
    private.fit(x, y, batch_size=BATCH, epochs=9, verbose=0)
    assert private.privacy_spent(DELTA) <= 1.0
    last = entries(private)[0].mechanism
    assert last.noise_multiplier == pytest.approx(1.5, rel=0.0101)
    ledger = Ledger.from_config(private._privacy.ledger(private).get_config())
    ledger.record(last, 1)
    assert ledger.epsilon(DELTA, "pld") > 1.0


def test_a_budget_holds_outside_of_fit(right):
    x, y = data()
    private = model(max_epsilon=1.0, delta=DELTA, expected_batch_size=BATCH)
    before = private.get_weights()
    with pytest.raises(BudgetExceededError, match="outside `fit`"):
        private.train_on_batch(x[:8], y[:8])
    with pytest.raises(tf.errors.InvalidArgumentError, match="exceed"):
        private.train_step((tf.constant(x), tf.constant(y)))
    for old, new in zip(before, private.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    batches = iter(PoissonDataset(x, y, batch_size=BATCH))
    with pytest.raises(BudgetExceededError, match="epsilon = 1 at"):
        while True:
            private.train_on_batch(next(batches))
    assert [e.steps for e in entries(private)] == [right]


def test_a_budget_outside_of_fit_takes_few_distributions(monkeypatch):
    computed = []
    exact = accounting._accountants._pld_epsilon.__wrapped__

    def counted(parts, delta):
        computed.append(parts)
        return exact(parts, delta)

    monkeypatch.setattr(accounting._accountants, "_pld_epsilon", counted)
    x, y = data()
    private = model(max_epsilon=100.0, delta=DELTA)
    batches = iter(PoissonDataset(x, y, batch_size=BATCH))
    for _ in range(70):
        private.train_on_batch(next(batches))
    assert len(computed) == 2  # For 64 steps, and for as many again.
    assert computed[-1][0].uses == 128


def test_changes_count_for_what_was_looked_at_ahead():
    x, y = data()
    private = model(max_epsilon=2.0, delta=DELTA)
    batches = iter(PoissonDataset(x, y, batch_size=BATCH))
    private.train_on_batch(next(batches))
    private.set_privacy(noise_multiplier=0.1)
    with pytest.raises(BudgetExceededError, match="epsilon = 2 at"):
        private.train_on_batch(next(batches))
    private.set_privacy(noise_multiplier=SIGMA)
    private.train_on_batch(next(batches))
    private.set_privacy(max_epsilon=0.1)
    with pytest.raises(BudgetExceededError, match="epsilon = 0.1 at"):
        private.train_on_batch(next(batches))
    # With other batches, what is planned is other steps.
    private.set_privacy(max_epsilon=2.0)
    all_at_once = iter(PoissonDataset(x, y, batch_size=N))
    with pytest.raises(BudgetExceededError):
        for _ in range(20):
            private.train_on_batch(next(all_at_once))
    assert private.privacy_spent(DELTA) <= 2.0


def test_a_schedule_is_within_its_budget_outside_of_fit():
    x, y = data()
    falling = keras.optimizers.schedules.ExponentialDecay(2.0, 10, 0.5)
    private = model(noise_multiplier=falling, max_epsilon=1.0, delta=DELTA)
    batches = iter(PoissonDataset(x, y, batch_size=BATCH))
    with pytest.raises(BudgetExceededError):
        for _ in range(40):
            private.train_on_batch(next(batches))
    ledger = private._privacy.ledger(private)
    assert 0.5 < ledger.epsilon(DELTA, "pld") <= 1.0
    _, sigma = private._privacy.multiplier.at(private._privacy.steps)
    more = ledger.plus(PoissonSampling(N, BATCH, float(sigma)), 1)
    assert more.epsilon(DELTA, "pld") > 1.0


def test_steps_that_cannot_be_accounted_for_leave_no_budget():
    x, y = data()
    private = model(expected_batch_size=8)
    private.train_on_batch(x[:8], y[:8])
    with pytest.raises(BudgetExceededError, match="privacy_statement"):
        private.fit(
            x, y, batch_size=8, verbose=0, callbacks=[PrivacyBudget(5.0, DELTA)]
        )


class During(keras.callbacks.Callback):
    """Does something after each of the first batches."""

    def __init__(self, action):
        super().__init__()
        self.action, self.left = action, 3

    def on_train_batch_end(self, batch, logs=None):
        if self.left:
            self.left -= 1
            self.action()


@pytest.mark.parametrize("on", ["model", "callback"])
@pytest.mark.parametrize("what", ["fit", "drawn", "unknown", "step"])
def test_what_callbacks_do_is_within_the_budget(on, what):
    x, y = data()
    options, callbacks = {"expected_batch_size": 8}, []
    if on == "model":
        options |= {"max_epsilon": 3.0, "delta": DELTA}
    else:
        callbacks = [PrivacyBudget(3.0, DELTA)]
    private = model(**options)
    batches = iter(PoissonDataset(x, y, batch_size=32))

    def action():
        if what == "fit":
            private.fit(x, y, batch_size=32, steps_per_epoch=1, verbose=0)
        elif what == "drawn":
            private.train_on_batch(next(batches))
        elif what == "unknown":
            private.train_on_batch(x[:8], y[:8])
        else:
            private.train_step((tf.constant(x[:8]), tf.constant(y[:8])))

    try:
        private.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=9,
            verbose=0,
            callbacks=[*callbacks, During(action)],
        )
    except BudgetExceededError:
        assert what != "step"
    assert 0 < private.privacy_spent(DELTA) <= 3.0


def test_a_large_budget_stops_nothing():
    x, y = data()
    schedule = keras.optimizers.schedules.ExponentialDecay(2.0, 10, 0.9)
    for options in ({}, {"noise_multiplier": schedule}):
        private = model(**options)
        private.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=2,
            verbose=0,
            callbacks=[PrivacyBudget(1000.0, DELTA)],
        )
        assert sum(e.steps for e in entries(private)) == 16
    private = model(noise_multiplier=schedule, sampling="shuffle")
    with pytest.raises(ValueError, match="needs Poisson sampling"):
        private.fit(
            x,
            y,
            batch_size=BATCH,
            verbose=0,
            callbacks=[PrivacyBudget(3.0, DELTA)],
        )


def test_a_budget_can_be_lifted_and_a_target_is_kept():
    x, y = data()
    options = {"batch_size": BATCH, "steps_per_epoch": 2, "verbose": 0}
    private = model(max_epsilon=1.0, delta=DELTA)
    private.fit(x, y, **options)
    private.set_privacy(max_epsilon=None)
    private.fit(x, y, **options)
    assert [e.steps for e in entries(private)] == [4]
    private = model(noise_multiplier=None, target_epsilon=2.0, delta=DELTA)

    def stop():
        private.stop_training = True

    private.fit(x, y, epochs=9, callbacks=[During(stop)], **options)
    private.set_privacy(noise_multiplier=1.0)
    private.fit(x, y, **{**options, "steps_per_epoch": 99})
    assert 1.5 < private.privacy_spent(DELTA) <= 2.0
    assert len(entries(private)) == 2


# -- targets -----------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_a_target_is_met_by_the_first_fit(sampling, tmp_path):
    x, y = data()
    private = model(
        noise_multiplier=None,
        target_epsilon=2.0,
        delta=DELTA,
        sampling=sampling,
    )
    history = private.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    assert len(history.epoch) == 3
    (entry,) = entries(private)
    assert entry.steps == 24
    assert 1.98 < private.privacy_spent(DELTA) <= 2.0
    assert entry.mechanism.noise_multiplier == keras_fastclip.calibrate_noise(
        2.0, DELTA, N, BATCH, 3, sampling=sampling
    )
    assert "target of epsilon = 2" in private.privacy_statement(DELTA)
    with pytest.raises(BudgetExceededError):
        private.fit(x, y, batch_size=BATCH, verbose=0)
    private.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert entries(again) == [entry]
    with pytest.raises(BudgetExceededError):
        again.fit(x, y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_all_planned_steps_are_no_early_end(steps_per_execution, capsys):
    x, y = data()
    private = model(
        steps_per_execution,
        noise_multiplier=None,
        target_epsilon=2.0,
        delta=DELTA,
    )
    private.fit(x, y, batch_size=BATCH, epochs=3, verbose=2)
    assert int(private.optimizer.iterations) == 24
    assert "stopped" not in capsys.readouterr().out


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_an_end_within_the_last_epoch_is_told(
    steps_per_execution, right, capsys
):
    x, y = data()
    private = model(steps_per_execution, max_epsilon=1.0, delta=DELTA)
    private.fit(x, y, batch_size=BATCH, epochs=2, verbose=2)
    assert int(private.optimizer.iterations) == right < 16
    assert f"stopped after {right} steps" in capsys.readouterr().out


@pytest.mark.parametrize("epochs", [1, 9])
def test_averaged_weights_are_those_after_fit(epochs):
    """Also if the budget ends it: nine epochs are more than there is room."""
    x, y = data()
    private = model(max_epsilon=1.0, delta=DELTA)
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9)
    private.compile(optimizer, cross_entropy())
    trained = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            trained.append(self.model.layers[-1].kernel.numpy())

    private.fit(
        x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[Note()]
    )
    averages = optimizer._model_variables_moving_average
    kernel = private.layers[-1].kernel.numpy()
    np.testing.assert_array_equal(kernel, averages[0].numpy())
    assert np.abs(kernel - trained[-1]).max() > 1e-3


def test_what_a_first_fit_left_over_is_used_by_the_next():
    x, y = data()
    private = model(noise_multiplier=None, target_epsilon=2.0, delta=DELTA)

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    options = {"batch_size": BATCH, "epochs": 3, "verbose": 0}
    private.fit(x, y, callbacks=[Stop()], **options)
    private.fit(x, y, **options)
    assert [e.steps for e in entries(private)] == [24]


def test_a_fit_that_made_no_step_fixes_no_noise():
    x, y = data()
    private = model(noise_multiplier=None, target_epsilon=2.0, delta=DELTA)

    class Crash(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        private.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Crash()])
    private.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    assert [e.steps for e in entries(private)] == [24]


def test_a_target_needs_a_fit_first():
    x, y = data()
    private = model(
        noise_multiplier=None,
        target_epsilon=2.0,
        delta=DELTA,
        expected_batch_size=8,
    )
    with pytest.raises(ValueError, match="calibrated.*fit"):
        private.train_on_batch(x[:8], y[:8])
    with pytest.raises(ValueError, match="calibrated.*fit"):
        private.train_step((tf.constant(x), tf.constant(y)))


# -- reports -----------------------------------------------------------------


def test_epsilon_after_every_few_batches(tmp_path):
    x, y = data()
    private, seen = model(), []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["epsilon"])

    history = private.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        callbacks=[
            EpsilonTracker(DELTA, every=3),
            Look(),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.TensorBoard(tmp_path / "board", update_freq=1),
        ],
    ).history
    assert seen == sorted(seen) and len(seen) == 16
    assert len(set(seen)) == 2 * (1 + 2)
    assert history["epsilon"][-1] == private.privacy_spent(DELTA)
    with open(tmp_path / "log.csv") as file:
        rows = [float(row["epsilon"]) for row in csv.DictReader(file)]
    assert rows == history["epsilon"]
    (events,) = (tmp_path / "board" / "train").glob("events*")
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    }
    assert "epoch_epsilon" in tags
    with pytest.raises(ValueError, match="every=0"):
        EpsilonTracker(DELTA, every=0)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_norms_are_monitored_and_marked(jit_compile):
    x, y = data()
    private = model(jit_compile=jit_compile, noise_multiplier=0.0)
    private.compile(
        keras.optimizers.SGD(0.0), cross_entropy(), jit_compile=jit_compile
    )
    history = private.fit(
        x,
        y,
        batch_size=N,
        epochs=2,
        verbose=0,
        callbacks=[GradientNormMonitor((0.1, 0.5, 0.99))],
    ).history
    _, squared = private.clipped_gradients(x, y)
    norms = np.sqrt(squared)
    for epoch in range(2):
        found = history["nonprivate_clipped_fraction"][epoch]
        assert found == pytest.approx(np.mean(norms > 0.5), abs=1e-6)
        for name, quantile in (("10", 0.1), ("50", 0.5), ("99", 0.99)):
            found = history[f"nonprivate_norm_p{name}"][epoch]
            right = np.quantile(norms, quantile, method="inverted_cdf")
            assert found == pytest.approx(right, rel=0.026)
    # It costs nothing once the fit is over.
    assert private._privacy.monitor is None
    with pytest.raises(ValueError, match="quantiles"):
        GradientNormMonitor((2.0,))


@pytest.mark.parametrize(
    "callback", [PrivacyBudget(1.0, DELTA), GradientNormMonitor()]
)
def test_plain_models_are_refused(callback):
    plain = keras.Sequential([layers.Dense(3)])
    plain.compile("sgd", cross_entropy())
    with pytest.raises(TypeError, match="make_private"):
        plain.fit(*data(), verbose=0, callbacks=[callback])


def test_an_infinite_epsilon_tells_why():
    private = model(noise_multiplier=0.0)
    private.fit(*data(), verbose=0)
    spent = private.privacy_spent(DELTA)
    assert spent == math.inf and "without noise" in spent.reasons[0]
