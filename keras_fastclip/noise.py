"""Gaussian noise, drawn on the device.

The generator is Philox, which is counter-based: a 64-bit key and a 128-bit
counter select the values. The key and the upper half of the counter start are
128 secret bits from the operating system, held in a variable that is never
saved; the step number and the index of the weight are added to the upper half
of the counter, and the values of one weight run through the lower half. So no
two draws share a value of the counter, with and without XLA, and the noise
cannot be recomputed from anything that is written to disk.
"""

import secrets

import numpy as np
import tensorflow as tf

PHILOX = 1
# Counters of one step: more weights than any model has.
STREAMS_PER_STEP = 1 << 20


class GaussianNoise:
    """Independent normal values for every step and every weight.

    Args:
        seed: an integer for repeatable experiments on public data; None takes
            the key from the operating system. Noise that others can recompute
            protects nothing: with real data leave it out.
    """

    def __init__(self, seed: int | None = None):
        secret = [secrets.randbits(64), secrets.randbits(64)]
        if seed is not None:
            secret = [int(seed), 0]
        with tf.init_scope():
            # Held as signed integers, which all devices have.
            self._secret = tf.Variable(
                [word - (1 << 64) if word >> 63 else word for word in secret],
                dtype=tf.int64,
                trainable=False,
            )

    def draw(
        self,
        like: list[tf.Tensor],
        stddev: tf.Tensor | float,
        step: tf.Tensor,
        first: int = 0,
    ) -> list[tf.Tensor]:
        """Noise of the shapes and types of `like`.

        The noise of a weight is drawn once its tensor is there: all noise at
        once would hold as many numbers again as there are weights.

        Args:
            like: tensors, of float32 or float64.
            stddev: standard deviation.
            step: number of the step.
            first: number of the first of these tensors among all of the step;
                step and number together may be used once only.
        """
        secret = tf.bitcast(self._secret.read_value(), tf.uint64)
        key, start = secret[:1], secret[1]
        start += tf.cast(step, tf.uint64) * tf.constant(
            STREAMS_PER_STEP, tf.uint64
        )
        # Unsigned sums wrap around, which keeps streams apart all the same.
        numbers = np.arange(first, first + len(like))
        upper = start + tf.constant(numbers, tf.uint64)
        counters = tf.unstack(tf.stack([tf.zeros_like(upper), upper], 1))
        noise = []
        for tensor, counter in zip(like, counters, strict=True):
            with tf.control_dependencies([tensor]):
                values = tf.raw_ops.StatelessRandomNormalV2(
                    shape=tf.shape(tensor),
                    key=key,
                    counter=counter,
                    alg=PHILOX,
                    dtype=tensor.dtype,
                )
            noise.append(values * tf.cast(stddev, values.dtype))
        return noise
