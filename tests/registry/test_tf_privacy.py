"""Registry functions of TensorFlow Privacy serve unchanged."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import LayerRegistry, default_registry

# The three ways in which such functions choose what they watch.


def dense_computation(
    layer_instance, input_args, input_kwargs, tape, num_microbatches=None
):
    """Watches the pre-activation."""
    (x,) = input_args
    base_vars = tf.matmul(x, layer_instance.kernel) + layer_instance.bias
    tape.watch(base_vars)

    def sqr_norm_fn(base_vars_grads):
        inputs = 1 + tf.reduce_sum(tf.square(x), 1)
        return inputs * tf.reduce_sum(tf.square(base_vars_grads), 1)

    return base_vars, layer_instance.activation(base_vars), sqr_norm_fn


def embedding_computation(layer_instance, input_args, input_kwargs, tape):
    """Watches the table, and gets the gradient as slices of it."""
    (ids,) = input_args
    table = tf.convert_to_tensor(layer_instance.embeddings)
    tape.watch(table)
    outputs = tf.gather(table, ids)

    def sqr_norm_fn(table_grads):
        assert isinstance(table_grads, tf.IndexedSlices)
        values = tf.reshape(table_grads.values, tf.shape(outputs))
        same = tf.cast(ids[:, :, None] == ids[:, None, :], values.dtype)
        gram = tf.matmul(values, values, transpose_b=True)
        return tf.reduce_sum(same * gram, [1, 2])

    return table, outputs, sqr_norm_fn


def layer_normalization_computation(
    layer_instance, input_args, input_kwargs, tape, num_microbatches
):
    """Watches a copy of the weights for each example."""
    assert num_microbatches is None
    (x,) = input_args
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    size = tf.shape(x)[0]
    gamma, beta = (
        tf.tile(tf.convert_to_tensor(weight)[None, None], [size, 1, 1])
        for weight in (layer_instance.gamma, layer_instance.beta)
    )
    base_vars = [gamma, beta]
    tape.watch(base_vars)
    outputs = (x - mean) * tf.math.rsqrt(variance + layer_instance.epsilon)
    outputs = outputs * base_vars[0] + base_vars[1]

    def sqr_norm_fn(base_vars_grads):
        return tf.add_n(
            [tf.reduce_sum(tf.square(g), [1, 2]) for g in base_vars_grads]
        )

    return base_vars, outputs, sqr_norm_fn


def registry(**changed):
    table = LayerRegistry(parent=default_registry())
    functions = {
        "Dense": dense_computation,
        "Embedding": embedding_computation,
        "LayerNormalization": layer_normalization_computation,
        **changed,
    }
    for name, function in functions.items():
        rule = keras_fastclip.from_tf_privacy(function)
        table.register(getattr(layers, name), rule)
    return table


def private(table):
    ids = keras.Input((4,), dtype="int32")
    x = layers.LayerNormalization()(layers.Embedding(6, 3)(ids))
    x = layers.Dense(4, activation="tanh")(layers.Flatten()(x))
    model = keras_fastclip.DPModel(
        ids,
        layers.Dense(2)(x),
        l2_norm_clip=0.1,
        noise_multiplier=0.0,
        registry=table,
        strict=True,
        expected_batch_size=1,
    )
    model.compile(
        keras.optimizers.SGD(1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rng = np.random.default_rng(0)
    return model, rng.integers(0, 6, (5, 4)), rng.integers(0, 2, 5)


def test_gradients_equal_the_loop(float64):
    model, x, y = private(registry())
    assert keras_fastclip.check_gradients(model, x, y).relative_error < 1e-9
    sums, norms = model.clipped_gradients(tf.constant(x), tf.constant(y))
    again = tf.function(model.clipped_gradients)(tf.constant(x), tf.constant(y))
    np.testing.assert_allclose(again[1], norms, rtol=1e-9)
    for one, other in zip(sums, again[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_model_trains():
    model, x, y = private(registry())
    model.fit(x, y, batch_size=5, verbose=0)


def test_function_that_forgets_the_bias_is_refused():
    def forgetful(layer_instance, input_args, input_kwargs, tape):
        base, outputs, _ = dense_computation(
            layer_instance, input_args, input_kwargs, tape
        )

        def sqr_norm_fn(grads):
            (x,) = input_args
            inputs = tf.reduce_sum(tf.square(x), 1)
            return inputs * tf.reduce_sum(tf.square(grads), 1)

        return base, outputs, sqr_norm_fn

    model, x, y = private(registry(Dense=forgetful))
    with pytest.raises(keras_fastclip.NotPrivateError, match="dense"):
        model.fit(x, y, batch_size=5, verbose=0)


def test_only_functions_are_taken():
    with pytest.raises(ValueError, match="registry function"):
        keras_fastclip.from_tf_privacy("dense")
