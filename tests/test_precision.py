"""Loss scaling in float16: gradients as they are, and no step left out."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip

CLIP, BATCH = 0.5, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, 5)).astype("float32")
Y = RNG.normal(size=(BATCH, 3)).astype("float32")


def norm(tensors):
    squares = [np.sum(np.square(np.array(t, "float64"))) for t in tensors]
    return np.sqrt(np.sum(squares))


class Affine(layers.Layer):
    """Without a rule, so that the fallback serves it."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.w


def model(policy="mixed_float16", optimizer=None, **settings):
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    options = settings.pop("compile", {})
    try:
        made = keras_fastclip.DPSequential(
            [
                keras.Input((5,)),
                layers.Dense(7, "tanh"),
                Affine(),
                layers.Dense(3),
            ],
            **{
                "l2_norm_clip": CLIP,
                "noise_multiplier": 0.0,
                "expected_batch_size": 1,
                **settings,
            },
        )
        made.compile(optimizer or keras.optimizers.SGD(1.0), "mse", **options)
    finally:
        keras.config.set_dtype_policy("float32")
    return made


@pytest.mark.parametrize("method", ["auto", "bk", "ghost", "opacus", "naive"])
def test_small_gradients_are_not_lost(method):
    """Cotangents of about 10⁻⁸, where float16 ends at 6·10⁻⁸."""
    weights = np.full(BATCH, 1e-8, "float32")
    scaled, exact = model(method=method), model("float32")
    sums, norms = scaled.clipped_gradients(X, Y, weights)
    right_sums, right_norms = exact.clipped_gradients(X, Y, weights)
    assert norms.dtype == tf.float32
    np.testing.assert_allclose(norms, right_norms, rtol=0.05)
    difference = norm([a - b for a, b in zip(sums, right_sums, strict=True)])
    assert difference < 0.02 * norm(right_sums)
    unscaled = model(method=method, compile={"auto_scale_loss": False})
    lost = unscaled.clipped_gradients(X, Y, weights)[1]
    assert np.sum(lost) < 0.5 * np.sum(right_norms)


def test_clipping_is_by_unscaled_norms():
    scaled, exact = model(), model("float32")
    sums, norms = scaled.clipped_gradients(X, Y)
    right_sums, right_norms = exact.clipped_gradients(X, Y)
    assert np.all(right_norms > CLIP**2)
    np.testing.assert_allclose(norms, right_norms, rtol=0.02)
    difference = norm([a - b for a, b in zip(sums, right_sums, strict=True)])
    assert difference < 0.02 * norm(right_sums)
    for i in range(BATCH):
        one, _ = scaled.clipped_gradients(X[i : i + 1], Y[i : i + 1])
        assert norm(one) <= CLIP * (1 + 1e-6)


def test_an_example_that_overflows_is_left_out_and_the_step_made():
    y = Y.copy()
    y[2] *= 1e4  # Scaled by 2¹⁵, its cotangents are beyond float16.
    private = model()
    scaling = private.optimizer
    assert isinstance(scaling, keras.optimizers.LossScaleOptimizer)
    rest = np.arange(BATCH) != 2
    expected, _ = private.clipped_gradients(X[rest], y[rest])
    before = private.get_weights()
    private.train_on_batch(X, y)
    assert private.nonfinite_examples() == 1
    pairs = zip(before, private.get_weights(), expected, strict=True)
    for old, new, total in pairs:
        np.testing.assert_allclose(old - new, total, atol=1e-3)
    assert int(scaling.iterations) == int(private._privacy.steps) == 1
    assert float(scaling.dynamic_scale) == scaling.initial_scale


def test_no_step_is_left_out_if_no_example_is_left():
    private = model(noise_multiplier=1.0)
    before = private.get_weights()
    private.train_on_batch(X, np.full_like(Y, 1e4))
    assert private.nonfinite_examples() == BATCH
    assert int(private.optimizer.iterations) == 1
    assert int(private._privacy.steps) == 1
    for old, new in zip(before, private.get_weights(), strict=True):
        assert np.all(np.isfinite(new)) and np.any(old != new)


def test_updates_are_not_scaled():
    """Whoever scales: a LossScaleOptimizer, the optimizer, or nobody."""
    sgd = keras.optimizers.SGD
    for optimizer in (
        sgd(1.0),
        keras.optimizers.LossScaleOptimizer(sgd(1.0), initial_scale=1000.0),
        sgd(1.0, loss_scale_factor=512.0),
    ):
        private, exact = model(optimizer=optimizer), model("float32")
        for one in (private, exact):
            one.fit(X, Y, batch_size=BATCH, verbose=0)
        pairs = zip(private.get_weights(), exact.get_weights(), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, atol=0.05)
        moved = private.get_weights()[0] - model().get_weights()[0]
        assert np.abs(moved).max() > 0.1


def test_the_scale_is_that_of_the_mean_over_a_batch():
    sgd = keras.optimizers.SGD
    scaling = keras.optimizers.LossScaleOptimizer
    for policy, optimizer, size, scale in (
        ("mixed_float16", None, 1, 2.0**15),
        ("mixed_float16", None, 256, 2.0**7),
        ("mixed_float16", None, 2**20, 1.0),
        ("mixed_float16", scaling(sgd(), initial_scale=1000.0), 10, 64.0),
        ("mixed_float16", scaling(sgd(loss_scale_factor=None)), 1, 2.0**15),
        ("mixed_bfloat16", None, 1, 1.0),
        ("mixed_bfloat16", sgd(loss_scale_factor=8.0), 1, 8.0),
        ("mixed_bfloat16", sgd(loss_scale_factor=2.0**70), 1, 2.0**32),
        ("float32", scaling(sgd()), 1, 1.0),
    ):
        private = model(policy, optimizer, expected_batch_size=size)
        assert private._privacy.loss_scale(private) == scale


def test_saved_and_loaded(tmp_path):
    private = model(noise_multiplier=1.0)
    private.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    private.save(tmp_path / "model.keras")
    # Keras makes the optimizer anew, by the policy of the moment.
    keras.config.set_dtype_policy("mixed_float16")
    try:
        loaded = keras.models.load_model(
            tmp_path / "model.keras", custom_objects={"Affine": Affine}
        )
    finally:
        keras.config.set_dtype_policy("float32")
    loaded.fit(X, Y, batch_size=4, verbose=0)
    (entry,) = loaded._privacy.ledger(loaded).entries
    assert entry.steps == int(loaded.optimizer.iterations) == 6


class Product(layers.Layer):
    """With a rule that computes in the precision of its tensors."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 100))

    def call(self, x):
        return tf.matmul(x, self.w)


def product_rule(layer, x):
    def omega(g):
        return tf.reduce_sum(x * x, -1) * tf.reduce_sum(g * g, -1)

    return tf.matmul(x, layer.w), omega


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("residual", [0.1, 0.005])
def test_norms_of_users_rules_bound_what_is_summed(policy, residual):
    """In float16 the squares of small cotangents are zero."""
    registry = keras_fastclip.LayerRegistry()
    registry.register(Product, product_rule)
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        private = keras_fastclip.DPSequential(
            [
                keras.Input((500,)),
                Product(),
                layers.Activation("linear", dtype="float32"),
            ],
            l2_norm_clip=0.01,
            noise_multiplier=0.0,
            expected_batch_size=2**15,  # The losses are not scaled then.
            registry=registry,
        )
        private.compile("sgd", "mse")
        x = 6 * RNG.normal(size=(4, 500)).astype("float32")
        y = private.predict(x, verbose=0) + residual
        sums, _ = private.clipped_gradients(x[:1], y[:1])
    finally:
        keras.config.set_dtype_policy("float32")
    assert 0.009 < norm(sums) <= 0.01 * (1 + 1e-6)
