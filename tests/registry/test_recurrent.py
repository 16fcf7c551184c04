"""Recurrent layers in a model: dropout, loops in graphs, what is left out."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip.registry import default_registry, recurrent

KINDS = [layers.SimpleRNN, layers.LSTM, layers.GRU]


def private(layer, method="auto", clip=0.5, jit=False):
    inputs = keras.Input((4, 3))
    outputs = layers.Dense(2)(layer(layers.Masking()(inputs)))
    model = keras_fastclip.DPModel(
        inputs,
        outputs,
        l2_norm_clip=clip,
        noise_multiplier=0.0,
        expected_batch_size=1,
        method=method,
        strict=True,
    )
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(2 * rng.normal(size=variable.shape))
    model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=jit)
    x = rng.normal(size=(5, 4, 3))
    x[1, 2:] = 0
    return model, x, 10 * rng.normal(size=(5, 2))


@pytest.mark.parametrize(
    "rates, jit",
    [
        ((0.5, 0.0), False),
        ((0.0, 0.5), False),
        ((0.5, 0.5), False),
        ((0.5, 0.5), True),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_update_of_one_example_is_bounded_under_dropout(
    kind, rates, jit, float64
):
    """Norms of another draw than the sum's would let it exceed the bound.

    XLA takes long to compile a loop, so it gets both kinds of dropout at once.
    """
    dropout, recurrent_dropout = rates
    layer = kind(4, dropout=dropout, recurrent_dropout=recurrent_dropout)
    model, x, y = private(layer, jit=jit)
    for i in range(3):
        before = model.get_weights()
        model.train_on_batch(x[i : i + 1], y[i : i + 1])
        after = model.get_weights()
        moved = sum(
            np.sum((a - b) ** 2) for a, b in zip(after, before, strict=True)
        )
        assert np.sqrt(moved) == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loop_in_a_graph_has_the_gradient_of_autodiff(
    kind, known, rows, float64
):
    """Also of the weights that the loop reads, which no step asks for.

    And for any number of examples, which the loop takes in two halves.
    """
    layer = kind(2, return_sequences=True)
    x = tf.constant(np.random.default_rng(0).normal(size=(3, 4, 5)))
    layer(x)
    mask = tf.constant([[1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]]) > 0
    x, mask = x[:rows], mask[:rows]

    def gradients(x, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            zeta, _, psi = recurrent.recurrent(layer, x, mask=mask)
            loss = tf.reduce_sum(tf.sin(psi(zeta)))
        variables = [v.value for v in layer.trainable_variables]
        return tape.gradient(loss, [x, *variables])

    sizes = [[rows if known else None, *t.shape[1:]] for t in (x, mask)]
    signature = [
        tf.TensorSpec(sizes[0], x.dtype),
        tf.TensorSpec(sizes[1], bool),
    ]
    traced = tf.function(gradients, input_signature=signature, autograph=False)
    pairs = zip(traced(x, mask), gradients(x, mask), strict=True)
    for found, right in pairs:
        np.testing.assert_allclose(found, right, atol=1e-12)


class Doubled(layers.LSTM):
    def inner_loop(self, sequences, *args, **kwargs):
        return super().inner_loop(2 * sequences, *args, **kwargs)


class MyCell(layers.GRUCell):
    def call(self, inputs, states, training=False):
        return super().call(2 * inputs, states, training)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Doubled(2),
        lambda: layers.RNN(MyCell(2)),
        lambda: layers.RNN([layers.GRUCell(2), layers.GRUCell(2)]),
        lambda: layers.LSTM(2, recurrent_dropout=1.0),
        lambda: layers.LSTM(2, stateful=True),
    ],
    ids=["inner_loop", "cell", "stacked", "dropped", "stateful"],
)
def test_what_computes_something_else_is_left_to_the_fallback(make):
    layer = make()
    x = tf.random.normal((3, 4, 5))
    layer(x)
    rule = default_registry().lookup(layer)
    assert rule is None or rule(layer, x) is NotImplemented


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_unknown_length(kind, float64):
    inputs = keras.Input((None, 3))
    model = keras_fastclip.DPModel(
        inputs,
        layers.Dense(2)(kind(2)(inputs)),
        l2_norm_clip=0.5,
        noise_multiplier=0.0,
        strict=True,
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    for length in (3, 5):
        x, y = rng.normal(size=(4, length, 3)), rng.normal(size=(4, 2))
        report = keras_fastclip.check_gradients(model, x, y)
        assert report.relative_error < 1e-9
        model.fit(x, y, batch_size=2, verbose=0)


@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU])
def test_bidirectional_layers_are_never_fused(kind, float64, monkeypatch):
    """On GPUs Keras runs both directions in one operation."""

    def fused(*args, **kwargs):
        raise AssertionError("the two layers are not called")

    inputs = keras.Input((4, 3))
    layer = layers.Bidirectional(kind(2))
    model = keras_fastclip.DPModel(
        inputs,
        layers.Dense(2)(layer(inputs)),
        l2_norm_clip=0.5,
        noise_multiplier=0.0,
        strict=True,
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 4, 3)), rng.normal(size=(5, 2))
    model._privacy.plan(model, (x, y, None))
    for name in ("_call_fused_lstm", "_call_fused_gru"):
        monkeypatch.setattr(layers.Bidirectional, name, fused)
    model.clipped_gradients(tf.constant(x), tf.constant(y))
