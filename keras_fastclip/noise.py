"""Gaussian noise, drawn on the device.

The generator is counter-based (Philox). Its key is 128 bits from the operating
system, held in a variable that is never saved; the step number and the index
of the weight select the stream. So no two draws share a stream, and the noise
cannot be recomputed from anything that is written to disk.
"""

import secrets

import tensorflow as tf

_INT64 = 1 << 63


class GaussianNoise:
    """Independent normal values for every step and every weight.

    Args:
        seed: an integer for repeatable experiments on public data; None takes
            the key from the operating system. Noise that others can recompute
            protects nothing: with real data leave it out.
    """

    def __init__(self, seed: int | None = None):
        if seed is None:
            key = [secrets.randbits(64) - _INT64 for _ in range(2)]
        else:
            key = [int(seed), 0]
        with tf.init_scope():
            self._key = tf.Variable(key, dtype=tf.int64, trainable=False)

    def draw(
        self, like: list[tf.Tensor], stddev: float, step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Noise of the shapes and types of `like`.

        Args:
            like: tensors.
            stddev: standard deviation.
            step: number of the step; each number may be used once only.
        """
        step_key = tf.random.fold_in(self._key, step)
        keys = tf.random.split(step_key, max(len(like), 1))
        return [
            tf.random.stateless_normal(
                tf.shape(tensor), keys[index], stddev=stddev, dtype=tensor.dtype
            )
            for index, tensor in enumerate(like)
        ]
