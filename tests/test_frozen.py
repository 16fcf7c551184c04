"""Parameter-efficient training: what is frozen costs nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from tests.graphs import count_products, used_operations


def private(prepare, shape=(4,)):
    """Four Dense layers, of which `prepare` freezes some."""
    inputs = x = keras.Input(shape)
    stack = [layers.Dense(4, name=name) for name in "abcd"]
    for layer in stack:
        x = layer(x)
    prepare(*stack)
    model = keras_fastclip.DPModel(
        inputs, x, l2_norm_clip=0.1, noise_multiplier=0.0
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    x = rng.normal(size=(6, *shape)).astype(keras.config.floatx())
    return model, tf.constant(x), tf.constant(x[..., ::-1])


def products(model, x, y):
    """How many matrix products a step computes."""
    return count_products(used_operations(model.clipped_gradients, x, y))


def captured(model, x, y):
    return [u.path for u in model._privacy.plan(model, (x, y, None)).units]


def freeze(*names):
    def prepare(*stack):
        for layer in stack:
            layer.trainable = layer.name not in names

    return prepare


def biases_only(*stack):
    for layer in stack:
        layer.kernel.trainable = False


def low_rank(*stack):
    for layer in stack[:3]:
        layer.trainable = False
    stack[3].enable_lora(2)
    stack[3].bias.trainable = False


@pytest.mark.parametrize(
    "prepare, paths, count",
    [
        # forward, to the inputs of b, c and d, sums of kernels, one of biases
        (freeze(), "abcd", 4 + 3 + 5),
        # the last layer alone: no cotangent goes below it
        (freeze("a", "b", "c"), "d", 4 + 2),
        # the lowest trained layer ends the backward pass
        (freeze("a", "b"), "cd", 4 + 1 + 3),
        # a frozen layer is passed through, without a sum of its own
        (freeze("c"), "abd", 4 + 3 + 4),
        (biases_only, "abcd", 4 + 3 + 1),
        # A·B, x·A, g·Bᵀ for norm and sum, and two sums
        (low_rank, "d", 4 + 1 + 1 + 2 + 2),
    ],
    ids=["all", "last", "upper", "between", "biases", "lora"],
)
def test_frozen_layers_are_not_captured(prepare, paths, count):
    model, x, y = private(prepare)
    assert captured(model, x, y) == list(paths)
    assert products(model, x, y) == count


@pytest.mark.parametrize(
    "prepare",
    [freeze("a", "b", "c"), freeze("b"), biases_only, low_rank],
    ids=["last", "between", "biases", "lora"],
)
def test_gradients_equal_the_loop(prepare, float64):
    model, x, y = private(prepare, (3, 4))
    report = keras_fastclip.check_gradients(model, x, y)
    # Keras holds LoRA's weights in float32 always.
    assert report.relative_error < (1e-6 if prepare is low_rank else 1e-9)


def test_adapters_beside_frozen_layers_equal_the_loop(float64):
    inputs = x = keras.Input((3, 4))
    for _ in range(2):
        x = layers.Dense(4, trainable=False)(x)
        inner = layers.Dense(2, activation="gelu")(x)
        x = layers.Add()([x, layers.Dense(4)(inner)])
    model = keras_fastclip.DPModel(
        inputs, x, l2_norm_clip=0.1, noise_multiplier=0.0, strict=True
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    data = rng.normal(size=(2, 5, 3, 4))
    report = keras_fastclip.check_gradients(model, *data)
    assert report.relative_error < 1e-9
    assert len(model._privacy.plan(model, (*data, None)).units) == 4
