"""Gaussian noise from a secret that nobody else has.

On a CPU the values come from a keystream of AES (`keystream.py`). On other
devices and in steps compiled by XLA, which cannot call it, they come from
TensorFlow's Philox generator on the device itself: a counter-based generator,
too, with 128 secret bits from the operating system. `noise="secure"` adds
integers to integers (`rounded.py`), on the processor and nowhere else.
"""

import functools
import os
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, keystream, normal, rounded
from keras_fastclip.keystream import Keystream
from keras_fastclip.registry.terms import shaped_as
from keras_fastclip.rooms import ALIGNMENT

PHILOX = 1
# Counters of one step: more weights than any model has.
STREAMS_PER_STEP = 1 << 20
# Sums of fewer values get their noise together.
SMALL = 1 << 16
# Compiled, longer ones get it in pieces, so many at a time: more would hold
# memory, and threads would wait for Python's lock.
IN_FLIGHT = min(os.cpu_count() or 1, 8)
# Noise is compiled where there are many values, and few multiplications beside
# each of them: where it takes much of the time of a step.
COMPILED_FROM = 1 << 21
FEW_MULTIPLICATIONS = 500
NOT_BY_XLA = (
    "noise='secure' takes exact arithmetic, which XLA does not have. Compile "
    "the model with jit_compile=False, or make it with noise='fast'."
)


class GaussianNoise:
    """Independent normal values for every step and every weight.

    Args:
        seed: an integer for repeatable experiments on public data; None takes
            all secrets from the operating system. Noise that others can
            recompute protects nothing: with real data leave it out.
    """

    def __init__(self, seed: int | None = None):
        self._seed = seed
        # Held as signed integers, which all devices have. Never saved.
        self._secret = _keras.variable(np.zeros(2, np.int64))
        self.renew()

    def renew(self) -> None:
        """Takes another secret, unless there is a seed."""
        secret = [secrets.randbits(64), secrets.randbits(64)]
        if self._seed is not None:
            secret = [int(self._seed), 0]
        with tf.init_scope():  # Now, also while a step is traced.
            self._secret.assign(np.array(secret, np.uint64).view("i8"))

    def add(
        self,
        sums: list[tf.Tensor],
        stddev: tf.Tensor,
        step: tf.Tensor,
        divisor: float = 1.0,
        first: int = 0,
        sensitivity: tf.Tensor | None = None,
        multiplications: float = 0.0,
    ) -> list[tf.Tensor]:
        """(sum + noise) / divisor for each of the sums.

        Args:
            sums: tensors, of float32 or float64. Those whose size is known
                when the step is traced take less time.
            stddev: standard deviation of the noise.
            step: number of the step.
            divisor: what sum and noise are divided by.
            first: number of the first of these tensors among all of the step;
                step and number together may be used once only.
            sensitivity: C, how far one example can move all sums together;
                `SecureNoise` needs it.
            multiplications: in the forward pass of the step, about.
        """
        del sensitivity
        numbers = range(first, first + len(sums))
        if not _keras.on_cpu():
            return self._add_on_device(sums, stddev, step, divisor, numbers)
        stddev = tf.cast(stddev, tf.float64)
        values = sum(total.shape.num_elements() or 0 for total in sums)
        compiled = values >= COMPILED_FROM
        compiled &= multiplications < FEW_MULTIPLICATIONS * values

        def stream(place, piece, step):
            return Keystream(self._name((numbers[place], piece), step))

        def add(flats):
            """By AES, for vectors by the places of their first sums."""
            by_xla, others = {}, flats
            if compiled:
                by_xla, others = _divided(flats)
            draw = stddev, divisor, stream, step
            return _by_xla(by_xla, *draw) | _by_numpy(others, *draw)

        return _in_groups(sums, add)

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


def get(name: str, seed: int | None) -> "GaussianNoise | SecureNoise":
    """By name: "fast" or "secure"."""
    return SecureNoise() if name == "secure" else GaussianNoise(seed)


class SecureNoise:
    """Noise without a trace of floating-point arithmetic; see `rounded.py`.

    It has no state: every tensor of every step has a key of its own, which is
    forgotten at once.
    """

    def renew(self) -> None:
        """As `GaussianNoise.renew`."""

    def add(
        self,
        sums: list[tf.Tensor],
        stddev: tf.Tensor,
        step: tf.Tensor,
        divisor: float = 1.0,
        first: int = 0,
        sensitivity: tf.Tensor | None = None,
        multiplications: float = 0.0,
    ) -> list[tf.Tensor]:
        """As `GaussianNoise.add`."""
        del step, first, multiplications  # No two draws are alike.
        if _keras.in_xla():
            raise ValueError(NOT_BY_XLA)
        coordinates = sum(total.shape.num_elements() for total in sums)
        sensitivity = tf.cast(sensitivity, tf.float64)
        # Where C is zero, so are the sums.
        multiplier = tf.math.divide_no_nan(
            tf.cast(stddev, tf.float64), sensitivity
        )

        def draw(flat, multiplier, sensitivity):
            return rounded.add(
                flat,
                float(multiplier),
                float(sensitivity),
                coordinates,
                divisor,
            )

        def add(flats):
            found = {}
            for place, flat in flats.items():
                arguments = [flat, multiplier, sensitivity]
                found[place] = tf.numpy_function(draw, arguments, flat.dtype)
            return found

        return _in_groups(sums, add)


def _by_numpy(flats, stddev, divisor, stream, step):
    """(sum + noise) / divisor for vectors, by place.

    In one call of Python, which has its own threads: calls of their own would
    wait for other operations, and for each other. TensorFlow gives the room:
    with oneDNN it uses memory again (see `rooms.py`).
    """
    if not flats:
        return {}
    places, vectors = zip(*flats.items(), strict=True)

    def draw(stddev, step, *arrays):
        def own(vector, piece):
            return stream(places[vector], piece, step)

        vectors, rooms = arrays[: len(places)], arrays[len(places) :]
        pairs = zip(vectors, rooms, strict=True)
        noised = [room.view(vector.dtype) for vector, room in pairs]
        normal.add(vectors, noised, float(stddev), divisor, own)
        return noised

    with tf.control_dependencies(vectors):
        rooms = [_room_for(vector) for vector in vectors]
    arguments = [stddev, step, *vectors, *rooms]
    dtypes = [vector.dtype for vector in vectors]
    noised = tf.numpy_function(draw, arguments, dtypes)
    # Run eagerly, it returns a single one as it is.
    return dict(zip(places, tf.nest.flatten(noised), strict=True))


def _room_for(vector):
    """Memory yet to be set. As integers, of which none is no number."""
    kind = {4: tf.int32, 8: tf.int64}[vector.dtype.size]
    return tf.raw_ops.Empty(shape=tf.shape(vector), dtype=kind)


def _divided(flats):
    """Those that are compiled, and the others.

    For a size that varies XLA would compile again and again.
    """
    by_xla = {
        place: flat
        for place, flat in flats.items()
        if flat.shape[0] is not None and flat.shape[0] >= SMALL
    }
    return by_xla, {p: flat for p, flat in flats.items() if p not in by_xla}


def _by_xla(flats, stddev, divisor, stream, step):
    """The same, no more than some pieces at a time."""
    parts, noised = [], {}
    for place, flat in flats.items():
        pieces = _pieces(flat)
        for i, piece in enumerate(pieces):
            before = [parts[-IN_FLIGHT]] if len(parts) >= IN_FLIGHT else []
            own = functools.partial(stream, place, i)
            with tf.control_dependencies([piece, *before]):
                parts.append(_piece_by_xla(piece, stddev, divisor, own, step))
        own = parts[-len(pieces) :]
        noised[place] = own[0] if len(own) == 1 else tf.concat(own, 0)
    return noised


def _piece_by_xla(piece, stddev, divisor, stream, step):
    size = piece.shape[0]
    pairs = (size + 1) // 2
    words = tf.numpy_function(
        lambda step: normal.random_words(pairs, stream(step)), [step], tf.uint32
    )
    words = tf.ensure_shape(_keras.independent(words), [normal.WORDS, pairs])
    add = normal.add_by_xla(piece.dtype)
    # Pairs of values as complex numbers; the same memory.
    even = piece if size == 2 * pairs else tf.pad(piece, [[0, 1]])
    flat = tf.bitcast(tf.reshape(even, [-1, 2]), normal.COMPLEX[piece.dtype])
    noised = add(flat, words, stddev, tf.constant(divisor, tf.float64))
    noised = tf.reshape(tf.bitcast(noised, piece.dtype), [-1])
    return noised if even is piece else noised[:size]


def _pieces(flat):
    """Parts of a long vector, so that several threads work on it."""
    size = flat.shape[0]
    count = -(-size // normal.COMPILED_PIECE)
    # Where they begin, TensorFlow takes them from the vector without a copy.
    each = ALIGNMENT * -(-size // (ALIGNMENT * count))
    return [flat[start : start + each] for start in range(0, size, each)]


def _in_groups(
    sums: list[tf.Tensor],
    add: Callable[[dict[int, tf.Tensor]], dict[int, tf.Tensor]],
) -> list[tf.Tensor]:
    """What `add` makes of vectors: one of all small sums, one for each other.

    Args:
        sums: tensors.
        add: takes and returns vectors, by the place of the first of their sums.
    """
    groups: dict[Any, list[int]] = {}
    for place, total in enumerate(sums):
        size = total.shape.num_elements()
        small = size is not None and size < SMALL
        key = ("small", total.dtype) if small else ("alone", place)
        groups.setdefault(key, []).append(place)
    flats = {}
    for places in groups.values():
        flat = [_as_vector(sums[place]) for place in places]
        flats[places[0]] = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
    means, noised = add(flats), {}
    for places in groups.values():
        mean = means[places[0]]
        sizes = [sums[place].shape.num_elements() for place in places]
        parts = [mean] if len(places) == 1 else tf.split(mean, sizes)
        for place, part in zip(places, parts, strict=True):
            noised[place] = shaped_as(sums[place], part)
    return [noised[place] for place in range(len(sums))]


def _as_vector(tensor):
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])
