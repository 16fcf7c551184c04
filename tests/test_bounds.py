"""The bound on one example holds where numbers are rounded or lost."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip.registry import linear

pytestmark = pytest.mark.filterwarnings("ignore:No rule is registered")


def private(inputs, outputs, method="auto", jit=False, loss="mse"):
    model = keras_fastclip.DPModel(
        inputs,
        outputs,
        l2_norm_clip=1.0,
        noise_multiplier=0.0,
        expected_batch_size=1,
        method=method,
    )
    model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=jit)
    return model


def update_norm(model, x, y):
    before = model.get_weights()
    model.train_on_batch(x, y)
    return np.sqrt(
        sum(
            np.sum((a.astype("float64") - b) ** 2)
            for a, b in zip(model.get_weights(), before, strict=True)
        )
    )


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: layers.Dense(64, kernel_initializer="zeros"), (3,)),
        (lambda: layers.Dense(64, kernel_initializer="zeros"), (4, 3)),
        (lambda: layers.Conv1D(64, 2, kernel_initializer="zeros"), (4, 3)),
    ],
    ids=["vectors", "sequences", "convolution"],
)
def test_squares_that_are_too_small_to_hold(make, shape, jit):
    """1e-19 squared is zero in float32, yet 1e-19 times 1e19 is one."""
    inputs = keras.Input(shape)
    layer = make()
    outputs = layer(inputs)
    layer.bias.trainable = False
    model = private(inputs, outputs, "bk", jit)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, *shape)).astype("float32")
    y = rng.normal(size=(4, *outputs.shape[1:])).astype("float32")
    model.train_on_batch(x, y)  # checks the model on ordinary numbers
    layer.kernel.assign(tf.zeros_like(layer.kernel))
    tiny, huge = np.full_like(x[:1], 9e-20), np.full_like(y[:1], 1e19)
    assert update_norm(model, tiny, huge) < 1 + 1e-6


LAYERS = {
    "lora": lambda: layers.Dense(6, lora_rank=2),
    "separable": lambda: layers.SeparableConv1D(6, 2),
    "transposed": lambda: layers.Conv1DTranspose(6, 2),
    "gru": lambda: layers.GRU(6, return_sequences=True),
    "lstm": lambda: layers.LSTM(6, return_sequences=True),
}


@pytest.mark.parametrize("method", ["auto", "bk"])
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision(name, method):
    """Norms must be those of the very tensors that are summed."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        inputs = keras.Input((5, 4))
        hidden = LAYERS[name]()(inputs)
        outputs = layers.Dense(3, dtype="float32", trainable=False)(hidden)
        model = private(inputs, outputs, method)
    finally:
        keras.config.set_dtype_policy("float32")
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    for _ in range(4):
        x = rng.normal(size=(1, 5, 4)).astype("float32")
        y = 100 * rng.normal(size=(1, *outputs.shape[1:])).astype("float32")
        # The weights are rounded when they move.
        assert update_norm(model, x, y) < 1 + 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_ids_that_the_table_does_not_have(tied):
    """XLA takes some row for them, and lets their gradients go."""
    inputs = keras.Input((4,), dtype="int32")
    table = layers.ReversibleEmbedding(5, 3, tie_weights=tied)
    outputs = table(layers.Dense(3)(table(inputs)), reverse=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = private(inputs, outputs, jit=True, loss=loss)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(3 * rng.normal(size=variable.shape))
    x, y = rng.integers(0, 5, (2, 4, 4))
    model.train_on_batch(x, y)
    for unknown in (5, 7, 1000):
        assert update_norm(model, x[:1] * 0 + unknown, y[:1]) < 1 + 1e-6
        mixed = np.where(np.arange(4) < 2, x[:1], unknown)
        assert update_norm(model, mixed, y[:1]) < 1 + 1e-6


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("positions", [2, 16, 64, 150, 300, 700, 1500])
@pytest.mark.parametrize("value", [0.1, 1 / 3])
def test_ghost_norms_of_constant_inputs_are_not_too_small(
    positions, value, jit
):
    """All terms are rounded the same way, and XLA adds them one by one."""
    a = tf.fill([1, positions, 3], value)
    g = tf.fill([1, positions, 5], value)
    norm = tf.function(linear.ghost_norm, jit_compile=jit)
    exact = 15 * (positions * np.float64(np.float32(value)) ** 2) ** 2
    assert norm(a, g).numpy()[0] >= exact
    assert norm(a, g).numpy()[0] <= exact * (1 + 1e-4)
