"""Memory that is used again, step after step.

To get memory from the system takes as long as to fill it with noise: the
processor stops at every new page. TensorFlow uses the memory of its own arrays
again, the C library gives that of large ones of NumPy's back.
"""

import contextlib
import weakref
from collections.abc import Sequence

import numpy as np

# TensorFlow takes arrays that start at a multiple of it without a copy.
ALIGNMENT = 64


def aligned(size: int) -> np.ndarray:
    """So many bytes, yet to be set, that TensorFlow can take as they are."""
    room = np.empty(ALIGNMENT + size, np.uint8)
    first = -room.ctypes.data % ALIGNMENT
    return room[first : first + size]


class Rooms:
    """Arrays in memory that is used again once nothing refers to any of it.

    Several threads may take arrays at a time.
    """

    def __init__(self):
        self._free: list[bytearray] = []

    def take(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Arrays of so many bytes each, as of `aligned`.

        Free memory of another size than all these together is given back.
        """
        steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        memory = self._memory(ALIGNMENT + sum(steps))
        # NumPy has an array refer to the one that it is a part of; to this one
        # at the last, as its memory is no array's.
        whole = np.frombuffer(memory, np.uint8)
        weakref.finalize(whole, self._free.append, memory).atexit = False
        start, found = -whole.ctypes.data % ALIGNMENT, []
        for size, step in zip(sizes, steps, strict=True):
            found.append(whole[start : start + size])
            start += step
        return found

    def _memory(self, size):
        with contextlib.suppress(IndexError):
            while len(memory := self._free.pop()) != size:
                pass
            return memory
        return bytearray(size)
