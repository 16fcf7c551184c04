"""Memory that is used again, step after step.

To get memory from the system takes time: the processor stops at every new
page, which counts beside the little that noise takes. The C library gives the
memory of large arrays of NumPy's back, to get it again in the next step.
"""

import weakref

import numpy as np

# TensorFlow takes arrays that start at a multiple of it without a copy.
ALIGNMENT = 64


def aligned(size: int) -> np.ndarray:
    """So many bytes, yet to be set, that TensorFlow can take as they are."""
    return _part(np.empty(ALIGNMENT + size, np.uint8), size)


class Rooms:
    """Arrays in memory that is used again once nothing refers to any of it.

    Several threads may take arrays at a time.

    Args:
        size: of each array, in bytes.
    """

    def __init__(self, size: int):
        self._size = size
        self._free: list[bytearray] = []

    def take(self) -> np.ndarray:
        """As `aligned`."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = bytearray(ALIGNMENT + self._size)
        # NumPy has an array refer to the one that it is a part of; to this one
        # at the last, as its memory is no array's.
        whole = np.frombuffer(memory, np.uint8)
        weakref.finalize(whole, self._free.append, memory).atexit = False
        return _part(whole, self._size)


def _part(whole, size):
    first = -whole.ctypes.data % ALIGNMENT
    return whole[first : first + size]
