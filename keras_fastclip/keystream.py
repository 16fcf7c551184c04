"""A keystream of AES: random bytes, and random places.

The cipher runs in counter mode, for each tensor with a key of its own from the
operating system that is forgotten at once. So there is no state to save, to
share between processes or to use twice, and whoever can tell the bytes from
truly random ones breaks AES. Processors have instructions for it.
"""

import functools
import hashlib
import math
import os
import time
from collections.abc import Hashable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from keras_fastclip.rooms import aligned

# The cipher asks for room for one more of its own blocks.
BEHIND = 16
# What is encrypted, again and again; fits into caches.
ZEROS = memoryview(bytes(1 << 18))


# Two ways to the same bytes: GCM counts from 2, and its tag is left out. Where
# processors encrypt several blocks at once, OpenSSL may do so for GCM only.
MODES = {
    "CTR": lambda: modes.CTR(bytes(15) + b"\2"),
    "GCM": lambda: modes.GCM(bytes(12)),
}


@functools.cache
def fastest_mode() -> str:
    """The one of `MODES` that takes less time on this machine."""
    room = aligned(len(ZEROS) + BEHIND)

    def seconds(mode):
        stream = Keystream("to be timed", mode)
        times = []
        for _ in range(8):
            start = time.perf_counter()
            stream.fill(room)
            times.append(time.perf_counter() - start)
        return min(times)

    return min(MODES, key=seconds)


class Keystream:
    """Random bytes by a key that is used for nothing else and forgotten.

    Args:
        name: None for secret ones, or what repeatable ones are made from.
        mode: one of `MODES`, by default the fastest.
    """

    def __init__(self, name: Hashable = None, mode: str | None = None):
        key = os.urandom(16)
        if name is not None:
            key = hashlib.sha256(repr(name).encode()).digest()[:16]
        mode = MODES[mode or fastest_mode()]()
        self._encrypt = Cipher(algorithms.AES128(key), mode).encryptor()

    def fill(self, room: np.ndarray) -> np.ndarray:
        """The next bytes, all of the room but for what is `BEHIND`."""
        size = len(room) - BEHIND
        for start in range(0, size, len(ZEROS)):
            self._encrypt.update_into(ZEROS[: size - start], room[start:])
        return room[:size]


def random_bytes(size: int, name: Hashable = None) -> np.ndarray:
    """So many random bytes; `name` is as for `Keystream`."""
    return Keystream(name).fill(aligned(size + BEHIND))


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
        words = random_bytes(8 * count, part).view(np.uint64)
        exponential = -log_uniform(words, 64)
        with np.errstate(divide="ignore"):
            passed = exponential / -np.log1p(-chance)
        # Sums of these must not overflow.
        gaps = np.minimum(passed, size).astype(np.int64) + 1
        places = last + np.cumsum(gaps)
        found.append(places[places < size])
        last = places[-1]
    return np.concatenate(found)


def log_uniform(k: np.ndarray, bits: int) -> np.ndarray:
    """ln u of u = (k + ½)/2ᵇ, with the precision of float64."""
    last = np.uint64(2**bits - 1)
    u, rest = (k + 0.5) * 2.0**-bits, (last - k + 0.5) * 2.0**-bits
    with np.errstate(divide="ignore"):
        return np.where(u < 0.5, np.log(u), np.log1p(-rest))
