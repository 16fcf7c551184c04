"""Normalizations: rules against automatic differentiation."""

import functools
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

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
