"""The zoo: one small model of every ordinary kind, with data to train it on.

`ZOO` maps names to functions that return `(build, x, y, loss)`: `build(make)`
makes the model, where `make(inputs, outputs)` is a model class with its privacy
settings bound by `functools.partial`.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import keras_fastclip

ZOO = {}
CLASSES = 3


def entry(function):
    ZOO[function.__name__] = function
    return function


def random(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(keras.config.floatx())


def labels(*shape, seed=1, high=CLASSES):
    return np.random.default_rng(seed).integers(0, high, shape)


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


BATCH = 6


# -- layers ------------------------------------------------------------------


class Scale(layers.Layer):
    """y = x · scale, with a rule of its own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="normal")

    def call(self, x):
        return x * self.scale


@keras_fastclip.register(Scale)
def scale_rule(layer, x):
    def omega(g):
        sums = tf.reduce_sum(g * x, list(range(1, x.shape.rank - 1)))
        return tf.reduce_sum(tf.square(sums), -1)

    return x * layer.scale, omega


class Quadratic(layers.Layer):
    """y = (x·W)² + x·U + b, with no rule."""

    def build(self, shape):
        d = shape[-1]
        self.w = self.add_weight(shape=(d, 4), initializer="glorot_normal")
        self.u = self.add_weight(shape=(d, 4), initializer="glorot_normal")
        self.b = self.add_weight(shape=(4,), initializer="normal")

    def call(self, x):
        return ops.matmul(x, self.w) ** 2 + ops.matmul(x, self.u) + self.b


class NoisyQuadratic(Quadratic):
    """Draws random numbers inside a layer that has no rule."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    def call(self, x, training=None):
        return super().call(self.dropout(x, training=training))


class ClassToken(layers.Layer):
    """A weight of its own beside a sublayer with weights."""

    def __init__(self):
        super().__init__()
        self.projection = layers.Dense(4)

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, 4), initializer="normal")
        self.projection.build(shape)

    def call(self, x):
        x = self.projection(x)
        token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, 4))
        return ops.concatenate([token, x], axis=1)


class GatedAttention(layers.Layer):
    """Its sublayer finds the mask on the tensor, not among the arguments."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4)
        self.supports_masking = True

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1],), initializer="normal")
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.gate * self.attention(x, x)


class Positions(layers.Layer):
    """Looks positions up without a batch axis."""

    def __init__(self, length, width, stacked=True):
        super().__init__()
        self.table = layers.Embedding(length, width)
        self.length, self.stacked = length, stacked
        self.supports_masking = True

    def call(self, x):
        positions = ops.arange(self.length)
        if self.stacked:
            positions = positions[None]
        return x + self.table(positions)


class Windows(layers.Layer):
    """Folds windows of a sequence into the batch axis."""

    def __init__(self, example_major=True):
        super().__init__()
        self.inner = layers.Dense(4, activation="tanh")
        self.kernel = layers.Conv1D(3, 2)
        self.example_major = example_major

    def call(self, x):
        x = ops.reshape(x, (-1, 2, 3, x.shape[-1]))
        if not self.example_major:
            x = ops.transpose(x, (1, 0, 2, 3))
        x = self.kernel(self.inner(ops.reshape(x, (-1, 3, x.shape[-1]))))
        if self.example_major:
            return ops.reshape(x, (-1, 4, 3))
        x = ops.reshape(x, (2, -1, 2, 3))
        return ops.reshape(ops.transpose(x, (1, 0, 2, 3)), (-1, 4, 3))


def feed_forward(x, width):
    y = layers.Dense(2 * width, activation="gelu")(
        layers.LayerNormalization()(x)
    )
    return x + layers.Dense(width)(y)


# -- models ------------------------------------------------------------------


@entry
def mlp():
    def build(make):
        x = keras.Input((5,))
        y = layers.Dense(7, activation="relu")(x)
        y = layers.Dense(4, activation="tanh", use_bias=False)(y)
        return make(x, layers.Dense(CLASSES)(y))

    return build, random(BATCH, 5), labels(BATCH), cross_entropy()


@entry
def cnn():
    def build(make):
        x = keras.Input((8, 7, 2))
        y = layers.Conv2D(4, 3, padding="same", activation="tanh")(x)
        y = layers.Conv2D(6, (3, 2), strides=2, groups=2)(y)
        y = layers.Conv2D(3, 2, dilation_rate=2, padding="same")(y)
        y = layers.Flatten()(layers.MaxPooling2D(2)(y))
        return make(x, layers.Dense(CLASSES)(y))

    return build, random(BATCH, 8, 7, 2), labels(BATCH), cross_entropy()


@entry
def resnet():
    def block(x, filters, stride):
        y = layers.Conv2D(filters, 3, stride, "same", use_bias=False)(x)
        y = layers.ReLU()(layers.GroupNormalization(2)(y))
        y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
        y = layers.GroupNormalization(2)(y)
        if stride > 1:
            x = layers.Conv2D(filters, 1, stride, use_bias=False)(x)
        return layers.ReLU()(layers.Add()([x, y]))

    def build(make):
        x = keras.Input((8, 8, 3))
        y = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
        y = block(block(y, 4, 1), 8, 2)
        y = layers.GlobalAveragePooling2D()(y)
        return make(x, layers.Dense(CLASSES)(y))

    return build, random(BATCH, 8, 8, 3), labels(BATCH), cross_entropy()


@entry
def encoder():
    def build(make):
        x = keras.Input((6,), dtype="int32")
        y = layers.Embedding(11, 8, mask_zero=True)(x)
        y = Positions(6, 8)(y)
        attended = layers.MultiHeadAttention(2, 4)(y, y)
        y = feed_forward(layers.LayerNormalization()(y + attended), 8)
        y = layers.GlobalAveragePooling1D()(y)
        return make(x, layers.Dense(CLASSES)(y))

    return build, labels(BATCH, 6, high=11), labels(BATCH), cross_entropy()


@entry
def decoder():
    def build(make):
        x = keras.Input((6,), dtype="int32")
        y = Positions(6, 8, stacked=False)(layers.Embedding(11, 8)(x))
        normed = layers.RMSNormalization()(y)
        y = y + layers.GroupQueryAttention(4, 4, 2)(
            normed, normed, use_causal_mask=True
        )
        return make(x, layers.Dense(11, use_bias=False)(feed_forward(y, 8)))

    tokens = labels(BATCH, 7, high=11)
    return build, tokens[:, :-1], tokens[:, 1:], cross_entropy()


@entry
def nested():
    def build(make):
        inner_in = keras.Input((4,))
        inner = keras.Model(inner_in, layers.Dense(4, "tanh")(inner_in))
        stack = keras.Sequential([layers.Dense(4, "relu"), inner])
        x = keras.Input((5,))
        return make(x, layers.Dense(CLASSES)(stack(x)))

    return build, random(BATCH, 5), labels(BATCH), cross_entropy()


@entry
def subclassed():
    def build(make):
        class Subclassed(make.func):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.hidden = layers.Dense(6, activation="tanh")
                self.temperature = self.add_weight(shape=(), initializer="ones")
                self.head = layers.Dense(CLASSES)

            def call(self, x):
                return self.head(self.hidden(x)) * self.temperature

        return Subclassed(**make.keywords)

    return build, random(BATCH, 5), labels(BATCH), cross_entropy()


@entry
def custom_with_rule():
    def build(make):
        x = keras.Input((4, 5))
        y = Scale()(layers.Dense(6)(Scale()(x)))
        return make(x, layers.Dense(CLASSES)(layers.Flatten()(y)))

    return build, random(BATCH, 4, 5), labels(BATCH), cross_entropy()


@entry
def custom_without_rule():
    def build(make):
        x = keras.Input((4, 5))
        y = Quadratic()(layers.Dense(5)(x))
        return make(x, layers.Dense(CLASSES)(layers.Flatten()(y)))

    return build, random(BATCH, 4, 5), labels(BATCH), cross_entropy()


@entry
def own_weight_and_sublayer():
    def build(make):
        x = keras.Input((4, 5))
        y = feed_forward(ClassToken()(x), 4)
        return make(x, layers.Dense(CLASSES)(y[:, 0]))

    return build, random(BATCH, 4, 5), labels(BATCH), cross_entropy()


@entry
def implicit_masks():
    def build(make):
        x = keras.Input((6,), dtype="int32")
        y = layers.ReversibleEmbedding(5, 4, mask_zero=True)(x)
        y = GatedAttention()(y)
        return make(x, layers.Dense(5)(y))

    tokens = labels(BATCH, 7, high=5)
    return build, tokens[:, :-1], tokens[:, 1:], cross_entropy()


@entry
def layer_called_three_times():
    def build(make):
        x = keras.Input((4, 5))
        shared = layers.Dense(5, activation="tanh")
        y = shared(shared(shared(x)))
        return make(x, layers.Dense(CLASSES)(layers.Flatten()(y)))

    return build, random(BATCH, 4, 5), labels(BATCH), cross_entropy()


@entry
def tied_embedding():
    def build(make):
        x = keras.Input((6,), dtype="int32")
        table = layers.ReversibleEmbedding(11, 8)
        y = feed_forward(table(x), 8)
        return make(x, table(y, reverse=True))

    tokens = labels(BATCH, 7, high=11)
    return build, tokens[:, :-1], tokens[:, 1:], cross_entropy()


@entry
def recurrent():
    def build(make):
        x = keras.Input((5,), dtype="int32")
        y = layers.Embedding(9, 4, mask_zero=True)(x)
        y = layers.LSTM(3)(y)
        return make(x, layers.Dense(CLASSES)(y))

    return build, labels(BATCH, 5, high=9), labels(BATCH), cross_entropy()


@entry
def time_distributed():
    def build(make):
        x = keras.Input((4, 6, 2))
        y = layers.TimeDistributed(layers.Conv1D(3, 2, activation="relu"))(x)
        return make(x, layers.Dense(CLASSES)(layers.Flatten()(y)))

    return build, random(BATCH, 4, 6, 2), labels(BATCH), cross_entropy()


@entry
def windows():
    def build(make):
        x = keras.Input((6, 3))
        y = Windows()(x)
        return make(x, layers.Dense(CLASSES)(layers.Flatten()(y)))

    return build, random(BATCH, 6, 3), labels(BATCH), cross_entropy()


@entry
def windows_batch_minor():
    def build(make):
        x = keras.Input((6, 3))
        y = Windows(example_major=False)(x)
        return make(x, layers.Dense(CLASSES)(layers.Flatten()(y)))

    return build, random(BATCH, 6, 3), labels(BATCH), cross_entropy()


@entry
def frozen():
    def build(make):
        x = keras.Input((5,))
        y = layers.Dense(7, activation="relu", trainable=False)(x)
        bias_only = layers.Dense(4, activation="tanh")
        y = bias_only(y)
        bias_only._kernel.trainable = False
        return make(x, layers.Dense(CLASSES)(y))

    return build, random(BATCH, 5), labels(BATCH), cross_entropy()


@entry
def lora():
    def build(make):
        x = keras.Input((4, 5))
        low_rank = layers.Dense(6, activation="relu")
        y = low_rank(x)
        low_rank.enable_lora(2)
        low_rank.lora_kernel_b.assign(random(2, 6, seed=7))
        return make(x, layers.Dense(CLASSES)(layers.Flatten()(y)))

    return build, random(BATCH, 4, 5), labels(BATCH), cross_entropy()
