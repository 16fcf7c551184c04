"""Memory is used again, but never while something refers to it."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from keras_fastclip.rooms import ALIGNMENT, Rooms


def test_arrays_are_aligned_and_can_be_written():
    for size in 1, 64, 65, 1 << 20:
        array = Rooms(size).take()
        assert array.nbytes == size and array.ctypes.data % ALIGNMENT == 0
        array[:] = 7
        assert np.all(array == 7)


def test_memory_is_used_again():
    rooms = Rooms(1 << 20)
    before = rooms.take().ctypes.data
    assert rooms.take().ctypes.data == before


def part(array):
    return array[8:16]


def part_of_a_part(array):
    return array[8:][8:].view(np.float32).reshape(-1, 2).T


def asarray(array):
    return np.asarray(array, order="C")


@pytest.mark.parametrize("held", [part, part_of_a_part, asarray, memoryview])
def test_memory_that_is_referred_to_is_not_used_again(held):
    rooms = Rooms(128)
    array = rooms.take()
    other, place = held(array), array.ctypes.data
    del array
    assert rooms.take().ctypes.data != place
    del other
    taken = [rooms.take() for _ in range(2)]
    assert place in [array.ctypes.data for array in taken]


def test_what_a_graph_returns_is_not_used_again():
    rooms = Rooms(4096)

    def ones(value):
        array = rooms.take().view(np.float32)
        array[:] = value
        return array

    @tf.function
    def step(value):
        return tf.numpy_function(ones, [value], tf.float32)

    found = [step(tf.constant(float(i))) for i in range(5)]
    for i, tensor in enumerate(found):
        assert np.all(tensor == i)


def test_threads_get_memory_of_their_own():
    rooms, wrong = Rooms(512), []

    def work(number):
        for _ in range(300):
            array = rooms.take()
            array[:] = number
            if not np.all(array == number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # A thread holds one array while it takes the next.
    assert len(rooms._free) <= 16
