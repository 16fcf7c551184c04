"""The privacy spent shows wherever Keras shows the logs of an epoch."""

import csv
import math

import keras
import numpy as np
import pytest

from keras_fastclip import callbacks


class FakePrivateModel(keras.Sequential):
    """Spends 0.5 per epoch and notes how it was asked."""

    spent = 0.0

    def privacy_spent(self, delta, accountant="rdp"):
        self.asked = (delta, accountant)
        self.spent = self.spent + 0.5
        return np.float64(self.spent)


def compiled(model_class):
    model = model_class([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(model, callback_list, **kwargs):
    x = np.zeros((8, 2), np.float32)
    return model.fit(
        x,
        x[:, :1],
        batch_size=4,
        callbacks=callback_list,
        **{"verbose": 0, "epochs": 2, **kwargs},
    )


def test_epsilon_is_in_the_history():
    history = fit(compiled(FakePrivateModel), [callbacks.EpsilonTracker(1e-5)])
    assert history.history["epsilon"] == [0.5, 1.0]
    assert all(type(e) is float for e in history.history["epsilon"])


def test_epsilon_is_in_the_history_beside_validation():
    x = np.zeros((4, 2), np.float32)
    history = fit(
        compiled(FakePrivateModel),
        [callbacks.EpsilonTracker(1e-5)],
        validation_data=(x, x[:, :1]),
    )
    assert history.history["epsilon"] == [0.5, 1.0]
    assert "val_epsilon" not in history.history


def test_the_model_is_asked_with_delta_and_accountant():
    model = compiled(FakePrivateModel)
    fit(model, [callbacks.EpsilonTracker(1e-6, accountant="rdp")])
    assert model.asked == (1e-6, "rdp")
    fit(model, [callbacks.EpsilonTracker(1e-5)])
    assert model.asked == (1e-5, "pld")


def test_epsilon_is_in_the_csv_of_a_later_logger(tmp_path):
    path = tmp_path / "log.csv"
    fit(
        compiled(FakePrivateModel),
        [callbacks.EpsilonTracker(1e-5), keras.callbacks.CSVLogger(path)],
    )
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert [float(row["epsilon"]) for row in rows] == [0.5, 1.0]


@pytest.mark.parametrize("verbose", [1, 2])
def test_epsilon_is_printed_by_the_progress_bar(verbose, capsys):
    fit(
        compiled(FakePrivateModel),
        [callbacks.EpsilonTracker(1e-5)],
        verbose=verbose,
    )
    printed = capsys.readouterr().out
    assert "epsilon: 0.5000" in printed
    assert "epsilon: 1.0000" in printed


def test_infinite_epsilon_is_reported(capsys):
    model = compiled(FakePrivateModel)
    model.spent = math.inf
    history = fit(model, [callbacks.EpsilonTracker(1e-5)], verbose=1)
    assert history.history["epsilon"] == [math.inf, math.inf]
    assert "epsilon: inf" in capsys.readouterr().out


def test_a_model_without_privacy_is_refused_before_training():
    model = compiled(keras.Sequential)
    before = model.get_weights()
    with pytest.raises(TypeError, match="is not a private model: use DPSeq"):
        fit(model, [callbacks.EpsilonTracker(1e-5)])
    assert model.optimizer.iterations == 0
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


@pytest.mark.parametrize("delta", [0, 1, -0.1, 2, float("nan")])
def test_delta_is_validated(delta):
    with pytest.raises(ValueError, match=f"delta={delta}"):
        callbacks.EpsilonTracker(delta)


def test_accountant_is_validated():
    with pytest.raises(ValueError, match="accountant='gdp'"):
        callbacks.EpsilonTracker(1e-5, accountant="gdp")


def test_missing_logs_are_tolerated():
    tracker = callbacks.EpsilonTracker(1e-5)
    tracker.set_model(compiled(FakePrivateModel))
    tracker.on_epoch_end(0)
