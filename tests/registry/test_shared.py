"""Weights used several times: norms with cross terms, in closed form."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip.parts import Part
from keras_fastclip.registry import shared
from keras_fastclip.registry.embedding import Lookup, Projection
from keras_fastclip.registry.linear import Linear
from keras_fastclip.registry.terms import ONE_ROW, Rows

B, V, D = 3, 7, 4


@dataclasses.dataclass(frozen=True)
class Unit:
    layer: Any = None
    path: str = "layer"


@dataclasses.dataclass(frozen=True)
class Use:
    term: Any
    g: Any
    rows: Rows = ONE_ROW
    unit: Unit = Unit()


def random(*shape, seed):
    rng = np.random.default_rng(seed)
    return tf.constant(rng.normal(size=shape), "float64")


def table():
    return keras.Variable(np.zeros((V, D)), dtype="float64")


def same(tensor):
    return tensor


def lookup(weight, positions, seed, rows=1):
    ids = np.random.default_rng(seed).integers(0, V, (B * rows, positions))
    g = random(B * rows, positions, D, seed=seed + 1)
    return Use(Lookup(weight, tf.constant(ids)), g, Rows(rows))


def projection(weight, positions, seed, rows=1):
    a = random(B * rows, positions, D, seed=seed)
    g = random(B * rows, positions, V, seed=seed + 1)
    return Use(Projection(weight, a, same), g, Rows(rows))


def kernel(weight, positions, seed):
    a = random(B, positions, V, seed=seed)
    g = random(B, positions, D, seed=seed + 1)
    return Use(Linear(weight, a, same), g)


CASES = {
    "two_lookups": lambda w: [lookup(w, 5, 1), lookup(w, 3, 2)],
    "tied": lambda w: [lookup(w, 5, 1), projection(w, 5, 3)],
    "tied_and_folded": lambda w: [lookup(w, 5, 1, 2), projection(w, 2, 3, 3)],
    "all": lambda w: [
        lookup(w, 5, 1),
        projection(w, 6, 3),
        lookup(w, 2, 5),
        kernel(w, 4, 7),
    ],
    "two_kernels": lambda w: [kernel(w, 4, 7), kernel(w, 1, 9)],
}


@pytest.mark.parametrize("case", CASES)
def test_closed_form_is_the_norm_of_the_sum(case):
    uses = CASES[case](table())
    total = sum(use.term.per_example(use.g, use.rows)[0] for use in uses)
    right = np.sum(np.square(total), (1, 2))
    np.testing.assert_allclose(shared.omega(uses), right, rtol=1e-12)


def test_uses_without_a_closed_form_are_built():
    weight = table()
    odd = Linear(weight, random(B, 2, V, seed=1), same, lambda m: m)
    uses = [Use(odd, random(B, 2, D, seed=2)), lookup(weight, 3, 4)]
    assert shared.omega(uses) is None
    part = Part(uses)
    total = sum(use.term.per_example(use.g, use.rows)[0] for use in uses)
    right = np.sum(np.square(total), (1, 2))
    np.testing.assert_allclose(part.squared_norms(), right, rtol=1e-12)


def test_cancelling_uses_are_not_rounded_below_the_truth():
    """A lookup and a projection whose gradients nearly cancel."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(V)[None]
    u = rng.normal(size=(1, V, D)).astype("float32")
    weight = keras.Variable(np.zeros((V, D)), dtype="float32")
    one_hot = np.eye(V, dtype="float32")[ids]
    noise = 1e-4 * rng.normal(size=u.shape).astype("float32")
    u = tf.constant(u)
    uses = [
        Use(Lookup(weight, tf.constant(ids)), u),
        Use(Projection(weight, -u + noise, same), tf.constant(one_hot)),
    ]
    total = np.array(u, "float64") + np.array(-u + noise, "float64")
    found = shared.omega(uses)[0]
    assert found >= np.sum(np.square(total))
    assert found <= np.sum(np.square(total)) + 5e-3


def check_language_model(**options):
    """Gradients of a model whose table also makes its logits."""
    x = keras.Input((6,), dtype="int32")
    table = layers.ReversibleEmbedding(V, D, **options)
    model = keras_fastclip.DPModel(
        x,
        table(layers.Dense(D)(table(x)), reverse=True),
        l2_norm_clip=0.1,
        noise_multiplier=1.0,
        strict=True,  # no fallback
    )
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    tokens = np.random.default_rng(0).integers(0, V, (4, 7))
    return keras_fastclip.check_gradients(model, tokens[:, :-1], tokens[:, 1:])


def test_tied_model_in_float32():
    assert check_language_model(logit_soft_cap=5.0).relative_error < 1e-5


@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("mask_zero", [True, False])
def test_reversible_embedding_both_ways(tie_weights, mask_zero, float64):
    report = check_language_model(tie_weights=tie_weights, mask_zero=mask_zero)
    assert report.relative_error < 1e-9


def test_calls_of_different_forms_are_added_after_all(float64):
    """With dropout each gate has its own input, and without all have one."""
    inputs = keras.Input((3, 2))
    layer = keras.layers.GRU(
        2, dropout=0.5, recurrent_dropout=0.5, return_sequences=True
    )
    outputs = layer(layer(inputs, training=True), training=False)
    model = keras_fastclip.DPModel(
        inputs,
        outputs,
        l2_norm_clip=0.5,
        noise_multiplier=0.0,
        expected_batch_size=1,
        method="bk",
    )
    model.compile(keras.optimizers.SGD(1.0), "mse")
    rng = np.random.default_rng(0)
    before = model.get_weights()
    model.train_on_batch(rng.normal(size=(1, 3, 2)), np.full((1, 3, 2), 90.0))
    moved = sum(
        np.sum((a - b) ** 2)
        for a, b in zip(model.get_weights(), before, strict=True)
    )
    assert np.sqrt(moved) == pytest.approx(0.5, rel=1e-9)
