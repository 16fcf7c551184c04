"""Peak memory of training, each case in a process of its own."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_fastclip
from benchmarks.processes import measured

MEGABYTE = 2**20


def long_sequence():
    inputs = keras.Input((8192, 32))
    x = layers.Dense(64, activation="relu")(inputs)
    return inputs, layers.Dense(1)(x), np.ones((4, 8192, 32), "float32")


def large_table():
    inputs = keras.Input((16,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(1_000_000, 8)(inputs))
    return inputs, layers.Dense(1)(x), np.arange(1024).reshape(64, 16)


def wide_kernels():
    """Four kernels; for 64 examples, each has gradients of 268 MB."""
    inputs = x = keras.Input((64, 1024))
    for _ in range(4):
        x = layers.Dense(1024, activation="tanh", use_bias=False)(x)
    return inputs, x, np.ones((64, 64, 1024), "float32")


def many_examples():
    """A layer's activations take 67 MB, the kernels less than one."""
    inputs = x = keras.Input((64, 256))
    for _ in range(6):
        x = layers.Dense(256, activation="tanh")(x)
    return inputs, x, np.ones((1024, 64, 256), "float32")


def words(examples):
    """Activations take some 160 KB for an example, its words 64 bytes."""
    inputs = keras.Input((16,), dtype="int32")
    x = layers.Embedding(1000, 256)(inputs)
    for _ in range(4):
        x = layers.Dense(256, activation="tanh")(x)
    outputs = layers.Dense(1)(layers.GlobalAveragePooling1D()(x))
    return inputs, outputs, np.arange(16 * examples).reshape(-1, 16) % 1000


def sixteen_examples():
    return words(16)


def four_thousand_examples():
    return words(4096)


def train(build, method, **settings):
    """Two steps, of a plain model if there is no method."""
    inputs, outputs, x = build()
    if method is None:
        model = keras.Model(inputs, outputs)
    else:
        model = keras_fastclip.DPModel(
            inputs,
            outputs,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            method=method,
            expected_batch_size=len(x),
            **settings,
        )
    model.compile("sgd", "mse")
    y = np.zeros((len(x), *outputs.shape[1:]), "float32")
    for _ in range(2):
        model.train_on_batch(x, y)


def extra(build, method, **settings):
    """Megabytes beyond plain training."""
    _, plain = measured(train, build, None)
    _, private = measured(_train, build, method, settings)
    return private - plain


def _train(build, method, settings):
    train(build, method, **settings)


def test_long_sequences_have_no_square_of_their_length():
    """T² numbers of 4 examples are 1 GB; twice, for both Gram matrices."""
    assert extra(long_sequence, "auto") < 400
    assert extra(long_sequence, "bk") > 2000


@pytest.mark.parametrize("method", ["auto", "opacus", "ghost"])
def test_large_tables_are_not_built_for_each_example(method):
    """A table of 30 MB, its sums and noise; for each example it were 2 GB."""
    assert extra(large_table, method) < 500


def test_memory_follows_the_budget():
    """All gradients of 64 examples take 1 GB."""
    assert extra(wide_kernels, "auto", memory_budget=150 * MEGABYTE) < 300
    assert extra(wide_kernels, "opacus") > 900


def test_physical_batches_take_the_memory_of_a_few_examples():
    """Activations and their gradients go, of which plain training has all."""
    assert extra(many_examples, "auto", physical_batch_size=16) < -300


def test_a_logical_batch_of_4096_takes_the_memory_of_16():
    settings = {"physical_batch_size": 16}
    _, few = measured(_train, sixteen_examples, "auto", settings)
    _, many = measured(_train, four_thousand_examples, "auto", settings)
    _, at_once = measured(_train, four_thousand_examples, "auto", {})
    assert many < few + 50
    assert at_once > few + 400
