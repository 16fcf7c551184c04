"""A step is traced once for a `fit`, whatever the model is compiled with."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import DPSequential
from keras_fastclip import model as model_module

N = 50


@pytest.fixture
def traces(monkeypatch):
    """Grows by one whenever a step is traced."""
    seen = []
    clip = model_module.clip

    def count(*arguments):
        seen.append(tf.executing_eagerly())
        return clip(*arguments)

    monkeypatch.setattr(model_module, "clip", count)
    return seen


def compiled(optimizer="adam", jit_compile=False, **options):
    model = DPSequential(
        [layers.Input((5,)), layers.Dense(4, "relu"), layers.Dense(3)],
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        **options,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile
    )
    return model


def arrays():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, 5)).astype("float32"), rng.integers(0, 3, N)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_poisson_batches_of_all_sizes_take_one_trace(
    traces, optimizer, jit_compile
):
    model = compiled(optimizer, jit_compile)
    x, y = arrays()
    model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    model.fit(x, y, batch_size=8, verbose=0)
    assert traces == [False]


@pytest.mark.parametrize("jit_compile", [False, True])
def test_passes_with_a_shorter_last_batch_take_one_trace(traces, jit_compile):
    model = compiled(sampling="shuffle", jit_compile=jit_compile)
    model.fit(*arrays(), batch_size=16, epochs=2, verbose=0)
    assert traces == [False]


def test_streams_with_a_shorter_last_batch_take_one_trace(traces):
    model = compiled(expected_batch_size=16)
    stream = tf.data.Dataset.from_tensor_slices(arrays()).batch(16)
    model.fit(stream, epochs=2, verbose=0, num_examples=N)
    assert traces == [False]


def test_another_clip_norm_needs_no_trace(traces):
    model = compiled()
    model.fit(*arrays(), batch_size=8, verbose=0)
    model.set_privacy(l2_norm_clip=0.5, noise_multiplier=2.0)
    model.fit(*arrays(), batch_size=8, verbose=0)
    assert traces == [False]


def test_callbacks_need_no_trace(traces):
    model = compiled()
    callbacks = [keras_fastclip.EpsilonTracker(1e-5)]
    model.fit(*arrays(), batch_size=8, verbose=0, callbacks=callbacks)
    model.fit(*arrays(), batch_size=8, verbose=0, callbacks=callbacks)
    assert traces == [False]


def test_subclassed_models_take_one_trace(traces):
    class Own(keras_fastclip.DPModel):
        def __init__(self):
            super().__init__(l2_norm_clip=1.0, noise_multiplier=1.0)
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    model = Own()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model.fit(*arrays(), batch_size=8, verbose=0)
    assert traces == [False]
