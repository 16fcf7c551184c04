"""Dense and EinsumDense: rules against automatic differentiation."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given
from hypothesis import strategies as st
from keras import layers

from keras_fastclip.registry.terms import Rows
from tests.registry.helpers import (
    built,
    captured,
    check_rule,
    check_rule_in_graph,
    few_cases,
    random,
    takes,
)

pytestmark = pytest.mark.usefixtures("float64")


# -- Dense --------------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("activation", [None, "tanh", "softmax"])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_dense_equals_autodiff(rank, activation, use_bias):
    x = random(4, *[2, 3, 4, 5][-(rank - 1) :])
    layer = layers.Dense(3, activation=activation, use_bias=use_bias)
    check_rule(built(layer, x), x)


@few_cases
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    batch=st.integers(1, 5),
    units=st.integers(1, 4),
    use_bias=st.booleans(),
)
def test_dense_of_any_shape_equals_autodiff(shape, batch, units, use_bias):
    x = random(batch, *shape)
    check_rule(built(layers.Dense(units, use_bias=use_bias), x), x)


@pytest.mark.parametrize("frozen", ["_kernel", "bias"])
def test_frozen_weight_of_dense_has_no_term(frozen):
    x = random(4, 3, 5)
    layer = built(layers.Dense(3, activation="tanh"), x)
    getattr(layer, frozen).trainable = False
    assert len(check_rule(layer, x).terms) == 1


@pytest.mark.parametrize("example_major", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 5), (3, 2, 5)])
def test_dense_with_folded_rows_equals_autodiff(shape, example_major):
    x = random(6, *shape)
    layer = built(layers.Dense(3), x)
    check_rule(layer, x, rows=Rows(2, example_major))
    check_rule(layer, x, rows=Rows(3, example_major))


@pytest.mark.parametrize(
    "shape", [(None, 5), (None, None, 5), (None, None, None, 5)]
)
def test_dense_in_a_graph_of_unknown_sizes(shape):
    x = random(6, *[2] * (len(shape) - 2), 5)
    layer = built(layers.Dense(3), x)
    check_rule_in_graph(layer, x, shape)
    check_rule_in_graph(layer, x, shape, rows=Rows(2))


# -- EinsumDense --------------------------------------------------------------

EINSUMS = [
    # equation, shape of the input, output shape, bias axes
    ("ab,bc->ac", (5,), 4, "c"),
    ("ab,bc->ac", (5,), 4, None),
    ("ab,cb->ac", (5,), 4, "c"),
    ("ab,b->a", (5,), (), None),
    ("ab,bcd->acd", (5,), (4, 3), "c"),
    ("ab,bcd->adc", (5,), (3, 4), "cd"),
    ("abc,cd->abd", (2, 5), (None, 4), "d"),
    ("abc,cd->abd", (2, 5), (2, 4), "b"),
    ("abc,cd->abd", (2, 5), (2, 4), "bd"),
    ("abc,cd->adb", (2, 5), (4, 2), "d"),
    ("abc,bcd->ad", (2, 5), 4, "d"),
    ("abc,cde->abde", (2, 5), (None, 4, 3), "de"),
    ("abc,cde->abde", (2, 5), (None, 4, 3), "d"),
    ("abc,cde->abde", (2, 5), (None, 4, 3), "e"),
    ("abcd,cde->abe", (2, 3, 5), (None, 4), "e"),
    ("abcd,dce->abe", (2, 3, 5), (None, 4), "e"),
    ("abcd,de->abce", (2, 3, 5), (2, 3, 4), "c"),
    ("abcd,de->abce", (2, 3, 5), (2, 3, 4), "bce"),
    # an axis that input, kernel and output share
    ("abc,bcd->abd", (2, 5), (2, 4), "d"),
    ("abc,bcd->abd", (2, 5), (2, 4), "bd"),
    ("abc,cbd->adb", (2, 5), (4, 2), "b"),
    ("abcd,bde->abce", (2, 3, 5), (2, 3, 4), "be"),
    ("abcd,cbde->aebc", (2, 3, 5), (4, 2, 3), "e"),
    ("abc,c->abc", (2, 5), (2, 5), "c"),
    ("abc,bc->abc", (2, 5), (2, 5), "bc"),
    # nothing is contracted
    ("abc,bd->abcd", (2, 5), (2, 5, 4), "d"),
    ("abc,d->abcd", (2, 5), (2, 5, 4), "c"),
    # axes that are summed in the input
    ("abc,cd->ad", (2, 5), 4, "d"),
    ("abcd,de->abe", (2, 3, 5), (2, 4), "e"),
    ("abc,d->abd", (2, 5), (2, 4), "d"),
    # an ellipsis
    ("...x,xy->...y", (5,), 4, "y"),
    ("...x,xy->...y", (2, 5), 4, "y"),
    ("...x,xy->...y", (2, 3, 5), 4, "y"),
    ("...wx,xy->...wy", (2, 3, 5), (3, 4), "w"),
    ("...wx,wxy->...wy", (2, 3, 5), (3, 4), "wy"),
    ("ab...,bc->ac...", (5,), 4, "c"),
    ("ab...,bc->ac...", (5, 2), 4, "c"),
    ("ab...,bc->ac...", (5, 2, 3), 4, "c"),
    ("ab...,bcd->acd...", (5, 2, 3), (4, 6), "d"),
]


def einsum_dense(equation, output_shape, bias_axes, **options):
    return layers.EinsumDense(
        equation,
        output_shape,
        bias_axes=bias_axes,
        kernel_initializer="random_normal",
        **options,
    )


@pytest.mark.parametrize("equation, shape, output_shape, bias_axes", EINSUMS)
def test_einsum_dense_equals_autodiff(equation, shape, output_shape, bias_axes):
    layer = einsum_dense(equation, output_shape, bias_axes, activation="tanh")
    x = random(3, *shape)
    check_rule(built(layer, x), x)


@st.composite
def einsums(draw):
    """An equation with axes of every role, in any order, and its sizes."""
    letters, parts = iter("bcdefghij"), {"x": [], "w": [], "y": []}
    sizes = {}
    # where the axes of a role stand: input x, kernel w, output y
    for role, most in [("xw", 2), ("wy", 2), ("xy", 2), ("xwy", 1), ("x", 1)]:
        for _ in range(draw(st.integers(0, most))):
            letter = next(letters)
            sizes[letter] = draw(st.integers(1, 3))
            for part in role:
                parts[part].append(letter)
    assume(parts["w"])
    x, w, y = (draw(st.permutations(parts[part])) for part in "xwy")
    bias_axes = None
    if y and draw(st.booleans()):
        bias_axes = "".join(
            draw(st.lists(st.sampled_from(y), min_size=1, unique=True))
        )
    equation = f"a{''.join(x)},{''.join(w)}->a{''.join(y)}"
    return equation, [sizes[c] for c in x], [sizes[c] for c in y], bias_axes


@few_cases
@given(einsums(), st.sampled_from([Rows(), Rows(2), Rows(2, False)]))
def test_einsum_dense_of_any_equation_equals_autodiff(einsum, rows):
    equation, shape, output_shape, bias_axes = einsum
    layer = einsum_dense(equation, output_shape, bias_axes)
    x = random(4, *shape)
    built(layer, x)
    assume(bias_axes is None or takes(layer, x))
    check_rule(layer, x, rows=rows)


@pytest.mark.parametrize(
    "equation, shape, output_shape",
    [
        ("abc,cd->abd", (3, 5), (None, 4)),
        ("abcd,bde->abce", (2, 3, 5), (2, 3, 4)),
        ("ab...,bc->ac...", (5, 2, 3), 4),
    ],
)
def test_einsum_dense_in_a_graph_of_unknown_sizes(
    equation, shape, output_shape
):
    x = random(4, *shape)
    layer = built(einsum_dense(equation, output_shape, None), x)
    kernel_axes = set(equation.split(",")[1].split("->")[0])
    labels = equation.split(",")[0].replace("...", "yz")
    known = [
        size if label in kernel_axes else None
        for label, size in zip(labels, x.shape, strict=True)
    ]
    assert known.count(None) > 1
    check_rule_in_graph(layer, x, known)


@pytest.mark.parametrize(
    "equation, output_shape",
    [
        ("abc,cd->bad", (4, 2)),  # another axis comes first
        ("abc,acd->abd", (4, 2)),  # a kernel for each example
        ("abc,cd->bd", 2),  # examples are summed
    ],
)
def test_einsum_dense_without_batch_first_is_left_to_the_fallback(
    equation, output_shape
):
    x = random(4, 4, 5)
    assert not takes(built(einsum_dense(equation, output_shape, None), x), x)


@pytest.mark.parametrize(
    "equation, shape, output_shape, bias_axes",
    [
        ("abc,cd->abd", (4, 5), (4, 4), "b"),
        ("abcd,de->abce", (2, 4, 5), (2, 4, 4), "c"),
        ("abcd,de->abce", (3, 3, 5), (3, 3, 4), "c"),
    ],
)
def test_bias_that_keras_adds_to_another_axis_is_left_to_the_fallback(
    equation, shape, output_shape, bias_axes
):
    x = random(3, *shape)
    layer = built(einsum_dense(equation, output_shape, bias_axes), x)
    assert not takes(layer, x)


def test_einsum_dense_takes_inputs_of_another_type():
    x = tf.cast(random(2, 3, 4), "float32")
    layer = layers.EinsumDense("abc,cd->abd", (3, 2), autocast=False)
    layer.build(x.shape)
    call, _ = captured(layer, x)
    np.testing.assert_allclose(call.zetas[0], layer(x))
