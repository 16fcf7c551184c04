"""Normal values from a keystream of AES.

The cipher runs in counter mode, for each tensor with a key of its own from the
operating system that is forgotten at once. So there is no state to save, to
share between processes or to use twice, and whoever can tell the values from
truly random ones breaks AES. Processors have instructions for it: 6 bytes a
value take under a nanosecond, and the values made of them a third of the time
of TensorFlow's own.

The transform is Box and Muller's, r cos t and r sin t with r² = -2 ln u. The
angle t is one of 2³² around the circle; u = (k + ½)/2⁶⁴ for a random k below
2⁶⁴, rounded to float32. The values therefore end at r = 9.5, where a normal
pair goes on with probability 2⁻⁶⁴: over 10¹² values, such as 10,000 steps of
100 million weights, they differ from unbounded ones with probability below
3·10⁻⁸, which adds as much to delta. (32 bits in place of 64, the usual choice,
end at 6.7, which shows within a few hundred steps of a large model.) What the
rounding of values to float32 reveals is another matter, as with every such
generator.
"""

import hashlib
import math
import os
from collections.abc import Hashable

import numpy as np
import tensorflow as tf
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

WORDS = 3  # of 32 bits for each pair: two for the radius, one for the angle.
ALIGNMENT = 64  # TensorFlow takes such arrays without a copy.
ZEROS = memoryview(
    bytes(1 << 18)
)  # What is encrypted, again and again; fits into caches.


def random_words(pairs: int, name: Hashable = None) -> np.ndarray:
    """Random integers of 32 bits, shape (3, pairs).

    Args:
        pairs: of normal values to be made from them.
        name: None for secret ones, or what repeatable ones are made from.
    """
    key = os.urandom(16)
    if name is not None:
        key = hashlib.sha256(repr(name).encode()).digest()[:16]
    size = 4 * WORDS * pairs
    # The cipher asks for room for one more of its own blocks.
    room = np.empty(ALIGNMENT + size + 16, np.uint8)
    first = -room.ctypes.data % ALIGNMENT
    encrypt = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()
    for start in range(first, first + size, len(ZEROS)):
        encrypt.update_into(ZEROS[: first + size - start], room[start:])
    words = room[first : first + size].view(np.uint32)
    return words.reshape(WORDS, pairs)


def normal(words: tf.Tensor) -> tf.Tensor:
    """Normal values of float32, two for each column of the words.

    Sine and cosine are polynomials on the eighth of a turn to both sides of
    zero; two bits of the angle choose the quarter of the circle. XLA makes a
    loop over vectors of that, which it does not of its own sine and cosine.
    """
    high, low, angle = tf.unstack(words)
    u = _float(high) * 2.0**-32 + (_float(low) * 2.0**-64 + 2.0**-65)
    radius = tf.sqrt(-2 * tf.math.log(u))
    angle = tf.bitcast(angle, tf.int32)
    turn = _float(tf.bitwise.right_shift(angle, 2)) * (math.pi / 2 * 2.0**-30)
    square = tf.square(turn)
    sine = turn * _series(square, first=1)
    cosine = _series(square, first=0)
    quarter = tf.bitwise.bitwise_and(angle, 3)
    swapped = tf.bitwise.bitwise_and(quarter, 1) > 0
    radius = tf.where(quarter > 1, -radius, radius)
    return tf.concat(
        [
            radius * tf.where(swapped, sine, cosine),
            radius * tf.where(swapped, cosine, sine),
        ],
        0,
    )


def _series(square: tf.Tensor, first: int) -> tf.Tensor:
    """Σ (-x²)ᵏ/(2k + first)!; on [-π/4, π/4] right to 3·10⁻⁸."""
    total = tf.ones_like(square) / math.factorial(first + 8)
    for power in (6, 4, 2, 0):
        total = 1 / math.factorial(first + power) - total * square
    return total


def _float(integers: tf.Tensor) -> tf.Tensor:
    return tf.cast(integers, tf.float32)
