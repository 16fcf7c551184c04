"""The pictures that matplotlib draws."""

import sys

import keras
import numpy as np
import pytest

import keras_fastclip

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    matplotlib.pyplot.close("all")


@pytest.fixture
def trained():
    layers = [
        keras.layers.Dense(4, name="hidden"),
        keras.layers.Dense(3, name="logits"),
    ]
    model = keras_fastclip.DPSequential(
        layers, l2_norm_clip=1.0, noise_multiplier=1.0, name="model"
    )
    loss = keras.losses.SparseCategoricalCrossentropy(True)
    model.compile("sgd", loss, metrics=["accuracy"])
    rng = np.random.default_rng(0)
    history = model.fit(
        rng.normal(size=(64, 5)),
        rng.integers(0, 3, 64),
        batch_size=16,
        epochs=2,
        verbose=0,
        callbacks=[
            keras_fastclip.EpsilonTracker(1e-3),
            keras_fastclip.GradientNormMonitor(),
        ],
    )
    return model, history


def lines(axis):
    return {line.get_label(): line.get_xydata() for line in axis.lines}


def test_pictures_show_what_was_logged_and_planned(trained, tmp_path):
    model, history = trained
    logs = history.history
    figure = keras_fastclip.plot_privacy(history)
    spent, bought, clipped = figure.axes
    np.testing.assert_allclose(
        lines(spent)["ε at δ = 0.001"],
        list(zip((1, 2), logs["epsilon"], strict=True)),
    )
    np.testing.assert_allclose(
        lines(bought)["accuracy"],
        list(zip(logs["epsilon"], logs["accuracy"], strict=True)),
    )
    (fractions,) = lines(clipped).values()
    np.testing.assert_allclose(
        fractions[:, 1], logs["nonprivate_clipped_fraction"]
    )
    figure.savefig(tmp_path / "privacy.png")
    figure = keras_fastclip.plot_plan(model)
    memory, time = figure.axes
    figure.savefig(tmp_path / "plan.png")
    labels = [label.get_text() for label in memory.get_yticklabels()]
    assert sorted(labels) == ["model/hidden", "model/logits"]
    assert len(time.patches) == 2
    assert all(bar.get_width() > 0 for bar in time.patches)
    assert "batch of 16" in time.get_xlabel()


def test_losses_take_the_place_of_accuracies():
    figure = keras_fastclip.plot_privacy({"epsilon": [1, 2], "loss": [3, 4]})
    spent, bought = figure.axes
    assert set(lines(bought)) == {"loss"} and set(lines(spent)) == {"ε"}


def test_what_cannot_be_plotted_says_what_is_missing(monkeypatch):
    with pytest.raises(ValueError, match="EpsilonTracker"):
        keras_fastclip.plot_privacy({"loss": [1.0]})
    model = keras_fastclip.DPSequential(l2_norm_clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="clipping_summary"):
        keras_fastclip.plot_plan(model)
    with pytest.raises(ValueError, match="is not private"):
        keras_fastclip.plot_plan(keras.Sequential())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="keras-fastclip\\[plots\\]"):
        keras_fastclip.plot_privacy({"epsilon": [1.0]})
