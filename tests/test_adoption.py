"""Weights whose layer cannot be captured belong to the layer around it."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_fastclip

pytestmark = pytest.mark.filterwarnings("ignore:No rule is registered")


class Experts(layers.Layer):
    """All tokens of the batch through all experts; the batch is not first."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(2, shape[-1], 3))

    def call(self, tokens):
        return ops.einsum("td,edh->eth", tokens, self.kernel)


class Routed(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.router = layers.Dense(2, activation="softmax")
        self.experts = Experts()

    def build(self, shape):
        self.router.build(shape)
        self.experts.build((None, shape[-1]))

    def call(self, x):
        length, width = x.shape[1:]
        tokens = ops.reshape(x, (-1, width))
        weights = ops.transpose(self.router(tokens))[..., None]
        mixed = ops.sum(self.experts(tokens) * weights, 0)
        return ops.reshape(mixed, (-1, length, 3))


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.routed = Routed()
        self.dense = layers.Dense(3)

    def build(self, shape):
        self.routed.build(shape)
        self.dense.build((*shape[:-1], 3))

    def call(self, x):
        return self.dense(self.routed(x))


class ReadsItsChild(layers.Layer):
    """Uses the kernel of a layer inside it a second time."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return ops.matmul(self.dense(x), ops.transpose(self.dense.kernel))


class ReadsGrandchild(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = ReadsItsChild()

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x) + ops.sum(self.inner.dense.bias)


@pytest.mark.parametrize("make", [Block, ReadsItsChild, ReadsGrandchild])
def test_gradients_equal_the_loop(make, float64):
    inputs = keras.Input((3, 4))
    hidden = layers.Dense(4)(inputs)
    model = keras_fastclip.DPModel(
        inputs,
        layers.Dense(2)(make()(hidden)),
        l2_norm_clip=0.3,
        noise_multiplier=0.0,
    )
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    model.compile("sgd", "mse")
    x, y = rng.normal(size=(5, 3, 4)), rng.normal(size=(5, 3, 2))
    report = keras_fastclip.check_gradients(model, x, y)
    assert report.relative_error < 1e-9, report


def test_only_what_cannot_be_captured_is_adopted(float64):
    inputs = keras.Input((3, 4))
    model = keras_fastclip.DPModel(
        inputs, Block()(inputs), l2_norm_clip=0.3, noise_multiplier=0.0
    )
    model.compile("sgd", "mse")
    data = np.random.default_rng(0).normal(size=(2, 5, 3, 4))
    plan = model._privacy.plan(model, (data[0], data[1][..., :3], None))
    owners = {unit.path: len(unit.variables) for unit in plan.units}
    assert sorted(owners.values()) == [1, 2, 2]
    (adopter,) = [path for path, count in owners.items() if count == 1]
    assert "routed" in adopter and "experts" not in adopter


class ReadsOutside(keras_fastclip.DPModel):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4, name="dense")

    def call(self, x):
        return ops.matmul(self.dense(x), ops.transpose(self.dense.kernel))


def test_weight_that_is_read_outside_of_all_layers_is_refused():
    model = ReadsOutside(l2_norm_clip=0.3, noise_multiplier=0.0)
    model.compile("sgd", "mse")
    data = np.random.default_rng(0).normal(size=(2, 5, 4)).astype("float32")
    with pytest.raises(keras_fastclip.NotPrivateError, match="dense/kernel"):
        keras_fastclip.check_gradients(model, *data)


def test_strict_refuses_the_layer_around():
    inputs = keras.Input((3, 4))
    model = keras_fastclip.DPModel(
        inputs,
        ReadsItsChild(name="reads")(inputs),
        l2_norm_clip=0.3,
        noise_multiplier=0.0,
        strict=True,
    )
    model.compile("sgd", "mse")
    data = np.random.default_rng(0).normal(size=(2, 5, 3, 4))
    with pytest.raises(keras_fastclip.NotPrivateError, match="reads"):
        keras_fastclip.check_gradients(model, *data.astype("float32"))
