"""Memory is used again, but never while something refers to it."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from keras_fastclip.rooms import ALIGNMENT, Rooms


def addresses(arrays):
    return [array.ctypes.data for array in arrays]


def test_arrays_are_apart_aligned_and_can_be_written():
    arrays = Rooms().take([3, 0, 64, 65, 1])
    assert [array.nbytes for array in arrays] == [3, 0, 64, 65, 1]
    filled = addresses(array for array in arrays if array.size)
    assert all(address % ALIGNMENT == 0 for address in filled)
    for number, array in enumerate(arrays):
        array[:] = number
    for number, array in enumerate(arrays):
        assert np.all(array == number)


def test_memory_is_used_again():
    rooms = Rooms()
    before = addresses(rooms.take([1 << 20, 8]))
    assert addresses(rooms.take([1 << 20, 8])) == before


def part(array):
    return array[8:16]


def part_of_a_part(array):
    return array[8:][8:].view(np.float32).reshape(-1, 2).T


def asarray(array):
    return np.asarray(array, order="C")


@pytest.mark.parametrize("held", [part, part_of_a_part, asarray, memoryview])
def test_memory_that_is_referred_to_is_not_used_again(held):
    rooms = Rooms()
    first, second = rooms.take([64, 64])
    other, place = held(second), first.ctypes.data
    del first, second
    assert rooms.take([64, 64])[0].ctypes.data != place
    del other
    taken = [rooms.take([64, 64]) for _ in range(2)]
    assert place in [arrays[0].ctypes.data for arrays in taken]


def test_what_a_graph_returns_is_not_used_again():
    rooms = Rooms()

    def ones(value):
        (array,) = rooms.take([4096])
        array = array.view(np.float32)
        array[:] = value
        return array

    @tf.function
    def step(value):
        return tf.numpy_function(ones, [value], tf.float32)

    found = [step(tf.constant(float(i))) for i in range(5)]
    for i, tensor in enumerate(found):
        assert np.all(tensor == i)


def test_free_memory_of_another_size_is_given_back():
    rooms = Rooms()
    rooms.take([1 << 20])
    rooms.take([8])
    assert sum(map(len, rooms._free)) < 1 << 10


def test_threads_get_memory_of_their_own():
    rooms, wrong = Rooms(), []

    def work(number):
        for _ in range(300):
            (array,) = rooms.take([512])
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
