"""Secure noise: integers, exact, and the model that trains with it.

Statistical bounds are exceeded with probability below 1e-9 by right noise.
"""

import math
import os

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

import keras_fastclip
from keras_fastclip import keystream, rounded
from keras_fastclip.noise import SMALL, SecureNoise

STEP = tf.constant(5, tf.int64)


# -- the integers ------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.05, 0.3, 1.7, 25.0])
def test_integers_have_the_probabilities_of_rounded_normal_values(scale):
    values = rounded.rounded_normal(scale, 1 << 20)
    reach = 2 + int(3.5 * scale)
    inner = np.arange(-reach, reach + 1)
    edges = np.concatenate([[-np.inf], inner[:-1] + 0.5, [np.inf]])
    expected = values.size * np.diff(scipy.stats.norm.cdf(edges / scale))
    counts = np.bincount(np.clip(values, -reach, reach) + reach)
    counts = np.pad(counts, (0, inner.size - counts.size))
    common = expected > 5
    rare = counts[~common].sum()
    assert rare <= scipy.stats.poisson(expected[~common].sum()).ppf(1 - 1e-10)
    statistic = np.sum((counts - expected)[common] ** 2 / expected[common])
    assert scipy.stats.chi2(common.sum()).sf(statistic) > 1e-9


@pytest.mark.parametrize("scale", [3e3, 2.0**30 + 0.1])
def test_large_integers_have_the_moments_of_normal_values(scale):
    values = rounded.rounded_normal(scale, 1 << 20) / scale
    count = values.size
    assert abs(values.mean()) < 6.2 / count**0.5
    assert abs((values**2).mean() - 1) < 6.2 * (2 / count) ** 0.5
    assert abs((values**4).mean() - 3) < 6.2 * (96 / count) ** 0.5
    # The lower bits are those of a real number, too.
    bits = np.bincount(rounded.rounded_normal(scale, 1 << 18) & 7)
    assert scipy.stats.chisquare(bits).pvalue > 1e-9
    # Halves of pairs have nothing to do with each other.
    one, other = np.split(rounded.rounded_normal(scale, 1 << 20) / scale, 2)
    assert abs((one * other).mean()) < 6.2 / one.size**0.5
    squares = (one**2 - 1) * (other**2 - 1)
    assert abs(squares.mean()) < 6.2 * 2 / one.size**0.5


@pytest.mark.parametrize("scale", [2.5, 2.0**30, 2.0**40])
def test_no_value_is_rounded_wrongly(scale, monkeypatch):
    """What float64 leaves no doubt about is what all bits say."""
    words = keystream.random_bytes(3 * 8 * 1000).view("u8").reshape(3, -1)
    doubtful = []
    right = rounded._in_decimals

    def in_decimals(scale, low, *rest):
        doubtful.append(low)
        return right(scale, low, *rest)

    monkeypatch.setattr(rounded, "_in_decimals", in_decimals)
    quick = rounded._from_words(scale, *words)
    left = np.isin(words[0] >> np.uint64(1), np.array(doubtful, "u8"))
    assert left.mean() < 0.2
    monkeypatch.setattr(rounded, "ERROR", 1.0)
    exact = rounded._from_words(scale, *words)
    known = np.tile(~left, 2)
    np.testing.assert_array_equal(quick[known], exact[known])


def test_errors_are_well_within_their_bound():
    """At 2⁶⁰ integers show what float64 does to a value."""
    scale = 2.0**60
    words = keystream.random_bytes(3 * 8 * 2000).view("u8").reshape(3, -1)
    low, top, angle = words[0] >> 1, words[1] >> 11, words[2]
    halvings = 53 - np.frexp(top.astype("f8"))[1]
    u = halvings * math.log(2) - np.log1p(-(low.astype("f8") * 2.0**-64))
    radius = np.sqrt(2 * u)
    turn = angle.astype("f8") * (math.pi / 2 * 2.0**-64)
    for at in range(low.size):
        bits = int(low[at]), int(top[at]), int(angle[at])
        exact = rounded._in_decimals(scale, *bits)
        for value, function in zip(exact, (math.cos, math.sin), strict=True):
            found = int(scale * radius[at] * function(turn[at]))
            bound = scale * rounded.ERROR * (1 + radius[at])
            assert abs(found - value) < bound / 2


@pytest.mark.parametrize("low, top", [(0, 1 << 52), (5, 1), (1 << 62, 0)])
def test_rare_words(low, top):
    """Radii near zero, and those that float64 has no bits for."""
    words = [
        np.uint64([low << 1]),
        np.uint64([top << 11]),
        np.uint64([1 << 60]),
    ]
    values = rounded._from_words(2.0**30, *words)
    least = (2 * 52 * math.log(2)) ** 0.5 if top < 2 else 0
    found = math.hypot(*values) / 2.0**30
    assert least <= found + 1e-6 < 20
    if not low:
        assert found < 1e-3


def test_signs_are_bits_of_their_own():
    words = np.uint64(
        [[1 << 62] * 4, range(1 << 60, (1 << 60) + 4), [1 << 63] * 4]
    )
    one, other = rounded._from_words(100.0, *words).reshape(2, -1)
    assert [*np.sign(one)] == [1, -1, 1, -1]
    assert [*np.sign(other)] == [1, 1, -1, -1]


def test_pi():
    digits = "3.14159265358979323846264338327950288419716939937510582097494459"
    assert str(rounded._pi(200)).startswith(digits)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_any_number_of_integers(count):
    values = rounded.rounded_normal(5.0, count)
    assert values.shape == (count,) and values.dtype == np.int64


def test_no_two_draws_are_alike_nor_are_those_of_a_fork():
    drawn = [rounded.rounded_normal(1e9, 8).tobytes() for _ in range(100)]
    assert len(set(drawn)) == 100
    read, write = os.pipe()
    child = os.fork()
    mine = rounded.rounded_normal(1e9, 8).tobytes()
    if not child:
        os.write(write, mine)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000) not in [mine, *drawn]


# -- the grid ----------------------------------------------------------------


@pytest.mark.parametrize("sensitivity", [1e-3, 0.3, 1.0, 2.0, 1e6])
@pytest.mark.parametrize("coordinates", [1, 2, 1000, 10**9])
@pytest.mark.parametrize("multiplier", [0.0, 0.3, 1.1, 10.0])
def test_the_grid_is_fine_and_the_noise_makes_up_for_it(
    sensitivity, coordinates, multiplier
):
    grid = rounded.spacing(multiplier, sensitivity, coordinates)
    assert math.frexp(grid)[0] == 0.5
    added = grid * math.sqrt(coordinates) / sensitivity
    assert 2.0**-21 < added <= 2.0**-20
    scale = rounded.scale(multiplier, sensitivity, coordinates, grid)
    reach = sensitivity * (1 + 1e-6 + added)
    assert scale * grid >= multiplier * reach
    assert scale * grid <= multiplier * sensitivity * (1 + 3e-6)


def test_noise_beyond_all_use_is_exact_as_well():
    """The grid grows with it, and the noise with the grid."""
    grid = rounded.spacing(1e9, 1.0, 10**8)
    scale = rounded.scale(1e9, 1.0, 10**8, grid)
    assert scale <= 2.0**44
    assert scale * grid >= 1e9 * (1 + grid * 1e4)
    rounded.rounded_normal(scale, 10)


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e6), st.integers(1, 200))
def test_neighbours_stay_neighbours_on_the_grid(seed, size, coordinates):
    rng = np.random.default_rng(seed)
    grid = rounded.spacing(1.0, 1.0, coordinates)
    one = size * rng.normal(size=coordinates)
    moved = rng.normal(size=coordinates)
    other = one + moved / np.linalg.norm(moved)
    units = rounded.on_grid(other, grid) - rounded.on_grid(one, grid)
    # The sums themselves are rounded, too, which is not counted here.
    exact = np.linalg.norm(other - one) + 1e-12
    assert grid * np.linalg.norm(units) <= exact + grid * coordinates**0.5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_whatever_the_sum_results_are_on_one_grid(dtype):
    """So that no value tells which sum it came from."""
    for total in (0.0, 1 / 3, -7e-9, 12345.678):
        sums = np.full(3 * rounded.BLOCK, total, dtype)
        mean = rounded.add(sums, 1.1, 0.7, 1000, 8.0)
        grid = rounded.spacing(1.1, 0.7, 1000)
        if dtype == "float64":
            units = mean * 8 / grid
            np.testing.assert_array_equal(units, np.rint(units))
        assert mean.dtype == dtype
        noise = 8 * mean.astype("float64") - total
        bounds = scipy.stats.chi2(noise.size).ppf([5e-10, 1 - 5e-10])
        squares = np.sum(np.square(noise / 0.77))
        assert bounds[0] <= squares <= bounds[1]


def test_without_noise_sums_are_rounded_and_nothing_else():
    sums = np.random.default_rng(0).normal(size=1000)
    grid = rounded.spacing(0.0, 1.0, 1000)
    exact = np.rint(sums / grid) * grid / 4
    np.testing.assert_array_equal(rounded.add(sums, 0.0, 1.0, 1000, 4.0), exact)


def test_sums_beyond_all_bounds():
    mean = rounded.add(np.array([1e30, -1e30]), 1.0, 1.0, 2)
    assert mean[0] > 2.0**40 and mean[1] < -(2.0**40)
    with pytest.raises(ValueError, match="not finite"):
        rounded.add(np.array([np.nan]), 1.0, 1.0, 1)


def test_tensors_of_all_sizes_and_types():
    sums = [
        tf.fill([3, 2], 5.0),
        tf.fill([SMALL], tf.constant(5.0, "float64")),
        tf.fill([SMALL + 1], 5.0),
        tf.constant(5.0, "float64"),
        tf.zeros([0, 3]),
    ]

    @tf.function
    def add(stddev, norm):
        return SecureNoise().add(sums, stddev, STEP, 4.0, sensitivity=norm)

    for stddev in (0.0, 0.2):
        noised = add(
            tf.constant(stddev, "float64"), tf.constant(0.1, "float64")
        )
        for total, mean in zip(sums, noised, strict=True):
            assert mean.dtype == total.dtype and mean.shape == total.shape
            noise = 4 * mean.numpy().astype("float64").ravel() - 5
            if not stddev:
                np.testing.assert_allclose(noise, 0, atol=1e-6)
            elif noise.size:
                bounds = scipy.stats.chi2(noise.size).ppf([5e-10, 1 - 5e-10])
                assert bounds[0] <= np.sum((noise / 0.2) ** 2) <= bounds[1]


# -- models ------------------------------------------------------------------

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype("float32")
Y = RNG.normal(size=(64, 3)).astype("float32")


def model(jit=False, **settings):
    settings = {"noise_multiplier": 1.1, "noise": "secure", **settings}
    private = keras_fastclip.DPSequential(
        [keras.Input((4,)), layers.Dense(3)],
        **{"l2_norm_clip": 0.5, **settings},
    )
    private.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=jit)
    return private


@pytest.mark.parametrize("options", [{}, {"physical_batch_size": 4}])
def test_a_model_trains_and_accounts_as_with_fast_noise(options):
    spent, norms = [], []
    for noise in ("fast", "secure"):
        private = model(noise=noise, **options)
        private.fit(X, Y, batch_size=16, epochs=3, verbose=0)
        spent.append(private.privacy_spent(1e-5))
        norms.append(private.nonfinite_examples())
    assert spent[0] == spent[1] and norms == [0, 0]


def test_an_update_is_on_the_grid():
    """No example, a learning rate of one and a mean over a power of two."""
    keras.config.set_floatx("float64")
    try:
        private = model(expected_batch_size=16)
    finally:
        keras.config.set_floatx("float32")
    for variable in private.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    private.fit(X, Y, batch_size=16, steps_per_epoch=1, verbose=0)
    grid = rounded.spacing(1.1, 0.5, 15) / 16
    for weight in private.get_weights():
        units = weight / grid
        assert np.all(units != 0)
        np.testing.assert_array_equal(units, np.rint(units))


def test_an_adaptive_norm_with_secure_noise():
    norm = keras_fastclip.AdaptiveNorm(0.5)
    private = model(l2_norm_clip=norm)
    private.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    assert private._privacy.clip_norm.value != 0.5
    assert math.isfinite(private.privacy_spent(1e-5))


def test_statement_and_summary_tell_of_it(tmp_path):
    texts = {}
    for noise in ("fast", "secure"):
        private = model(noise=noise)
        private.fit(X, Y, batch_size=16, verbose=0)
        lines = []
        keras_fastclip.clipping_summary(private, print_fn=lines.append)
        assert f"{noise} noise" in lines[-1]
        texts[noise] = " ".join(private.privacy_statement(1e-5).split())
    assert "added as integers" in texts["secure"]
    assert "added as integers" not in texts["fast"]
    assert "ideal Gaussian noise" in texts["fast"]
    assert "ideal Gaussian noise" not in texts["secure"]
    # Steps of another model, made with fast noise, are none of it.
    fast = model(noise="fast")
    fast.fit(X, Y, batch_size=16, verbose=0)
    fast.save_weights(tmp_path / "fast.weights.h5")
    private.load_weights(tmp_path / "fast.weights.h5")
    assert "added as integers" not in private.privacy_statement(1e-5)


def test_it_is_saved():
    private = model()
    assert private.get_config()["noise"] == "secure"
    again = type(private).from_config(private.get_config())
    assert isinstance(again._privacy.noise, SecureNoise)
    assert model(noise="fast").get_config()["noise"] == "fast"


def test_loaded_models_go_on_with_it(tmp_path):
    private = model()
    private.fit(X, Y, batch_size=16, verbose=0)
    private.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    again.fit(X, Y, batch_size=16, verbose=0)
    text = " ".join(again.privacy_statement(1e-5).split())
    assert "added as integers" in text


def test_refusals():
    with pytest.raises(ValueError, match="noise='secure' cannot be repeated"):
        model(seed=3)
    with pytest.raises(ValueError, match="noise"):
        model(noise="slow")
    with pytest.raises(ValueError, match="jit_compile=False"):
        model(jit=True).fit(X, Y, batch_size=16, verbose=0)


def test_own_loops_by_xla_are_refused():
    private = model(expected_batch_size=8)
    step = tf.function(private.train_step, jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=False"):
        step((X[:8], Y[:8]))


def test_models_made_private_have_it_too():
    plain = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    plain.compile("sgd", "mse")
    keras_fastclip.make_private(
        plain, l2_norm_clip=1.0, noise_multiplier=1.0, noise="secure"
    )
    before = plain.get_weights()
    plain.fit(X, Y, batch_size=16, verbose=0)
    for old, new in zip(before, plain.get_weights(), strict=True):
        assert np.all(np.isfinite(new)) and np.all(new != old)
