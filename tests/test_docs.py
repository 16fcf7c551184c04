"""The code in docs/ runs, prints what the pages say, and is complete."""

import pathlib
import re

import keras
import pytest
import tensorflow as tf

import keras_fastclip
from keras_fastclip.registry import lookup
from tests import pages

DOCS = pathlib.Path(__file__).parents[1] / "docs"
WRITTEN = sorted(set(DOCS.glob("*.md")) - {DOCS / "api.md"})

pytestmark = pytest.mark.filterwarnings("ignore:No rule is registered")


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_code_does_what_the_page_says(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lookup._default, "_rules", dict(lookup._default._rules))
    namespace = pages.names()
    for line, _, code, outcome in pages.blocks(path):
        namespace.pop("error", None)
        found = pages.outcome_of(code, f"{path.name}:{line}", namespace)
        where = f"{path.name}, line {line}:\n{found}"
        if outcome is not None:
            assert pages.agree(outcome, found), where
        else:
            assert "error" not in namespace, where


class MyLayer(keras.Layer):
    """What the reference calls a layer of yours."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        return x * self.scale


def my_layer_computation(layer, inputs, kwargs, tape, num_microbatches=None):
    """A function of the registry of TensorFlow Privacy for it."""
    (x,) = inputs
    zeta = x * layer.scale
    tape.watch(zeta)
    return zeta, zeta, lambda g: tf.reduce_sum((g * x) ** 2, -1)


def names_of_the_reference():
    """What its head says, made anew for each example."""
    names = pages.names()
    model = keras_fastclip.DPSequential(
        [MyLayer(), keras.layers.Dense(128), keras.layers.Dense(10)],
        l2_norm_clip=1.0,
        noise_multiplier=2.0,
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    return names | {
        "model": model,
        "MyLayer": MyLayer,
        "my_layer_computation": my_layer_computation,
    }


@pytest.mark.parametrize(
    "block", pages.blocks(DOCS / "api.md"), ids=lambda block: block.section
)
def test_examples_of_the_reference_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lookup._default, "_rules", dict(lookup._default._rules))
    names = names_of_the_reference()
    if "history" in block.code and "history =" not in block.code:
        tracker = keras_fastclip.EpsilonTracker(delta=1e-3)
        names["history"] = names["model"].fit(
            names["x"], names["y"], callbacks=[tracker]
        )
    if block.section == "plot_plan":
        names["model"].fit(names["x"], names["y"])
    found = pages.outcome_of(block.code, block.section, names)
    assert "error" not in names, found
    assert block.outcome is None or pages.agree(block.outcome, found)
    if "(MyLayer)" in block.code:  # A rule: is it right?
        names["model"].fit(names["x"], names["y"])
        report = keras_fastclip.check_gradients(
            names["model"], names["x"][:4], names["y"][:4]
        )
        assert report.relative_error < 1e-5


def test_outcomes_are_compared():
    assert pages.agree("a\nb\n", "a b")
    assert pages.agree("Error: ... was 3.\n", "Error: x\n was 3.\n")
    assert not pages.agree("Error: ... was 3.\n", "Error: x\n was 4.\n")
    assert not pages.agree("a", "a b")
    error = pages.outcome_of("print(1)\n{}['k']", "here", {})
    assert error == "1\nKeyError: 'k'\n"


def test_links_lead_somewhere():
    for path in [*WRITTEN, DOCS.parent / "README.md"]:
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)[)#]", text):
            assert (path.parent / link).exists(), (path.name, link)


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in keras_fastclip.__all__:
        assert f"\n## {name}\n" in text, name


def test_reference_is_that_of_the_code():
    from docs import make_api

    assert (DOCS / "api.md").read_text(encoding="utf-8") == make_api.page(), (
        "Run `make docs`."
    )
