"""GELU with a derivative of its own, against Keras's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_fastclip.registry.activation import with_own_derivative
from tests.registry.helpers import built, check_rule, random

gelu = with_own_derivative(keras.activations.gelu)


def derivative(function, x, g):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y, tape.gradient(y, x, g)


@pytest.mark.parametrize(
    "dtype, close", [("float32", 2e-6), ("float64", 1e-13)]
)
@pytest.mark.parametrize("run", ["eager", "graph", "xla"])
def test_values_and_derivatives_are_those_of_keras(dtype, close, run):
    far = [-1e30, -100.0, -10.0, -1e-20, 0.0, 1e-20, 10.0, 100.0, 1e18]
    x = tf.constant(np.concatenate([np.linspace(-9, 9, 999), far]), dtype)
    g = tf.cast(random(*x.shape), dtype)
    of = derivative
    if run != "eager":
        of = tf.function(derivative, jit_compile=run == "xla")
    exact = derivative(keras.activations.gelu, x, g)
    for mine, right in zip(of(gelu, x, g), exact, strict=True):
        assert mine.dtype == dtype
        np.testing.assert_allclose(mine, right, close, close)


def test_second_derivatives_are_those_of_keras(float64):
    x = random(50)

    def second(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            first = derivative(function, x, tf.ones_like(x))[1]
        return tape.gradient(first, x)

    exact = second(keras.activations.gelu)
    np.testing.assert_allclose(second(gelu), exact, 1e-12, 1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_left_to_keras(dtype):
    x = tf.cast(random(50), dtype)
    pairs = zip(
        derivative(gelu, x, tf.ones_like(x)),
        derivative(keras.activations.gelu, x, tf.ones_like(x)),
        strict=True,
    )
    for mine, right in pairs:
        np.testing.assert_array_equal(mine, right)


def test_other_activations_are_left_as_they_are():
    def own(x):
        return keras.activations.gelu(x, approximate=True)

    for activation in (None, own, keras.activations.relu):
        assert with_own_derivative(activation) is activation


def test_a_layer_with_it_has_the_gradients_of_autodiff(float64):
    x = random(4, 3, 5)
    check_rule(built(keras.layers.Dense(6, activation="gelu"), x), x)
