"""The bound on one example holds where numbers are rounded or lost."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import keras_fastclip
from keras_fastclip.capture import Use
from keras_fastclip.clipping import FlatClipping
from keras_fastclip.parts import Part
from keras_fastclip.planner import Way
from keras_fastclip.registry import convolution, linear
from keras_fastclip.registry.embedding import Lookup
from keras_fastclip.registry.terms import ONE_ROW, itself, squared_norm
from keras_fastclip.registry.turns import norm_of_one

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
    norm = tf.function(linear.ghost_norm, jit_compile=jit, autograph=False)
    exact = 15 * (positions * np.float64(np.float32(value)) ** 2) ** 2
    assert norm(a, g).numpy()[0] >= exact
    assert norm(a, g).numpy()[0] <= exact * (1 + 1e-5 + 1.4e-7 * positions)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("norm", [squared_norm, lambda g: norm_of_one([g])])
def test_a_million_equal_squares_are_not_too_small(norm, jit):
    """Nor are they with XLA, which would add them one after the other."""
    compiled = tf.function(norm, jit_compile=jit, autograph=False)
    for value in np.linspace(0.5, 1, 60, dtype="float32"):
        gradient = tf.fill([1, 1024, 1024], value)
        exact = 2**20 * np.float64(value) ** 2
        # 320 units of roundoff are 1.9e-5; the sum may itself be rounded up.
        assert 0 <= compiled(gradient).numpy()[0] / exact - 1 + 1e-7 < 2.5e-5


# -- many cases --------------------------------------------------------------

WAYS = ["ghost", "ghost:loop", "ghost:tiles", "build", "keep", "build:loop"]


def clipped_norm(a, g, way, limit=1.0):
    """The norm, in float64, of one example's clipped gradient aᵀg."""
    kernel = tf.zeros([a.shape[-1], g.shape[-1]])
    part = Part([Use(linear.Linear(kernel, a, itself), g, ONE_ROW, None)])
    part.way = Way.parse(way)
    norms = part.squared_norms()[None]
    factors = FlatClipping(limit).bounded_factors(norms)
    (total,) = part.weighted_sum(factors[0]).values()
    return np.linalg.norm(total.numpy().astype("float64"))


def signal(rng, shape, pattern):
    """Numbers of one size, which cancel each other in several ways."""
    positions = np.arange(shape[1])[None, :, None]
    if pattern == "random":
        return rng.normal(size=shape)
    if pattern == "constant":
        return np.full(shape, rng.uniform(0.1, 1))
    if pattern == "alternating":
        return rng.uniform(0.1, 1) * (-1.0) ** positions * np.ones(shape)
    if pattern == "nearly alternating":
        noise = 1e-6 * rng.normal(size=shape)
        return (-1.0) ** positions * np.ones(shape) + noise
    if pattern == "wide":
        return rng.normal(size=shape) * 10.0 ** rng.uniform(-9, 9, shape)
    return np.where(positions == shape[1] // 2, 1.0, 1e-7) * np.ones(shape)


PATTERNS = [
    "random",
    "constant",
    "alternating",
    "nearly alternating",
    "wide",
    "one",
]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    positions=st.sampled_from([1, 2, 3, 5, 16, 33, 100]),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    patterns=st.tuples(st.sampled_from(PATTERNS), st.sampled_from(PATTERNS)),
    scales=st.tuples(st.integers(-18, 12), st.integers(-18, 12)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_gradient_is_longer_than_the_clip_norm(
    positions, widths, patterns, scales, dtype, seed
):
    """By every way, at any scale, whatever cancels: to one part in a million.

    Some 1,500 cases; a case of half precision has numbers of that precision.
    """
    rng = np.random.default_rng(seed)
    a, g = (
        10.0**scale * signal(rng, (1, positions, width), pattern)
        for scale, width, pattern in zip(scales, widths, patterns, strict=True)
    )
    a, g = (tf.cast(tf.constant(each, "float32"), dtype) for each in (a, g))
    for way in WAYS:
        assert clipped_norm(a, g, way) <= 1 + 1e-6, way


@pytest.mark.parametrize("way", ["ghost", "ghost:tiles", "keep"])
@pytest.mark.parametrize(
    "patterns", list(itertools.product(PATTERNS[1:4], repeat=2))
)
@pytest.mark.parametrize("positions", [1024, 4096])
def test_long_sequences_that_cancel(positions, patterns, way):
    rng = np.random.default_rng(positions)
    a, g = (
        tf.constant(signal(rng, (1, positions, 7), pattern), "float32")
        for pattern in patterns
    )
    for scale in (1.0, 1e4):
        assert clipped_norm(scale * a, g, way) <= 1 + 1e-6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "positions, widths, cost",
    [
        (1, (64, 48), 1e-4),
        (16, (64, 48), 1e-4),
        (64, (64, 48), 1e-4),
        (128, (64, 48), 1e-4),
        (128, (768, 752), 1e-4),
        (128, (768, 3072), 1e-4),
        (512, (256, 256), 1e-4),
        (512, (768, 752), 1e-4),
        (512, (1024, 1024), 1e-4),
        (512, (64, 48), 1.5e-4),
        (512, (768, 3072), 1.5e-4),
        (100, (256, 10_000), 1e-4),
    ],
)
def test_what_the_margin_costs(positions, widths, cost, way):
    """Less than 1e-4 of a gradient, in general.

    Positions that have nothing to do with each other are the worst case short
    of cancelling. Norms of gradients that are kept for the sum have a margin
    for sums of squares only. Those of gradients that are built and dropped
    know no Gram matrix, and have to take it that all partial sums are as long
    as they can be.
    """
    rng = np.random.default_rng(positions)
    a, g = (
        tf.constant(rng.normal(size=(1, positions, width)), "float32")
        for width in widths
    )
    if way == "keep":
        cost = 1.1e-5
    elif way.startswith("build") and positions >= 128:
        cost = 1.2e-4 if positions == 128 else 8e-4
    assert 1 - cost < clipped_norm(a, g, way, limit=1e-2) / 1e-2 <= 1 + 1e-6


def test_what_the_margin_costs_behind_a_relu():
    """Inputs of one sign have much in common, and large Gram matrices."""
    rng = np.random.default_rng(0)
    a, g = (rng.normal(size=(1, 512, width)) for width in (768, 752))
    a, g = tf.constant(np.maximum(a, 0), "float32"), tf.constant(g, "float32")
    assert clipped_norm(a, g, "ghost", limit=1e-2) > 1e-2 * (1 - 5e-4)


def vocabulary(rng, positions=100, widths=(256, 10_000)):
    """a and g of a language model's last layer, before it has learned much.

    Inputs are much alike, and each position has a label of its own.
    """
    shared, own = (rng.normal(size=(1, n, widths[0])) for n in (1, positions))
    a = 2 * shared + own
    logits = 0.2 * rng.normal(size=(1, positions, widths[1]))
    g = np.exp(logits) / np.sum(np.exp(logits), -1, keepdims=True)
    labels = rng.integers(0, widths[1], positions)
    g[0, np.arange(positions), labels] -= 1
    return tf.constant(a, "float32"), tf.constant(g, "float32")


GHOST_WAYS = [way for way in WAYS if way.startswith("ghost")]


@pytest.mark.parametrize("way", GHOST_WAYS)
def test_what_the_margin_of_a_vocabulary_costs(way):
    """Ten thousand outputs, and inputs that have much in common."""
    a, g = vocabulary(np.random.default_rng(0))
    found = clipped_norm(a, g, way, limit=1e-2) / 1e-2
    assert 1 - 1e-4 < found <= 1 + 1e-6


def exact_norm(a, g):
    """The squared norm of aᵀg of one example, in float64."""
    a, g = a.numpy().astype("float64")[0], g.numpy().astype("float64")[0]
    return np.sum(np.square(a.T @ g))


def assert_not_below(a, g, way):
    """Neither the norm, nor the clip norm below what is clipped to it."""
    norm = linear.ghost_norm(a, g, Way.parse(way).form)
    assert norm.numpy()[0] >= exact_norm(a, g)
    assert clipped_norm(a, g, way) <= 1 + 1e-6


@pytest.mark.parametrize("way", GHOST_WAYS)
@pytest.mark.parametrize("first, second", [(256, 3_000), (3_000, 1_100)])
@pytest.mark.parametrize("pattern", PATTERNS[:5])
def test_wide_vectors_that_cancel(pattern, first, second, way):
    """In several chunks of a Gram matrix, of one or both."""
    rng = np.random.default_rng(first)
    signs = (-1.0) ** np.arange(20)[None, :, None]
    a = signal(rng, (1, 20, first), pattern)
    for g in (
        signal(rng, (1, 20, second), "constant") * signs,
        rng.normal(size=(1, 1, second)) * signs,
        signal(rng, (1, 20, second), "one"),
    ):
        for scale in (1e-9, 1e4):
            left, right = (tf.constant(x, "float32") for x in (scale * a, g))
            assert_not_below(left, right, way)


@pytest.mark.parametrize("way", GHOST_WAYS)
@pytest.mark.parametrize("cancel", [1.0, 1e-3, 1e-6])
def test_a_vocabulary_that_cancels(cancel, way):
    """Two halves of a sequence, one of which nearly takes back the other."""
    rng = np.random.default_rng(0)
    a, g = vocabulary(rng, positions=30)
    noise = tf.constant(cancel * rng.normal(size=g.shape), "float32")
    g = tf.concat([g, g * (cancel * noise - 1)], 1)
    assert_not_below(tf.concat([a, a], 1), g, way)


@pytest.mark.parametrize("way", GHOST_WAYS)
@pytest.mark.parametrize("width", [1_100, 3_000])
def test_squares_that_are_lost_in_every_chunk(width, way):
    """A one in each, and squares of half its last bit."""
    step = linear.chunk_width(width)
    for period in (step, step - 1, step // 2):
        ones = np.arange(width) % period == 0
        a = np.where(ones, 1.0, 2.0**-12) * np.ones((1, 16, 1))
        a = tf.constant(a, "float32")
        for g in (a[..., :300], tf.eye(16)[None], tf.eye(16, 300)[None]):
            assert_not_below(a, g, way)
            assert_not_below(g, a, way)


@pytest.mark.parametrize("way", GHOST_WAYS)
@pytest.mark.parametrize("width", [200, 1_300])
def test_vectors_of_any_length_that_are_long_to_add(width, way):
    """Lengths of which the square is too small to hold, and others."""
    rng = np.random.default_rng(width)
    for _ in range(20):
        scales = 10.0 ** rng.uniform(-24, 15, (2, 1, 12, 1))
        sizes = (1, 12, width), (1, 12, 150)
        a, g = (
            tf.constant(scale * signal(rng, size, "constant"), "float32")
            for scale, size in zip(scales, sizes, strict=True)
        )
        # Products of the longest are too large for float32.
        a = a / tf.maximum(tf.reduce_max(a) * tf.reduce_max(g) / 1e12, 1)
        assert clipped_norm(a, g, way) <= 1 + 1e-6


@pytest.mark.parametrize("form", ["batched", "blocks", "loop"])
@pytest.mark.parametrize("channels", [7, 150, 1_100])
@pytest.mark.parametrize("pattern", [*PATTERNS[:4], "lost"])
def test_patches_that_cancel(pattern, channels, form):
    """Their Gram matrix is a sum of those of pixels."""
    rng = np.random.default_rng(channels)
    image = signal(rng, (1, 36, channels), pattern)
    if pattern == "lost":
        image = one_and_many((1, 36, channels), 2, 2.0**-12)
    image = tf.constant(image.reshape(1, 6, 6, channels), "float32")
    layer = layers.Conv2D(5, 3, padding="same")
    layer.build(image.shape)
    _, terms = convolution.convolution(layer, image)
    kernel = terms[0].kernel(ONE_ROW)
    assert kernel.has_shifted_grams
    for other in ("random", "alternating", "nearly alternating"):
        g = tf.constant(signal(rng, (1, 36, 5), other), "float32")
        g = tf.reshape(g, [1, 6, 6, 5])
        exact = exact_norm(*terms[0].pair(g, ONE_ROW))
        assert terms[0].omega(g, ONE_ROW, form).numpy()[0] >= exact


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("width", [256, 512, 2048, 4096])
def test_ghost_norms_of_wide_constant_inputs_are_not_too_small(width, jit):
    """Long inner products, all terms of which are rounded the same way."""
    norm = tf.function(linear.ghost_norm, jit_compile=jit, autograph=False)
    for value in np.linspace(0.5, 1, 40, dtype="float32"):
        a = tf.fill([1, 16, width], value)
        exact = (16 * width * np.float64(value) ** 2) ** 2
        most = exact * (1 + 1e-5 + 1.6e-7 * width)
        assert exact <= norm(a, a).numpy()[0] <= most


# -- numbers that are lost one by one ----------------------------------------


def one_and_many(shape, axis, small):
    """One, and then numbers so small that each is rounded away, or up.

    Half a bit is the most that an addition can lose, and here all lose it in
    the same direction.
    """
    places = np.arange(shape[axis])
    places = np.expand_dims(places, [i for i in range(3) if i != axis])
    return np.broadcast_to(np.where(places == 0, 1.0, small), shape)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [256, 513, 768, 1024, 1025, 2048, 8192])
@pytest.mark.parametrize("positions", [1, 2, 16, 128])
def test_squares_that_are_lost_one_by_one(positions, width, way):
    """Along the vectors: a one, and squares of half its last bit."""
    a = one_and_many((1, positions, width), 2, 2.0**-12)
    a = tf.constant(a, "float32")
    for g in (a[..., :256], a[..., :1]):
        for left, right in ((a, g), (g, a)):
            assert clipped_norm(left, right, way, 1e-2) <= 1e-2 * (1 + 1e-6)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("width", [256, 1024, 4096])
@pytest.mark.parametrize("positions", [1, 2, 16])
def test_norms_are_not_too_small_if_squares_are_lost(positions, width, jit):
    norm = tf.function(linear.ghost_norm, jit_compile=jit, autograph=False)
    a = one_and_many((1, positions, width), 2, 2.0**-12)
    exact = (positions * (1 + (width - 1) * 2.0**-24)) ** 2
    a = tf.constant(a, "float32")
    assert norm(a, a[..., :1]).numpy()[0] >= positions * np.sqrt(exact)
    assert norm(a, a).numpy()[0] >= exact


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("widths", [(1, 1), (3, 5), (64, 64)])
@pytest.mark.parametrize("positions", [16, 256, 300, 512, 2048])
def test_positions_that_are_lost_one_by_one(positions, widths, way):
    """Each is rounded away, or up, depending on what it is multiplied by."""
    a = tf.ones([1, positions, widths[0]])
    for more in (1 - 2.0**-20, 1.0, 1 + 2.0**-20):
        shape = (1, positions, widths[1])
        g = one_and_many(shape, 1, 2.0**-24 * more)
        g = tf.constant(g, "float32")
        for limit in (1.0, 1e-2, 0.7e-2):
            found = clipped_norm(a, g, way, limit)
            assert found <= limit * (1 + 1e-6)


@pytest.mark.parametrize("way", ["ghost", "ghost:tiles", "build"])
@pytest.mark.parametrize("scale", [1e-18, 1e-9, 1.0, 1e9, 1e15])
@pytest.mark.parametrize("positions, width", [(2, 2048), (64, 300), (700, 20)])
def test_gradients_of_rank_one_that_cancel(positions, width, scale, way):
    """All positions have the same a and g but for a factor."""
    rng = np.random.default_rng(positions)
    factors = rng.normal(size=(1, positions, 1))
    signs = (-1.0) ** np.arange(positions)[None, :, None]
    a = rng.normal(size=(1, 1, width)) * np.ones_like(factors)
    for g in (factors - np.mean(factors), signs, signs + 1e-6 * factors):
        g = g * rng.normal(size=(1, 1, 7)) / scale * 1e4
        left, right = (tf.constant(x, "float32") for x in (scale * a, g))
        assert clipped_norm(left, right, way) <= 1 + 1e-6


def looked_up_norm(ids, g, limit):
    """The norm of one example's clipped gradient of a table."""
    table = tf.Variable(tf.zeros([max(ids) + 1, g.shape[-1]]))
    term = Lookup(table, tf.constant([ids]))
    part = Part([Use(term, tf.constant(g, "float32"), ONE_ROW, None)])
    factors = FlatClipping(limit).bounded_factors(part.squared_norms()[None])
    (total,) = part.weighted_sum(factors[0]).values()
    return np.linalg.norm(total.numpy().astype("float64"))


@pytest.mark.parametrize("count", [16, 512, 4096])
def test_rows_of_a_table_that_are_lost_one_by_one(count):
    for more in (1 - 2.0**-20, 1.0, 1 + 2.0**-20):
        g = one_and_many((1, count, 3), 1, 2.0**-24 * more)
        for limit in (1.0, 1e-2, 0.7e-2):
            found = looked_up_norm([1] * count, g, limit)
            assert found <= limit * (1 + 1e-6)


def test_what_the_margin_of_a_table_costs():
    rng = np.random.default_rng(0)
    g = rng.normal(size=(1, 512, 64))
    ids = rng.integers(0, 10_000, 512).tolist()
    assert looked_up_norm(ids, g, 1e-2) > 1e-2 * (1 - 2e-5)
