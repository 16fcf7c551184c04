"""Private models that share layers."""

import gc
import math

import keras
import numpy as np
import pytest
from keras import layers

import keras_fastclip
from keras_fastclip import sharing

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 4)).astype("float32")
Y = RNG.normal(size=(32, 2)).astype("float32")


def model(hidden, name=None, **settings):
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **settings}
    private = keras_fastclip.DPSequential(
        [keras.Input((4,)), hidden, layers.Dense(2)], name=name, **settings
    )
    private.compile("sgd", "mse")
    return private


def fit(private):
    private.fit(X, Y, batch_size=8, steps_per_epoch=1, verbose=0)


def spent(private):
    return private.privacy_spent(1e-3)


def trained(**settings):
    """A model that was trained, and the layer that others take from it."""
    hidden = layers.Dense(3)
    private = model(hidden, "first", **settings)
    fit(private)
    return private, hidden


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_another_model_trained_are_refused(frozen):
    first, hidden = trained()
    hidden.trainable = not frozen
    second = model(hidden)
    with pytest.raises(ValueError, match="shares layers with .* 'first'"):
        fit(second)
    with pytest.raises(ValueError, match="record=file"):
        second.train_on_batch(X[:8], Y[:8])
    assert math.isinf(spent(second))
    assert "the private model 'first'" in spent(second).reasons[0]
    assert "- Steps that cannot" in second.privacy_statement(1e-3)
    hidden.trainable = True
    first.compile("sgd", "mse")
    fit(first)
    assert math.isfinite(spent(first))


def test_also_when_that_model_is_gone_and_in_loops_of_ones_own():
    first, hidden = trained()
    del first
    gc.collect()
    second = model(hidden, expected_batch_size=8)
    with pytest.raises(ValueError, match="shares layers"):
        second.train_step((X[:8], Y[:8]))


def test_models_without_noise_may_train_what_others_may_not_train_after_them():
    first, hidden = trained()
    other = model(hidden, "other", noise_multiplier=0.0)
    fit(other)
    with pytest.raises(ValueError, match="shares layers with .* 'other'"):
        fit(first)
    assert math.isinf(spent(first)) and math.isinf(spent(other))


def test_layers_that_nobody_trained_may_be_shared():
    hidden = layers.Dense(3, trainable=False)
    for _ in range(2):
        private = model(hidden)
        fit(private)
        assert math.isfinite(spent(private))


def test_layers_built_anew_go_on_with_the_record(tmp_path):
    first, _ = trained()
    first.save_weights(tmp_path / "first.weights.h5")
    second = model(layers.Dense(3))
    second.load_weights(tmp_path / "first.weights.h5")
    fit(second)
    assert spent(first) < spent(second) < math.inf


def test_weights_are_forgotten_with_their_layers():
    first, hidden = trained()
    keys = [id(weight) for weight in first.weights]
    assert all(key in sharing._owners for key in keys)
    del first, hidden
    keras.backend.clear_session()
    gc.collect()
    assert not any(key in sharing._owners for key in keys)
