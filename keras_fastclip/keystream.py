"""Normal values from a keystream of AES.

The cipher runs in counter mode, for each tensor with a key of its own from the
operating system that is forgotten at once. So there is no state to save, to
share between processes or to use twice, and whoever can tell the values from
truly random ones breaks AES. Processors have instructions for it, and values
made so take half the time of TensorFlow's own or less
(`python -m benchmarks.noise`).

The transform is Box and Muller's, r cos t and r sin t with r² = -2 ln u. The
angle t is one of 2³² around the circle; u = (k + ½)/2⁶⁴ for a random k below
2⁶⁴, taken as 1 - v near 1, so that ln u has the precision of its type
everywhere. The values therefore end at r = 9.5, where a normal pair goes on
with probability 2⁻⁶⁴: over 10¹² values, such as 10,000 steps of 100 million
weights, they differ from unbounded ones with probability below 3·10⁻⁸, which
adds as much to delta. (32 bits in place of 64, the usual choice, end at 6.7,
which shows within a few hundred steps of a large model.) What the rounding of
values to their type reveals is another matter, as with every such generator.
"""

import hashlib
import math
import os
from collections.abc import Hashable

import numpy as np
import tensorflow as tf
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

# Of 32 bits for each pair: two for the radius, one for the angle.
WORDS = 3
# TensorFlow takes arrays that start at a multiple of it without a copy.
ALIGNMENT = 64
# What is encrypted, again and again; fits into caches.
ZEROS = memoryview(bytes(1 << 18))
# Pairs that NumPy works on at a time; their numbers stay in caches.
BLOCK = 1 << 14
# (ln(1 + t) - t + t²/2)/t³ for 1 + t between √½ and √2, fitted at Chebyshev's
# points; the logarithm is right to 10⁻⁷ of itself. Highest power first.
LOG_SERIES = (
    -0.08101559,
    0.12712307,
    -0.12972239,
    0.14202175,
    -0.16642247,
    0.20001468,
    -0.25000298,
    0.33333328,
)


def random_words(pairs: int, name: Hashable = None) -> np.ndarray:
    """Random integers of 32 bits, shape (3, pairs).

    Args:
        pairs: of normal values to be made from them.
        name: None for secret ones, or what repeatable ones are made from.
    """
    words = random_bytes(4 * WORDS * pairs, name).view(np.uint32)
    return words.reshape(WORDS, pairs)


def random_bytes(size: int, name: Hashable = None) -> np.ndarray:
    """Random bytes, by a key that is used for nothing else and forgotten.

    Args:
        size: how many.
        name: as for `random_words`.
    """
    if name is None:
        key = os.urandom(16)
    else:
        key = hashlib.sha256(repr(name).encode()).digest()[:16]
    # The cipher asks for room for one more of its own blocks.
    room = _aligned(size + 16)
    encrypt = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()
    for start in range(0, size, len(ZEROS)):
        encrypt.update_into(ZEROS[: size - start], room[start:])
    return room[:size]


def _aligned(size):
    """So many bytes, yet to be set, that TensorFlow can take as they are."""
    room = np.empty(ALIGNMENT + size, np.uint8)
    first = -room.ctypes.data % ALIGNMENT
    return room[first : first + size]


def normal(
    words: tf.Tensor, dtype: tf.DType = tf.float32
) -> tuple[tf.Tensor, tf.Tensor]:
    """Normal values, two for each column of the words."""
    high, low, angle = tf.unstack(words)
    radius = tf.sqrt(-2 * _log_uniform(high, low, dtype))
    angle = tf.bitcast(angle, tf.int32)
    cosine, sine = _directions(angle, dtype)
    return radius * cosine, radius * sine


def normal_by_numpy(words: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Normal values, two for each column of the words, shape (2, pairs).

    There is nothing to compile, but it takes more than twice the time of
    `normal` compiled by XLA (`python -m benchmarks.noise`). The angle is
    rounded to the type, to 2²⁴ steps in half a turn of float32.
    """
    size = 2 * words.shape[1] * np.dtype(dtype).itemsize
    values = _aligned(size).view(dtype).reshape(2, -1)
    k, angles = _long_words(words), words[2].view(np.int32)
    log_uniform = _log_uniform_exactly
    if values.dtype == np.float32:
        log_uniform = _log_uniform_quickly
    for start in range(0, len(angles), BLOCK):
        some = slice(start, start + BLOCK)
        radius = log_uniform(k[some]).astype(dtype)
        radius *= -2
        np.sqrt(radius, out=radius)
        turn = angles[some].astype(dtype)
        turn *= turn.dtype.type(2 * math.pi * 2.0**-32)
        cosine, sine = values[:, some]
        np.cos(turn, out=cosine)
        cosine *= radius
        np.sin(turn, out=sine)
        sine *= radius
    return values


def _long_words(words):
    """One integer of 64 bits for each pair."""
    return words[:2].reshape(-1).view(np.uint64)


def _log_uniform_exactly(k):
    """ln u of u = (k + ½)/2⁶⁴, with the precision of float64."""
    u, rest = (k + 0.5) * 2.0**-64, (~k + 0.5) * 2.0**-64
    with np.errstate(divide="ignore"):
        return np.where(u < 0.5, np.log(u), np.log1p(-rest))


def _log_uniform_quickly(k):
    """The same with that of float32: only where u is near 1 is it hard."""
    log = k.astype(np.float64)
    log += 0.5
    log *= 2.0**-64
    np.log(log, out=log)
    hard = k > np.uint64(2**64 - 2**44)
    if hard.any():
        log[hard] = _log_uniform_exactly(k[hard])
    return log


def scattered(size: int, chance: float, name: Hashable = None) -> np.ndarray:
    """Places below `size`, each with the same chance, independently.

    Goes from one to the next: the number of places passed over is geometric,
    which is what an exponential value divided by -ln(1 - chance) is, rounded
    down. That of a uniform u of 64 bits, -ln u, has the precision of float64
    everywhere. Takes time by the number of places found.

    Args:
        size: how many places there are.
        chance: of each.
        name: None for secret places, or what repeatable ones are made from.
    """
    expected = size * chance
    count = int(expected + 5 * math.sqrt(expected)) + 8  # Usually enough.
    found, last = [], -1
    while last < size:
        part = None if name is None else (name, len(found))
        words = _long_words(random_words(count, part))
        exponential = -_log_uniform_exactly(words)
        with np.errstate(divide="ignore"):
            passed = exponential / -np.log1p(-chance)
        # Sums of these must not overflow.
        gaps = np.minimum(passed, size).astype(np.int64) + 1
        places = last + np.cumsum(gaps)
        found.append(places[places < size])
        last = places[-1]
    return np.concatenate(found)


def _log_uniform(high, low, dtype):
    """ln u of u = (k + ½)/2⁶⁴, for k of two words."""
    near_one = high >= 3 << 30
    # There ln(1 - v) of v = 1 - u, which is exact where u is not.
    flipped = tf.bitwise.invert(high), tf.bitwise.invert(low)
    high = tf.where(near_one, flipped[0], high)
    low = tf.where(near_one, flipped[1], low)
    part = tf.cast(low, dtype) * 2.0**-64 + 2.0**-65
    part += tf.cast(high, dtype) * 2.0**-32
    if dtype == tf.float64:
        return tf.where(near_one, tf.math.log1p(-part), tf.math.log(part))
    # One polynomial serves both: ln(1 + t) with t = -v, or after the power of
    # two nearest to u is taken out.
    bits = tf.bitcast(part, tf.int32)
    fraction = tf.bitwise.bitwise_and(bits, 0x7FFFFF)
    mantissa = tf.bitcast(tf.bitwise.bitwise_or(fraction, 0x3F800000), dtype)
    power = tf.cast(tf.bitwise.right_shift(bits, 23) - 127, dtype)
    above = mantissa > math.sqrt(2)
    power = tf.where(near_one, 0.0, power + tf.cast(above, dtype))
    mantissa = tf.where(above, mantissa / 2, mantissa)
    t = tf.where(near_one, -part, mantissa - 1)
    total = tf.zeros_like(t)
    for coefficient in LOG_SERIES:
        total = total * t + coefficient
    square = tf.square(t)
    return (t + (t * square * total - square / 2)) + power * math.log(2)


def _directions(angle, dtype):
    """Cosine and sine of one of 2³² angles.

    In float32 by polynomials on the eighth of a turn to both sides of zero;
    two bits choose the quarter of the circle. XLA makes a loop over vectors of
    that, which it does not of its own sine and cosine.
    """
    if dtype == tf.float64:
        turn = tf.cast(angle, dtype) * (2 * math.pi * 2.0**-32)
        return tf.cos(turn), tf.sin(turn)
    turn = tf.cast(tf.bitwise.right_shift(angle, 2), dtype)
    turn *= math.pi / 2 * 2.0**-30
    square = tf.square(turn)
    sine = turn * _series(square, first=1)
    cosine = _series(square, first=0)
    quarter = tf.bitwise.bitwise_and(angle, 3)
    swapped = tf.bitwise.bitwise_and(quarter, 1) > 0
    cosine, sine = (
        tf.where(swapped, sine, cosine),
        tf.where(swapped, cosine, sine),
    )
    opposite = quarter > 1
    return tf.where(opposite, -cosine, cosine), tf.where(opposite, -sine, sine)


def _series(square, first):
    """Σ (-x²)ᵏ/(2k + first)!; on [-π/4, π/4] right to 3·10⁻⁸."""
    total = tf.ones_like(square) / math.factorial(first + 8)
    for power in (6, 4, 2, 0):
        total = 1 / math.factorial(first + power) - total * square
    return total
