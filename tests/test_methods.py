"""All methods give one clipped sum, and each does the work it is known for."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import methods
from keras_fastclip.checking import loop_over_examples
from keras_fastclip.methods import METHODS
from tests.graphs import count_products, used_operations
from tests.test_zoo import private, relative_error
from tests.zoo import BATCH, ZOO, cross_entropy, labels, random

pytestmark = pytest.mark.filterwarnings("ignore:No rule is registered")

TWICE = [name for name, method in METHODS.items() if method.twice]


def by_method(model, name, jit_compile=False):
    """A graph of the model's step with another method."""
    model._privacy.method = METHODS[name]
    return tf.function(model.clipped_gradients, jit_compile=jit_compile)


def test_every_method_of_the_papers_has_a_name():
    assert set(METHODS) == {
        "naive",
        "opacus",
        "fastgradclip",
        "ghost",
        "mixed_ghost",
        "bk",
        "bk_mixghost",
        "bk_mixopt",
        "auto",
    }


def test_unknown_method_lists_the_known_ones():
    with pytest.raises(ValueError) as error:
        private("mlp", method="magic")
    assert "magic" in str(error.value)
    assert all(repr(name) in str(error.value) for name in METHODS)


@pytest.mark.parametrize("name", ZOO)
def test_methods_agree_with_the_loop(name, float64):
    model, x, y = private(name)
    right = loop_over_examples(model, (x, y, None), model._privacy.clipping)
    # Keras holds LoRA weights in float32 always.
    tolerance = 1e-6 if name == "lora" else 1e-9
    for method in METHODS:
        sums, squared_norms = by_method(model, method)(x, y)
        assert relative_error(sums, right[0]) < tolerance, method
        np.testing.assert_allclose(
            squared_norms, right[1], rtol=tolerance, err_msg=method
        )


@pytest.mark.parametrize("name", ["cnn", "tied_embedding", "recurrent"])
@pytest.mark.parametrize("method", TWICE)
def test_second_backward_pass_compiles(name, method, float64):
    model, x, y = private(name)
    right = loop_over_examples(model, (x, y, None), model._privacy.clipping)
    sums, _ = by_method(model, method, jit_compile=True)(x, y)
    assert relative_error(sums, right[0]) < 1e-9


def test_methods_agree_under_dropout(float64):
    """All but `naive`, which draws anew for every example."""
    inputs = keras.Input((6, 4))
    x = layers.Dropout(0.5, seed=1)(layers.Dense(5)(inputs))
    x = layers.LSTM(4, dropout=0.3, recurrent_dropout=0.3, seed=2)(x)
    model = keras_fastclip.DPModel(
        inputs, layers.Dense(3)(x), l2_norm_clip=0.1, noise_multiplier=0.0
    )
    model.compile("sgd", cross_entropy())
    x, y = tf.constant(random(BATCH, 6, 4)), tf.constant(labels(BATCH))
    model.clipped_gradients(x, y)  # builds the model and checks it
    seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
    saved, found = [v.numpy() for v in seeds], []
    assert seeds
    for method in METHODS:
        if method != "naive":
            for variable, value in zip(seeds, saved, strict=True):
                variable.assign(value)
            found.append(by_method(model, method)(x, y))
    for other in found[1:]:
        assert relative_error(other[0], found[0][0]) < 1e-9
        np.testing.assert_allclose(other[1], found[0][1], rtol=1e-9)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("method", [m for m in METHODS if m != "naive"])
def test_a_bad_example_leaves_the_others_alone(method, jit_compile, float64):
    """An infinite gradient times a factor of zero would spoil the sum."""
    model, x, y = private("cnn")
    good = [i for i in range(BATCH) if i != 1]
    right = loop_over_examples(
        model,
        (tf.gather(x, good), tf.gather(y, good), None),
        model._privacy.clipping,
    )
    bad = tf.tensor_scatter_nd_update(x, [[1, 0, 0, 0]], [np.inf])
    sums, squared_norms = by_method(model, method, jit_compile)(bad, y)
    assert relative_error(sums, right[0]) < 1e-9
    assert not np.isfinite(squared_norms[1])


@pytest.mark.parametrize("method", TWICE)
def test_groups_have_factors_of_their_own(method, float64):
    inputs = keras.Input((4, 5))
    x = layers.Dense(6, activation="tanh", name="a")(inputs)
    x = layers.Dense(3, name="b")(layers.Flatten()(x))
    model = keras_fastclip.DPModel(
        inputs,
        x,
        l2_norm_clip=0.5,
        noise_multiplier=0.0,
        clipping={"a": 0.3, "b": 0.4},
        method=method,
    )
    model.compile("sgd", cross_entropy())
    x, y = random(BATCH, 4, 5), labels(BATCH)
    assert keras_fastclip.check_gradients(model, x, y).relative_error < 1e-9


@pytest.mark.parametrize("method", TWICE)
def test_sums_are_not_rounded_to_half_precision(method):
    """A second backward pass would add up 512 examples in bfloat16."""
    found = {}
    for name in (method, "bk"):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((3,))
        x = layers.Dense(4, dtype="mixed_bfloat16")(inputs)
        model = keras_fastclip.DPModel(
            inputs,
            layers.Dense(1)(x),
            l2_norm_clip=100.0,
            noise_multiplier=0.0,
            method=name,
        )
        model.compile("sgd", "mse")
        x, y = tf.constant(random(512, 3)), tf.ones((512, 1))
        found[name], _ = tf.function(model.clipped_gradients)(x, y)
    assert relative_error(found[method], found["bk"]) < 1e-6


@pytest.mark.parametrize("method", TWICE)
def test_rows_that_fill_up_a_batch_count_for_nothing(method, float64):
    model, x, y = private("mlp")
    model._privacy.method = METHODS[method]
    real = tf.constant([True] * 2 + [False] * (BATCH - 2))
    filled = keras_fastclip.model.clip(model, (x, y, None), real)
    alone = keras_fastclip.model.clip(model, (x[:2], y[:2], None))
    for variable in model.trainable_variables:
        np.testing.assert_allclose(
            filled.sums[id(variable)], alone.sums[id(variable)], atol=1e-12
        )


ONE_PASS = [n for n, method in METHODS.items() if not method.twice]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("layer", ["dense", "conv", "bias"])
def test_cancelling_positions_stay_within_the_clip_norm(layer, jit_compile):
    """Norm and sum round the same products otherwise; what cancels counts."""
    inputs = keras.Input((600, 1))
    x = {
        "dense": layers.Dense(1, use_bias=False),
        "conv": layers.Conv1D(1, 3, padding="same", use_bias=False),
        "bias": layers.Dense(1, kernel_initializer="zeros"),
    }[layer](inputs)
    weighted = x * inputs  # so that the cotangents are as large
    model = keras_fastclip.DPModel(
        inputs,
        layers.GlobalAveragePooling1D()(weighted),
        l2_norm_clip=1.0,
        noise_multiplier=0.0,
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    steps = {
        method: by_method(model, method, jit_compile) for method in ONE_PASS
    }
    for _ in range(3):
        half = 1e4 * rng.normal(size=300)
        one = rng.permutation(np.concatenate([half, -half]))
        x = np.zeros((4, 600, 1), "float32")
        x[0, :, 0] = one
        for method, step in steps.items():
            model._privacy.method = METHODS[method]
            sums, _ = step(tf.constant(x), tf.zeros((4, 1)))
            assert norm_of(sums) <= 1 + 1e-5, method


def norm_of(sums):
    return np.sqrt(sum(np.sum(np.square(s, dtype="float64")) for s in sums))


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_none_adds_nothing(method):
    inputs = keras.Input((5, 5, 4))
    x = layers.DepthwiseConv2D(3)(inputs)
    x = layers.Conv2D(3, 2)(layers.SeparableConv2D(4, 2)(x))
    model = keras_fastclip.DPModel(
        inputs,
        layers.Dense(2)(layers.Flatten()(x)),
        l2_norm_clip=1.0,
        noise_multiplier=0.0,
        method=method,
    )
    model.compile("sgd", "mse")
    step = tf.function(
        model.clipped_gradients,
        input_signature=[
            tf.TensorSpec([None, 5, 5, 4]),
            tf.TensorSpec([None, 2]),
        ],
    )
    x, y = tf.constant(random(4, 5, 5, 4)), tf.ones((4, 2))
    for _ in range(3):
        step(x, y)  # leaves numbers in memory
        sums, squared_norms = step(x[:0], y[:0])
        assert norm_of(sums) == 0 and squared_norms.shape == (0,)


class Half(layers.Layer):
    """Uses one of its two weights."""

    def build(self, shape):
        self.used = self.add_weight(shape=shape[-1:])
        self.unused = self.add_weight(shape=(2,))

    def call(self, x):
        return x * self.used


@pytest.mark.parametrize("method", TWICE)
def test_weights_that_are_not_used_have_no_gradient(method):
    inputs = keras.Input((3,))
    model = keras_fastclip.DPModel(
        inputs,
        Half()(inputs),
        l2_norm_clip=1.0,
        noise_multiplier=0.0,
        method=method,
    )
    model.compile("sgd", "mse")
    sums, _ = model.clipped_gradients(random(4, 3), np.ones((4, 3)))
    assert np.any(sums[0]) and not np.any(sums[1])


@pytest.mark.parametrize("method", TWICE)
def test_half_precision_above_a_layer_does_not_round_its_sum(method):
    inputs = keras.Input((16,))
    x = layers.Dense(16, activation="tanh")(inputs)
    above = layers.Dense(16, activation="tanh", dtype="mixed_bfloat16")
    above.trainable = False
    model = keras_fastclip.DPModel(
        inputs,
        layers.Dense(1, trainable=False)(above(x)),
        l2_norm_clip=1e-3,
        noise_multiplier=0.0,
        method=method,
    )
    model.compile("sgd", "mse")
    step = tf.function(model.clipped_gradients)
    for seed in range(20):
        sums, _ = step(tf.constant(random(1, 16, seed=seed)), tf.ones((1, 1)))
        assert norm_of(sums) <= 1e-3 * (1 + 1e-5)


# -- what each method costs -------------------------------------------------


def plain_step(model, loss):
    def step(x, y):
        with tf.GradientTape() as tape:
            total = loss(y, model(x, training=True))
        return tape.gradient(total, model.trainable_variables)

    return step


LAYERS, POSITIONS = 4, 5


def dense_stack(method=None):
    inputs = x = keras.Input((POSITIONS, 7))
    for width in (8, 9, 10, 7):
        x = layers.Dense(width, use_bias=False)(x)
    if method is None:
        return keras.Model(inputs, x)
    model = keras_fastclip.DPModel(
        inputs, x, l2_norm_clip=1.0, noise_multiplier=0.0, method=method
    )
    model.compile("sgd", "mse")
    return model


# Forward, and backward to the inputs of all layers but the first.
ONCE = LAYERS + (LAYERS - 1)
PLAIN = ONCE + LAYERS
KEPT = LAYERS  # weighted sums of kept gradients
GHOST = 2 * LAYERS  # two Gram matrices a layer


@pytest.mark.parametrize(
    ("method", "products"),
    [
        ("bk", PLAIN + GHOST),
        ("bk_mixghost", PLAIN + GHOST),
        ("bk_mixopt", PLAIN + GHOST),
        ("opacus", ONCE + LAYERS + KEPT),
        ("ghost", PLAIN + GHOST + (LAYERS - 1)),
        ("mixed_ghost", PLAIN + GHOST + (LAYERS - 1)),
        ("fastgradclip", PLAIN + LAYERS + (LAYERS - 1)),
    ],
)
def test_products_of_a_stack_of_dense_layers(method, products):
    x = tf.constant(random(BATCH, POSITIONS, 7))
    plain = used_operations(
        plain_step(dense_stack(), keras.losses.mean_squared_error), x, x
    )
    assert count_products(plain) == PLAIN
    model = dense_stack(method)
    found = used_operations(lambda x, y: model.clipped_gradients(x, y)[0], x, x)
    assert count_products(found) == products


def test_vectors_take_no_products_for_their_norms():
    inputs = x = keras.Input((7,))
    for width in (8, 9, 7):
        x = layers.Dense(width, use_bias=False)(x)
    model = keras_fastclip.DPModel(
        inputs, x, l2_norm_clip=1.0, noise_multiplier=0.0, method="bk"
    )
    model.compile("sgd", "mse")
    x = tf.constant(random(BATCH, 7))
    found = used_operations(lambda x, y: model.clipped_gradients(x, y)[0], x, x)
    plain = used_operations(
        plain_step(
            keras.Model(inputs, model.output), keras.losses.mean_squared_error
        ),
        x,
        x,
    )
    assert count_products(found) == count_products(plain) == 3 + 2 + 3


@pytest.mark.parametrize(
    ("method", "forward", "inputs", "filters"),
    [
        # An operation is named for what it is the derivative by.
        ("bk", 3, 2, 3),
        ("bk_mixghost", 3, 2, 3),
        ("mixed_ghost", 3, 4, 3),
        ("ghost", 3, 4, 3),
        ("fastgradclip", 3, 4, 3),
        ("opacus", 3, 2, 0),
        ("bk_mixopt", 3, 2, 0),
    ],
)
def test_convolutions_of_a_stack(method, forward, inputs, filters):
    source = x = keras.Input((8, 8, 3))
    for width in (4, 5, 3):
        x = layers.Conv2D(width, 3, padding="same")(x)
    model = keras_fastclip.DPModel(
        source, x, l2_norm_clip=1.0, noise_multiplier=0.0, method=method
    )
    model.compile("sgd", "mse")
    x = tf.constant(random(BATCH, 8, 8, 3))
    found = used_operations(lambda x, y: model.clipped_gradients(x, y)[0], x, x)
    assert found["Conv2D"] == forward
    assert found["Conv2DBackpropInput"] == inputs
    assert found["Conv2DBackpropFilter"] == filters


def test_a_row_of_the_grid_is_all_that_a_method_takes(float64):
    """Ghost norms with kept gradients where there are none: a new method."""
    model, x, y = private("cnn")
    right = loop_over_examples(model, (x, y, None), model._privacy.clipping)
    model._privacy.method = methods.Method("ghost", "keep")
    sums, _ = model.clipped_gradients(x, y)
    assert relative_error(sums, right[0]) < 1e-9
