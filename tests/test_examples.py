"""Every example runs, in its fast mode, and does what it says."""

import math
import pathlib
import runpy
import sys

import pytest

import keras_fastclip
from keras_fastclip.registry import lookup

FOLDER = pathlib.Path(__file__).parents[1] / "examples"
# These have no fast mode and are run by targets of the Makefile.
ELSEWHERE = {"quickstart"}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(not set for the target|layer .* does not have)"
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs an example as a user would, and returns its variables."""
    monkeypatch.chdir(tmp_path)
    # What an example registers is not for other tests.
    rules = dict(lookup._default._rules)
    yield lambda name: run_example(name, monkeypatch)
    lookup._default._rules = rules


def run_example(name, monkeypatch):
    path = FOLDER / f"{name}.py"
    assert path.read_text(encoding="utf-8").startswith('"""\nTitle: ')
    monkeypatch.setattr(sys, "argv", [str(path), "--fast"])
    names = runpy.run_path(str(path), run_name="__main__")
    assert 0 < names["epsilon"] < math.inf
    return names


def test_text_classification_with_lora(run):
    names = run("text_classification_lora")
    task = names["task"]
    assert 3.9 < names["epsilon"] <= 4.0
    paths = [v.path for v in task.trainable_variables]
    assert any("lora" in path for path in paths)
    assert names["trained"] < task.count_params() / 4


def test_gpt2_fine_tuning(run):
    names = run("gpt2_fine_tuning")
    assert names["line"].startswith("the king")
    assert names["task"].optimizer.iterations == 4


def test_tabular(run):
    names = run("tabular")
    assert 1.9 < names["epsilon"] <= 2.0
    assert names["accuracy"] > 0.7  # Always the same answer: 0.59.


def test_recommender(run):
    names = run("recommender")
    assert names["rmse"] < 1.05 * names["constant"]


def test_lstm(run):
    names = run("lstm")
    assert names["model"].optimizer.iterations == 4


def test_fashion_mnist(run):
    try:
        names = run("fashion_mnist")
    except Exception as error:
        if "URL fetch failure" not in str(error):
            raise
        pytest.skip("Fashion-MNIST is not here (make data), nor a network")
    assert names["epsilon"] <= 2.7
    assert [row[0] for row in names["rows"]] == list(names["PLANS"])
    assert names["rows"][0][2] > 0.5  # By chance: 0.1.


def test_custom_layer(run):
    names = run("custom_layer")
    assert names["report"].relative_error < 1e-5
    assert names["LowRank"] in keras_fastclip.default_registry()


def test_custom_loop(run):
    names = run("custom_loop")
    assert names["epsilon"] <= 1.0 and names["accuracy"] > 0.3
    assert math.isinf(names["unknown"])


def test_two_workers(run):
    names = run("two_workers")
    assert names["model"]._privacy.ledger(names["model"]).total_steps == 22


def test_migrating_from_tf_privacy(run):
    names = run("migrating_from_tf_privacy")
    assert names["report"].relative_error < 1e-5


def test_all_examples_are_run():
    tested = {
        name.removeprefix("test_")
        for name, value in globals().items()
        if name.startswith("test_") and callable(value)
    }
    tested.add("text_classification_lora")
    assert {path.stem for path in FOLDER.glob("*.py")} <= tested | ELSEWHERE
