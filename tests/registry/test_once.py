"""Functions that are in a graph once."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_fastclip import DPSequential
from keras_fastclip.registry import once as once_module
from keras_fastclip.registry.once import of_any_size, once


def scaled(factor, x, y):
    return factor * x + y


def calls_and_functions(function, *arguments):
    graph = function.get_concrete_function(*arguments).graph.as_graph_def()
    calls = [n for n in graph.node if n.op == "PartitionedCall"]
    return len(calls), len({n.attr["f"].func.name for n in calls})


def test_is_written_once_for_all_calls_with_the_same_sizes():
    @tf.function(autograph=False)
    def step(x):
        for _ in range(3):
            x = once(scaled, 2.0)(x, x)
        return once(scaled, 3.0)(x, x)

    x = tf.ones([4])
    assert calls_and_functions(step, x) == (4, 2)
    np.testing.assert_array_equal(step(x), np.full(4, 108.0))


@pytest.mark.parametrize(
    "written, number", [(once, 2), (of_any_size, 1)], ids=["once", "any size"]
)
def test_which_shapes_share_a_function(written, number):
    @tf.function(autograph=False)
    def step(x):
        all_rows, fewer, narrow = x, x[:2], x[:, :1]
        return [
            written(scaled, 2.0)(part, part)
            for part in (all_rows, fewer, narrow)
        ]

    x = tf.reshape(tf.range(12.0), [4, 3])
    assert calls_and_functions(step, x) == (3, number)
    for found, part in zip(step(x), (x, x[:2], x[:, :1]), strict=True):
        np.testing.assert_array_equal(found, 3 * part)


@pytest.mark.parametrize("written", [once, of_any_size])
def test_is_traced_once_for_all_graphs(written):
    traced = []

    def noted(x):
        traced.append(x.shape)
        return x + 1.0

    for size in 3, 4:
        step = tf.function(lambda x: written(noted)(x), autograph=False)
        np.testing.assert_array_equal(step(tf.ones([size])), np.full(size, 2.0))
    assert traced == [[None]]


def test_takes_constants_and_tensors_that_are_there_already():
    there = tf.ones([3])

    @tf.function(autograph=False)
    def step(x):
        return [
            of_any_size(scaled, 2.0)(x, other)
            for other in (x, tf.constant([1.0, 2.0, 3.0]), there)
        ]

    calls, functions = calls_and_functions(step, there)
    assert (calls, functions) == (3, 1)
    np.testing.assert_array_equal(
        step(there), [[3, 3, 3], [3, 4, 5], [3, 3, 3]]
    )


def test_the_graph_goes():
    def step(x):
        return once(scaled, 2.0)(x, x)

    function = tf.function(step, autograph=False)
    graph = function.get_concrete_function(tf.ones([4])).graph
    gone = weakref.ref(graph)
    del graph, function
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("jit_compile", [False, True])
def test_same_as_without(jit_compile):
    def step(x):
        return once(scaled, 2.0)(x, x)

    x = tf.constant([1.0, -2.0])
    function = tf.function(step, autograph=False, jit_compile=jit_compile)
    np.testing.assert_array_equal(function(x), step(x))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.Conv2D(16, 3, padding="same"),
        lambda: keras.layers.GroupNormalization(4),
        lambda: keras.layers.LayerNormalization(),
        lambda: keras.layers.Dense(16),
    ],
    ids=["Conv2D", "GroupNormalization", "LayerNormalization", "Dense"],
)
@pytest.mark.parametrize("method", ["auto", "bk"])
def test_more_layers_of_one_size_add_few_operations(layer, method, monkeypatch):
    functions, original = [], once_module._written

    def noted(*key):
        functions.append(original(*key))
        return functions[-1]

    monkeypatch.setattr(once_module, "_written", noted)
    x = np.zeros([4, 8, 8, 16], "float32")

    def written(count):
        model = DPSequential(
            [keras.Input(x.shape[1:]), *(layer() for _ in range(count))],
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            method=method,
        )
        model.compile("sgd", "mse")
        step = tf.function(model.clipped_gradients, autograph=False)
        step = step.get_concrete_function(tf.constant(x), tf.constant(x))
        graph = step.graph.as_graph_def()
        # Those would wait for each other, in the order of the layers.
        assert not any(n.op == "StatefulPartitionedCall" for n in graph.node)
        library = graph.library.function
        return len(graph.node) + sum(len(f.node_def) for f in library)

    two, four = written(2), written(4)
    for function in functions:
        for traced in function._list_all_concrete_functions():
            assert not traced.captured_inputs
    assert (four - two) / 2 < 60
