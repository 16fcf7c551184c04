"""The private step: the bound on an update, the noise, what it leaves out."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from scipy import stats

import keras_fastclip
from keras_fastclip.checking import loop_over_examples
from tests.test_zoo import CLIP, private
from tests.zoo import BATCH, ZOO, NoisyQuadratic, cross_entropy, labels, random

pytestmark = pytest.mark.filterwarnings("ignore:No rule is registered")


def weights(model):
    return [np.array(v.numpy(), "float64") for v in model.trainable_variables]


def update(model, data):
    """What one step does to the weights."""
    before = weights(model)
    model.train_step(data)
    pairs = zip(before, weights(model), strict=True)
    return [b - a for b, a in pairs]


def norm(tensors):
    return np.sqrt(sum(np.sum(np.square(t)) for t in tensors))


def with_dropout(make):
    """A model with dropout before, between and inside layers."""
    x = keras.Input((4, 5))
    y = layers.Dropout(0.5)(x)
    y = layers.Dense(6, activation="tanh")(y)
    y = layers.SpatialDropout1D(0.5)(y)
    y = NoisyQuadratic()(layers.GaussianNoise(0.3)(y))
    y = layers.Flatten()(y)
    return make(x, layers.Dense(3)(layers.Dropout(0.9)(y)))


@pytest.mark.parametrize("name", [*ZOO, "with_dropout"])
def test_update_from_one_example_is_within_the_clip_norm(name):
    if name == "with_dropout":
        settings = dict(
            l2_norm_clip=CLIP, noise_multiplier=0.0, expected_batch_size=1
        )
        make = functools.partial(keras_fastclip.DPModel, **settings)
        model = with_dropout(make)
        model.compile(keras.optimizers.SGD(1.0), cross_entropy())
        x, y = tf.constant(random(BATCH, 4, 5)), tf.constant(labels(BATCH))
    else:
        model, x, y = private(name)
    largest = 0.0
    for i in range(3):
        one = 3.0 * x[i : i + 1] if x.dtype.is_floating else x[i : i + 1]
        found = norm(update(model, (one, y[i : i + 1])))
        assert found <= CLIP * (1 + 1e-5)  # weights are float32 and about 1
        largest = max(largest, found)
    assert largest > 0.99 * CLIP  # it was clipped, so the test can fail


class Constant(layers.Layer):
    """A weight that does not move the output: its gradient is zero."""

    def build(self, shape):
        self.w = self.add_weight(shape=(60, 50), initializer="zeros")

    def call(self, x):
        return x + 0.0 * keras.ops.sum(self.w)


def zero_gradient_model(**settings):
    x = keras.Input((2,))
    y = layers.Dense(40, kernel_initializer="zeros")(Constant()(x))
    y = layers.Dense(1, kernel_initializer="zeros", trainable=False)(y)
    model = keras_fastclip.DPModel(x, y, **settings)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    return model


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_noise_has_the_right_scale(mode, float64):
    clip, sigma, expected = 0.7, 1.3, 5
    model = zero_gradient_model(
        l2_norm_clip=clip, noise_multiplier=sigma, expected_batch_size=expected
    )
    model.compile(
        keras.optimizers.SGD(1.0),
        "mse",
        run_eagerly=mode == "eager",
        jit_compile=mode == "xla",
    )
    x, y = np.zeros((4, 2)), np.zeros((4, 1))
    draws = []
    for _ in range(4):
        before = weights(model)
        model.train_on_batch(x, y)
        pairs = zip(before, weights(model), strict=True)
        draws.append(np.concatenate([(b - a).ravel() for b, a in pairs]))
    values = np.concatenate(draws)
    std = sigma * clip / expected
    # 12,480 values: the right scale fails once in 10⁹ runs, and scales off by
    # a half are told from it with certainty.
    assert stats.kstest(values, "norm", (0, std)).pvalue > 1e-9
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(values, "norm", (0, wrong * std)).pvalue < 1e-9
    assert len(np.unique(values)) == len(values)


def test_noise_is_not_repeated_by_another_model(float64):
    x, y = np.zeros((4, 2)), np.zeros((4, 1))
    values = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        model = zero_gradient_model(
            l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=1
        )
        model.train_on_batch(x, y)
        values.append(np.concatenate([w.ravel() for w in weights(model)]))
    assert not np.intersect1d(*values).size


def test_seed_makes_noise_repeatable(float64):
    x, y = np.zeros((4, 2)), np.zeros((4, 1))
    values = []
    for _ in range(2):
        model = zero_gradient_model(
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            expected_batch_size=1,
            seed=3,
        )
        model.train_on_batch(x, y)
        values.append(np.concatenate([w.ravel() for w in weights(model)]))
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name, method",
    [
        ("mlp", "auto"),
        ("mlp", "naive"),
        ("cnn", "auto"),
        ("cnn", "bk"),
        ("cnn", "bk_mixghost"),
        ("custom_with_rule", "auto"),
        ("custom_without_rule", "auto"),
    ],
)
def test_example_that_is_not_finite_contributes_nothing(name, bad, method):
    model, x, y = private(name, method=method, expected_batch_size=BATCH)
    model.clipped_gradients(x, y)
    right, _ = model.clipped_gradients(x[1:], y[1:])
    spoiled = tf.concat([tf.fill(x[:1].shape, bad), x[1:]], 0)
    sums, norms = model.clipped_gradients(spoiled, y)
    assert not np.isfinite(norms[0]) and np.isfinite(norms[1:]).all()
    for found, expected in zip(sums, right, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    before = model.nonfinite_examples()
    model.train_step((spoiled, y))
    assert model.nonfinite_examples() == before + 1
    assert all(np.isfinite(w).all() for w in weights(model))


def test_example_that_overflows_inside_the_model_contributes_nothing():
    x = keras.Input((5,))
    y = layers.Dense(4, kernel_initializer="ones")(x)
    model = keras_fastclip.DPModel(
        x,
        layers.Dense(1, kernel_initializer="ones")(y),
        l2_norm_clip=1.0,
        noise_multiplier=0.0,
        expected_batch_size=1,
    )
    model.compile("sgd", "mse")
    x, y = random(BATCH, 5), random(BATCH, 1)
    right, _ = model.clipped_gradients(x[1:], y[1:])
    x[0] = 1e38  # finite, but not after a sum
    sums, norms = model.clipped_gradients(x, y)
    assert not np.isfinite(norms[0])
    for found, expected in zip(sums, right, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_zero_gradients_give_noise_alone():
    model = zero_gradient_model(
        l2_norm_clip=1.0, noise_multiplier=0.0, expected_batch_size=1
    )
    x = tf.zeros((3, 2))
    assert norm(update(model, (x, tf.zeros((3, 1))))) == 0.0


def test_division_is_by_the_expected_batch_size():
    model, x, y = private("mlp", expected_batch_size=50)
    sums, _ = model.clipped_gradients(x, y)
    moved = update(model, (x, y))
    for total, change in zip(sums, moved, strict=True):
        np.testing.assert_allclose(change, total / 50, atol=1e-7)


@pytest.mark.parametrize(
    "optimizer", ["SGD", "Adam", "AdamW", "Lamb", "Lion", "Adafactor"]
)
def test_optimizer_gets_the_private_gradient(optimizer):
    """Any Keras optimizer: the same as applying the mean by hand."""
    model, x, y = private("mlp", expected_batch_size=BATCH)
    sums, _ = model.clipped_gradients(x, y)
    start = model.get_weights()
    make = getattr(keras.optimizers, optimizer)
    right = make()
    right.apply([s / BATCH for s in sums], model.trainable_variables)
    expected = model.get_weights()
    model.set_weights(start)
    model.compile(make(), cross_entropy())
    model.train_step((x, y))
    for found, value in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "cnn", "encoder", "custom_with_rule"])
def test_mixed_bfloat16_takes_norms_in_float32(name):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model, x, y = private(name)
    finally:
        keras.config.set_dtype_policy("float32")
    sums, norms = tf.function(model.clipped_gradients)(x, y)
    assert norms.dtype == tf.float32
    exact, exact_norms = loop_over_examples(
        model, (x, y, None), model._privacy.clipping
    )
    np.testing.assert_allclose(norms, exact_norms, rtol=0.1)
    for i in range(3):
        moved = update(model, (x[i : i + 1], y[i : i + 1]))
        assert norm(moved) <= CLIP * (1 + 1e-2)


def test_one_example_moves_a_bfloat16_sum_by_no_more_than_the_clip_norm():
    """The sum over many alike examples is not rounded to half precision."""
    inputs = keras.Input((300,), dtype="bfloat16")
    outputs = layers.Dense(200, dtype="mixed_bfloat16")(inputs)
    model = keras_fastclip.DPModel(
        inputs,
        layers.Activation("linear", dtype="float32")(outputs),
        l2_norm_clip=1.0,
        noise_multiplier=0.0,
        expected_batch_size=1,
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 300)) + 0.01 * rng.normal(size=(256, 300))
    x, y = tf.cast(x, "bfloat16"), 10 + rng.normal(size=(256, 200))
    all_of_them, _ = model.clipped_gradients(x, y)
    without_one, _ = model.clipped_gradients(x[1:], y[1:])
    pairs = zip(all_of_them, without_one, strict=True)
    assert norm([np.array(a - b, "float64") for a, b in pairs]) <= 1.001


def test_longer_sequences_than_were_checked_are_checked_again():
    class Fold(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = layers.Dense(2)

        def call(self, x):
            rows = keras.ops.reshape(x, (-1, 3))
            return keras.ops.reshape(
                self.inner(rows), (-1, keras.ops.shape(x)[1], 2)
            )

    inputs = keras.Input((None, 3))
    outputs = layers.GlobalAveragePooling1D()(Fold()(inputs))
    model = keras_fastclip.DPModel(
        inputs,
        outputs,
        l2_norm_clip=0.1,
        noise_multiplier=0.0,
        expected_batch_size=1,
    )
    model.compile("sgd", "mse")
    for length in (4, 64):
        x, y = random(1, length, 3), random(1, 2)
        sums, norms = model.clipped_gradients(10 * x, y)
        assert norms.shape == (1,)
        assert norm([np.array(s) for s in sums]) <= 0.1 * (1 + 1e-6)

    @tf.function(input_signature=[tf.TensorSpec((None, None, 3))])
    def any_length(x):
        return model.clipped_gradients(x, tf.zeros((tf.shape(x)[0], 2)))

    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        any_length(tf.ones((1, 16, 3)))


@pytest.mark.parametrize("how", ["fit", "train_step", "clipped_gradients"])
def test_nothing_is_converted_by_autograph(how):
    """Neither in `fit` nor in a function of one's own, where it takes long."""
    seen = []

    class Look(layers.Layer):
        def call(self, x):
            status = tf.__internal__.autograph.control_status_ctx().status
            seen.append((tf.inside_function(), status.name))
            return x

    model = keras_fastclip.DPSequential(
        [keras.Input((5,)), Look(), layers.Dense(3)],
        l2_norm_clip=CLIP,
        noise_multiplier=1.0,
        expected_batch_size=BATCH,
    )
    model.compile("sgd", cross_entropy(), jit_compile=False)
    x, y = tf.constant(random(BATCH, 5)), tf.constant(labels(BATCH))
    if how == "fit":
        model.fit(x, y, batch_size=BATCH, verbose=0)
    elif how == "train_step":
        tf.function(model.train_step)((x, y))
    else:
        tf.function(model.clipped_gradients)(x, y)
    traced = {status for inside, status in seen if inside}
    assert "DISABLED" in traced and "ENABLED" not in traced


class Elsewhere(layers.Layer):
    """What follows a layer may bring back gradients of other kinds."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def call(self, x):
        if self.kind == "slices":  # Its gradient is one of rows.
            return tf.gather(x, tf.range(tf.shape(x)[0]))

        @tf.custom_gradient
        def same(x):
            def back(g):  # Without a shape.
                return tf.numpy_function(lambda g: g, [g], g.dtype)

            return tf.identity(x), back

        return same(x)


@pytest.mark.parametrize("kind", ["slices", "unknown"])
@pytest.mark.parametrize("norm", [False, True])
def test_cotangents_without_a_shape_or_by_rows(kind, norm):
    """Rules get tensors with the shape of what they returned."""
    found = []
    for way in ("plain", kind):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((3, 4))
        y = layers.Dense(4)(inputs)
        if norm:
            y = layers.GroupNormalization(2)(y)
        if way != "plain":
            y = Elsewhere(way)(y)
        model = keras_fastclip.DPModel(
            inputs,
            layers.Dense(2)(layers.Flatten()(y)),
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
        )
        model.compile("sgd", "mse", jit_compile=False)
        x = np.random.default_rng(0).normal(size=(5, 3, 4)).astype("float32")
        run = tf.function(model.clipped_gradients)
        found.append(run(tf.constant(x), tf.zeros([5, 2]))[0])
    for exact, own in zip(*found, strict=True):
        np.testing.assert_allclose(own, exact, atol=1e-5)
