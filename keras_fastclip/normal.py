"""Normal values from random bytes.

The transform is Box and Muller's, r cos t and r sin t with r² = -2 ln u. The
angle t is one of 2³² around the circle, which NumPy's form rounds to the type
(to 2²⁴ steps in half a turn of float32). u = (k + ½)/2ᵇ for a random k below
2ᵇ, with b of 63 or 64, taken as 1 - v near 1, so that ln u has the precision of
its type everywhere. The values therefore end at r = 9.4 or 9.5, where a normal
pair goes on with probability 2⁻⁶⁴ or less: over 10¹² values, such as 10,000
steps of 100 million weights, they differ from unbounded ones with probability
below 6·10⁻⁸, which adds as much to delta. (32 bits, the usual choice, end at
6.7, which shows within a few hundred steps of a large model.) What the rounding
of values to their type reveals is another matter, as with every such generator.

There are two forms. That of NumPy works on blocks of numbers in the caches of a
processor, with threads of Python. That of XLA takes less time
(`python -m benchmarks.noise`), but memory for its compiler, and time before the
first step.
"""

import functools
import math
import os
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from keras_fastclip.keystream import BEHIND, Keystream, log_uniform
from keras_fastclip.rooms import ALIGNMENT, Rooms

# Of 32 bits for each pair: two for the radius, one for the angle.
WORDS = 3
BYTES = 4 * WORDS

# -- by NumPy ------------------------------------------------------------------

# Pairs that are made at a time. Python's lock is taken for each operation on
# them: with fewer, threads wait for it.
BLOCK = 1 << 16
# Values that a thread makes with one key.
PIECE = 1 << 19
THREADS = min(os.cpu_count() or 1, 8)
# Shorter radii are taken from v: ln u is right to 2⁻⁵³.
SHORT = 2.0**-14


def add(
    vectors: Sequence[np.ndarray],
    noised: Sequence[np.ndarray],
    stddev: float,
    divisor: float,
    stream: Callable[[int, int], Keystream],
) -> None:
    """(vector + noise) / divisor for each, of float32 or float64.

    Args:
        vectors: the vectors.
        noised: like these; what comes of them is written there.
        stddev: standard deviation of the noise.
        divisor: what vector and noise are divided by.
        stream: makes the keystream of a piece, from the number of its vector
            and its own number within that.
    """
    pieces = [
        (i, piece)
        for i, vector in enumerate(vectors)
        for piece in range(-(-vector.size // PIECE))
    ]

    def one(i, piece):
        some = slice(piece * PIECE, (piece + 1) * PIECE)
        own = vectors[i][some], noised[i][some]
        _add(*own, stddev, divisor, stream(i, piece))

    _in_threads(one, pieces)


def _in_threads(work, tasks):
    """Has some threads, this one among them, do the work of all tasks.

    NumPy lets go of Python's lock, and so do newer versions of the cipher.
    """
    waiting, errors = queue.SimpleQueue(), []
    for task in tasks:
        waiting.put(task)

    def run():
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                work(*task)
            except BaseException as error:
                errors.append(error)

    number = min(THREADS, len(tasks)) - 1
    others = [threading.Thread(target=run) for _ in range(number)]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _add(flat, noised, stddev, divisor, stream):
    """The same for a piece of a vector."""
    desk = Desk(flat.dtype)
    for start in range(0, flat.size, 2 * BLOCK):
        some = slice(start, start + 2 * BLOCK)
        block = noised[some]
        np.multiply(flat[some], 1 / divisor, out=block)
        pairs = -(-block.size // 2)
        words = stream.fill(desk.words[: BYTES * pairs + BEHIND])
        halves = desk.values(words, stddev / divisor)
        for half in block[:pairs], block[pairs:]:
            half += next(halves)[: half.size]


class Desk:
    """Arrays on which a thread makes values of a type, `BLOCK` pairs at most.

    Attributes:
        words: for random bytes.
    """

    _rooms = Rooms(BYTES * BLOCK + ALIGNMENT + 4 * 8 * BLOCK)

    def __init__(self, dtype: np.dtype):
        room = self._rooms.take()
        self.words, room = np.split(room, [BYTES * BLOCK + ALIGNMENT])
        # Logarithms take float64. Then radii, angles and values.
        types = [np.dtype(np.float64), *[np.dtype(dtype)] * 3]
        ends = np.cumsum([each.itemsize * BLOCK for each in types])
        *parts, _ = np.split(room, ends)
        pairs = zip(parts, types, strict=True)
        self._arrays = [part.view(own) for part, own in pairs]

    def values(self, words: np.ndarray, stddev: float = 1.0):
        """Normal values from random bytes.

        Yields:
            The first values of all pairs, and then the second ones, in one and
            the same array.
        """
        pairs = len(words) // BYTES
        log, radius, turn, values = (each[:pairs] for each in self._arrays)
        k, angle = words[: 8 * pairs].view(np.uint64), words[8 * pairs :]
        np.right_shift(k, 1, out=k)
        if radius.dtype == np.float64:
            log[...] = log_uniform(k, 63)
        else:
            log[...] = k.view(np.int64)  # Faster than unsigned numbers.
            log += 0.5
            log *= 2.0**-63
            np.log(log, out=log)
        log *= -2
        radius[...] = log
        np.sqrt(radius, out=radius)
        if pairs and radius.min() < SHORT:
            short = radius < SHORT
            radius[short] = np.sqrt(-2 * log_uniform(k[short], 63))
        radius *= stddev
        turn[...] = angle.view(np.int32)
        turn *= 2 * math.pi * 2.0**-32
        for direction in np.cos, np.sin:
            direction(turn, out=values)
            values *= radius
            yield values


# -- by XLA --------------------------------------------------------------------

COMPLEX = {tf.float32: tf.complex64, tf.float64: tf.complex128}
# Values that are made at a time.
COMPILED_PIECE = 1 << 20
_words = Rooms(BYTES * COMPILED_PIECE // 2 + BEHIND)

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


@functools.cache
def add_by_xla(dtype: tf.DType) -> tf.types.experimental.PolymorphicFunction:
    """A function of flat, words, stddev and divisor: (flat + noise) / divisor.

    One loop over the values, in place of some thirty passes over them. Traced
    once in a process; XLA compiles it for each size that it meets.

    Args:
        dtype: of a vector, of which the function takes and returns two values
            as one complex number: a loop of XLA writes one number at a time,
            and would work out a pair again for its second value.
    """
    signature = [
        tf.TensorSpec([None], COMPLEX[dtype]),
        tf.TensorSpec([WORDS, None], tf.uint32),
        tf.TensorSpec([], tf.float64),
        tf.TensorSpec([], tf.float64),
    ]
    return tf.function(
        _add_by_xla, signature, autograph=False, jit_compile=True
    )


def _add_by_xla(flat, words, stddev, divisor):
    parts = tf.math.real(flat), tf.math.imag(flat)
    dtype = parts[0].dtype
    factor = tf.cast(1 / divisor, dtype)
    scale = tf.cast(stddev / divisor, dtype)
    return tf.complex(
        *(
            part * factor + scale * values
            for part, values in zip(
                parts, by_tensorflow(words, dtype), strict=True
            )
        )
    )


def random_words(pairs: int, stream: Keystream) -> np.ndarray:
    """For so many pairs of values, (3, pairs), of `COMPILED_PIECE` values."""
    room = _words.take()[: BYTES * pairs + BEHIND]
    return stream.fill(room).view(np.uint32).reshape(WORDS, pairs)


def by_tensorflow(
    words: tf.Tensor, dtype: tf.DType = tf.float32
) -> tuple[tf.Tensor, tf.Tensor]:
    """Normal values, two for each column of three random words."""
    high, low, angle = tf.unstack(words)
    radius = tf.sqrt(-2 * _log_uniform(high, low, dtype))
    angle = tf.bitcast(angle, tf.int32)
    cosine, sine = _directions(angle, dtype)
    return radius * cosine, radius * sine


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
