"""Embedding: the rule against automatic differentiation."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

from keras_fastclip.registry.embedding import Lookup
from keras_fastclip.registry.terms import ONE_ROW, Rows
from tests.registry.helpers import (
    assert_close,
    built,
    captured,
    check_rule,
    check_rule_in_graph,
    few_cases,
    random,
)

pytestmark = pytest.mark.usefixtures("float64")

VOCABULARY = 7


def random_ids(*shape, dtype="int32", low=0):
    rng = np.random.default_rng(0)
    return tf.constant(rng.integers(low, VOCABULARY, shape), dtype)


def table(ids, **options):
    return built(layers.Embedding(VOCABULARY, 3, **options), ids)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 2)])
def test_embedding_equals_autodiff(shape, dtype):
    ids = random_ids(4, *shape, dtype=dtype)
    check_rule(table(ids), ids)


def test_masked_ids_have_gradients_too():
    ids = tf.constant([[0, 1, 0], [2, 0, 0]])
    check_rule(table(ids, mask_zero=True), ids)


@pytest.mark.parametrize(
    "ids",
    [
        [[2, 2, 2], [2, 2, 2]],
        [[6, 0, 6], [0, 6, 0]],
        [[0, 1, 2], [2, 1, 0]],
    ],
    ids=str,
)
def test_cotangents_of_one_id_are_added_before_the_norm(ids):
    ids = tf.constant(ids)
    check_rule(table(ids), ids)


def test_norm_squares_the_sum_over_each_id():
    ids = tf.constant([[5, 3, 5]])
    g = tf.constant([[[1.0, 0, 0], [0, 1, 0], [3, 0, 0]]], "float64")
    term = Lookup(table(ids).embeddings, ids)
    np.testing.assert_allclose(term.omega(g, ONE_ROW), [(1 + 3) ** 2 + 1])


def test_cotangents_that_cancel_have_norm_zero():
    ids = tf.constant([[4, 1, 4]])
    term = Lookup(table(ids).embeddings, ids)
    g = tf.constant([[[1.0, 2, 3], [0, 0, 0], [-1, -2, -3]]], "float64")
    # Up to what the sum may round.
    np.testing.assert_allclose(term.omega(g, ONE_ROW), [0], atol=1e-24)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cotangents_of_half_precision_are_added_in_float32(dtype):
    """In half precision such a sum stops at 2048, or at 256."""
    ids = tf.zeros([2, 3000], "int32")
    term = Lookup(table(ids).embeddings, ids)
    g = tf.ones([2, 3000, 3], dtype)
    found = [
        term.adjoint(g, tf.constant([True, True]))[0][0],
        tf.reduce_sum(term.per_example(g, ONE_ROW)[0], 0)[0],
    ]
    for sums in found:
        np.testing.assert_array_equal(sums, [6000, 6000, 6000])
    right = np.array([3 * 3000**2] * 2)
    # Two sums of 3000 terms, and the square of them, rounded up.
    most = 2e-5 + 4 * 3002 * 2.0**-24
    np.testing.assert_allclose(term.omega(g, ONE_ROW), right, rtol=most)
    assert np.all(term.omega(g, ONE_ROW) >= right)


def test_negative_ids_count_from_the_end():
    ids = tf.constant([[1, -1, 6], [-7, 0, -1], [-2, -2, 5]])
    check_rule(table(ids), ids)


@pytest.mark.parametrize("example_major", [True, False])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_embedding_with_folded_rows_equals_autodiff(shape, example_major):
    ids = random_ids(6, *shape)
    check_rule(table(ids), ids, rows=Rows(2, example_major))
    check_rule(table(ids), ids, rows=Rows(3, example_major))


@few_cases
@given(
    shape=st.lists(st.integers(1, 5), max_size=3),
    examples=st.integers(1, 4),
    rows=st.builds(Rows, st.integers(1, 3), st.booleans()),
    high=st.integers(1, VOCABULARY),
    seed=st.integers(0, 9),
)
def test_embedding_of_any_shape_equals_autodiff(
    shape, examples, rows, high, seed
):
    rng = np.random.default_rng(seed)
    size = (examples * rows.per_example, *shape)
    ids = tf.constant(rng.integers(0, high, size), "int32")
    check_rule(table(ids), ids, rows=rows)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
def test_embedding_in_a_graph_of_unknown_sizes(dtype):
    ids = random_ids(4, 5, dtype=dtype)
    check_rule_in_graph(table(ids), ids, [None, None])
    check_rule_in_graph(table(ids), ids, [None, None], rows=Rows(2))


def test_norm_never_builds_a_table_for_each_example():
    ids = random_ids(2, 4)
    layer = built(layers.Embedding(1000, 3), ids)
    term = captured(layer, ids)[0].terms[0]
    graph = tf.function(lambda g: term.omega(g, ONE_ROW))
    graph = graph.get_concrete_function(tf.TensorSpec([2, 4, 3], "float64"))
    largest = max(
        np.prod(tensor.shape)
        for operation in graph.graph.get_operations()
        for tensor in operation.outputs
        if tensor.shape.is_fully_defined()
    )
    assert largest < 1000
    g = random(2, 4, 3)
    assert_close(
        graph(g),
        tf.reduce_sum(term.per_example(g, ONE_ROW)[0] ** 2, [1, 2]),
    )
    assert term.prefers_omega(ONE_ROW)
