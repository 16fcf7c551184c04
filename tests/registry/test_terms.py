"""Rows, sums and what terms do with examples that are left out."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from keras import layers, ops

from keras_fastclip.registry.fallback import UserRule
from keras_fastclip.registry.terms import (
    ONE_ROW,
    Rows,
    Small,
    Term,
    at_least_float32,
    is_computed,
    select_rows,
    squared_norm,
    sum_to_shape,
)
from tests.registry.helpers import (
    assert_close,
    built,
    captured,
    check_dropped_examples,
    few_cases,
    random,
)
from tests.zoo import Scale

# -- rows ---------------------------------------------------------------------


def test_fold_puts_rows_beside_their_example():
    rows = tf.range(6)
    assert Rows(2).fold(rows).numpy().tolist() == [[0, 1], [2, 3], [4, 5]]
    minor = Rows(2, example_major=False)
    assert minor.fold(rows).numpy().tolist() == [[0, 3], [1, 4], [2, 5]]


@few_cases
@given(
    rows=st.builds(Rows, st.integers(1, 4), st.booleans()),
    examples=st.integers(0, 4),
    shape=st.lists(st.integers(1, 3), max_size=3),
)
def test_unfold_is_the_inverse_of_fold(rows, examples, shape):
    tensor = random(examples * rows.per_example, *shape)
    folded = rows.fold(tensor)
    assert folded.shape == [examples, rows.per_example, *shape]
    np.testing.assert_array_equal(rows.unfold(folded), tensor)
    np.testing.assert_array_equal(rows.fold(rows.unfold(folded)), folded)


@few_cases
@given(
    rows=st.builds(Rows, st.integers(1, 4), st.booleans()),
    examples=st.integers(1, 4),
)
def test_spread_gives_every_row_the_value_of_its_example(rows, examples):
    folded = rows.fold(rows.spread(tf.range(examples)))
    for example, values in enumerate(folded):
        assert set(values.numpy()) == {example}


@pytest.mark.parametrize("rows", [Rows(), Rows(3), Rows(3, False)])
def test_static_sizes_survive_in_a_graph(rows):
    @tf.function(input_signature=[tf.TensorSpec([None, 4, 5])])
    def folded_twice(tensor):
        folded = rows.fold(tensor)
        assert folded.shape.as_list() == [None, rows.per_example, 4, 5]
        again = rows.unfold(folded)
        assert again.shape.as_list() == [None, 4, 5]
        return again

    tensor = random(6, 4, 5)
    np.testing.assert_array_equal(folded_twice(tensor), tensor)


# -- sums ---------------------------------------------------------------------


@few_cases
@given(st.data())
def test_sum_to_shape_undoes_the_broadcasting_of_numpy(data):
    full = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axes = data.draw(st.integers(1, len(full)))
    shape = [data.draw(st.sampled_from([size, 1])) for size in full[-axes:]]
    g = random(3, *full)
    # Where each entry of the weight goes.
    numbers = np.arange(np.prod(shape)).reshape(shape)
    numbers = np.broadcast_to(numbers, full).ravel()
    right = [
        np.bincount(numbers, np.ravel(row), np.prod(shape)).reshape(shape)
        for row in g
    ]
    np.testing.assert_allclose(sum_to_shape(g, shape), right, 1e-5, 1e-6)


def test_squared_norm_is_taken_over_all_axes_but_the_first():
    tensor = random(3, 2, 4)
    right = np.sum(np.square(tensor), (1, 2))
    np.testing.assert_allclose(squared_norm(tensor), right, 1e-6)
    vector = tensor[:, 0, 0]
    np.testing.assert_allclose(squared_norm(vector), vector**2, 1e-6)


@pytest.mark.parametrize(
    "given_type, wanted",
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_half_precision_becomes_float32(given_type, wanted):
    assert at_least_float32(tf.zeros(2, given_type)).dtype == wanted


def test_computed_weights_are_told_from_variables():
    class Squared(keras.layers.Dense):
        @property
        def kernel(self):
            return self._kernel**2

    plain, squared = keras.layers.Dense(2), Squared(2)
    for layer in (plain, squared):
        layer.build((None, 3))
    assert not is_computed(plain, "kernel")
    assert is_computed(squared, "kernel")
    plain.enable_lora(1)
    assert not is_computed(plain, "kernel")


# -- examples that are left out -----------------------------------------------

BAD = [np.nan, np.inf, -np.inf]


def test_select_rows_replaces_whatever_is_there():
    tensor = tf.constant([[1.0, 2], [np.nan, 3], [np.inf, -np.inf]])
    found = select_rows(tf.constant([True, False, False]), tensor)
    np.testing.assert_array_equal(found, [[1, 2], [0, 0], [0, 0]])
    kept = select_rows(tf.constant([False, True, True]), tensor)
    np.testing.assert_array_equal(kept[1:], tensor[1:])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: layers.Dense(3), (5,)),
        (lambda: layers.Dense(3), (2, 5)),
        (lambda: layers.EinsumDense("abc,bcd->abd", (2, 3)), (2, 5)),
        (lambda: layers.Conv2D(3, 2), (4, 5, 2)),
        (lambda: layers.Conv1D(3, 2, padding="causal", strides=2), (4, 2)),
        (lambda: layers.LayerNormalization(), (2, 5)),
        (lambda: layers.RMSNormalization(), (2, 5)),
        (lambda: layers.GroupNormalization(2), (3, 4)),
        (lambda: Scale(), (2, 5)),
    ],
    ids=[
        "vectors",
        "sequences",
        "blocks",
        "images",
        "causal",
        "layer norm",
        "rms norm",
        "group norm",
        "user rule",
    ],
)
def test_examples_left_out_may_be_non_finite(float64, make, shape, bad):
    x = random(4, *shape)
    layer = built(make(), x)
    check_dropped_examples(layer, x, bad, dropped=[0, 2])
    check_dropped_examples(layer, x, bad, dropped=[3])
    check_dropped_examples(layer, x, bad, dropped=[0, 1, 2, 3])


@pytest.mark.parametrize("rows", [Rows(2), Rows(2, example_major=False)])
@pytest.mark.parametrize("layer", [layers.Dense, layers.Conv1D])
def test_folded_rows_of_examples_left_out_may_be_non_finite(
    float64, layer, rows
):
    x = random(6, 4, 2)
    options = {"kernel_size": 2} if layer is layers.Conv1D else {}
    layer = built(layer(3, **options), x)
    check_dropped_examples(layer, x, np.nan, dropped=[1], rows=rows)


def test_examples_left_out_may_be_non_finite_in_groups(float64):
    x = random(3, 3, 4)
    layer = built(layers.Conv1D(4, 2, groups=2), x)
    check_dropped_examples(layer, x, np.nan, dropped=[1])


class LogScale(Scale):
    """y = log(x) · scale, which has no derivative by the scale at zero."""

    def call(self, x):
        return ops.log(x) * self.scale


def log_scale_rule(layer, x):
    x = tf.math.log(x)
    return x * layer.scale, lambda g: tf.reduce_sum(tf.square(g * x), 1)


@pytest.mark.parametrize("bad", [*BAD, 0.0])
@pytest.mark.parametrize("dropped", [[0], [1, 3], [0, 1, 2, 3]], ids=str)
def test_user_rule_need_not_be_finite_at_examples_left_out(
    float64, bad, dropped
):
    x = tf.exp(random(4, 5))
    check_dropped_examples(
        built(LogScale(), x), x, bad, dropped, rule=log_scale_rule
    )


class ScaledSum(Scale):
    """Adds the two rows of each example, then scales."""

    def call(self, x):
        return ops.sum(ops.reshape(x, (-1, 2, x.shape[-1])), 1) * self.scale


def scaled_sum_rule(layer, x):
    x = tf.reduce_sum(tf.reshape(x, (-1, 2, x.shape[-1])), 1)
    return x * layer.scale, lambda g: tf.reduce_sum(tf.square(g * x), 1)


def test_user_rule_may_take_more_rows_than_it_returns(float64):
    x = random(8, 5)
    layer = built(ScaledSum(), x)
    check_dropped_examples(
        layer, x, np.nan, [0, 2], input_rows=Rows(2), rule=scaled_sum_rule
    )


# -- a user's rule ------------------------------------------------------------


def test_user_rule_gets_its_sum_and_gradients_by_differentiation(float64):
    x = random(4, 3, 5)
    layer = built(Scale(), x)
    (term,) = captured(layer, x)[0].terms
    assert isinstance(term, UserRule)
    g = random(4, 3, 5, seed=1)
    right = np.sum(g * x, 1)
    keep = tf.fill([4], True)
    assert_close(term.per_example(g, ONE_ROW)[0], right)
    assert_close(term.adjoint(g, keep)[0], right.sum(0))
    assert_close(term.omega(g, ONE_ROW), np.sum(np.square(right), 1))
    assert term.prefers_omega(ONE_ROW)


def test_user_rule_with_folded_rows_is_left_to_the_fallback():
    """Its Ω knows one row an example."""
    x = random(4, 5)
    layer = built(Scale(), x)
    assert captured(layer, x)[0].single
    assert not captured(layer, x, rows=Rows(2))[0].single


def test_norms_of_a_user_rule_must_be_one_for_each_example():
    x = random(4, 5)
    layer = built(Scale(), x)

    def rule(layer, x):
        return x * layer.scale, lambda g: tf.square(g * x)

    (term,) = captured(layer, x, rule=rule)[0].terms
    with pytest.raises(ValueError, match="one squared norm for each example"):
        term.omega(x, ONE_ROW)


@pytest.mark.parametrize("result", [None, 1.0, (1.0,), (1.0, 2.0, 3.0, 4.0)])
def test_rule_that_returns_something_else_is_refused(result):
    x = random(4, 5)
    with pytest.raises(ValueError, match="must return"):
        captured(built(Scale(), x), x, rule=lambda layer, x: result)


def test_rule_may_say_what_follows_zeta(float64):
    x = random(4, 5)
    layer = built(layers.Dense(3, activation="tanh"), x)

    def rule(layer, x):
        zeta = x @ layer.kernel + layer.bias
        return zeta, lambda g: tf.reduce_sum(g, 1), ops.relu

    call, finish = captured(layer, x, rule=rule)
    assert_close(finish(call.zetas), ops.relu(x @ layer.kernel + layer.bias))


# -- small terms --------------------------------------------------------------


def test_small_term_adds_the_rows_of_an_example():
    term = Small(keras.Variable(np.zeros(2)), lambda g: g)
    g = tf.constant([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    found = term.per_example(g, Rows(2))[0]
    np.testing.assert_array_equal(found, [[4, 6], [12, 14]])
    found = term.per_example(g, Rows(2, example_major=False))[0]
    np.testing.assert_array_equal(found, [[6, 8], [10, 12]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_term_adds_in_float32(dtype):
    """In half precision such a sum overflows, or stops at 256."""
    term = Small(keras.Variable(np.zeros(1)), lambda g: tf.reduce_sum(g, 1))
    g = tf.fill([2, 70000, 1], tf.cast(1, dtype))
    assert term.per_example(g, ONE_ROW)[0].numpy().tolist() == [[7e4], [7e4]]
    keep = tf.constant([True, True])
    assert term.adjoint(g, keep)[0].numpy().tolist() == [1.4e5]


def test_base_term_promises_nothing():
    term, g = Term(), tf.zeros([2, 3])
    assert not term.has_omega and not term.prefers_omega(ONE_ROW)
    for method in (term.adjoint, term.per_example, term.omega):
        with pytest.raises(NotImplementedError):
            method(g, ONE_ROW)
