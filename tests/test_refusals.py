"""What cannot be clipped exactly is refused before the first update."""

import functools
import gc
import unittest.mock
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_fastclip
from keras_fastclip import _keras, probe
from keras_fastclip.checking import check_gradients
from keras_fastclip.registry import linear
from tests.zoo import NoisyQuadratic, Quadratic, labels, random

ROWS = 8
SETTINGS = {"l2_norm_clip": 0.5, "noise_multiplier": 1.0}


def private(outputs, shape=(4,), dtype=None, **settings):
    """A private model from a function of its input."""
    x = keras.Input(shape, dtype=dtype)
    return keras_fastclip.DPModel(x, outputs(x), **{**SETTINGS, **settings})


def compiled(model, loss="mse", optimizer="sgd", **kwargs):
    model.compile(optimizer, loss, **kwargs)
    return model


def around(layer, **settings):
    """A model with a layer in its middle."""

    def outputs(x):
        y = layer(layers.Dense(4, activation="tanh")(x))
        return layers.Dense(3)(y)

    return compiled(private(outputs, **settings))


def plain(**settings):
    return private(layers.Dense(3, name="last"), **settings)


# name: (builder of a compiled model, words of the message)
CASES = {}
DATA = {}


def refused(*words, x=None, y=None, sample_weight=None):
    """Adds a model to the table; data are made by functions."""

    def add(build):
        CASES[build.__name__] = build, words
        DATA[build.__name__] = (
            x or (lambda: random(ROWS, 4)),
            y or (lambda: random(ROWS, 3, seed=2)),
            sample_weight or (lambda: None),
        )
        return build

    return add


def values(model):
    metrics = [v for m in model.metrics for v in m.variables]
    return [v.numpy() for v in [*model.variables, *metrics]]


def require_unchanged(before, after):
    for b, a in zip(before, after, strict=True):
        np.testing.assert_array_equal(b, a)


def require_no_interception(model):
    for layer in model._flatten_layers():
        assert "call" not in vars(layer)
        assert "quantized_call" not in vars(layer)
    if model.compiled and model._compile_loss is not None:
        for entry in model._compile_loss._flat_losses or []:
            assert isinstance(entry.loss, keras.Loss)


@pytest.fixture(autouse=True)
def no_fallback_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No rule is registered")
        yield


# -- layers that mix examples or keep statistics -----------------------------


@refused("'bn'", "BatchNormalization", "GroupNormalization", "trainable")
def batch_normalization():
    return around(layers.BatchNormalization(name="bn"))


@refused("'bn'", "BatchNormalization", "GroupNormalization", "trainable")
def batch_normalization_without_weights():
    return around(
        layers.BatchNormalization(scale=False, center=False, name="bn")
    )


@refused("'bn'", "BatchNormalization", "GroupNormalization", "trainable")
def batch_normalization_that_forgets():
    return around(layers.BatchNormalization(momentum=1.0, name="bn"))


@refused("'center'", "mixes examples", "own data alone")
def difference_from_the_mean_of_the_batch():
    return around(
        layers.Lambda(lambda x: x - ops.mean(x, axis=0), name="center")
    )


class Center(layers.Layer):
    def call(self, x, training=None):
        return x - ops.mean(x, axis=0) if training else x


@refused("'center'", "Center", "mixes examples", "own data alone")
def mixing_in_a_layer_of_its_own():
    return around(Center(name="center"))


@refused("'center'", "mixes examples")
def mixing_of_the_inputs():
    return compiled(
        private(lambda x: layers.Dense(3)(Center(name="center")(x)))
    )


@refused("'center'", "mixes examples")
def mixing_of_the_outputs():
    return compiled(
        private(lambda x: Center(name="center")(layers.Dense(3)(x)))
    )


@refused("'roll'", "mixes examples")
def roll_over_the_batch():
    return around(
        layers.Lambda(lambda x: x + ops.roll(x, 1, axis=0), name="roll")
    )


@refused("'inner/center'", "mixes examples")
def mixing_inside_a_nested_model():
    inner = keras.Sequential(
        [keras.Input((4,)), Center(name="center")], name="inner"
    )
    return around(inner)


@refused(
    "MixUp",
    "blends examples",
    x=lambda: {
        "images": np.abs(random(ROWS, 4, 4, 3)),
        "labels": np.eye(ROWS, 3, dtype="float32"),
    },
)
def mix_up():
    x = {
        "images": keras.Input((4, 4, 3), name="images"),
        "labels": keras.Input((3,), name="labels"),
    }
    mixed = layers.MixUp(seed=1)(x)
    y = layers.Dense(3)(layers.Flatten()(mixed["images"]))
    return compiled(keras_fastclip.DPModel(x, y, **SETTINGS))


def contrastive(y_true, y_pred):
    similarity = ops.matmul(y_pred, ops.transpose(y_pred))
    targets = ops.arange(ops.shape(y_pred)[0])
    return keras.losses.sparse_categorical_crossentropy(
        targets, similarity, from_logits=True
    )


@refused("loss", "mixes examples")
def contrastive_loss():
    return compiled(plain(), contrastive)


def ids():
    """Integers with the smallest in every example."""
    x = labels(ROWS, 5, high=9)
    x[:, 0] = 0
    return x


def embedded(transform):
    def outputs(x):
        y = layers.Lambda(transform, name="ids", output_shape=(5,))(x)
        return layers.Dense(3)(layers.Flatten()(layers.Embedding(9, 2)(y)))

    return compiled(private(outputs, (5,), "int32"))


@refused("'ids'", "mixes examples", x=lambda: labels(ROWS, 5, high=9))
def smallest_integer_of_the_batch():
    return embedded(lambda x: x - ops.min(x))


@refused("'ids'", "mixes examples", x=ids)
def smallest_integer_of_the_batch_that_all_examples_hold():
    return embedded(lambda x: x - ops.min(x))


@refused("'ids'", "mixes examples", x=lambda: np.tile(ids()[:1], (ROWS, 1)))
def integers_of_the_batch_in_equal_examples():
    return embedded(lambda x: x - ops.min(x))


def balanced(y_true, y_pred):
    """Weights classes by how often they are in the batch."""
    same = ops.equal(y_true, ops.transpose(y_true))
    count = ops.sum(ops.cast(same, y_pred.dtype), axis=1)
    return ops.mean(ops.square(y_pred), axis=-1) / count


@refused("loss", "mixes examples", y=lambda: labels(ROWS, 1, high=2))
def loss_that_counts_labels():
    return compiled(plain(), balanced)


@refused(
    "loss",
    "mixes examples",
    y=lambda: np.arange(ROWS)[:, None] // (ROWS - 2),
)
def loss_that_counts_labels_which_begin_equal():
    return compiled(plain(), balanced)


def quadruplets(y_true, y_pred):
    """Takes one example of the same class and two of different others."""
    other = ops.cast(ops.not_equal(y_true, ops.transpose(y_true)), "float32")
    same = 1 - other - ops.eye(ops.shape(y_pred)[0])
    gaps = ops.sum(ops.square(y_pred[:, None] - y_pred), axis=-1)
    others = ops.einsum("in,nm,im->i", other, other * gaps, other)
    return ops.sum(same * gaps, axis=1) * others


@refused("loss", "mixes examples", y=lambda: np.arange(ROWS)[:, None])
def loss_of_four_examples_that_are_rarely_together():
    return compiled(plain(), quadruplets)


class OwnLoss(keras_fastclip.DPModel):
    """A model whose loss is a function."""

    def __init__(self, *args, own=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.own = own

    def compute_per_example_loss(self, x, y, y_pred, sample_weight=None):
        return self.own(ops.mean((y - y_pred) ** 2, axis=-1), sample_weight)


def with_own_loss(own):
    x = keras.Input((4,))
    y = layers.Dense(3)(x)
    return compiled(OwnLoss(x, y, own=own, **SETTINGS))


@refused("loss", "batch", "own data alone")
def loss_divided_by_the_size_of_the_batch():
    return with_own_loss(
        lambda losses, _: losses / ops.cast(ops.shape(losses)[0], "float32")
    )


@refused("loss", "batch", "own data alone")
def loss_divided_by_the_size_of_the_batch_beside_dropout():
    def own(losses, _):
        return losses / ops.cast(ops.shape(losses)[0], "float32")

    x = keras.Input((4,))
    y = layers.Dense(3)(layers.Dropout(0.5)(x))
    return compiled(OwnLoss(x, y, own=own, **SETTINGS))


@refused(
    "loss",
    "mixes examples",
    sample_weight=lambda: np.ones(ROWS, "float32"),
)
def loss_divided_by_the_sum_of_sample_weights():
    return with_own_loss(lambda losses, weights: losses / ops.sum(weights))


@refused(
    "'center'",
    "mixes examples",
    sample_weight=lambda: np.float32(np.arange(ROWS) >= 4),
)
def mixing_that_sample_weights_of_zero_hide():
    return around(Center(name="center"))


class Statistic(layers.Layer):
    """Keeps something about the data in a variable."""

    def __init__(self, statistic, **kwargs):
        super().__init__(**kwargs)
        self.statistic = statistic

    def build(self, shape):
        self.kept = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="kept"
        )

    def call(self, x, training=None):
        if training:
            self.kept.assign_add(self.statistic(x))
        return x


@refused("'statistic'", "statistics of the data", "statistic/kept")
def statistic_of_the_data():
    return around(Statistic(ops.mean, name="statistic"))


@refused("'statistic'", "statistics of the data", "statistic/kept")
def count_of_the_examples():
    return around(
        Statistic(
            lambda x: ops.cast(ops.shape(x)[0], "float32"), name="statistic"
        )
    )


@refused("lstm", "stateful=False", x=lambda: random(ROWS, 5, 2))
def stateful_recurrent_layer():
    x = keras.Input((5, 2), batch_size=4)
    y = layers.LSTM(3, stateful=True, name="lstm")(x)
    return compiled(keras_fastclip.DPModel(x, y, **SETTINGS))


# -- losses ------------------------------------------------------------------


def one_number(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


@refused("one_number", "shape ()", "first axis is the batch")
def loss_of_one_number():
    return compiled(plain(), one_number)


def by_output(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=0)


@refused("by_output", "shape (3,)", "first axis is the batch")
def loss_with_another_leading_axis():
    return compiled(plain(), by_output)


@refused("'by_output'", "shape (3,)", "first axis is the batch")
def loss_with_another_leading_axis_for_one_of_two_outputs():
    return compiled(
        private(lambda x: [layers.Dense(3)(x), layers.Dense(3)(x)]),
        ["mse", by_output],
    )


DATA["loss_with_another_leading_axis_for_one_of_two_outputs"] = (
    lambda: random(ROWS, 4),
    lambda: [random(ROWS, 3, seed=2), random(ROWS, 3, seed=3)],
    lambda: None,
)


class OwnReduction(keras.losses.MeanSquaredError):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(self.call(y_true, y_pred))


@refused("'own'", "overrides `__call__`", "Override `call`")
def loss_that_overrides_its_reduction():
    return compiled(plain(), OwnReduction(name="own"))


@refused("'dense_of_activity'", "activity_regularizer", "add_loss")
def activity_regularizer():
    return around(
        layers.Dense(4, activity_regularizer="l2", name="dense_of_activity")
    )


class AddLoss(layers.Layer):
    def __init__(self, loss, **kwargs):
        super().__init__(**kwargs)
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


@refused("'adds'", "add_loss", "one value for each example")
def add_loss_of_one_number():
    return around(AddLoss(ops.mean, name="adds"))


@refused("'adds'", "add_loss", "shape (1,)", "first axis is the batch")
def add_loss_of_one_row():
    return around(AddLoss(lambda x: ops.mean(x)[None], name="adds"))


@refused("trained weight", "trainable")
def loss_of_no_trained_weight():
    model = plain()
    model.trainable = False
    return compiled(model)


@refused("trained weight", "trainable")
def loss_of_no_weight_at_all():
    def constant(y_true, y_pred):
        return ops.mean(ops.square(y_true), axis=-1)

    return compiled(plain(), constant)


# -- weights out of reach ----------------------------------------------------


class Outside(keras_fastclip.DPModel):
    """Reads a weight outside the call of its layer."""

    def __init__(self, call_too):
        super().__init__(**SETTINGS)
        self.first = layers.Dense(4, name="first")
        self.second = layers.Dense(3, name="second")
        self.call_too = call_too
        self.first.build((None, 4))
        self.second.build((None, 4))

    def call(self, x):
        y = self.first(x) if self.call_too else x
        return self.second(y @ self.first.kernel)


@refused("first/kernel", "outside the call", "freeze")
def kernel_read_outside_its_layer():
    return compiled(Outside(call_too=False))


@refused("first/kernel", "outside the call", "freeze")
def kernel_read_inside_and_outside_its_layer():
    return compiled(Outside(call_too=True))


class Traced(layers.Layer):
    """Reads its weight in a function that was traced before."""

    def build(self, shape):
        self.w = self.add_weight(
            shape=(shape[-1], 4), name="w", initializer="normal"
        )
        self.function = tf.function(lambda x: x @ self.w)
        self.function(tf.zeros([2, shape[-1]]))

    def call(self, x):
        return self.function(x)


@refused("traced/w", "compiled function")
def weight_in_a_traced_function():
    return around(Traced(name="traced"))


@refused("remat/kernel", "rematerialized")
def rematerialized_layer():
    with keras.RematScope(mode="full"):
        layer = layers.Dense(4, name="remat")
    return around(layer)


class Loop(layers.Layer):
    """Calls a layer in a loop of TensorFlow."""

    def __init__(self, map_fn, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(4, name="inner")
        self.map_fn = map_fn

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        if self.map_fn:
            return tf.map_fn(lambda row: self.inner(row[None])[0], x)
        _, x = tf.while_loop(
            lambda i, x: i < 2, lambda i, x: (i + 1, self.inner(x)), (0, x)
        )
        return x


@refused("loop/inner", "loop", "unroll")
def layer_in_a_while_loop():
    return around(Loop(map_fn=False, name="loop"))


@refused("loop/inner", "loop over the examples")
def layer_in_map_fn():
    return around(Loop(map_fn=True, name="loop"))


@refused("'float8'", "float8", "int8")
def layer_quantized_to_float8():
    layer = layers.Dense(4, name="float8")
    model = around(layer)
    layer.quantize("float8")
    return compiled(model)


# -- optimizers --------------------------------------------------------------


@refused("gradient_accumulation_steps=2", "batch_size")
def accumulation_by_the_optimizer():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    return compiled(plain(), optimizer=optimizer)


@refused("gradient_accumulation_steps=2", "batch_size")
def accumulation_below_loss_scaling():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return compiled(plain(), optimizer=optimizer)


@refused("OwnScaling", "mixed_bfloat16")
def loss_scaling_of_another_kind():
    class OwnScaling(keras.optimizers.LossScaleOptimizer):
        pass

    optimizer = OwnScaling(keras.optimizers.SGD())
    return compiled(plain(), optimizer=optimizer)


# -- rules -------------------------------------------------------------------


class Affine(layers.Layer):
    """y = x·w + b, elementwise."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="normal")
        self.b = self.add_weight(shape=(shape[-1],), initializer="normal")

    def call(self, x):
        return x * self.w + self.b


def with_rule(zeta, omega):
    registry = keras_fastclip.LayerRegistry(
        parent=keras_fastclip.registry.default_registry()
    )

    @keras_fastclip.register(Affine, registry)
    def rule(layer, x):
        return zeta(layer, x), functools.partial(omega, x)

    return around(Affine(name="affine"), registry=registry)


def right_zeta(layer, x):
    return x * layer.w + layer.b


def right_omega(x, g):
    return tf.reduce_sum(tf.square(g) * (1 + tf.square(x)), -1)


@refused("affine", "norms", "omega")
def rule_without_the_bias():
    return with_rule(
        right_zeta, lambda x, g: tf.reduce_sum(tf.square(g * x), -1)
    )


@refused("affine", "norms", "omega", x=lambda: 1e4 * random(ROWS, 4))
def rule_without_the_bias_beside_large_inputs():
    registry = keras_fastclip.LayerRegistry(
        parent=keras_fastclip.registry.default_registry()
    )

    @keras_fastclip.register(Affine, registry)
    def rule(layer, x):
        return right_zeta(layer, x), lambda g: tf.reduce_sum((g * x) ** 2, -1)

    return compiled(
        private(
            lambda x: layers.Dense(3)(Affine(name="affine")(x)),
            registry=registry,
        )
    )


@refused("affine", "norms", "omega")
def rule_with_a_factor():
    return with_rule(right_zeta, lambda x, g: 2 * right_omega(x, g))


@refused("affine", "another output", "zeta", "call")
def rule_with_another_output():
    return with_rule(lambda layer, x: 2 * right_zeta(layer, x), right_omega)


@refused("affine", "another output", "zeta", "call")
def rule_with_another_output_and_its_norms():
    return with_rule(
        lambda layer, x: x * layer.w,
        lambda x, g: tf.reduce_sum(tf.square(g * x), -1),
    )


@refused("affine", "shape (batch,)", "(2, 4)")
def rule_with_norms_of_another_shape():
    return with_rule(right_zeta, lambda x, g: tf.square(g) * (1 + x**2))


@refused("affine", "norms", "omega")
def rule_with_one_norm_for_the_batch():
    return with_rule(
        right_zeta, lambda x, g: tf.reduce_sum(right_omega(x, g))[None]
    )


@refused("quadratic", "Quadratic", "strict=True", "keras_fastclip.register")
def layer_without_rule_under_strict():
    return around(Quadratic(name="quadratic"), strict=True)


# -- data --------------------------------------------------------------------


@refused("finite", x=lambda: np.full((ROWS, 4), np.nan, "float32"))
def data_without_a_finite_example():
    return compiled(plain())


# -- clipping that does not fit the model ------------------------------------


@refused("lists 2 norms", "1 layers", "last")
def clipping_list_of_another_length():
    return compiled(plain(clipping=[0.3, 0.4]))


@refused("not found: ['other']", "missing: ['last']")
def clipping_of_an_unknown_layer():
    return compiled(plain(clipping={"other": 0.5}))


@refused("missing: ['second']")
def clipping_that_misses_a_layer():
    def outputs(x):
        y = layers.Dense(3, name="first")(x)
        return layers.Dense(3, name="second")(y)

    return compiled(private(outputs, clipping={"first": 0.5}))


# -- the table ---------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_refused_before_the_first_update(name):
    build, words = CASES[name]
    model = build()
    x, y, sample_weight = (make() for make in DATA[name])
    before = values(model)
    with pytest.raises((ValueError, RuntimeError)) as error:
        model.fit(x, y, 4, sample_weight=sample_weight, verbose=0)
    assert not isinstance(error.value, (tf.errors.OpError, NotImplementedError))
    for word in words:
        assert word in str(error.value)
    require_unchanged(before, values(model)[: len(before)])
    require_no_interception(model)
    assert int(model._privacy.steps) == 0


def test_mixing_is_found_in_a_single_example():
    model = around(Center(name="center"), expected_batch_size=1)
    before = values(model)
    with pytest.raises(ValueError, match="'center'.*mixes examples"):
        model.train_on_batch(random(1, 4), random(1, 3))
    require_unchanged(before, values(model)[: len(before)])


def test_a_model_that_was_refused_can_be_repaired():
    layer = layers.BatchNormalization(name="bn")
    model = around(layer)
    x, y = random(ROWS, 4), random(ROWS, 3)
    with pytest.raises(ValueError, match="'bn'"):
        model.fit(x, y, 4, verbose=0)
    layer.trainable = False
    before = values(model)
    model.fit(x, y, 4, epochs=1, steps_per_epoch=1, verbose=0)
    assert not np.array_equal(before[0], values(model)[0])


# -- what looks alike and is right -------------------------------------------


class InInference(layers.Layer):
    """Calls BatchNormalization in inference mode."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x):
        return self.norm(x, training=False)


class Steps(layers.Layer):
    """Counts its calls, which tells nothing about the data."""

    def build(self, shape):
        self.steps = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        self.steps.assign_add(1)
        return x


ACCEPTED = {
    "frozen": lambda: layers.BatchNormalization(trainable=False),
    "frozen_without_weights": lambda: layers.BatchNormalization(
        scale=False, center=False, trainable=False
    ),
    "in_inference_mode": InInference,
    "count_of_steps": Steps,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_and_right(name, float64):
    layer = ACCEPTED[name]()
    model = around(layer)
    statistics = [v for v in layer.non_trainable_variables if v.shape == (4,)]
    for index, variable in enumerate(statistics):
        variable.assign(np.exp(random(4, seed=index)))
    before = [v.numpy() for v in statistics]
    x, y = random(ROWS, 4), random(ROWS, 3, seed=2)
    assert check_gradients(model, x, y).relative_error < 1e-9
    model.fit(x, y, 4, steps_per_epoch=2, verbose=0)
    require_unchanged(before, [v.numpy() for v in statistics])
    if name == "count_of_steps":
        assert layer.steps.numpy() >= 2


def one_number_added(width, views=1):
    def outputs(x):
        x = layers.GaussianNoise(0.1)(x) if views > 1 else x
        return layers.Add()([layers.Dense(width)(x), layers.Dense(1)(x)])

    return compiled(private(outputs, views=views))


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_one_number_added_to_all_of_an_example_is_no_mixing(width, views):
    """Keras adds it to those of others in a batch of `width` examples."""
    model = one_number_added(width, views)
    model.fit(random(8, 4), random(8, width, seed=1), 4, verbose=0)
    assert model.privacy_spent(1e-3) < np.inf


@pytest.mark.parametrize("traced", [False, True])
def test_one_number_is_added_to_its_own_example_in_the_step(traced, float64):
    model = one_number_added(ROWS)
    x, y = random(ROWS, 4), random(ROWS, ROWS, seed=1)
    report = check_gradients(model, x, y)
    assert report.relative_error < 1e-9
    if traced:  # with the number of examples known
        right = model.clipped_gradients(x[:5], y[:5])[1]
        right = [*right, *model.clipped_gradients(x[5:], y[5:])[1]]
        clipped = tf.function(model.clipped_gradients)
        _, squared = clipped(tf.constant(x), tf.constant(y))
        np.testing.assert_allclose(squared, right, rtol=1e-9)


def test_batch_normalization_that_is_thawed_later_is_refused():
    layer = layers.BatchNormalization(
        scale=False, center=False, trainable=False, name="bn"
    )
    model = around(layer)
    x, y = random(ROWS, 4), random(ROWS, 3, seed=2)
    model.fit(x, y, 4, steps_per_epoch=1, verbose=0)
    layer.trainable = True
    before = values(model)
    with pytest.raises(ValueError, match="'bn'.*GroupNormalization"):
        model.fit(x, y, 4, steps_per_epoch=1, verbose=0)
    require_unchanged(before, values(model))


def test_another_loss_is_checked_anew():
    model = compiled(plain())
    x, y = random(ROWS, 4), random(ROWS, 3, seed=2)
    model.fit(x, y, 4, steps_per_epoch=1, verbose=0)
    compiled(model, contrastive)
    with pytest.raises(ValueError, match="loss mixes examples"):
        model.fit(x, y, 4, steps_per_epoch=1, verbose=0)


def test_a_weight_that_is_frozen_later_stays_as_it_is():
    model = compiled(plain())
    x, y = random(ROWS, 4), random(ROWS, 3, seed=2)
    model.fit(x, y, 4, steps_per_epoch=1, verbose=0)
    model.layers[-1].kernel.trainable = False
    compiled(model)
    kernel, bias = model.get_weights()
    model.fit(x, y, 4, steps_per_epoch=1, verbose=0)
    np.testing.assert_array_equal(kernel, model.layers[-1].kernel)
    assert not np.array_equal(bias, model.layers[-1].bias)


# -- arguments ---------------------------------------------------------------

NUMBERS = [0, -1.0, float("nan"), float("inf"), "1", None, True]
SETTINGS_REFUSED = [
    *(({"l2_norm_clip": n}, ["l2_norm_clip=", repr(n)]) for n in NUMBERS),
    ({"l2_norm_clip": 9e-10}, ["l2_norm_clip=9e-10", "at least 1e-09"]),
    *(
        ({"noise_multiplier": n}, ["noise_multiplier=", repr(n)])
        for n in NUMBERS[1:]
    ),
    ({"method": "fast"}, ["method='fast'", "'auto'", "'bk'", "'naive'"]),
    (
        {"clipping": "soft"},
        ["clipping='soft'", "'flat'", "'automatic'", "'global'"],
    ),
    ({"clipping": 1.0}, ["clipping=1.0", "'flat'", "sensitivity"]),
    ({"clipping": keras_fastclip.Clipping()}, ["clipping=", "sensitivity"]),
    (
        {"clipping": keras_fastclip.FlatClipping(2.0)},
        ["sensitivity", "2.0", "l2_norm_clip=0.5"],
    ),
    ({"clipping": [0.3, 0.3]}, ["sensitivity", "0.42", "l2_norm_clip=0.5"]),
    ({"clipping": {"last": -0.5}}, ["clipping['last']", "-0.5"]),
    ({"clipping": []}, ["at least one norm"]),
    ({"expected_batch_size": 0}, ["expected_batch_size=0"]),
    ({"expected_batch_size": 1.5}, ["expected_batch_size=1.5"]),
    ({"registry": {}}, ["registry={}", "LayerRegistry"]),
]


@pytest.mark.parametrize("settings, words", SETTINGS_REFUSED)
def test_settings_that_are_refused(settings, words):
    for make in (plain, make_plain_private):
        with pytest.raises(ValueError) as error:
            make(**settings)
        for word in words:
            assert word in str(error.value)


def plain_model():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3)])


def make_plain_private(**settings):
    model = plain_model()
    return keras_fastclip.make_private(model, **{**SETTINGS, **settings})


@pytest.mark.parametrize(
    "name, error",
    # In place of a noise multiplier, a target may be given.
    [("l2_norm_clip", TypeError), ("noise_multiplier", ValueError)],
)
def test_clip_norm_and_noise_must_be_given(name, error):
    settings = {k: v for k, v in SETTINGS.items() if k != name}
    with pytest.raises(error, match=name):
        keras_fastclip.DPSequential([layers.Dense(3)], **settings)
    with pytest.raises(error, match=name):
        keras_fastclip.make_private(plain_model(), **settings)


def arrays():
    return random(ROWS, 4), random(ROWS, 3, seed=2)


def batches(size):
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(size)


TRAINING_REFUSED = {
    "batch_larger_than_the_data": (
        lambda model: model.fit(*arrays(), batch_size=ROWS + 1),
        ["batch_size=9", "8 examples", "smaller"],
    ),
    "batch_of_nothing": (
        lambda model: model.fit(*arrays(), batch_size=0),
        ["batch_size=0"],
    ),
    "batch_of_a_fraction": (
        lambda model: model.fit(*arrays(), batch_size=1.5),
        ["batch_size=1.5"],
    ),
    "no_examples": (
        lambda model: model.fit(*(a[:0] for a in arrays()), batch_size=1),
        ["examples"],
    ),
    "arrays_of_different_lengths": (
        lambda model: model.fit(arrays()[0], arrays()[1][1:], batch_size=2),
        ["[8, 7]"],
    ),
    "one_batch_of_unknown_expectation": (
        lambda model: model.train_on_batch(*arrays()),
        ["expected_batch_size="],
    ),
    "stream_of_unknown_batch_size": (
        lambda model: model.fit(batches(3), num_examples=ROWS),
        ["expected_batch_size="],
    ),
    "generator": (
        lambda model: model.fit(iter([arrays()]), num_examples=ROWS),
        ["expected_batch_size="],
    ),
    "stream_of_unknown_origin": (
        lambda model: model.fit(batches(3)),
        ["num_examples=", "PoissonDataset"],
    ),
    "own_loop_of_unknown_batch_size": (
        lambda model: model.train_step(
            keras.tree.map_structure(tf.constant, arrays())
        ),
        ["expected_batch_size="],
    ),
}


@pytest.mark.parametrize("name", TRAINING_REFUSED)
def test_training_that_is_refused(name):
    train, words = TRAINING_REFUSED[name]
    model = compiled(plain())
    before = values(model)
    with pytest.raises(ValueError) as error:
        train(model)
    for word in words:
        assert word in str(error.value)
    require_unchanged(before, values(model)[: len(before)])
    assert int(model._privacy.steps) == 0


TRAININGS = {
    "fit": lambda model: model.fit(*arrays(), batch_size=4),
    "stream": lambda model: model.fit(batches(4)),
    "train_on_batch": lambda model: model.train_on_batch(*arrays()),
    "clipped_gradients": lambda model: model.clipped_gradients(*arrays()),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_model_that_is_not_compiled_is_refused(name):
    with pytest.raises(ValueError, match="Call `compile`"):
        TRAININGS[name](plain(expected_batch_size=4))


@pytest.mark.parametrize("name", TRAININGS)
def test_a_model_without_loss_is_refused(name):
    model = plain(expected_batch_size=4)
    model.compile("sgd")
    with pytest.raises(ValueError, match="pass `loss=` to `compile`"):
        TRAININGS[name](model)


# -- classes -----------------------------------------------------------------


class OwnStep(keras.Model):
    def train_step(self, data):
        return {}


class OwnStepBelow(OwnStep):
    pass


class OwnComputeLoss(keras.Model):
    def compute_loss(self, *args, **kwargs):
        return 0.0


@pytest.mark.parametrize(
    "cls, words",
    [
        (OwnStep, ["OwnStep overrides train_step", "compute_metrics"]),
        (OwnStepBelow, ["OwnStepBelow overrides train_step (in OwnStep)"]),
        (OwnComputeLoss, ["compute_loss", "compute_per_example_loss"]),
    ],
)
def test_make_private_refuses_classes_that_train_themselves(cls, words):
    x = keras.Input((4,))
    model = cls(x, layers.Dense(3)(x))
    with pytest.raises(TypeError) as error:
        keras_fastclip.make_private(model, **SETTINGS)
    for word in words:
        assert word in str(error.value)
    assert getattr(model, "_privacy", None) is None


@pytest.mark.parametrize("name", ["train_step", "compute_loss"])
@pytest.mark.parametrize(
    "base", [keras_fastclip.DPModel, keras_fastclip.DPSequential]
)
def test_subclasses_that_train_themselves_cannot_be_defined(base, name):
    with pytest.raises(TypeError, match=f"Own overrides {name}"):
        type("Own", (base,), {name: lambda self, *args, **kwargs: None})


def test_a_loss_by_example_allows_another_compute_loss():
    own = {
        "compute_loss": lambda self, *args, **kwargs: None,
        "compute_per_example_loss": lambda self, x, y, y_pred, w: y_pred[:, 0],
    }
    assert type("Own", (keras_fastclip.DPModel,), own)


def test_make_private_refuses_what_is_no_model():
    for model in (None, "model", layers.Dense(3)):
        with pytest.raises(ValueError, match="takes a keras.Model; received"):
            keras_fastclip.make_private(model, **SETTINGS)


@pytest.mark.parametrize("make", [plain, make_plain_private])
def test_make_private_refuses_private_models(make):
    model = make()
    privacy = model._privacy
    with pytest.raises(ValueError, match="private already"):
        keras_fastclip.make_private(model, **SETTINGS)
    assert model._privacy is privacy


# -- the check leaves no trace -----------------------------------------------


def everything(model):
    """All variables, those of random generators, metrics and optimizer."""
    found = [*model.variables, *model.optimizer.variables]
    found += [v for metric in model.metrics for v in metric.variables]
    return [v.numpy() for v in [*found, *_keras.seed_states(model)]]


def random_model():
    def outputs(x):
        y = Steps()(layers.Dropout(0.5, seed=3)(layers.Dense(5)(x)))
        y = layers.GaussianNoise(0.1)(NoisyQuadratic()(y))
        return [layers.Dense(3, name="a")(y), layers.Dense(3, name="b")(y)]

    model = private(outputs)
    return compiled(model, ["mse", "mae"], metrics=[["mae"], ["mse"]])


def test_the_check_changes_no_variable():
    model = random_model()
    x, y = arrays()
    model.evaluate(x, [y, y], verbose=0)  # gives the metrics a state
    before = everything(model)
    assert any(np.any(v) for m in model.metrics for v in m.variables)
    model._privacy.plan(model, (tf.constant(x), [tf.constant(y)] * 2, None))
    require_unchanged(before, everything(model))


def test_a_first_step_is_that_of_a_model_which_was_checked_already():
    x, y = arrays()
    found = []
    for checked in (False, True):
        keras.utils.set_random_seed(7)
        model = random_model()
        if checked:
            batch = tf.constant(x), [tf.constant(y)] * 2, None
            model._privacy.plan(model, batch)
        found.append(model.clipped_gradients(x, [y, y]))
    (sums, norms), (checked_sums, checked_norms) = found
    np.testing.assert_array_equal(norms, checked_norms)
    require_unchanged(sums, checked_sums)


class TensorFlowNoise(layers.Layer):
    """Draws from the global stream of TensorFlow."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


@pytest.mark.parametrize("layer", [layers.Dropout, TensorFlowNoise])
@pytest.mark.parametrize("seed", [5, None])
def test_the_check_leaves_the_random_stream_of_tensorflow(layer, seed):
    layer = layer(0.5) if layer is layers.Dropout else layer()
    model = around(layer)
    batch = (*map(tf.constant, arrays()), None)
    tf.random.set_seed(seed)
    expected = [tf.random.uniform([3]).numpy() for _ in range(4)]
    tf.random.set_seed(seed)
    found = [tf.random.uniform([3]).numpy() for _ in range(2)]
    model._privacy.plan(model, batch)
    found += [tf.random.uniform([3]).numpy() for _ in range(2)]
    if seed is None:
        assert len({tuple(draw) for draw in [*found, *expected]}) == 8
    else:
        np.testing.assert_array_equal(found, expected)


class Counting(layers.Layer):
    """Counts how often Python runs it."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x


def test_the_check_traces_the_model_for_its_many_runs():
    """Examples are exchanged 16 times here, in four runs of random numbers."""
    counting = Counting()
    model = around(keras.Sequential([layers.Dropout(0.5), counting]))
    model._privacy.plan(model, (*map(tf.constant, arrays()), None))
    assert 0 < counting.calls < 16


class Shifted(layers.Layer):
    """Takes something away: of the batch, or of the example itself.

    Args:
        mixes: whether it is the first row of the batch.
        in_numpy: whether NumPy computes it, which cannot be traced.
        eagerly: if given, it is only done where that is how the layer runs.
    """

    def __init__(self, mixes, in_numpy=False, eagerly=None):
        super().__init__()
        self.mixes, self.in_numpy, self.eagerly = mixes, in_numpy, eagerly

    def compute_output_shape(self, shape):
        return shape

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)

    def call(self, x):
        if self.eagerly not in (None, tf.executing_eagerly()):
            return x
        value = x.numpy() if self.in_numpy else x
        return x - (value[:1] if self.mixes else 0.5 * value)


def test_mixing_in_a_model_that_cannot_be_traced_is_found():
    batch = (*map(tf.constant, arrays()), None)
    model = around(Shifted(False, in_numpy=True))
    assert model._privacy.plan(model, batch).units
    model = around(Shifted(True, in_numpy=True))
    with pytest.raises(ValueError, match="mixes examples"):
        model._privacy.plan(model, batch)


@pytest.mark.parametrize("eagerly", [True, False])
def test_mixing_is_looked_for_in_the_way_that_the_model_is_trained(eagerly):
    batch = (*map(tf.constant, arrays()), None)
    model = around(Shifted(True, eagerly=eagerly))
    model.run_eagerly = eagerly
    with pytest.raises(ValueError, match="mixes examples"):
        model._privacy.plan(model, batch)


class Own(layers.Dense):
    """Layers of one size, with a rule of their own."""


@pytest.mark.parametrize("wrong", [None, "first", "second"])
def test_layers_of_the_same_sizes_are_each_looked_at(wrong):
    """Also where the closed form is known from the first of them."""

    def rule(layer, x, training=None):
        a = 2 * x if layer.name == wrong else x
        zeta = tf.matmul(x, layer.kernel)
        return zeta, [linear.Linear(layer.kernel, a, lambda g: g)]

    registry = keras_fastclip.LayerRegistry()
    registry.register(Own, rule)
    dense = [Own(8, use_bias=False, name=name) for name in ("first", "second")]
    model = private(
        lambda x: dense[1](dense[0](x)), shape=(2, 8), registry=registry
    )
    batch = tf.constant(random(ROWS, 2, 8)), tf.constant(random(ROWS, 2, 8))
    compiled(model)
    if wrong is None:
        assert len(model._privacy.plan(model, (*batch, None)).units) == 2
        return
    with pytest.raises(ValueError, match=f"rule for '{wrong}' gives"):
        model._privacy.plan(model, (*batch, None))


@pytest.mark.parametrize("dead", [None, 0, 1])
def test_a_closed_form_that_is_wrong_is_found(dead, monkeypatch):
    """Also beside a layer of that size whose gradients are zero."""
    norm = linear.ghost_norm
    monkeypatch.setattr(linear, "ghost_norm", lambda *args: norm(*args) / 4)

    def outputs(x):
        found = [layers.Dense(8)(x), layers.Dense(8)(x)]
        if dead is not None:
            found[dead] = layers.Rescaling(0.0)(found[dead])
        return layers.Add()(found)

    model = compiled(private(outputs, shape=(2, 8)))
    batch = tf.constant(random(ROWS, 2, 8)), tf.constant(random(ROWS, 2, 8))
    with pytest.raises(ValueError, match="The norms that the rule for"):
        model._privacy.plan(model, (*batch, None))


class MixesFour(layers.Layer):
    """Mixes examples where it runs eagerly, and where it is not looked for."""

    def call(self, x):
        if tf.executing_eagerly() and x.shape[0] == 4:
            return x - tf.stop_gradient(x[:1])
        return x


def test_a_model_that_computes_something_else_when_traced_runs_eagerly():
    model = around(MixesFour())
    with pytest.raises(ValueError, match="mixes examples"):
        model._privacy.plan(model, (*map(tf.constant, arrays()), None))


def test_the_check_holds_nothing_when_it_is_done():
    model = around(layers.Dense(4))
    probes = weakref.WeakSet()
    new = probe._Probe.__init__

    def init(self, *args):
        new(self, *args)
        probes.add(self)

    with unittest.mock.patch.object(probe._Probe, "__init__", init):
        gc.disable()
        try:
            model._privacy.plan(model, (*map(tf.constant, arrays()), None))
            assert not probes
        finally:
            gc.enable()


def test_layers_get_their_call_back_after_an_error():
    model = compiled(plain(), contrastive)
    layer = model.layers[-1]
    with pytest.raises(ValueError):
        model.clipped_gradients(*arrays())
    assert "call" not in vars(layer)
    compiled(model)
    model.clipped_gradients(*arrays())
    assert "call" not in vars(layer)

    def broken(y_true, y_pred):
        raise ArithmeticError

    compiled(model, broken)
    with pytest.raises(ArithmeticError):
        model.clipped_gradients(*arrays())
    require_no_interception(model)
