"""The linear object: its two norms, its rows, and its rounding margin."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_fastclip.registry.linear import Linear, by_example, ghost_norm
from keras_fastclip.registry.terms import ONE_ROW, Rows, squared_norm
from tests.registry.helpers import assert_close, few_cases, random


def linear(a, width):
    """A term for the input a and a kernel with as many blocks as a has."""
    shape = [*a.shape[2:], width]
    kernel = keras.Variable(np.zeros(shape), dtype=a.dtype.name)
    return Linear(kernel, a, lambda g: g, lambda matrices: matrices)


def exact_norms(a, g):
    """Squared norms of the gradients of the very same a and g, in float64."""
    a, g = np.array(a, "float64"), np.array(g, "float64")
    gradients = np.matmul(np.swapaxes(a, 1, 2), g)
    return np.sum(np.square(gradients), (1, 2))


# -- the two forms of the norm ------------------------------------------------


@few_cases
@given(
    examples=st.integers(1, 4),
    rows=st.builds(Rows, st.integers(1, 3), st.booleans()),
    positions=st.integers(1, 5),
    blocks=st.none() | st.integers(1, 3),
    widths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_ghost_norm_equals_instantiated_norm(
    float64, examples, rows, positions, blocks, widths
):
    d, p = widths
    middle = [] if blocks is None else [blocks]
    shape = [examples * rows.per_example, positions, *middle]
    a, g = random(*shape, d), random(*shape, p, seed=1)
    term = linear(a, p)
    (built,) = term.per_example(g, rows)
    assert_close(term.omega(g, rows), squared_norm(built))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("widths", [(20, 8), (1200, 8), (20, 1200)])
def test_ghost_norms_have_derivatives(widths, traced):
    a, g = random(2, 6, widths[0]), random(2, 6, widths[1], seed=1)
    a, g = tf.cast(a, tf.float32), tf.cast(g, tf.float32)

    def built(a, g):
        return squared_norm(tf.matmul(a, g, transpose_a=True))

    def derivatives(norms):
        with tf.GradientTape() as tape:
            tape.watch([a, g])
            found = norms(a, g)
        return tape.gradient(found, [a, g])

    run = tf.function(ghost_norm, autograph=False) if traced else ghost_norm
    for found, right in zip(derivatives(run), derivatives(built), strict=True):
        gap = np.max(np.abs(found - right))
        assert gap <= 1e-3 * np.max(np.abs(right))


@pytest.mark.parametrize("example_major", [True, False])
def test_folded_rows_are_more_positions_of_one_example(float64, example_major):
    rows = Rows(3, example_major)
    a, g = random(6, 4, 5), random(6, 4, 2, seed=1)
    folded = [tf.reshape(rows.fold(t), [2, 12, -1]) for t in (a, g)]
    flat = linear(folded[0], 2)
    term = linear(a, 2)
    assert_close(term.omega(g, rows), flat.omega(folded[1], ONE_ROW))
    assert_close(
        term.per_example(g, rows)[0], flat.per_example(folded[1], ONE_ROW)[0]
    )


@pytest.mark.parametrize("example_major", [True, False])
@pytest.mark.parametrize("tail", [(5,), (3, 5)])
def test_by_example_joins_rows_and_puts_blocks_first(example_major, tail):
    rows = Rows(2, example_major)
    tensor = random(6, 4, *tail)
    found = by_example(tensor, rows)
    for i in range(3):
        mine = [2 * i, 2 * i + 1] if example_major else [i, i + 3]
        right = np.concatenate([tensor[r] for r in mine])
        if len(tail) == 2:
            right = np.swapaxes(right, 0, 1)
        np.testing.assert_array_equal(found[i], right)


def test_single_positions_need_no_margin():
    a, g = random(4, 1, 5), random(4, 1, 3, seed=1)
    norms = np.sum(np.square(a), (1, 2)) * np.sum(np.square(g), (1, 2))
    np.testing.assert_allclose(linear(a, 3).omega(g, ONE_ROW), norms, 1e-6)
    zeros = linear(tf.zeros_like(a), 3).omega(g, ONE_ROW)
    np.testing.assert_allclose(zeros, np.zeros(4), atol=1e-30)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_of_half_precision_are_taken_in_float32(dtype):
    a = tf.cast(200 * random(3, 4, 5), dtype)
    g = tf.cast(200 * random(3, 4, 2, seed=1), dtype)
    term = linear(a, 2)
    right = exact_norms(tf.cast(a, "float32"), tf.cast(g, "float32"))
    for norms in (
        term.omega(g, ONE_ROW),
        squared_norm(term.per_example(g, ONE_ROW)[0]),
    ):
        assert norms.dtype == tf.float32
        np.testing.assert_allclose(norms, right, 1e-5)


# -- the choice between them --------------------------------------------------


@pytest.mark.parametrize(
    "positions, d, p, prefers",
    [
        (1, 1, 2, False),
        (1, 1, 3, True),
        (4, 8, 4, False),  # 2·16 = 32
        (4, 11, 3, True),
        (16, 32, 16, False),  # 2·256 = 512
        (16, 27, 19, True),
    ],
)
def test_ghost_norm_is_preferred_if_twice_the_positions_squared_is_less(
    positions, d, p, prefers
):
    term = linear(tf.zeros([2, positions, d]), p)
    assert term.prefers_omega(ONE_ROW) is prefers
    folded = linear(tf.zeros([2 * positions, 1, d]), p)
    assert folded.prefers_omega(Rows(positions)) is prefers
    # Both the Gram matrices and the kernel consist of blocks.
    blocks = linear(tf.zeros([2, positions, 3, d]), p)
    assert blocks.prefers_omega(ONE_ROW) is prefers


def test_ghost_norm_is_preferred_if_the_number_of_positions_is_unknown():
    kernel = keras.Variable(np.zeros((2, 2)))

    @tf.function(input_signature=[tf.TensorSpec([None, None, 2])])
    def prefers(a):
        term = Linear(kernel, a, lambda g: g, lambda matrices: matrices)
        return tf.constant(term.prefers_omega(ONE_ROW))

    assert prefers(tf.zeros([2, 100, 2]))


# -- the rounding margin ------------------------------------------------------

LENGTH = 1024
SIGNS = np.where(np.arange(LENGTH) % 2 == 0, 1.0, -1.0)[None, :, None]


def alternating(d, noise, seed):
    """a and g of which neighbouring positions nearly cancel in aᵀg."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(2, 1, d)) + noise * rng.normal(size=(2, LENGTH, d))
    g = SIGNS * rng.normal(size=(2, 1, 8))
    return tf.constant(a, "float32"), tf.constant(g, "float32")


@pytest.mark.parametrize("d", [2, 16, 128, 1024])
@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-5, 1e-4, 1e-3])
def test_ghost_norm_is_not_below_the_true_norm_if_positions_cancel(d, noise):
    a, g = alternating(d, noise, seed=d)
    right = exact_norms(a, g)
    products = LENGTH * np.sum(np.square(a), (1, 2)) * np.mean(g**2, (1, 2))
    assert np.all(right < 1e-5 * products)
    assert np.all(linear(a, 8).omega(g, ONE_ROW) >= right)


def test_cancelling_case_needs_the_margin():
    """Without it the sum of float32 products does come out too low."""
    below = 0
    for seed in range(5):
        a, g = alternating(16, 1e-4, seed)
        assert np.all(exact_norms(a, g) < 1e-1)
        gram = tf.matmul(a, a, transpose_b=True)
        gram *= tf.matmul(g, g, transpose_b=True)
        below += np.sum(tf.reduce_sum(gram, [1, 2]) < exact_norms(a, g))
    assert below


@pytest.mark.parametrize(
    "positions, d, p",
    [
        (47, 1, 1),
        (47, 8, 8),
        (8, 256, 8),
        (8, 32, 32),
        (2, 64, 64),
        (2, 128, 128),
        (2, 256, 256),
        (4, 1024, 1024),
    ],
)
def test_ghost_norm_is_not_below_the_true_norm_of_constant_inputs(
    positions, d, p
):
    rng = np.random.default_rng(0)
    signs = SIGNS[:, :positions]
    size = rng.uniform(0.5, 1, (300, 1, 1))
    other = size * rng.uniform(0.99, 1.01, (300, 1, 1))
    a = np.where(signs > 0, size, other)
    g = signs * rng.uniform(0.5, 1, (300, 1, 1))
    a = tf.constant(np.tile(a, (1, 1, d)), "float32")
    g = tf.constant(np.tile(g, (1, 1, p)), "float32")
    assert np.all(linear(a, p).omega(g, ONE_ROW) >= exact_norms(a, g))


@pytest.mark.parametrize("d, p", [(8, 8), (64, 32), (512, 128)])
@pytest.mark.parametrize("positions", [2, 16, 128])
def test_margin_is_small_on_ordinary_data(positions, d, p):
    rng = np.random.default_rng(0)
    a = tf.constant(rng.normal(size=(8, positions, d)), "float32")
    g = tf.constant(rng.normal(size=(8, positions, p)), "float32")
    found, right = linear(a, p).omega(g, ONE_ROW), exact_norms(a, g)
    assert np.all(found >= right)
    # Of the norm itself, half of this.
    assert np.all(found < right * (1 + 1.2e-4))
