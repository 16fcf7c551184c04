"""The record of the steps travels with the weights, whatever happens."""

import multiprocessing
import os
import random as python_random
import signal
import time
import zipfile

import keras
import numpy as np
import pytest
from keras import layers

import keras_fastclip
from keras_fastclip import DPSequential, make_private
from tests.test_model import Subclassed, functional
from tests.zoo import cross_entropy, labels, random

SETTINGS = {"l2_norm_clip": 0.5, "noise_multiplier": 1.0}
DELTA = 1e-3


def data(n=64):
    return random(n, 5), labels(n)


def stack():
    return [layers.Input((5,)), layers.Dense(4, "relu"), layers.Dense(3)]


def compiled(model):
    model.compile(keras.optimizers.Adam(0.01), cross_entropy())
    return model


def entries(model):
    return list(model._privacy.ledger(model).entries)


KINDS = {
    "sequential": lambda: DPSequential(stack(), **SETTINGS),
    "functional": functional,
    "subclassed": lambda: Subclassed(4, **SETTINGS),
    "converted": lambda: make_private(keras.Sequential(stack()), **SETTINGS),
}


def trained(kind, **options):
    model = compiled(KINDS[kind]())
    x, y = data()
    model.fit(x, y, batch_size=8, verbose=0, **options)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_weights_files_carry_the_record(kind, tmp_path):
    model = trained(kind)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    x, y = data()
    again = compiled(KINDS[kind]())
    again.build((None, 5)) if kind != "subclassed" else again(x[:1])
    again.load_weights(path)
    assert entries(again) == entries(model) and len(entries(model)) == 1
    again.fit(x, y, batch_size=8, verbose=0)
    assert [e.steps for e in entries(again)] == [16]
    # A plain model takes the weights and passes over the record.
    if kind != "subclassed":
        plain = keras.Sequential(stack())
        plain.load_weights(path)
        for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["sequential", "functional", "subclassed"])
@pytest.mark.parametrize("compile", [True, False])
def test_whole_models_come_back_private(kind, compile, tmp_path):
    model = trained(kind)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras", compile=compile)
    assert type(again) is type(model)
    assert entries(again) == entries(model)
    assert again._privacy.settings == model._privacy.settings
    compiled(again).fit(*data(), batch_size=8, verbose=0)
    assert [e.steps for e in entries(again)] == [16]


def test_settings_that_are_objects_come_back(tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(2.0, 10, 0.5)
    for settings in (
        {"l2_norm_clip": schedule, "noise_multiplier": schedule},
        {
            "l2_norm_clip": keras_fastclip.AdaptiveNorm(2.0, quantile=0.9),
            "noise_multiplier": 1.0,
            "physical_batch_size": 4,
        },
    ):
        model = compiled(DPSequential(stack(), **settings))
        model.fit(*data(), batch_size=8, verbose=0)
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        assert entries(again) == entries(model)
        found = again._privacy
        assert found.clip_norm.value == model._privacy.clip_norm.value
        assert int(found.counter.total) == 8
        again.fit(*data(), batch_size=8, verbose=0)
        assert sum(e.steps for e in entries(again)) == 16


def test_a_converted_model_is_saved_as_what_it_was(tmp_path):
    model = trained("converted")
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.models.load_model(path)
    assert type(again) is keras.Sequential
    # The record is named ...
    make_private(again, **SETTINGS, record=path)
    assert entries(again) == entries(model)
    again.fit(*data(), batch_size=8, verbose=0)
    assert [e.steps for e in entries(again)] == [16]
    # ... or comes with the weights ...
    other = make_private(keras.Sequential(stack()), **SETTINGS)
    other.load_weights(path)
    assert entries(other) == entries(model)
    # ... or the optimizer's steps are missed.
    lost = make_private(keras.models.load_model(path), **SETTINGS)
    spent = lost.privacy_spent(DELTA)
    assert spent == np.inf and "record=" in spent.reasons[0]
    plain = tmp_path / "plain.keras"
    keras.Sequential(stack()).save(plain)
    with pytest.raises(ValueError, match="plain.keras.*no privacy record"):
        make_private(keras.Sequential(stack()), **SETTINGS, record=plain)


def test_weights_of_plain_models_leave_the_record_alone(tmp_path):
    model = trained("sequential")
    plain = keras.Sequential(stack())
    plain.save_weights(tmp_path / "plain.weights.h5")
    before = entries(model)
    model.load_weights(tmp_path / "plain.weights.h5", skip_mismatch=True)
    assert entries(model) == before


def test_going_back_to_earlier_weights_forgets_nothing(tmp_path):
    model, (x, y) = trained("sequential"), data()
    path = tmp_path / "early.weights.h5"
    model.save_weights(path)
    model.fit(x, y, batch_size=8, verbose=0)
    model.load_weights(path)
    assert [e.steps for e in entries(model)] == [16]
    # Weights that saw other steps bring these along.
    for batch_size, right in ((16, [8, 4]), (8, [16])):
        other = compiled(KINDS["sequential"]())
        other.fit(x, y, batch_size=batch_size, verbose=0)
        other.load_weights(path)
        assert [e.steps for e in entries(other)] == right


def test_a_seed_is_not_started_over(tmp_path):
    x, y = data()

    def steps(model):
        start = model.get_weights()
        model.fit(x, y, batch_size=64, verbose=0)
        return [a - b for a, b in zip(start, model.get_weights(), strict=True)]

    model = DPSequential(
        stack(), l2_norm_clip=1e-6, noise_multiplier=1e6, seed=5
    )
    model.compile(keras.optimizers.SGD(1.0), cross_entropy())
    first = steps(model)
    model.save_weights(tmp_path / "w.weights.h5")
    again = DPSequential(
        stack(), l2_norm_clip=1e-6, noise_multiplier=1e6, seed=5
    )
    again.compile(keras.optimizers.SGD(1.0), cross_entropy())
    again.load_weights(tmp_path / "w.weights.h5")
    for one, other in zip(first, steps(again), strict=True):
        assert not np.any(np.isclose(one, other, rtol=1e-3, atol=1e-9))
    draws = again._privacy.sampling_rng.integers(1 << 60)
    assert draws != np.random.default_rng(5).integers(1 << 60)


def test_no_secret_is_in_the_file(tmp_path):
    model = trained("sequential")
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    for word in model._privacy.noise._secret.numpy():
        assert word.tobytes() not in content
        assert str(int(word)).encode() not in content
        assert str(int(word) % (1 << 64)).encode() not in content
    assert b'"seed"' not in content.replace(b'"seed": null', b"")


# -- a process that is killed ------------------------------------------------


def counting_model():
    """One weight shrinks by a hundredth in every step, and that alone."""

    class Idle(keras.Layer):
        def build(self, shape):
            self.idle = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return x

    model = DPSequential(
        [layers.Input((5,)), Idle(), layers.Dense(3)],
        l2_norm_clip=1e-9,  # hence next to no noise
        noise_multiplier=1.0,
    )
    model.compile(
        keras.optimizers.SGD(1e-3, weight_decay=10.0), cross_entropy()
    )
    return model


def run(folder, batches):
    """Trains for ever, from where the run before was killed.

    Says that it is alive after so many batches.
    """

    class Alive(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            ledger = self.model._privacy.ledger(self.model)
            weight = float(self.model.layers[0].idle.numpy())
            seen = round(np.log(weight) / np.log(0.99))
            with open(folder / "resumed", "a") as file:
                file.write(f"{seen} {ledger.total_steps}\n")
            self.left = batches
            self.on_train_batch_end()

        def on_train_batch_end(self, batch=None, logs=None):
            if self.left == 0:
                (folder / "alive").write_text("yes")
            self.left -= 1

    x, y = data()
    counting_model().fit(
        x,
        y,
        batch_size=8,
        epochs=10**6,
        verbose=0,
        callbacks=[
            keras_fastclip.BackupAndRestore(folder / "backup", save_freq=1),
            Alive(),
        ],
    )


def test_a_killed_run_resumes_with_all_its_steps(tmp_path):
    """Twenty times, at any moment, in the middle of an epoch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_record"])
    rng = python_random.Random(0)
    for i in range(20):
        arguments = tmp_path, (2, 0)[i % 2]  # Also before the first step.
        process = context.Process(target=run, args=arguments)
        process.start()
        limit = time.monotonic() + 300
        while not (tmp_path / "alive").exists():
            assert process.is_alive() and time.monotonic() < limit
            time.sleep(0.01)
        (tmp_path / "alive").unlink()
        time.sleep(rng.uniform(0, 1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    lines = (tmp_path / "resumed").read_text().split("\n")[:-1]
    seen = [tuple(map(int, line.split())) for line in lines]
    assert len(seen) == 20 and seen[0] == (0, 0)
    for steps, recorded in seen:
        assert recorded >= steps
    # The runs did go on from each other.
    assert seen[-1][0] > seen[1][0] > 0
