"""The code in the README runs as it stands."""

import inspect
import pathlib
import re
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_fastclip
from keras_fastclip.registry import lookup
from tests.test_keras_hub import gpt2

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks():
    text = README.read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def block_with(words):
    (found,) = [block for block in blocks() if words in block]
    return found


def test_quick_start_and_follow_epsilon(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    names = {
        "x": rng.normal(size=(512, 8)).astype("float32"),
        "y": rng.integers(0, 10, 512),
    }
    exec(block_with("was: keras.Sequential("), names)
    assert "PRIVACY STATEMENT" in capsys.readouterr().out
    exec(block_with("callbacks=[keras_fastclip.EpsilonTracker"), names)
    exec(block_with("privacy_report"), names)
    assert "PRIVACY" in pathlib.Path("report.html").read_text("utf-8").upper()
    assert 0 < names["model"].privacy_spent(1e-5) < np.inf


def test_targets_loops_and_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    names = {
        "keras": keras,
        "keras_fastclip": keras_fastclip,
        "x": rng.normal(size=(512, 8)).astype("float32"),
        "y": rng.integers(0, 10, 512),
    }
    loss = keras.losses.SparseCategoricalCrossentropy(True)
    exec(block_with("target_epsilon=3.0"), names)
    model = names["model"]
    model.compile("sgd", loss)
    model.fit(names["x"], names["y"], batch_size=256, epochs=2, verbose=0)
    assert 2.9 < model.privacy_spent(1e-5) <= 3.0
    names["model"] = model = keras_fastclip.DPSequential(
        [keras.layers.Dense(10)], l2_norm_clip=1.0, noise_multiplier=1.1
    )
    model.compile("sgd", loss)
    exec(block_with("PrivacyBudget(3.0"), names)
    assert 0 < model.privacy_spent(1e-5) <= 3.0
    assert round(names["sigma"], 3) == 0.969
    plain = keras.Sequential([keras.layers.Dense(10)])
    names["model"] = model = keras_fastclip.make_private(
        plain,
        l2_norm_clip=1.0,
        noise_multiplier=4.0,
        max_epsilon=1.0,
        delta=0.1,
    )
    model.compile("sgd", loss)
    with pytest.raises(keras_fastclip.BudgetExceededError):
        exec(block_with("in keras_fastclip.PoissonDataset("), names)
    spent = model.privacy_spent(1e-5)
    assert 0 < spent < np.inf
    model.save("model.keras")
    exec(block_with('record="model.keras"'), names)
    assert names["model"].privacy_spent(1e-5) == spent


def test_audit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    model = keras_fastclip.DPSequential(
        [keras.layers.Dense(10)], l2_norm_clip=1.0, noise_multiplier=1.1
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    names = {
        "keras_fastclip": keras_fastclip,
        "model": model,
        "x": rng.normal(size=(512, 50)).astype("float32"),
        "y": rng.integers(0, 10, 512),
    }
    exec(block_with("keras_fastclip.audit("), names)
    assert "not refuted" in capsys.readouterr().out
    assert (tmp_path / "audit.png").exists()


def test_rule_of_the_readme_is_right(float64):
    names = {"keras": keras, "keras_fastclip": keras_fastclip, "tf": tf}
    exec(block_with("def scale_rule"), names)
    inputs = keras.Input((5,))
    model = keras_fastclip.DPModel(
        inputs,
        names["Scale"]()(inputs),
        l2_norm_clip=0.1,
        noise_multiplier=1.0,
        strict=True,
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    names |= {"model": model}
    names |= {"x": rng.normal(size=(8, 5)), "y": rng.normal(size=(8, 5))}
    exec(block_with("check_gradients(model"), names)
    report = keras_fastclip.check_gradients(model, names["x"], names["y"])
    assert report.relative_error < 1e-9


def test_rule_of_tf_privacy():
    registered = dict(lookup._default._rules)
    names = {
        "keras_fastclip": keras_fastclip,
        "MyLayer": type("MyLayer", (keras.Layer,), {}),
        "my_layer_computation": lambda *args: None,
    }
    try:
        exec(block_with("from_tf_privacy(my_layer_computation"), names)
        assert names["MyLayer"] in keras_fastclip.default_registry()
    finally:
        lookup._default._rules = registered


def test_hub_task():
    task = gpt2()
    hub = types.SimpleNamespace(
        models=types.SimpleNamespace(
            GPT2CausalLM=types.SimpleNamespace(from_preset=lambda name: task)
        )
    )
    names = {
        "keras": keras,
        "keras_fastclip": keras_fastclip,
        "keras_hub": hub,
        "texts": np.array(["a b", "b a"] * 64),
    }
    exec(block_with("GPT2CausalLM.from_preset"), names)
    assert 0 < task.privacy_spent(1e-5) < np.inf


def test_summary_and_replacement(capsys):
    rng = np.random.default_rng(0)
    names = {"keras": keras, "keras_fastclip": keras_fastclip}
    exec(block_with("keras_fastclip.replace_batch_normalization"), names)
    kinds = {type(layer).__name__ for layer in names["model"].layers}
    assert "GroupNormalization" in kinds and "BatchNormalization" not in kinds
    model = keras_fastclip.DPSequential(
        [keras.layers.Dense(10)], l2_norm_clip=1.0, noise_multiplier=1.1
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    names |= {"model": model, "y": rng.integers(0, 10, 8)}
    names |= {"x": rng.normal(size=(8, 4)).astype("float32")}
    exec(block_with("clipping_summary(model, x[:8]"), names)
    assert "closed form" in capsys.readouterr().out


def test_every_block_is_run():
    source = pathlib.Path(__file__).read_text(encoding="utf-8")
    chosen = re.findall(r"block_with\([\"'](.+?)[\"']\), names", source)
    for block in blocks():
        assert any(words in block for words in chosen), block


def test_functions_that_the_guarantee_names_exist():
    text = (ROOT / "docs" / "guarantee.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`((?:[a-z_]+\.)+[A-Za-z_.]+)`", text))
    names -= {"optimizer.iterations"}
    assert len(names) > 20
    for name in names:
        if name.endswith(".py"):
            continue
        found = keras_fastclip
        for part in name.split("."):
            if found is keras_fastclip or inspect.ismodule(found):
                full = f"{found.__name__}.{part}"
                found = sys.modules.get(full) or getattr(found, part)
            else:
                found = getattr(found, part)


def test_several_devices():
    rng = np.random.default_rng(0)
    names = {
        "keras": keras,
        "keras_fastclip": keras_fastclip,
        "tf": tf,
        "x": rng.normal(size=(512, 8)).astype("float32"),
        "y": rng.integers(0, 10, 512),
    }
    exec(block_with("MirroredStrategy"), names)
    (entry,) = names["model"]._privacy.ledger(names["model"]).entries
    assert (entry.mechanism.kind, entry.steps) == ("poisson_sampling", 2)
