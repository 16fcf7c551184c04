"""The noise: its source, its distribution, and that no two draws are alike.

Statistical bounds are exceeded with probability below 1e-9 by right noise.
"""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from keras_fastclip import keystream, noise, normal
from keras_fastclip.keystream import Keystream
from keras_fastclip.noise import COMPILED_FROM, SMALL, GaussianNoise

STEP = tf.constant(5, tf.int64)


def words(high, low, angle):
    return np.array([high, low, angle], np.uint32)[:, None]


def by_tensorflow(drawn, dtype=np.float32):
    return np.array(
        normal.by_tensorflow(tf.constant(drawn), tf.as_dtype(dtype))
    )


def by_numpy(drawn, dtype=np.float32):
    blocks = np.split(
        drawn, range(normal.BLOCK, drawn.shape[1], normal.BLOCK), 1
    )
    found = [
        [half.copy() for half in normal.Desk(dtype).values(_bytes(block))]
        for block in blocks
    ]
    return np.concatenate(found, 1)


def _bytes(drawn):
    """A copy, which is written to; low words come first."""
    return np.concatenate(
        [np.ravel(drawn[1::-1].T), drawn[2]], dtype=np.uint32
    ).view(np.uint8)


both = pytest.mark.parametrize("maker", [by_tensorflow, by_numpy])


@pytest.fixture(params=[0, COMPILED_FROM], ids=["compiled", "numpy"])
def by_both(request, monkeypatch):
    """Noise of large models, and that of others."""
    monkeypatch.setattr(noise, "COMPILED_FROM", request.param)


@functools.cache
def many_values(maker):
    """Normal values in pairs, (2, n)."""
    most = normal.COMPILED_PIECE // 2
    drawn = [normal.random_words(most, Keystream()) for _ in range(16)]
    return maker(np.concatenate(drawn, 1))


def test_bytes_are_the_keystream_of_the_cipher():
    """Also where zeros are encrypted in several turns."""
    size = 3 * len(keystream.ZEROS) // 2
    drawn = keystream.random_bytes(size, name=(7, "name"))
    key = keystream.hashlib.sha256(b"(7, 'name')").digest()[:16]
    counter = modes.CTR(bytes(15) + b"\2")
    encrypt = Cipher(algorithms.AES128(key), counter).encryptor()
    assert drawn.tobytes() == encrypt.update(bytes(size))


def test_all_modes_of_the_cipher_give_the_same_bytes():
    size = 5 * len(keystream.ZEROS) // 2 + keystream.BEHIND
    first, *others = (
        Keystream("name", mode).fill(np.zeros(size, np.uint8)).tobytes()
        for mode in keystream.MODES
    )
    assert others and all(drawn == first for drawn in others)


def test_a_stream_goes_on_where_it_was():
    stream = Keystream("name")
    rooms = [np.zeros(size + keystream.BEHIND, np.uint8) for size in (24, 48)]
    parts = [stream.fill(room).copy() for room in rooms]
    whole = keystream.random_bytes(72, "name")
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_no_two_draws_share_their_bytes():
    drawn = [keystream.random_bytes(96).tobytes() for _ in range(100)]
    assert len(set(drawn)) == 100


@pytest.mark.parametrize("pairs", [0, 1, 3])
def test_any_number_of_pairs(pairs):
    assert normal.random_words(pairs, Keystream()).shape == (3, pairs)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "size", [0, 1, 2, 2 * normal.BLOCK - 1, 5 * normal.BLOCK]
)
def test_blocks_leave_no_value_out_and_repeat_none(size, dtype):
    flat = np.zeros(size, dtype)
    noised = np.full_like(flat, np.nan)
    normal.add([flat], [noised], 2.0, 4.0, lambda *_: Keystream())
    assert noised.shape == flat.shape and noised.dtype == dtype
    assert not np.any(flat) and np.all(noised != 0)
    if size > 2:
        assert scipy.stats.kstest(2 * noised, "norm").pvalue > 1e-9
        assert len(np.unique(noised)) > 0.98 * size


@both
def test_values_are_normal(maker):
    values = many_values(maker)
    for side in values:
        p = scipy.stats.kstest(side[: 1 << 20], "norm").pvalue
        assert p > 1e-9
    total = values.size
    flat = values.reshape(-1).astype("float64")
    assert abs(flat.mean()) < 6.2 / total**0.5
    assert abs((flat**2).mean() - 1) < 6.2 * (2 / total) ** 0.5
    assert abs((flat**4).mean() - 3) < 6.2 * (96 / total) ** 0.5
    # Sine and cosine of one pair, and their squares, do not hang together.
    sine, cosine = values.astype("float64")
    assert abs((sine * cosine).mean()) < 6.2 / sine.size**0.5
    squares = (sine**2 - 1) * (cosine**2 - 1)
    assert abs(squares.mean()) < 6.2 * 2 / sine.size**0.5


@both
@pytest.mark.parametrize("limit", [1e-3, 0.1, 1.0, 3.0, 4.0, 5.0])
def test_tails_and_centre_have_the_weight_they_should(limit, maker):
    values = np.abs(many_values(maker))
    expected = scipy.stats.binom(values.size, 2 * scipy.stats.norm.sf(limit))
    low, high = expected.ppf([5e-10, 1 - 5e-10])
    assert low <= np.count_nonzero(values > limit) <= high


@both
def test_angles_are_spread_evenly(maker):
    sine, cosine = many_values(maker)
    sectors = np.histogram(np.arctan2(sine, cosine), 64, (-np.pi, np.pi))[0]
    assert scipy.stats.chisquare(sectors).pvalue > 1e-9


@both
def test_the_largest_value_is_that_of_64_bits(maker):
    """With 32 bits it would be 6.7, too small for models of today."""
    values = np.ravel(maker(words(0, 0, 0)))
    bits = 65 if maker is by_tensorflow else 64
    assert np.linalg.norm(values) == pytest.approx(
        (2 * bits * np.log(2)) ** 0.5, 1e-6
    )
    second = np.ravel(maker(words(0, 2, 0)))
    assert 9 < np.linalg.norm(second) < np.linalg.norm(values)


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_radii_are_as_fine_near_zero_as_elsewhere(maker, dtype):
    """A radius of zero would leave two weights without noise."""
    top = (1 << 32) - 1
    highs = np.arange(top - 1000, top + 1, dtype=np.uint32)
    rest = np.zeros_like(highs)
    found = np.linalg.norm(maker(np.stack([highs, rest, rest]), dtype), axis=0)
    v = (top - highs.astype("float64") + 1) / 2**32
    np.testing.assert_allclose(found, np.sqrt(-2 * np.log1p(-v)), 1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_has_all_radii_of_63_bits(dtype):
    """None is zero, and all are as fine as others of their type."""
    near = [2**63 - 1 - n for n in (0, 1, 2**10, 2**30, 2**43, 2**45, 2**60)]
    ks = [0, 1, 2**20, 2**40, 2**62, *near]
    drawn = np.array([[k >> 31, 2 * k % 2**32, 1 << 20] for k in ks], np.uint32)
    values = by_numpy(drawn.T, dtype)
    v = np.array([(2**63 - 1 - k + 0.5) / 2**63 for k in ks])
    u = np.array([(k + 0.5) / 2**63 for k in ks])
    logs = np.where(v < 0.5, np.log1p(-np.minimum(v, 0.5)), np.log(u))
    found = np.linalg.norm(values, axis=0)
    close = 1e-6 if dtype == np.float32 else 1e-14
    np.testing.assert_allclose(found, np.sqrt(-2 * logs), close)
    assert np.all(np.isfinite(values))


def test_noise_is_compiled_where_it_takes_much_of_a_step():
    """XLA takes memory and time to start, and less time to run."""
    few = noise.FEW_MULTIPLICATIONS
    for size, each, expected in (
        (COMPILED_FROM - 1, 0, False),
        (COMPILED_FROM, few - 1, True),
        (COMPILED_FROM, few, False),
    ):
        step = tf.function(
            lambda size=size, each=each: GaussianNoise().add(
                [tf.zeros([size])],
                tf.constant(1.0),
                STEP,
                multiplications=each * size,
            )
        )
        nodes = step.get_concrete_function().graph.as_graph_def().node
        assert any("_XlaMustCompile" in n.attr for n in nodes) == expected
        (values,) = step()
        assert scipy.stats.kstest(values[:100_000], "norm").pvalue > 1e-9


def test_compiled_pieces_do_not_wait_for_all_before_them(monkeypatch):
    """TensorFlow would have calls of Python wait for each other."""
    monkeypatch.setattr(noise, "COMPILED_FROM", 0)
    monkeypatch.setattr(noise, "IN_FLIGHT", 2)
    step = tf.function(
        lambda: GaussianNoise().add(
            [tf.zeros([SMALL])] * 4, tf.constant(1.0), STEP
        )
    ).get_concrete_function()
    operations = step.graph.get_operations()
    # What takes the words waits for nothing but what came two before.
    calls = [o for o in operations if o.type == "PyFunc"]
    adding = [o for o in operations if "_XlaMustCompile" in o.node_def.attr]
    assert len(calls) == len(adding) == 4
    for i, call in enumerate(calls):
        waits_for = {_made_by(o) for o in call.control_inputs}
        waits_for &= {*calls, *adding}
        assert waits_for == set(adding[i - 2 : i - 1] if i > 1 else [])


def _made_by(operation):
    """What made the numbers that an operation returns as they are."""
    while operation.type in ("Bitcast", "Reshape"):
        operation = operation.inputs[0].op
    return operation


def test_other_noise_is_one_call_of_python():
    step = tf.function(
        lambda: GaussianNoise().add(
            [tf.zeros([SMALL]), tf.zeros([5]), tf.zeros([5], "float64")],
            tf.constant(1.0),
            STEP,
        )
    ).get_concrete_function()
    kinds = [o.type for o in step.graph.get_operations()]
    assert kinds.count("PyFunc") == 1


@pytest.mark.parametrize("graph", [False, True])
def test_sums_are_left_as_they_are(graph):
    """They may be constants, the same in every step."""

    def noised():
        total = tf.zeros([SMALL])
        return total, *GaussianNoise().add([total], tf.constant(1.0), STEP)

    run = tf.function(noised) if graph else noised
    first, second = run(), run()
    assert not np.any(first[0]) and not np.any(second[0])
    for total, found in first, second:
        assert np.std(found - total) == pytest.approx(1, abs=0.05)
    assert abs(np.corrcoef(first[1], second[1])[0, 1]) < 0.03


def test_threads_make_the_same_noise_as_one(monkeypatch):
    sizes = [3, 2 * normal.PIECE + 1, 0, normal.PIECE - 1]

    def noised(threads):
        monkeypatch.setattr(normal, "THREADS", threads)
        vectors = [np.ones(size, np.float32) for size in sizes]
        found = [np.zeros_like(vector) for vector in vectors]
        normal.add(vectors, found, 1.0, 2.0, lambda *name: Keystream(name))
        return found

    for one, several in zip(noised(1), noised(4), strict=True):
        np.testing.assert_array_equal(one, several)
        assert len(np.unique(one)) >= 0.98 * one.size


LAST = """
import threading, time
import numpy as np
from keras_fastclip import normal
from keras_fastclip.keystream import Keystream

def work():
    time.sleep(1)
    vectors = [np.zeros(2 * normal.PIECE, np.float32)]
    normal.add(vectors, vectors, 1.0, 2.0, lambda *_: Keystream())
    print("noise", np.count_nonzero(vectors[0]))

threading.Thread(target=work).start()
"""


def test_noise_is_made_when_the_main_thread_has_ended():
    done = subprocess.run(
        [sys.executable, "-c", LAST], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"noise {2 * normal.PIECE}\n", done.stderr


NO_NUMBERS = """
import keras, numpy as np, tensorflow as tf
import keras_fastclip

tf.debugging.enable_check_numerics()
model = keras_fastclip.DPSequential(
    [keras.layers.Dense(50), keras.layers.Dense(10)],
    l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8,
)
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
model.train_on_batch(np.ones((8, 1500), "float32"), np.zeros(8))
print("trained", int(model.optimizer.iterations.numpy()))
"""


def test_memory_that_is_not_set_is_not_taken_for_numbers():
    """TensorFlow can be told to look for what is none."""
    done = subprocess.run(
        [sys.executable, "-c", NO_NUMBERS],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.endswith("trained 1\n"), done.stderr


def test_an_error_in_a_thread_is_an_error():
    def stream(vector, piece):
        return Keystream([vector, 1 // (1 - piece)])

    with pytest.raises(ZeroDivisionError):
        long = [np.zeros(2 * normal.PIECE)]
        normal.add(long, long, 1.0, 2.0, stream)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_has_threads_of_its_own():
    vectors = [np.zeros(2 * normal.PIECE, np.float32)]
    normal.add(vectors, vectors, 1.0, 2.0, lambda *_: Keystream())
    child = os.fork()
    if not child:
        normal.add(vectors, vectors, 1.0, 2.0, lambda *_: Keystream())
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_noise_of_float64_has_its_resolution():
    """Else what is left of the noise tells the right sum from others."""
    total = tf.constant(np.random.default_rng(0).normal(size=1000))
    (noised,) = GaussianNoise().add([total], tf.constant(1.0), STEP)
    noise = (noised - total).numpy()
    assert np.mean(noise == noise.astype("float32")) < 0.1


def test_large_and_small_sums_of_two_types(by_both):
    """Places and types of sums are not taken for each other."""
    sums = [
        tf.zeros([3]),
        tf.zeros([SMALL], "float64"),
        tf.zeros([COMPILED_FROM], "float32"),
        tf.zeros([SMALL], "float32"),
        tf.zeros([5], "float64"),
    ]
    noised = GaussianNoise().add(sums, tf.constant(1.0), STEP)
    for total, new in zip(sums, noised, strict=True):
        assert new.dtype == total.dtype and new.shape == total.shape
        assert np.all(new != 0)


@both
@pytest.mark.parametrize("word", [0, 1, 2, 3, 1 << 31, (1 << 32) - 1])
def test_values_are_finite_and_on_the_circle(word, maker):
    top = (1 << 32) - 1
    for radius in ((1 << 16, 0), (top, top), (1 << 31, 5)):
        pair = np.ravel(maker(words(*radius, word)))
        assert np.all(np.isfinite(pair))
        u = (radius[0] * 2**32 + radius[1] + 0.5) / 2**64
        length = (-2 * np.log(u)) ** 0.5
        assert np.linalg.norm(pair) == pytest.approx(length, 1e-6, 1e-4)


SHAPES = [(40, 5), (7,), (), (0, 3), (SMALL + 1,)]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_get_noise_of_the_given_size_and_are_divided(jit, dtype, by_both):
    source = GaussianNoise()
    sums = [tf.fill(shape, tf.constant(3, dtype)) for shape in SHAPES]

    @tf.function(jit_compile=jit)
    def add(stddev):
        return source.add(sums, stddev, STEP, 4.0)

    for exact, mean in zip(sums, add(tf.constant(0.0, "float64")), strict=True):
        assert mean.dtype == dtype and mean.shape == exact.shape
        np.testing.assert_allclose(mean, exact / 4, rtol=1e-6)
    noised = add(tf.constant(2.0, "float64"))
    for mean in noised:
        noise = (mean.numpy().ravel() * 4 - 3) / 2
        bounds = scipy.stats.chi2(noise.size).ppf([5e-10, 1 - 5e-10])
        if noise.size:
            assert bounds[0] <= np.sum(np.square(noise)) <= bounds[1]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_steps_and_weights_have_noise_of_their_own(jit, seed, float64):
    source = GaussianNoise(seed)
    sums = [tf.zeros([40, 5], "float64"), tf.zeros([7], "float64")]

    @tf.function(jit_compile=jit)
    def add(step, first):
        return source.add(sums, tf.constant(1.0, "float64"), step, first=first)

    values = [
        np.concatenate([n.numpy().ravel() for n in add(step, first)])
        for step in map(tf.constant, np.arange(10))
        for first in (0, 2)
    ]
    assert len(np.unique(values)) == 20 * 207


def test_without_a_seed_not_even_the_same_step_draws_the_same_again():
    """As when weights and steps are put back and training goes on anew."""
    source = GaussianNoise()
    one, other = (
        source.add([tf.zeros([50])], tf.constant(1.0), STEP)[0].numpy()
        for _ in range(2)
    )
    assert not np.any(np.isclose(one, other, rtol=1e-6))


def test_a_seed_repeats_the_noise(by_both):
    sums = [tf.zeros([50]), tf.zeros([SMALL + 1]), tf.zeros([3])]
    one, other = (
        GaussianNoise(4).add(sums, tf.constant(1.0), STEP) for _ in range(2)
    )
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_secret_bit_of_the_device_generator_changes_the_noise():
    source = GaussianNoise()
    draw = tf.function(
        lambda: source.add([tf.zeros([3])], tf.constant(1.0), STEP)[0],
        jit_compile=True,
    )
    secret = source._secret.numpy()
    seen = {tuple(draw().numpy())}
    for word in range(2):
        for bit in range(64):
            flipped = secret.view("uint64").copy()
            flipped[word] ^= np.uint64(1 << bit)
            source._secret.assign(flipped.view("int64"))
            seen.add(tuple(draw().numpy()))
    assert len(seen) == 129


@pytest.mark.parametrize("seed", [None, 3])
def test_long_sums_get_noise_in_pieces_that_are_not_alike(
    monkeypatch, seed, by_both
):
    """Of an odd length, with every value in its place."""
    monkeypatch.setattr(normal, "PIECE", 1 << 15)
    monkeypatch.setattr(normal, "COMPILED_PIECE", 1 << 15)
    size = (3 << 15) + 5

    @tf.function
    def add():
        sums = [1e3 * tf.range(size, dtype=tf.float64), tf.zeros([3, 5])]
        one = tf.constant(1.0)
        return GaussianNoise(seed).add(sums, one, STEP, divisor=2.0)

    long, short = (each.numpy() for each in add())
    values = 2 * long - 1e3 * np.arange(size)
    assert scipy.stats.kstest(values, "norm").pvalue > 1e-9
    assert len(np.unique(values)) > 0.99 * size
    assert np.all(np.abs(values) < 9) and short.shape == (3, 5)
