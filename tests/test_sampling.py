"""The sampler is exactly Poisson, and its batches carry what was drawn.

Statistical tests compare counts with the exact quantiles of their binomial
law at `TAIL` each side. With fewer than 2,000 comparisons in all, a correct
sampler with a random seed would fail with probability below 1e-9; seeds are
fixed all the same.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from keras_fastclip import sampling

TAIL = 1e-13


def assert_binomial(counts, trials, probability):
    law = stats.binom(trials, probability)
    assert np.all(counts >= law.ppf(TAIL))
    assert np.all(counts <= law.isf(TAIL))


def is_binomial(counts, trials, probability):
    try:
        assert_binomial(counts, trials, probability)
    except AssertionError:
        return False
    return True


def draw_memberships(n, b, draws, seed):
    """A (draws, n) matrix: was example j in draw i."""
    rng = np.random.default_rng(seed)
    member = np.zeros((draws, n), bool)
    for row in member:
        row[sampling.poisson_indices(n, b, rng)] = True
    return member


def take(dataset, count):
    return list(itertools.islice(dataset, count))


class FixedCount:
    """A generator whose binomial count is chosen by the test."""

    def __init__(self, count):
        self.count = count
        self.rng = np.random.default_rng(0)

    def binomial(self, n, p):
        return self.count

    def choice(self, *args, **kwargs):
        return self.rng.choice(*args, **kwargs)


# The draw.


@pytest.mark.parametrize("n, b", [(40, 8), (40, 39), (40, 0.5)])
def test_each_example_is_included_with_probability_q(n, b):
    member = draw_memberships(n, b, draws=10_000, seed=1)
    assert_binomial(member.sum(0), 10_000, b / n)


def test_pairs_are_included_independently():
    n, b, draws = 24, 6, 10_000
    member = draw_memberships(n, b, draws, seed=2)
    together = member.T.astype(int) @ member.astype(int)
    pairs = together[np.triu_indices(n, k=1)]
    assert_binomial(pairs, draws, (b / n) ** 2)


def test_draws_are_independent_of_each_other():
    n, b, draws = 24, 6, 10_000
    member = draw_memberships(n, b, draws, seed=3)
    # Pairs of draws that do not overlap, so that trials are independent.
    repeated = (member[0::2] & member[1::2]).sum(0)
    assert_binomial(repeated, draws // 2, (b / n) ** 2)


def test_batch_sizes_follow_the_binomial_law():
    n, b, draws = 1_000, 30, 20_000
    rng = np.random.default_rng(4)
    sizes = np.array(
        [len(sampling.poisson_indices(n, b, rng)) for _ in range(draws)]
    )
    law = stats.binom(n, b / n)
    frequency = np.bincount(sizes, minlength=n + 1)[:101]
    assert_binomial(frequency, draws, law.pmf(np.arange(101)))
    # Mean: the total is binomial itself. Variance: seven standard errors.
    assert_binomial(sizes.sum(), draws * n, b / n)
    variance = law.var()
    fourth = law.stats(moments="k") * variance**2 + 3 * variance**2
    error = np.sqrt((fourth - variance**2) / draws)
    assert abs(sizes.var(ddof=1) - variance) < 7 * error


def test_fixed_size_sampling_would_be_told_apart():
    """The bounds above are tight enough to reject another sampler."""
    n, b, draws = 24, 6, 10_000
    rng = np.random.default_rng(5)
    member = np.zeros((draws, n), bool)
    for row in member:
        row[rng.choice(n, b, replace=False)] = True
    together = member.T.astype(int) @ member.astype(int)
    pairs = together[np.triu_indices(n, k=1)]
    assert is_binomial(member.sum(0), draws, b / n)
    assert not is_binomial(pairs.sum(), draws * len(pairs), (b / n) ** 2)
    assert not is_binomial((member.sum(1) == b).sum(), draws, 0.2)


@pytest.mark.parametrize("b", [100, 5_000])
def test_large_data_sets_are_sampled_uniformly(b):
    """NumPy has two algorithms for large populations; both are used here."""
    n, draws, groups = 20_000, 300, 20
    rng = np.random.default_rng(6)
    counts = np.zeros(groups, int)
    for _ in range(draws):
        indices = sampling.poisson_indices(n, b, rng)
        assert len(np.unique(indices)) == len(indices)
        counts += np.bincount(indices // (n // groups), minlength=groups)
    assert_binomial(counts, draws * (n // groups), b / n)


def test_sampling_probability_one_takes_every_example():
    rng = np.random.default_rng(7)
    indices = sampling.poisson_indices(50, 50, rng)
    assert sorted(indices) == list(range(50))


def test_empty_draws_happen():
    rng = np.random.default_rng(8)
    sizes = [len(sampling.poisson_indices(100, 1, rng)) for _ in range(2_000)]
    assert_binomial(sizes.count(0), 2_000, 0.99**100)


def test_indices_are_int64_even_when_empty():
    for count in (0, 3):
        indices = sampling.poisson_indices(10, 2, FixedCount(count))
        assert indices.dtype == np.int64
        assert indices.shape == (count,)


@pytest.mark.parametrize("b", [0, -1, 11, float("nan")])
def test_impossible_batch_sizes_are_refused_with_the_values(b):
    with pytest.raises(ValueError, match=rf"expected_batch_size={b}.*=10"):
        sampling.poisson_indices(10, b, np.random.default_rng())
    with pytest.raises(ValueError, match=rf"expected_batch_size={b}.*=10"):
        sampling.poisson_dataset(
            np.zeros(10), b, np.random.default_rng(), static_shapes=True
        )


# Sizes.


@given(count=st.integers(0, 10_000), capacity=st.integers(1, 500))
def test_padded_size_is_the_smallest_multiple_that_fits(count, capacity):
    size = sampling.padded_size(count, capacity)
    assert size % capacity == 0
    assert size >= max(count, 1)
    assert size - capacity < max(count, 1)


def test_capacity_is_eight_deviations_above_the_mean():
    assert sampling.capacity(256, 60_000) == 256 + 8 * 16
    assert sampling.capacity(2, 60_000) == 14
    assert sampling.capacity(256, 300) == 300
    assert sampling.capacity(1, 1) == 1


def test_num_examples_skips_none():
    structure = ({"a": np.zeros((7, 2))}, [np.zeros(7), None], None)
    assert sampling.num_examples_of(structure) == 7


def test_num_examples_names_different_sizes():
    with pytest.raises(ValueError, match=r"\[7, 8\]"):
        sampling.num_examples_of((np.zeros(7), np.zeros((8, 2))))


@pytest.mark.parametrize("structure", [None, (), (None, {"a": None})])
def test_num_examples_needs_an_array(structure):
    with pytest.raises(ValueError, match="no arrays"):
        sampling.num_examples_of(structure)


@pytest.mark.parametrize("leaf", [3, "abc", np.float32(1)])
def test_num_examples_refuses_scalars(leaf):
    with pytest.raises(ValueError, match="leading size"):
        sampling.num_examples_of((np.zeros(3), leaf))


# The dataset.


def test_batches_hold_the_drawn_rows_of_every_array():
    x = np.arange(200, dtype=np.float32).reshape(100, 2)
    y = np.arange(100)
    data = sampling.poisson_dataset(
        (x, y), 20, np.random.default_rng(9), static_shapes=False
    )
    reference = np.random.default_rng(9)
    for (x_batch, y_batch), mask in take(data, 20):
        indices = sampling.poisson_indices(100, 20, reference)
        np.testing.assert_array_equal(y_batch, indices)
        np.testing.assert_array_equal(x_batch, x[indices])
        assert mask.numpy().all() and mask.shape == y_batch.shape


def test_empty_batches_are_delivered_as_one_masked_row():
    x = np.arange(100.0)
    data = sampling.poisson_dataset(
        x, 1, np.random.default_rng(10), static_shapes=False
    )
    reference = np.random.default_rng(10)
    empty = 0
    for batch, mask in take(data, 50):
        count = len(sampling.poisson_indices(100, 1, reference))
        assert mask.numpy().sum() == count
        assert len(batch) == len(mask) == max(count, 1)
        if count == 0:
            empty += 1
            np.testing.assert_array_equal(batch, x[:1])
    assert empty > 0


def test_static_shapes_pad_to_the_capacity_with_the_first_row():
    x = np.arange(1_000) + 5
    data = sampling.poisson_dataset(
        x, 10, np.random.default_rng(11), static_shapes=True
    )
    reference = np.random.default_rng(11)
    rows = sampling.capacity(10, 1_000)
    for batch, mask in take(data, 50):
        indices = sampling.poisson_indices(1_000, 10, reference)
        assert batch.shape == mask.shape == (rows,)
        assert mask.dtype == tf.bool
        np.testing.assert_array_equal(batch[mask], x[indices])
        assert np.all(batch[~mask] == 5)


def test_a_draw_beyond_the_capacity_is_not_truncated():
    data = sampling.poisson_dataset(
        np.arange(1_000), 10, FixedCount(1_000), static_shapes=True
    )
    batch, mask = next(iter(data))
    assert sampling.capacity(10, 1_000) == 36
    assert len(batch) == 28 * 36
    assert sorted(batch.numpy()[mask.numpy()]) == list(range(1_000))


@pytest.mark.parametrize("static_shapes", [False, True])
def test_sampling_probability_one_gives_the_whole_data_set(static_shapes):
    data = sampling.poisson_dataset(
        np.arange(30),
        30,
        np.random.default_rng(),
        static_shapes=static_shapes,
    )
    for batch, mask in take(data, 3):
        assert mask.numpy().all()
        assert sorted(batch.numpy()) == list(range(30))


def test_structures_survive_with_none_and_strings():
    n = 20
    words = [f"word {i}" for i in range(n)]
    arrays = (
        {
            "id": np.arange(n),
            "parts": [np.arange(n), tf.range(n)],
            "object": np.array(words, object),
            "unicode": np.array(words),
            "nothing": None,
        },
        (np.arange(n), None),
        None,
    )
    data = sampling.poisson_dataset(
        arrays, 10, np.random.default_rng(12), static_shapes=False
    )
    for (x, y, sample_weight), mask in take(data, 5):
        ids = x["id"].numpy()
        assert set(x) == {"id", "parts", "object", "unicode", "nothing"}
        assert x["nothing"] is None and y[1] is None and sample_weight is None
        # `tf.data` has no lists: they come back as tuples.
        assert isinstance(x["parts"], tuple) and isinstance(y, tuple)
        np.testing.assert_array_equal(x["parts"][0], ids)
        np.testing.assert_array_equal(x["parts"][1], ids)
        np.testing.assert_array_equal(y[0], ids)
        expected = [words[i].encode() for i in ids]
        assert x["object"].numpy().tolist() == expected
        assert x["unicode"].numpy().tolist() == expected
        assert len(mask) == len(ids)


def test_ragged_tensors_are_gathered():
    ragged = tf.ragged.constant([[0], [1, 1], [2], []])
    data = sampling.poisson_dataset(
        (ragged, np.arange(4)), 4, np.random.default_rng(), static_shapes=False
    )
    (x, y), _ = next(iter(data))
    assert x.to_list() == [ragged[i].numpy().tolist() for i in y.numpy()]


def test_transform_maps_the_gathered_batch():
    def transform(batch):
        text, label = batch
        return [{"length": tf.strings.length(text)}, label]

    text = np.array(["a" * i for i in range(30)], object)
    data = sampling.poisson_dataset(
        (text, np.arange(30)),
        10,
        np.random.default_rng(13),
        static_shapes=True,
        transforms=[transform],
    )
    for (x, y), mask in take(data, 3):
        np.testing.assert_array_equal(x["length"], y)
        assert len(mask) == len(y) == sampling.capacity(10, 30)


def test_a_new_iterator_makes_new_draws():
    data = sampling.poisson_dataset(
        np.arange(1_000), 500, np.random.default_rng(14), static_shapes=False
    )
    first = [tuple(batch.numpy()) for batch, _ in take(data, 3)]
    second = [tuple(batch.numpy()) for batch, _ in take(data, 3)]
    assert len({*first, *second}) == 6


def test_the_dataset_is_infinite():
    data = sampling.poisson_dataset(
        np.arange(10), 5, np.random.default_rng(), static_shapes=True
    )
    assert data.cardinality() == tf.data.INFINITE_CARDINALITY


def test_batches_inside_the_dataset_are_poisson():
    n, b, draws = 40, 8, 1_000
    data = sampling.poisson_dataset(
        np.arange(n), b, np.random.default_rng(15), static_shapes=True
    )
    counts = np.zeros(n, int)
    for batch, mask in data.take(draws).as_numpy_iterator():
        counts[batch[mask]] += 1
    assert_binomial(counts, draws, b / n)


@pytest.mark.parametrize("static_shapes, jit", [(False, False), (True, True)])
def test_fit_receives_batch_and_mask(static_shapes, jit):
    traces = []

    class CountRows(keras.Model):
        def __init__(self):
            super().__init__()
            self.drawn = keras.metrics.Sum(name="drawn")
            self.steps = keras.metrics.Sum(name="steps")
            self.built = True

        def train_step(self, data):
            (x, y, sample_weight), mask = data
            traces.append(x.shape)
            assert y is None and sample_weight is None
            # Padding is a copy of the first row, which is NaN here.
            first = tf.where(mask, x[:, 0], 0.0)
            self.drawn.update_state(tf.where(tf.math.is_nan(first), 1.0, first))
            self.steps.update_state(1.0)
            return {"drawn": self.drawn.result(), "steps": self.steps.result()}

    x = np.ones((500, 3), np.float32)
    x[0] = np.nan
    data = sampling.poisson_dataset(
        (x, None, None),
        2,
        np.random.default_rng(16),
        static_shapes=static_shapes,
    )
    model = CountRows()
    model.compile(jit_compile=jit)
    history = model.fit(data, steps_per_epoch=50, epochs=2, verbose=0).history
    reference = np.random.default_rng(16)
    sizes = [
        len(sampling.poisson_indices(500, 2, reference)) for _ in range(100)
    ]
    assert min(sizes) == 0
    assert history["steps"] == [50, 50]
    assert history["drawn"] == [sum(sizes[:50]), sum(sizes[50:])]
    assert len(set(traces)) == 1
