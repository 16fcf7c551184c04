"""Gaussian noise from a secret that nobody else has.

On a CPU the values come from a keystream of AES (`keystream.py`). On other
devices and in steps compiled by XLA, which cannot call it, they come from
TensorFlow's Philox generator on the device itself: a counter-based generator,
too, with 128 secret bits from the operating system.
"""

import functools
import secrets
from typing import Any

import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, keystream

PHILOX = 1
# Counters of one step: more weights than any model has.
STREAMS_PER_STEP = 1 << 20
# Sums of fewer values get their noise together. For fewer in all, nothing is
# compiled.
SMALL = 1 << 16
# Longer ones get it in pieces, so many at a time: more would hold memory.
PIECE = 1 << 20
IN_FLIGHT = 2


class GaussianNoise:
    """Independent normal values for every step and every weight.

    Args:
        seed: an integer for repeatable experiments on public data; None takes
            all secrets from the operating system. Noise that others can
            recompute protects nothing: with real data leave it out.
    """

    def __init__(self, seed: int | None = None):
        self._seed = seed
        secret = [secrets.randbits(64), secrets.randbits(64)]
        if seed is not None:
            secret = [int(seed), 0]
        # Held as signed integers, which all devices have. Never saved.
        self._secret = _keras.variable(np.array(secret, np.uint64).view("i8"))

    def add(
        self,
        sums: list[tf.Tensor],
        stddev: tf.Tensor,
        step: tf.Tensor,
        divisor: float = 1.0,
        first: int = 0,
    ) -> list[tf.Tensor]:
        """(sum + noise) / divisor for each of the sums.

        The noise of a sum is drawn once the sum is there: all noise at once
        would hold as many numbers again as there are weights.

        Args:
            sums: tensors, of float32 or float64.
            stddev: standard deviation of the noise.
            step: number of the step.
            divisor: what sum and noise are divided by.
            first: number of the first of these tensors among all of the step;
                step and number together may be used once only.
        """
        numbers = range(first, first + len(sums))
        if not _keras.on_cpu():
            return self._add_on_device(sums, stddev, step, divisor, numbers)
        stddev = tf.cast(stddev, tf.float64)
        divisor = tf.constant(divisor, tf.float64)
        groups: dict[Any, list[int]] = {}
        for place, total in enumerate(sums):
            small = total.shape.num_elements() < SMALL
            key = ("small", total.dtype) if small else ("large", place)
            groups.setdefault(key, []).append(place)
        noised, parts = {}, []
        for places in groups.values():
            flat = [tf.reshape(sums[place], [-1]) for place in places]
            sizes = [each.shape[0] for each in flat]
            flat = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
            number, first = numbers[places[0]], len(parts)
            for piece in _pieces(flat):
                waits = [] if len(parts) < IN_FLIGHT else parts[-IN_FLIGHT]
                name = number, len(parts) - first
                words = self._words(piece, step, name, waits)
                size = piece.shape[0]
                large = size >= SMALL
                add = _compiled(size, flat.dtype) if large else _add_normal
                parts.append(add(piece, words, stddev, divisor))
            mean = tf.concat(
                [half for part in parts[first:] for half in part], 0
            )
            means = [mean] if len(places) == 1 else tf.split(mean, sizes)
            noised.update(zip(places, means, strict=True))
        return [
            tf.reshape(noised[place], total.shape)
            for place, total in enumerate(sums)
        ]

    def _words(self, piece, step, name, waits):
        """Random words for values to be added, drawn once these are there."""
        pairs, seed = (piece.shape[0] + 1) // 2, self._seed

        def draw(step):
            whole = None if seed is None else (seed, *name, int(step))
            return keystream.random_words(pairs, whole)

        with tf.control_dependencies([piece, *waits]):
            words = tf.numpy_function(draw, [step], tf.uint32)
        words.set_shape([keystream.WORDS, pairs])
        return words

    def _add_on_device(self, sums, stddev, step, divisor, numbers):
        """By Philox, in which a key and a counter select the values.

        The key and the upper half of the counter start are secret; the number
        of the step and of the sum are added to the upper half, and the values
        of one sum run through the lower half. So no two draws share a value
        of the counter, with and without XLA.
        """
        secret = tf.bitcast(self._secret.read_value(), tf.uint64)
        key, start = secret[:1], secret[1]
        start += tf.cast(step, tf.uint64) * tf.constant(
            STREAMS_PER_STEP, tf.uint64
        )
        # Unsigned sums wrap around, which keeps streams apart all the same.
        upper = start + tf.constant(np.array(numbers), tf.uint64)
        counters = tf.unstack(tf.stack([tf.zeros_like(upper), upper], 1))
        noised = []
        for total, counter in zip(sums, counters, strict=True):
            with tf.control_dependencies([total]):
                values = tf.raw_ops.StatelessRandomNormalV2(
                    shape=tf.shape(total),
                    key=key,
                    counter=counter,
                    alg=PHILOX,
                    dtype=total.dtype,
                )
            values *= tf.cast(stddev, values.dtype)
            noised.append((total + values) / divisor)
        return noised


def _pieces(flat):
    """Parts of a long vector, so that several threads work on it."""
    size = flat.shape[0]
    count = -(-size // PIECE)
    # Of even length, but for the last: there are two values to each pair.
    each = 2 * -(-size // (2 * count))
    return [flat[start : start + each] for start in range(0, size, each)]


def _add_normal(flat, words, stddev, divisor):
    """(flat + noise) / divisor, in two halves.

    Joined in here, XLA would work out each pair of values twice.
    """
    values = keystream.normal(words, flat.dtype)
    scale = tf.cast(stddev / divisor, flat.dtype)
    pairs = words.shape[1]
    return [
        part * tf.cast(1 / divisor, flat.dtype) + scale * half[: part.shape[0]]
        for part, half in zip((flat[:pairs], flat[pairs:]), values, strict=True)
    ]


@functools.cache
def _compiled(size: int, dtype: tf.DType):
    """One loop over the values, in place of some thirty passes over them.

    One function for each size and type, held as long as the process lives.
    """
    return tf.function(_add_normal, jit_compile=True)
