"""Free memory is given back before the first step, and not again."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_fastclip
from keras_fastclip import heap

X = np.ones((8, 3), "float32")


@pytest.fixture
def given_back(monkeypatch):
    """Counts how often memory was given back."""
    calls = []
    monkeypatch.setattr(heap, "_trim", lambda: calls.append)
    return calls


def compiled_model(**options):
    model = keras_fastclip.DPSequential(
        [keras.Input((3,)), keras.layers.Dense(2)],
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
    )
    model.compile("sgd", "mse", **options)
    return model


def test_once_for_many_steps(given_back):
    model = compiled_model()
    model.fit(X, X[:, :2], batch_size=4, epochs=5, verbose=0)
    assert int(model.optimizer.iterations) == 10
    assert given_back == [0]


@pytest.mark.parametrize(
    "options", [{"jit_compile": True}, {"run_eagerly": True}]
)
def test_not_where_there_is_no_graph_on_a_cpu(given_back, options):
    model = compiled_model(**options)
    model.fit(X, X[:, :2], batch_size=4, verbose=0)
    assert given_back == []


def test_a_batch_stays_what_it_is(given_back):
    batch = {"a": tf.constant([1, 2]), "b": None}, tf.constant([True]), None

    @tf.function
    def run():
        return heap.trimmed(batch)[0]["a"], heap.trimmed(batch)[1]

    numbers, truth = run()
    assert numbers.numpy().tolist() == [1, 2] and truth.numpy().tolist() == [
        True
    ]
    assert given_back == [0, 0]
    assert heap.trimmed(batch) is batch  # Eagerly.


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(heap, "_trim", lambda: None)
    batch = (tf.constant(1.0),)

    @tf.function
    def run():
        assert heap.trimmed(batch) is batch

    run()
