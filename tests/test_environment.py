"""What `python -m keras_fastclip` tells of the machine."""

import os
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import keras_fastclip
from keras_fastclip import __main__ as doctor
from keras_fastclip import _keras, environment


def told(capsys):
    """What is printed, each fact on one line."""
    doctor.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 80
    facts, name = {}, None
    for line in lines:
        if not line.startswith(" "):
            name, _, line = line.partition("  ")
        facts[name] = f"{facts.get(name, '')} {line.strip()}".strip()
    return facts


def test_versions_devices_noise_and_layers_are_told(capsys):
    facts = told(capsys)
    assert facts["tensorflow"] == tf.__version__
    assert facts["keras"] == keras.__version__
    assert facts["keras-fastclip"] == keras_fastclip.__version__
    assert facts["devices"].startswith("CPU with ")
    assert facts["oneDNN"] == ("on" if _keras.uses_onednn() else "off")
    assert facts["dtype policy"] == "float32"
    rules = facts["layers with a rule"].split(", ")
    assert {"Dense", "Conv2D", "LSTM", "Embedding"} < set(rules)
    assert rules == sorted(rules)
    assert "PositionEmbedding" in facts["of other packages"].split(", ")


@pytest.mark.parametrize("cpu, words", [(True, "AES"), (False, "128 secret")])
def test_noise_is_that_of_the_device(capsys, monkeypatch, cpu, words):
    monkeypatch.setattr(_keras, "on_cpu", lambda: cpu)
    assert words in told(capsys)["noise"]


def test_packages_that_are_not_there_are_told(capsys, monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("keras", "no-such-package"))
    assert told(capsys)["no-such-package"] == "not installed"


def test_it_is_a_command():
    run = subprocess.run(
        [sys.executable, "-m", "keras_fastclip"],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "oneDNN              off" in run.stdout.splitlines()
