"""Layers without a rule: gradients of their examples one by one."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_fastclip
from keras_fastclip import _keras
from keras_fastclip.capture import Recording
from keras_fastclip.losses import per_example_losses
from keras_fastclip.parts import make_parts
from keras_fastclip.registry.fallback import (
    LayerLocal,
    float_tensors,
    tensors,
    with_tensors,
)
from keras_fastclip.registry.terms import ONE_ROW, Rows, squared_norm
from tests.registry.helpers import assert_close, built, random
from tests.zoo import NoisyQuadratic, Quadratic

BATCH = 4


@pytest.fixture(autouse=True)
def no_fallback_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No rule is registered")
        yield


def private(inputs, outputs):
    model = keras_fastclip.DPModel(
        inputs,
        outputs,
        l2_norm_clip=0.5,
        noise_multiplier=0.0,
        expected_batch_size=1,
    )
    model.compile("sgd", "mse")
    return model


def model_of(layer, shape):
    """A private model around one layer, and data for it."""
    inputs = keras.Input(shape)
    outputs = layers.Dense(1)(layers.Flatten()(layer(inputs)))
    return private(inputs, outputs), random(BATCH, *shape), random(BATCH, 1)


def fallback_layers(model, x, y):
    """Names of the classes of the layers that the fallback serves."""
    plan = model._privacy.plan(model, (x, y, None))
    with Recording(plan, tf.constant(BATCH)) as recording:
        model(x, training=True)
    return {
        type(call.unit.layer).__name__
        for call in recording.calls
        if not call.single
    }


# -- layers of Keras ----------------------------------------------------------

LAYERS = {
    "RMSNormalization": (lambda: layers.RMSNormalization(1), (3, 3)),
    "LayerNormalization": (lambda: layers.LayerNormalization([1, -1]), (3, 3)),
    "EinsumDense": (
        lambda: layers.EinsumDense("abc,cd->abd", (3, 3), bias_axes="b"),
        (3, 2),
    ),
    "RNN": (
        lambda: layers.RNN(
            [layers.SimpleRNNCell(2), layers.GRUCell(2)], unroll=True
        ),
        (2, 2),
    ),
    "ConvLSTM1D": (lambda: layers.ConvLSTM1D(1, 2, unroll=True), (2, 3, 1)),
    "STFTSpectrogram": (
        lambda: layers.STFTSpectrogram("magnitude", 4, 2, 4),
        (8, 1),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_equal_the_loop(float64, name):
    make, shape = LAYERS[name]
    model, x, y = model_of(make(), shape)
    report = keras_fastclip.check_gradients(model, x, y)
    assert report.relative_error < 1e-9, report
    assert fallback_layers(model, x, y) == {name}


# -- the term itself ----------------------------------------------------------


def local(layer, *inputs, input_rows=None, output_rows=(ONE_ROW,), **options):
    """A term for a call of the layer."""
    return LayerLocal(
        layer,
        layer.trainable_variables,
        (inputs, {}),
        input_rows or [ONE_ROW] * len(inputs),
        output_rows,
        **options,
    )


def loop(layer, examples, cotangents):
    """Gradients of a layer for inputs and cotangents given by example."""
    variables = layer.trainable_variables
    gradients = []
    for inputs, g in zip(examples, cotangents, strict=True):
        with tf.GradientTape() as tape:
            outputs = float_tensors(layer(*inputs))
        raw = [_keras.raw(v) for v in variables]
        gradients.append(tape.gradient(outputs, raw, g))
    return [np.stack(parts) for parts in zip(*gradients, strict=True)]


@pytest.mark.parametrize("rows", [Rows(2), Rows(2, example_major=False)])
def test_all_rows_of_an_example_are_taken_together(float64, rows):
    x, g = random(6, 5), random(6, 4, seed=1)
    layer = built(Quadratic(), x)
    term = local(layer, x, input_rows=[rows], output_rows=[rows])
    found = term.per_example([g], rows)
    right = loop(
        layer,
        [[part] for part in rows.fold(x)],
        [[part] for part in rows.fold(g)],
    )
    tf.nest.map_structure(assert_close, list(found), right)


class Mixture(layers.Layer):
    """Two outputs with a derivative and one without, of two inputs."""

    def build(self, *shapes):
        self.w = self.add_weight(shape=(3, 2), initializer="normal")
        self.unused = self.add_weight(shape=(2,))

    def call(self, x, table):
        y = ops.matmul(x, self.w) ** 2
        return {
            "first": y,
            "chosen": ops.argmax(y, -1),
            "second": ops.matmul(y, table) * self.w[0, 0],
        }


def test_inputs_may_be_shared_and_outputs_may_be_several(float64):
    x, table = random(4, 3), random(2, 5, seed=1)
    layer = Mixture()
    layer(x, table)
    term = local(
        layer,
        x,
        table,
        input_rows=[ONE_ROW, None],
        output_rows=[ONE_ROW, ONE_ROW],
    )
    g = [random(4, 2, seed=2), random(4, 5, seed=3)]
    w, unused = term.per_example(g, ONE_ROW)
    layer.unused.trainable = False
    (right,) = loop(
        layer,
        [[x[i : i + 1], table] for i in range(4)],
        [[part[i : i + 1] for part in g] for i in range(4)],
    )
    assert_close(w, right)
    np.testing.assert_array_equal(unused, np.zeros((4, 2)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_half_precision_come_in_float32(dtype):
    x = random(3, 5)
    layer = Quadratic(dtype=f"mixed_{dtype}")
    g = layer(x)
    for gradients in local(layer, x).per_example([g], ONE_ROW):
        assert gradients.dtype == tf.float32


def test_tensors_are_found_and_replaced_in_nested_structures():
    a, b = tf.zeros(1), tf.constant([1])
    structure = ([a, None, "text"], {"key": (b, 2)})
    assert tensors(structure) == [a, b]
    assert float_tensors(structure) == [a]
    again = with_tensors(structure, [b, a])
    assert again == ([b, None, "text"], {"key": (a, 2)})


# -- layers that draw random numbers ------------------------------------------


def noisy_model():
    return model_of(NoisyQuadratic(), (3, 5))


def test_random_layer_draws_anew_in_every_step(float64):
    model, x, y = noisy_model()
    runs = {"eager": model.clipped_gradients}
    runs["graph"] = tf.function(model.clipped_gradients)
    for run in runs.values():
        first, second = run(x, y)[1], run(x, y)[1]
        assert np.all(np.abs(first - second) > 1e-6 * first)


def test_random_layer_draws_for_every_example(float64):
    model, x, y = noisy_model()
    equal = tf.repeat(x[:1], BATCH, 0), tf.repeat(y[:1], BATCH, 0)
    _, squared_norms = model.clipped_gradients(*equal)
    assert len(set(squared_norms.numpy())) == BATCH


def test_random_layer_is_repeatable_by_its_seed(float64):
    model, x, y = noisy_model()
    model.clipped_gradients(x, y)
    states = _keras.seed_states(model)
    before = _keras.values(states)
    first = model.clipped_gradients(x, y)
    for state, value in zip(states, before, strict=True):
        state.assign(value)
    tf.nest.map_structure(assert_close, model.clipped_gradients(x, y), first)


def test_gradients_of_a_random_layer_belong_to_its_own_draw(float64):
    """Plain differentiation of the very same forward pass gives the same."""
    model, x, y = noisy_model()
    plan = model._privacy.plan(model, (x, y, None))
    variables = model.trainable_variables
    raw = [_keras.raw(v) for v in variables]
    with tf.GradientTape(persistent=True) as tape:
        with Recording(plan, tf.constant(BATCH)) as recording:
            y_pred = model(x, training=True)
            losses = per_example_losses(model, x, y, y_pred, None)
        each = tf.unstack(losses)
    uses, _ = recording.backward(losses)
    assert any(isinstance(use.term, LayerLocal) for use in uses)
    parts = make_parts(uses)
    norms = tf.add_n([part.squared_norms() for part in parts])
    sums = {}
    for part in parts:
        sums |= part.weighted_sum(tf.range(1.0, BATCH + 1))
    right = [
        np.stack(parts)
        for parts in zip(*[tape.gradient(e, raw) for e in each], strict=True)
    ]
    assert_close(norms, sum(squared_norm(tf.constant(r)) for r in right))
    for variable, gradients in zip(variables, right, strict=True):
        weighted = np.tensordot(np.arange(1.0, BATCH + 1), gradients, 1)
        assert_close(sums[id(variable)], weighted)


def test_random_layer_draws_nothing_in_inference(float64):
    model, x, y = noisy_model()
    report = keras_fastclip.check_gradients(model, x, y)
    assert report.relative_error < 1e-9, report
