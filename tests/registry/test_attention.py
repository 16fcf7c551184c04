"""Attention of several heads by products of matrices, against Keras's."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import _keras
from tests.registry.helpers import random

CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "bias": {"bias": (2, 1, 5, 4)},
    "mask": {"mask": (2, 1, 5, 4)},
    "all": {
        "bias": (1, 1, 5, 4),
        "mask": (2, 1, 5, 4),
        "is_causal": True,
        "scale": 2.0,
    },
}


def attended(options, tensors, g):
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        out = keras.ops.dot_product_attention(*tensors, **options)
    return [out, *tape.gradient(out, tensors, g)]


def own(options, tensors, g):
    with _keras.own_operations():
        return attended(options, tensors, g)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads", [(3, 3, 3), (6, 3, 3)])
@pytest.mark.parametrize("graph", [False, True])
def test_outputs_and_gradients_are_those_of_keras(name, heads, graph, float64):
    options = dict(CASES[name])
    for key in {"bias", "mask"} & set(options):
        options[key] = random(*options[key], seed=7)
    if "mask" in options:
        options["mask"] = options["mask"] > -1
    lengths = 5, 4, 4
    tensors = [
        random(2, length, n, 6, seed=i)
        for i, (length, n) in enumerate(zip(lengths, heads, strict=True))
    ]
    g = random(2, 5, heads[0], 6, seed=9)
    run = tf.function(own) if graph else own
    for mine, right in zip(
        run(options, tensors, g), attended(options, tensors, g), strict=True
    ):
        np.testing.assert_allclose(mine, right, 1e-12, 1e-12)


@pytest.mark.parametrize(
    "key, value",
    [((1, 4, 3, 6), (1, 4, 3, 6)), ((2, 4, 3, 6), (2, 4, 1, 6))],
)
def test_what_keras_refuses_is_refused(key, value):
    tensors = [random(2, 5, 3, 6), random(*key), random(*value)]
    for run in (attended, own):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            run({}, tensors, random(2, 5, 3, 6))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_left_to_keras(dtype):
    tensors = [tf.cast(random(2, 5, 3, 6, seed=i), dtype) for i in range(3)]
    g = tf.cast(random(2, 5, 3, 6, seed=9), dtype)
    for mine, right in zip(
        own({}, tensors, g), attended({}, tensors, g), strict=True
    ):
        np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.MultiHeadAttention(2, 3),
        lambda: layers.MultiHeadAttention(2, 3, dropout=0.3),
        lambda: layers.GroupQueryAttention(3, 4, 2),
    ],
)
def test_a_model_with_it_has_no_einsum_and_the_right_gradients(layer, float64):
    x = keras.Input((5, 4))
    y = layer()(x, x, use_causal_mask=True)
    model = keras_fastclip.DPModel(
        x,
        layers.Dense(2)(y[:, 0]),
        l2_norm_clip=0.1,
        noise_multiplier=0.0,
    )
    model.compile("sgd", "mse")
    data, target = random(6, 5, 4), random(6, 2)
    if layer().get_config().get("dropout"):
        model.clipped_gradients(data, target)  # The check looks at the rest.
    else:
        report = keras_fastclip.check_gradients(model, data, target)
        assert report.relative_error < 1e-9
    step = tf.function(model.clipped_gradients).get_concrete_function(
        tf.constant(data), tf.constant(target)
    )
    kinds = {op.type for op in step.graph.get_operations()}
    assert "Einsum" not in kinds
