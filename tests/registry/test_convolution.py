"""Convolutions: rules against automatic differentiation."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, event, given
from hypothesis import strategies as st
from keras import layers

from keras_fastclip.capture import Use
from keras_fastclip.parts import Part
from keras_fastclip.planner import Way
from keras_fastclip.registry import convolution, default_registry
from keras_fastclip.registry.terms import ONE_ROW, Rows
from tests.registry.helpers import (
    assert_close,
    built,
    captured,
    check_rule,
    check_rule_in_graph,
    few_cases,
    random,
    takes,
)

pytestmark = pytest.mark.usefixtures("float64")

CLASSES = {1: layers.Conv1D, 2: layers.Conv2D, 3: layers.Conv3D}

CASES = {
    "plain": (2, (5, 4, 2), {"kernel_size": 3}),
    "same": (2, (5, 4, 2), {"kernel_size": 3, "padding": "same"}),
    "even kernel": (2, (5, 4, 2), {"kernel_size": (2, 4), "padding": "same"}),
    "strides": (2, (6, 7, 2), {"kernel_size": 3, "strides": (2, 3)}),
    "same strides": (
        2,
        (6, 7, 2),
        {"kernel_size": 3, "strides": (2, 3), "padding": "same"},
    ),
    "dilation": (2, (6, 7, 2), {"kernel_size": 2, "dilation_rate": (2, 3)}),
    "same dilation": (
        2,
        (6, 4, 2),
        {"kernel_size": 3, "dilation_rate": (2, 3), "padding": "same"},
    ),
    "1x1": (2, (3, 4, 2), {"kernel_size": 1}),
    "1x1 strides": (2, (4, 5, 2), {"kernel_size": 1, "strides": 2}),
    "1x1 same strides": (
        2,
        (4, 5, 2),
        {"kernel_size": 1, "strides": 3, "padding": "same"},
    ),
    "strides beyond kernel": (2, (7, 8, 2), {"kernel_size": 2, "strides": 4}),
    "kernel beyond input": (
        2,
        (3, 2, 2),
        {"kernel_size": (7, 5), "padding": "same"},
    ),
    "kernel beyond input, strides": (
        2,
        (4, 2, 2),
        {"kernel_size": 7, "strides": 3, "padding": "same"},
    ),
    "one position": (2, (3, 3, 2), {"kernel_size": 3}),
    "groups": (2, (4, 4, 4), {"kernel_size": 2, "groups": 2}),
    "groups same strides": (
        2,
        (5, 4, 4),
        {"kernel_size": 3, "groups": 2, "strides": 2, "padding": "same"},
    ),
    "1d": (1, (6, 2), {"kernel_size": 3, "strides": 2}),
    "1d groups": (1, (4, 4), {"kernel_size": 2, "groups": 4}),
    "causal": (1, (6, 2), {"kernel_size": 3, "padding": "causal"}),
    "causal dilation": (
        1,
        (6, 2),
        {"kernel_size": 3, "padding": "causal", "dilation_rate": 2},
    ),
    "causal strides": (
        1,
        (6, 2),
        {"kernel_size": 3, "padding": "causal", "strides": 2},
    ),
    "causal strides, last inputs unused": (
        1,
        (6, 2),
        {"kernel_size": 3, "padding": "causal", "strides": 4},
    ),
    "causal kernel beyond input": (
        1,
        (2, 2),
        {"kernel_size": 5, "padding": "causal"},
    ),
    "3d": (3, (3, 4, 3, 2), {"kernel_size": (2, 3, 1)}),
    "3d same strides": (
        3,
        (3, 4, 3, 2),
        {"kernel_size": 2, "strides": (1, 2, 2), "padding": "same"},
    ),
    "3d dilation": (3, (4, 4, 3, 2), {"kernel_size": 2, "dilation_rate": 2}),
    "3d groups": (3, (2, 3, 2, 2), {"kernel_size": 2, "groups": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_convolution_equals_autodiff(name):
    rank, shape, options = CASES[name]
    x = random(3, *shape)
    layer = CLASSES[rank](4, activation="tanh", **options)
    check_rule(built(layer, x), x)


@pytest.mark.parametrize("frozen", ["_kernel", "bias"])
def test_frozen_weight_of_a_convolution_has_no_term(frozen):
    x = random(3, 4, 4, 2)
    layer = built(layers.Conv2D(3, 2), x)
    getattr(layer, frozen).trainable = False
    assert len(check_rule(layer, x).terms) == 1


def test_convolution_without_bias_equals_autodiff():
    x = random(3, 4, 4, 2)
    check_rule(built(layers.Conv2D(3, 2, use_bias=False), x), x)


@st.composite
def convolutions(draw):
    """A convolution without groups, and the shape of its input."""
    rank = draw(st.integers(1, 3))

    def sizes(most, least=1):
        return tuple(draw(st.integers(least, most)) for _ in range(rank))

    kernel, strides, dilation = sizes(3), sizes(1), sizes(1)
    # Keras takes strides or dilation, not both.
    if draw(st.booleans()):
        strides = sizes(3)
    else:
        dilation = sizes(3)
    paddings = ["valid", "same"] + ["causal"] * (rank == 1)
    padding = draw(st.sampled_from(paddings))
    if padding == "valid":
        spatial = tuple(
            (k - 1) * d + 1 + draw(st.integers(0, 3))
            for k, d in zip(kernel, dilation, strict=True)
        )
    else:
        spatial = sizes(5)
    options = {
        "filters": draw(st.integers(1, 3)),
        "kernel_size": kernel,
        "strides": strides,
        "dilation_rate": dilation,
        "padding": padding,
        "use_bias": draw(st.booleans()),
    }
    return rank, (*spatial, draw(st.integers(1, 3))), options


@few_cases
@given(convolutions(), st.sampled_from([Rows(), Rows(2), Rows(2, False)]))
def test_convolution_of_any_shape_equals_autodiff(convolution, rows):
    rank, shape, options = convolution
    x = random(4, *shape)
    check_rule(built(CLASSES[rank](**options), x), x, rows=rows)


@pytest.mark.parametrize("example_major", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_with_folded_rows_equals_autodiff(groups, example_major):
    x = random(6, 4, 3, 2)
    layer = built(layers.Conv2D(4, 2, groups=groups), x)
    check_rule(layer, x, rows=Rows(3, example_major))


# -- channels first -----------------------------------------------------------

CHANNELS_FIRST = {
    "1d": (1, (2, 6), {"kernel_size": 3}),
    "1d causal groups": (
        1,
        (2, 6),
        {"kernel_size": 3, "groups": 2, "padding": "causal"},
    ),
    "2d": (2, (2, 5, 6), {"kernel_size": 2}),
    "2d groups": (
        2,
        (2, 5, 6),
        {"kernel_size": 2, "groups": 2, "strides": 2, "padding": "same"},
    ),
    "3d same": (3, (2, 2, 4, 3), {"kernel_size": 3, "padding": "same"}),
}


@pytest.mark.parametrize("name", CHANNELS_FIRST)
def test_channels_first_equals_autodiff(name):
    rank, shape, options = CHANNELS_FIRST[name]
    x = random(3, *shape)
    layer = CLASSES[rank](4, data_format="channels_first", **options)
    try:
        built(layer, x)
    except tf.errors.UnimplementedError:
        pytest.skip("this device has no convolution with channels first")
    check_rule(layer, x)


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_compiled_channels_first_equals_channels_last(padding):
    x = random(3, 5, 6, 2)
    last = built(layers.Conv2D(5, 3, padding=padding), x)
    first = layers.Conv2D(5, 3, padding=padding, data_format="channels_first")
    first.build((3, 2, 5, 6))
    for mine, other in zip(first.weights, last.weights, strict=True):
        mine.assign(other)
    call = check_rule(last, x)
    g = random(*call.zetas[0].shape, seed=1)
    keep = tf.constant([True, True, True])

    def results(layer, x, g):
        call = captured(layer, x)[0]
        assert call.single
        return [
            (term.per_example(g, ONE_ROW), term.adjoint(g, keep))
            for term in call.terms
        ]

    @tf.function(jit_compile=True, autograph=False)
    def compiled(x, g):
        return results(first, x, g)

    found = compiled(*[tf.transpose(t, [0, 3, 1, 2]) for t in (x, g)])
    tf.nest.map_structure(assert_close, found, results(last, x, g))


def test_bias_that_keras_adds_to_another_axis_is_left_to_the_fallback():
    x = random(3, 2, 3, 2, 4)
    layer = layers.Conv3D(4, 1, data_format="channels_first")
    assert not takes(built(layer, x), x)
    assert takes(layer, x[..., :3])


# -- graphs -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": (2, 4), "strides": (2, 3), "padding": "same"},
        {"kernel_size": 3, "dilation_rate": 2, "padding": "same"},
    ],
    ids=str,
)
def test_convolution_of_unknown_spatial_sizes(options):
    x = random(4, 6, 7, 3)
    layer = built(layers.Conv2D(4, **options), x)
    check_rule_in_graph(layer, x, [None, 6, None, 3], rows=Rows(2))


@pytest.mark.parametrize("padding", ["valid", "causal"])
def test_convolution_over_time_of_unknown_length(padding):
    x = random(4, 6, 2)
    layer = built(layers.Conv1D(3, 2, strides=4, padding=padding), x)
    check_rule_in_graph(layer, x, [None, None, 2])


def test_functional_model_of_unknown_spatial_sizes():
    inputs = keras.Input((None, None, 3))
    layer = layers.Conv2D(4, 3, strides=2, padding="same")
    keras.Model(inputs, layer(inputs))
    for height, width in [(5, 4), (2, 7)]:
        x = random(3, height, width, 3)
        check_rule(layer, x)
        check_rule_in_graph(layer, x, [None, None, None, 3])


# -- the choice between the two forms -----------------------------------------


@pytest.mark.parametrize(
    "size, filters, prefers",
    [
        # T = (size - 1)², d = 4·2, and 2T² < d·filters
        (3, 4, False),  # 2·16 = 32
        (3, 5, True),
        (4, 20, False),  # 2·81 = 162
        (4, 21, True),
    ],
)
def test_ghost_norm_is_preferred_by_the_positions_of_the_output(
    size, filters, prefers
):
    x = random(2, size, size, 2)
    layer = built(layers.Conv2D(filters, 2), x)
    kernel = captured(layer, x)[0].terms[0]
    assert kernel.prefers_omega(ONE_ROW) is prefers


def test_groups_share_the_positions_of_the_output():
    # For each group T = 4, d = 8, p: 2·4² < 8p holds from p = 5 on.
    x = random(2, 3, 3, 4)
    for p, prefers in [(4, False), (5, True)]:
        layer = layers.Conv2D(2 * p, 2, groups=2)
        layer.build(x.shape)
        kernel = captured(layer, x)[0].terms[0]
        assert kernel.prefers_omega(ONE_ROW) is prefers


def test_per_example_gradients_never_hold_all_patches():
    """Products are taken offset by offset, so no tensor is larger."""
    x = random(2, 8, 8, 2)
    layer = built(layers.Conv2D(3, 3, padding="same"), x)
    call = captured(layer, x)[0]
    g = random(*call.zetas[0].shape)

    graph = tf.function(
        lambda g: call.terms[0].per_example(g, ONE_ROW)
    ).get_concrete_function(g)
    largest = max(
        np.prod(tensor.shape)
        for operation in graph.graph.get_operations()
        for tensor in operation.outputs
        if tensor.shape.is_fully_defined()
    )
    patches = 2 * 8 * 8 * 9 * 2
    assert largest < patches


# -- ghost norms from Gram matrices of pixels ---------------------------------


@few_cases
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    kernel=st.integers(1, 4),
    dilation=st.integers(1, 2),
    padding=st.sampled_from(["same", "valid", "causal"]),
    batch=st.integers(1, 3),
)
def test_norms_from_pixels_are_those_of_built_gradients(
    sizes, kernel, dilation, padding, batch
):
    assume(padding != "causal" or len(sizes) == 1)
    reach = (kernel - 1) * dilation + 1
    assume(padding != "valid" or min(sizes) >= reach)
    x = random(batch, *sizes, 2)
    layer = built(
        CLASSES[len(sizes)](
            3, kernel, padding=padding, dilation_rate=dilation, use_bias=False
        ),
        x,
    )
    zeta, (term,) = default_registry().lookup(layer)(layer, x)[:2]
    g = random(*zeta.shape, seed=1)
    event(f"from pixels: {term._has_shifted_grams(ONE_ROW)}")
    (gradients,) = term.per_example(g, ONE_ROW)
    exact = np.sum(np.square(gradients), axis=(*range(1, len(sizes) + 3),))
    assume(np.max(exact) > 0)  # Or all patches are padding.
    for form in (None, "batched", "loop", "tiles"):
        assert_close(term.omega(g, ONE_ROW, form), exact)


@pytest.mark.parametrize(
    "size, options, from_pixels",
    [
        (8, {"kernel_size": 3, "padding": "same"}, True),
        (8, {"kernel_size": 3}, True),
        (8, {"kernel_size": 3, "strides": 2}, False),
        (8, {"kernel_size": 8}, False),  # One position: no product at all.
        (8, {"kernel_size": 1}, False),
    ],
)
def test_norms_come_from_pixels_where_that_takes_less(
    size, options, from_pixels
):
    x = random(2, size, size, 2)
    layer = built(layers.Conv2D(3, use_bias=False, **options), x)
    term = captured(layer, x)[0].terms[0]
    assert term._has_shifted_grams(ONE_ROW) == from_pixels
    copied = term.kernel(ONE_ROW).copied_for_ghost("batched")
    assert copied <= 5 * (size + 2) ** 4


# -- blocks -------------------------------------------------------------------


@pytest.fixture
def in_line(monkeypatch):
    """Images are laid in one line wherever that is possible."""
    monkeypatch.setattr(convolution, "_FEW_ZEROS", np.inf)
    monkeypatch.setattr(convolution, "_ALIGNED", 1)
    monkeypatch.setattr(convolution, "_examples_in", lambda *_: 3)
    # Made for such settings, and for no others.
    convolution._blockwise.cache_clear()
    yield
    convolution._blockwise.cache_clear()


def in_blocks(layer, x, g, rows=ONE_ROW):
    """Norms and sum, as kept in blocks, and whether in line."""
    _, (term,) = default_registry().lookup(layer)(layer, x)[:2]
    part = Part([Use(term, g, rows, None)])
    part.way = Way.parse("keep:blocks")
    norms = part.squared_norms()
    factors = tf.ones_like(norms)
    (total,) = part.weighted_sum(factors, tf.constant(True)).values()
    return norms, total, term.kernel(rows).line is not None


@few_cases
@given(
    convolutions(),
    st.sampled_from([Rows(), Rows(2), Rows(2, False)]),
    st.sampled_from([2, 4, 8]),
)
def test_images_in_one_line_have_the_right_gradients(
    in_line, convolution, rows, number
):
    rank, shape, options = convolution
    x = random(number, *shape)
    layer = built(CLASSES[rank](**{**options, "use_bias": False}), x)
    g = random(*layer(x).shape, seed=1)
    norms, total, used = in_blocks(layer, x, g, rows)
    event(f"in line: {used}")
    assert used == (set(options["strides"]) == {1})
    _, (term,) = default_registry().lookup(layer)(layer, x)[:2]
    (exact,) = term.per_example(g, rows)
    axes = tuple(range(1, exact.shape.rank))
    assert_close(norms, np.sum(np.square(exact), axes))
    assert_close(total, np.sum(exact, 0))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e300])
@pytest.mark.parametrize("graph", [False, True])
def test_no_image_in_a_line_reaches_its_neighbours(in_line, value, graph):
    x, layer = random(7, 5, 4, 2), layers.Conv2D(3, 3, padding="same")
    layer.use_bias = False
    built(layer, x)
    g = random(7, 5, 4, 3, seed=1)
    right = in_blocks(layer, x, g)[0].numpy()
    for place in (0, 2, 3, 6):
        spoiled = x.numpy()
        spoiled[place] = value
        run = tf.function(in_blocks) if graph else in_blocks
        norms, _, used = run(layer, tf.constant(spoiled), g)
        assert used
        others = np.arange(7) != place
        np.testing.assert_array_equal(norms[others], right[others])


def test_gradients_in_one_line_take_no_slices_that_are_copies():
    x = tf.zeros((2, 8, 16, 16), "float64")
    layer = built(layers.Conv2D(4, 3, padding="same", use_bias=False), x)
    _, (term,) = default_registry().lookup(layer)(layer, x)[:2]
    line = term.kernel(ONE_ROW).line
    assert line.pixels == 9 * 17
    graph = tf.function(line.patches).get_concrete_function(x).graph
    kinds = [op.type for op in graph.get_operations()]
    # Three to be put side by side, and three of these without a copy.
    assert kinds.count("Slice") == 6 and kinds.count("ConcatV2") == 1
    strided = built(layers.Conv2D(4, 3, 2, use_bias=False), x)
    small = built(layers.Conv2D(4, 3, use_bias=False, padding="same"), x)
    for other, images in ((strided, x), (small, x[:, :3, :3])):
        _, (term,) = default_registry().lookup(other)(other, images)[:2]
        assert term.kernel(ONE_ROW).line is None


def test_kept_pieces_fill_the_pool_if_few_examples_more_will_do():
    def block(channels):
        x = random(2, 32, 32, channels)
        layer = built(layers.Conv2D(channels, 3, padding="same"), x)
        _, (term, _) = default_registry().lookup(layer)(layer, x)[:2]
        return term.kernel(ONE_ROW).block

    # A third of the gradient of an example has 3 x 64 x 64 numbers.
    assert block(64) == -(-(2**16) // (3 * 64 * 64)) == 6
    # So many would need 22, more than twice what the caches hold.
    assert block(32) == 9


@pytest.mark.parametrize("way", ["keep:blocks", "ghost:blocks"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("line", [False, True])
def test_blocks_that_do_not_divide_the_batch(monkeypatch, way, compiled, line):
    """Also with an example that is not finite, and with no example at all."""
    monkeypatch.setattr(convolution, "_examples_in", lambda *_: 3)
    monkeypatch.setattr(convolution, "_ALIGNED", 1)
    monkeypatch.setattr(convolution, "_FEW_ZEROS", 9 if line else 0)
    layer = keras.layers.Conv2D(4, 3, padding="same", dtype="float64")
    layer.build([None, 5, 5, 2])
    rng = np.random.default_rng(0)

    def sums(x, g, way, factors):
        _, terms = convolution.convolution(layer, x)
        part = Part([Use(terms[0], g, ONE_ROW, None)])
        part.way = Way.parse(way)
        norms = part.squared_norms()
        finite = tf.reduce_all(tf.math.is_finite(norms))
        return norms, list(part.weighted_sum(factors, finite).values())[0]

    run = tf.function(sums, jit_compile=compiled, autograph=False)
    for size in (1, 3, 7, 11, *((0,) if not compiled else ())):
        x = tf.constant(rng.normal(size=[size, 5, 5, 2]))
        g = tf.constant(rng.normal(size=[size, 5, 5, 4]))
        factors = tf.constant(rng.uniform(size=[size]))
        right = sums(x, g, "keep:patches", factors)
        for mine, exact in zip(run(x, g, way, factors), right, strict=True):
            np.testing.assert_allclose(mine, exact, rtol=1e-9, atol=1e-12)
        if size > 1:
            bad = tf.where(tf.range(size) == 1, np.inf, 1.0)
            bad = tf.cast(tf.reshape(bad, [-1, 1, 1, 1]), x.dtype)
            kept = tf.where(
                tf.range(size) == 1, tf.zeros_like(factors), factors
            )
            _, mine = run(x * bad, g, way, kept)
            _, exact = sums(x, g, "keep:patches", kept)
            np.testing.assert_allclose(mine, exact, rtol=1e-9, atol=1e-12)
