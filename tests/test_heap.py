"""Free memory is given back before the first step, and not again."""

import contextlib
import gc
import weakref

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


class Node:
    """Holds itself."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def no_automatic_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("error", [None, ValueError])
def test_new_unused_objects_go(no_automatic_collection, error):
    before = weakref.ref(Node())
    kept, inside = [], []
    with contextlib.suppress(ValueError), heap.tidied():
        inside.append(weakref.ref(Node()))
        kept.append(Node())
        inside.append(weakref.ref(kept[0]))
        if error is not None:
            raise error
    assert inside[0]() is None and inside[1]() is kept[0]
    # Others were not looked at, and will be as ever.
    assert before() is not None and gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


def test_what_somebody_else_put_aside_stays_there():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with heap.tidied():
            pass
        assert gc.get_freeze_count() >= count - 100 > 0  # Some may have gone.
    finally:
        gc.unfreeze()


def test_the_check_leaves_nothing_behind(no_automatic_collection):
    def graphs():
        return sum(isinstance(o, tf.Graph) for o in gc.get_objects())

    model, before = compiled_model(), graphs()
    model._privacy.prepare(model, (X, X[:, :2], None), 4)
    assert graphs() == before
    assert not gc.collect()
