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
            sums: tensors, of float32 or float64. Those whose size is known
                when the step is traced take less time.
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
            size = total.shape.num_elements()
            small = size is not None and size < SMALL
            key = ("small", total.dtype) if small else ("alone", place)
            groups.setdefault(key, []).append(place)
        noised = {}
        for places in groups.values():
            group = [sums[place] for place in places]
            number = numbers[places[0]]
            means = self._add_from_keystream(
                group, stddev, step, divisor, number
            )
            noised.update(zip(places, means, strict=True))
        return [noised[place] for place in range(len(sums))]

    def _add_from_keystream(self, sums, stddev, step, divisor, number):
        """By AES, drawn at once for all these sums."""
        flat = [tf.reshape(total, [-1]) for total in sums]
        sizes = [total.shape.num_elements() for total in sums]
        flat = flat[0] if len(sums) == 1 else tf.concat(flat, 0)
        size = flat.shape[0]

        def draw(step, size):
            name = self._name(number, step)
            return keystream.random_words((int(size) + 1) // 2, name)

        with tf.control_dependencies([flat]):
            words = tf.numpy_function(draw, [step, tf.size(flat)], tf.uint32)
        pairs = None if size is None else (size + 1) // 2
        words.set_shape([keystream.WORDS, pairs])
        # For a size that varies it would be compiled again and again.
        large = size is not None and size >= SMALL
        add = _compiled(size, flat.dtype) if large else _add_normal
        mean = add(flat, words, stddev, divisor)
        parts = [mean] if len(sums) == 1 else tf.split(mean, sizes)
        return [
            tf.reshape(part, tf.shape(total))
            for part, total in zip(parts, sums, strict=True)
        ]

    def _name(self, number, step):
        """What repeatable values are made from; None for secret ones."""
        return None if self._seed is None else (self._seed, number, int(step))

    def scattered(
        self, size: int, chance: tf.Tensor, step: tf.Tensor, number: int
    ) -> tf.Tensor:
        """Places below `size`, each with the same chance, independently.

        From the keystream on all devices; XLA cannot call it.

        Args:
            size: how many places there are.
            chance: scalar, float64.
            step: number of the step.
            number: of this draw among those of the step.
        """

        def draw(chance, step):
            name = self._name(("scattered", number), step)
            return keystream.scattered(size, float(chance), name)

        places = tf.numpy_function(draw, [chance, step], tf.int64)
        places.set_shape([None])
        return places

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


def _add_normal(flat, words, stddev, divisor):
    """(flat + noise) / divisor."""
    values = keystream.normal(words, flat.dtype)[: tf.size(flat)]
    scale = tf.cast(stddev / divisor, flat.dtype)
    return flat * tf.cast(1 / divisor, flat.dtype) + scale * values


@functools.cache
def _compiled(size: int, dtype: tf.DType):
    """One loop over the values, in place of some thirty passes over them.

    One function for each size and type, held as long as the process lives.
    """
    return tf.function(_add_normal, jit_compile=True)
