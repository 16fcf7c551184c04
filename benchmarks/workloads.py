"""Seven ordinary models, the same for every method that is compared.

float32, random inputs, plain SGD; the sizes are those at which the papers'
methods differ. And recurrent layers, each by itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with its loss and data.

    Attributes:
        batch: examples in a batch.
        build: returns (inputs, outputs) of a functional model.
        data: from a generator and a batch size to (x, y).
        loss: makes the loss.
    """

    batch: int
    build: Callable[[], tuple[Any, Any]]
    data: Callable[[np.random.Generator, int], tuple[Any, Any]]
    loss: Callable[[], keras.Loss]


def _cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _images(rng, n):
    x = rng.normal(size=(n, 32, 32, 3)).astype("float32")
    return x, rng.integers(0, 10, n)


def _ids(length, vocabulary, classes):
    def data(rng, n):
        x = rng.integers(0, vocabulary, (n, length)).astype("int32")
        return x, rng.integers(0, classes, n)

    return data


def _mlp():
    x = keras.Input((3072,))
    y = x
    for _ in range(10):
        y = layers.Dense(1000, activation="relu")(y)
    return x, layers.Dense(10)(y)


def _cnn():
    x = keras.Input((32, 32, 3))
    y = x
    for filters in (32, 64, 128):
        for _ in range(2):
            y = layers.Conv2D(filters, 3, padding="same", activation="tanh")(y)
        y = layers.MaxPooling2D(2)(y)
    y = layers.Dense(128, activation="tanh")(layers.Flatten()(y))
    return x, layers.Dense(10)(y)


def _resnet():
    def conv(x, filters, size=3, stride=1):
        x = layers.Conv2D(filters, size, stride, "same", use_bias=False)(x)
        return layers.GroupNormalization(16)(x)

    x = keras.Input((32, 32, 3))
    y = layers.ReLU()(conv(x, 64))
    for filters in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if filters > 64 and block == 0 else 1
            z = conv(layers.ReLU()(conv(y, filters, 3, stride)), filters)
            if stride == 2:
                y = conv(y, filters, 1, 2)
            y = layers.ReLU()(layers.Add()([y, z]))
    return x, layers.Dense(10)(layers.GlobalAveragePooling2D()(y))


class Positions(layers.Layer):
    """Adds a row of a table to each position."""

    def __init__(self, length, width):
        super().__init__()
        self.length = length
        self.table = layers.Embedding(length, width)

    def call(self, x):
        return x + self.table(keras.ops.arange(self.length)[None])


def _feed_forward(x):
    return layers.Dense(256)(layers.Dense(1024, activation="gelu")(x))


def _bert():
    x = keras.Input((128,), dtype="int32")
    y = Positions(128, 256)(layers.Embedding(30522, 256)(x))
    y = layers.LayerNormalization()(y)
    for _ in range(4):
        attended = layers.MultiHeadAttention(4, 64)(y, y)
        y = layers.LayerNormalization()(y + attended)
        y = layers.LayerNormalization()(y + _feed_forward(y))
    return x, layers.Dense(2)(layers.GlobalAveragePooling1D()(y))


def _gpt():
    x = keras.Input((100,), dtype="int32")
    y = Positions(100, 256)(layers.Embedding(10000, 256)(x))
    for _ in range(4):
        z = layers.LayerNormalization()(y)
        y = y + layers.MultiHeadAttention(4, 64)(z, z, use_causal_mask=True)
        y = y + _feed_forward(layers.LayerNormalization()(y))
    y = layers.LayerNormalization()(y)
    return x, layers.Dense(10000, use_bias=False)(y)


def _gpt_data(rng, n):
    tokens = rng.integers(0, 10000, (n, 101)).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]


def _lstm():
    x = keras.Input((100,), dtype="int32")
    y = layers.LSTM(128)(layers.Embedding(10000, 100)(x))
    return x, layers.Dense(2)(y)


def _rec():
    x = keras.Input((64,), dtype="int32")
    y = layers.GlobalAveragePooling1D()(layers.Embedding(100000, 32)(x))
    return x, layers.Dense(1)(layers.Dense(64, activation="relu")(y))


def _recurrent(layer):
    def build():
        x = keras.Input((100, 100))
        return x, layers.Dense(2)(layer(128)(x))

    return Workload(64, build, _sequences, _cross_entropy)


def _sequences(rng, n):
    x = rng.normal(size=(n, 100, 100)).astype("float32")
    return x, rng.integers(0, 2, n)


def _flat(rng, n):
    x = rng.normal(size=(n, 3072)).astype("float32")
    return x, rng.integers(0, 10, n)


def _binary():
    return keras.losses.BinaryCrossentropy(from_logits=True)


WORKLOADS = {
    "mlp": Workload(128, _mlp, _flat, _cross_entropy),
    "cnn": Workload(256, _cnn, _images, _cross_entropy),
    "resnet": Workload(32, _resnet, _images, _cross_entropy),
    "bert": Workload(32, _bert, _ids(128, 30522, 2), _cross_entropy),
    "gpt": Workload(16, _gpt, _gpt_data, _cross_entropy),
    "lstm": Workload(64, _lstm, _ids(100, 10000, 2), _cross_entropy),
    "rec": Workload(512, _rec, _ids(64, 100000, 2), _binary),
}

# Not among the seven: what becomes of single layers.
LAYERS = {
    "simple_rnn_layer": _recurrent(layers.SimpleRNN),
    "lstm_layer": _recurrent(layers.LSTM),
    "gru_layer": _recurrent(layers.GRU),
}
ALL = {**WORKLOADS, **LAYERS}
