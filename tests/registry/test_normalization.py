"""Normalizations: rules against automatic differentiation."""

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

from keras_fastclip import _keras
from keras_fastclip.registry.normalization import (
    group_normalization,
    layer_normalization,
)
from keras_fastclip.registry.terms import Rows
from tests.registry.helpers import (
    built,
    check_rule,
    check_rule_in_graph,
    few_cases,
    random,
    takes,
)

pytestmark = pytest.mark.usefixtures("float64")

# Layers whose rules have derivatives of their own, with these.
by_group = functools.partial(layers.GroupNormalization, 2)
own_derivatives = pytest.mark.parametrize(
    "make, rule",
    [
        (by_group, group_normalization),
        (layers.LayerNormalization, layer_normalization),
    ],
    ids=["groups", "last axis"],
)

SHAPES = {2: (4,), 3: (3, 4), 4: (2, 3, 4), 5: (2, 3, 2, 4)}


@pytest.mark.parametrize(
    "rank, axis",
    [
        (2, -1),
        (3, -1),
        (3, 1),
        (3, -2),
        (3, [1, 2]),
        (3, [2, 1]),
        (3, [-2, -1]),
        (4, -1),
        (4, 2),
        (4, [1, 2]),
        (4, [1, 3]),
        (4, [2, 3]),
        (4, [1, 2, 3]),
        (5, [1, 4]),
    ],
)
def test_layer_normalization_equals_autodiff(rank, axis):
    x = random(4, *SHAPES[rank])
    check_rule(built(layers.LayerNormalization(axis), x), x)


@pytest.mark.parametrize("scale, center", [(True, False), (False, True)])
@pytest.mark.parametrize(
    "make",
    [
        layers.LayerNormalization,
        functools.partial(layers.LayerNormalization, [1, 2]),
        functools.partial(layers.GroupNormalization, 2),
        functools.partial(layers.GroupNormalization, -1, 1),
    ],
)
def test_scale_or_offset_may_be_missing(make, scale, center):
    x = random(4, 3, 2, 4)
    layer = built(make(scale=scale, center=center), x)
    assert len(check_rule(layer, x).terms) == 1


@pytest.mark.parametrize(
    "rank, axis",
    [(2, -1), (3, -1), (3, 2), (3, [1, 2]), (4, [2, 3]), (4, [-1, -2])],
)
def test_rms_normalization_equals_autodiff(rank, axis):
    x = random(4, *SHAPES[rank])
    check_rule(built(layers.RMSNormalization(axis), x), x)


@pytest.mark.parametrize(
    "shape, axis", [((3, 3), 1), ((3, 3, 3), [1, 2]), ((3, 3, 4), [1, 3])]
)
def test_rms_normalization_whose_scale_lands_on_other_axes_is_left_out(
    shape, axis
):
    """Keras aligns the scale with the last axes, if the sizes allow."""
    x = random(4, *shape)
    assert not takes(built(layers.RMSNormalization(axis), x), x)


@pytest.mark.parametrize("groups", [1, 2, -1])
@pytest.mark.parametrize(
    "rank, axis",
    [(2, -1), (3, -1), (3, 1), (4, -1), (4, 1), (4, -2), (5, -1), (5, 1)],
)
def test_group_normalization_equals_autodiff(rank, axis, groups):
    x = random(3, *[2 if size == 3 else size for size in SHAPES[rank]])
    check_rule(built(layers.GroupNormalization(groups, axis), x), x)


@few_cases
@given(
    shape=st.lists(st.integers(2, 4), min_size=1, max_size=4),
    axes=st.sets(st.integers(1, 4), min_size=1),
    rows=st.sampled_from([Rows(), Rows(2), Rows(2, False)]),
)
def test_layer_normalization_of_any_shape_equals_autodiff(shape, axes, rows):
    axes = sorted({(axis - 1) % len(shape) + 1 for axis in axes})
    x = random(4, *shape)
    check_rule(built(layers.LayerNormalization(axes), x), x, rows=rows)


@few_cases
@given(
    shape=st.lists(st.integers(2, 4), min_size=1, max_size=4),
    axis=st.integers(1, 4),
    groups=st.integers(1, 2),
    rows=st.sampled_from([Rows(), Rows(2), Rows(2, False)]),
)
def test_group_normalization_of_any_shape_equals_autodiff(
    shape, axis, groups, rows
):
    axis = (axis - 1) % len(shape)
    shape[axis] = 2 * shape[axis]
    x = random(4, *shape)
    layer = layers.GroupNormalization(groups, axis + 1)
    check_rule(built(layer, x), x, rows=rows)


@pytest.mark.parametrize("dtype", ["float32", "float64", "mixed_float16"])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (5, 2, 4), (2, 3, 2, 4)])
def test_what_groups_pass_on_is_what_autodiff_does(shape, dtype):
    """The cotangents of input, gamma and beta, of a mean far from zero."""
    x = tf.cast(3 + 2 * random(3, *shape), "float32")
    layer = built(layers.GroupNormalization(2, dtype=dtype), x)
    layer.gamma.assign(random(4))
    layer.beta.assign(random(4))
    x = tf.cast(x, layer.compute_dtype)
    weights = [_keras.raw(layer.gamma), _keras.raw(layer.beta)]
    g, found = tf.cast(random(3, *shape), layer.compute_dtype), []
    for run in (layer, functools.partial(group_normalization, layer)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = run(x)
            result = result[0] if isinstance(result, tuple) else result
            loss = tf.reduce_sum(tf.cast(result * g, "float64"))
        assert result.dtype == layer.compute_dtype
        found.append([result, *tape.gradient(loss, [x, *weights])])
    close = {"float64": 1e-9, "float32": 1e-4, "mixed_float16": 2e-2}[dtype]
    for exact, own in zip(*found, strict=True):
        scale = float(tf.reduce_max(tf.abs(tf.cast(exact, "float64"))))
        np.testing.assert_allclose(own, exact, atol=close * max(scale, 1))


class Doubled(layers.GroupNormalization):
    def _apply_normalization(self, reshaped_inputs, input_shape):
        return 2 * super()._apply_normalization(reshaped_inputs, input_shape)


def test_subclasses_that_normalize_otherwise_are_left_out():
    x = random(3, 5, 4)
    assert takes(built(layers.GroupNormalization(2), x), x)
    assert not takes(built(Doubled(2), x), x)


@own_derivatives
@pytest.mark.parametrize("policy", ["float32", "float64", "mixed_float16"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_inputs_of_another_type_than_the_layer(dtype, policy, make, rule):
    """Keras does not convert them for such a layer."""
    x = tf.cast(random(3, 5, 4), dtype)
    layer = built(make(dtype=policy), x)
    zeta, terms = rule(layer, x)
    own = layer(x)
    assert zeta.dtype == own.dtype
    np.testing.assert_allclose(zeta, own, atol=5e-3)
    g = tf.cast(random(*zeta.shape), zeta.dtype)
    for term in terms:
        assert term.per_example(g, Rows())[0].shape == (3, 4)


@own_derivatives
@pytest.mark.parametrize("jit", [False, True])
def test_images_of_any_size_pass_on_what_autodiff_does(jit, make, rule):
    layer = built(make(), random(3, 5, 2, 4))
    shape = [None, None, None, 4]

    def derivative(run):
        @tf.function(
            autograph=False,
            jit_compile=jit,
            input_signature=2 * [tf.TensorSpec(shape, "float64")],
        )
        def of(x, g):
            with tf.GradientTape() as tape:
                tape.watch(x)
                zeta = run(x)
            return tape.gradient(zeta, x, g)

        return of

    own = derivative(lambda x: rule(layer, x)[0])
    exact = derivative(layer)
    for sizes in ((3, 5, 2, 4), (2, 1, 3, 4)):
        arguments = random(*sizes), random(*sizes, seed=1)
        np.testing.assert_allclose(own(*arguments), exact(*arguments), 1e-8)


def test_layer_normalization_with_the_epsilon_of_keras():
    x = random(4, 3, 5)
    check_rule(built(layers.LayerNormalization(epsilon=None), x), x)


@own_derivatives
def test_second_derivatives_are_those_of_autodiff(make, rule):
    """As in a model whose loss holds a gradient of its own."""
    x = random(3, 5, 4)
    layer = built(make(), x)

    def second(run):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.sin(run(x)))
            penalty = tf.reduce_sum(tf.square(inner.gradient(y, x)))
        return outer.gradient(penalty, x)

    own, exact = second(lambda x: rule(layer, x)[0]), second(layer)
    np.testing.assert_allclose(own, exact, 1e-8, 1e-10)


@own_derivatives
def test_sums_of_the_backward_pass_serve_the_norms(make, rule):
    """Not a second reduction of g for gamma and beta."""
    layer = built(make(), random(3, 5, 4))

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            zeta, terms = rule(layer, x)
            zeta = tf.identity(zeta)
            tape.watch(zeta)
            loss = tf.reduce_sum(tf.square(zeta))
        g, dx = tape.gradient(loss, [zeta, x])
        before = len(tf.compat.v1.get_default_graph().get_operations())
        sums = [term.per_example(g, Rows())[0] for term in terms]
        after = len(tf.compat.v1.get_default_graph().get_operations())
        counts.append(after - before)
        return dx, sums

    counts = []
    run(random(3, 5, 4))
    assert counts == [0]


@pytest.mark.parametrize("frozen", ["gamma", "beta"])
def test_frozen_weight_of_a_normalization_has_no_term(frozen):
    x = random(4, 3, 5)
    layer = built(layers.LayerNormalization(), x)
    getattr(layer, frozen).trainable = False
    assert len(check_rule(layer, x).terms) == 1


def test_normalized_input_is_computed_without_changing_the_weights():
    x = random(4, 3, 5)
    layer = built(layers.LayerNormalization(), x)
    before = layer.get_weights()
    check_rule(layer, x)
    for value, weight in zip(before, layer.get_weights(), strict=True):
        assert (value == weight).all()


@pytest.mark.parametrize(
    "make",
    [
        layers.LayerNormalization,
        layers.RMSNormalization,
        functools.partial(layers.GroupNormalization, 2),
    ],
)
def test_normalization_in_a_graph_of_unknown_sizes(make):
    x = random(4, 3, 2, 6)
    check_rule_in_graph(built(make(), x), x, [None, None, None, 6])


def test_axes_that_include_the_batch_are_left_to_the_fallback():
    x = random(4, 5)
    assert not takes(built(layers.LayerNormalization([0, 1]), x), x)


def test_axes_of_mixed_sign_are_left_to_the_fallback():
    """Keras sorts them as they are written, so the weights are transposed."""
    x = random(4, 5, 5)
    assert not takes(built(layers.LayerNormalization([1, -1]), x), x)


def test_scaling_by_the_variance_is_left_to_the_fallback():
    x = random(4, 5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `rms_scaling=True`")
        layer = layers.LayerNormalization(rms_scaling=True)
        assert not takes(built(layer, x), x)
