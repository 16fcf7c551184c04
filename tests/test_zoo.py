"""Every model of the zoo against the loop over single examples."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_fastclip
from keras_fastclip.checking import loop_over_examples
from tests.zoo import ZOO

CLIP = 0.3


def private(name, **settings):
    """A private model of the zoo, compiled, with its data."""
    build, x, y, loss = ZOO[name]()
    settings = {
        "l2_norm_clip": CLIP,
        "noise_multiplier": 0.0,
        "expected_batch_size": 1,
        **settings,
    }
    model = build(functools.partial(keras_fastclip.DPModel, **settings))
    model.compile(keras.optimizers.SGD(1.0), loss)
    model(x)  # builds it, for those that compare weights before and after
    return model, tf.constant(x), tf.constant(y)


def relative_error(found, right):
    gap = sum(
        np.sum(np.square(f - r)) for f, r in zip(found, right, strict=True)
    )
    return np.sqrt(gap / sum(np.sum(np.square(r)) for r in right))


@pytest.fixture(autouse=True)
def no_fallback_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No rule is registered")
        yield


@pytest.mark.parametrize("name", ZOO)
def test_equals_loop_in_float64(name, float64):
    model, x, y = private(name)
    right = loop_over_examples(model, (x, y, None), model._privacy.clipping)
    assert np.min(right[1]) > 0
    runs = {"eager": model.clipped_gradients}
    runs["graph"] = tf.function(model.clipped_gradients)
    runs["xla"] = tf.function(model.clipped_gradients, jit_compile=True)
    # Keras holds LoRA weights in float32 always.
    tolerance = 1e-6 if name == "lora" else 1e-9
    for run in runs.values():
        sums, squared_norms = run(x, y)
        assert relative_error(sums, right[0]) < tolerance
        np.testing.assert_allclose(squared_norms, right[1], rtol=tolerance)


@pytest.mark.parametrize("name", ZOO)
def test_equals_loop_in_float32(name):
    model, x, y = private(name)
    right = loop_over_examples(model, (x, y, None), model._privacy.clipping)
    sums, squared_norms = tf.function(model.clipped_gradients)(x, y)
    assert relative_error(sums, right[0]) < 1e-5
    np.testing.assert_allclose(
        np.sqrt(squared_norms), np.sqrt(right[1]), rtol=1e-5
    )
