"""The method `naive`: a loop over the examples.

Runs the model on one example at a time and differentiates its loss by all
weights. Slow; the plainest statement of what the other methods compute.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_fastclip import _keras, views
from keras_fastclip.capture import Plan
from keras_fastclip.clipping import Clipping
from keras_fastclip.losses import first_tensor
from keras_fastclip.methods import groups_of_weights
from keras_fastclip.registry.terms import at_least_float32, squared_norm


def clip(
    model: keras.Model,
    batch: tuple[Any, Any, Any],
    plan: Plan,
    clipping: Clipping,
    real: tf.Tensor | None,
    training: bool,
    scale: float,
) -> tuple:
    """As the other methods: the fields of `model.Clipped`."""
    group_of = groups_of_weights(plan, clipping)
    count_views = model._privacy.settings.views
    variables = [v for v in model.trainable_variables if id(v) in group_of]
    raw = [_keras.raw(v) for v in variables]
    count = max(group_of.values()) + 1
    wide = any(variable.dtype == "float64" for variable in variables)
    dtype = tf.float64 if wide else tf.float32

    def one_example(i):
        one = keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[i : i + 1], batch
        )
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(raw)
            _, loss = views.forward(model, one, count_views, training)
        gradients = tape.gradient(
            loss,
            raw,
            output_gradients=None if scale == 1 else scale * tf.ones_like(loss),
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        gradients = [
            at_least_float32(tf.convert_to_tensor(g)) for g in gradients
        ]
        gradients = [
            tf.ensure_shape(g / scale, v.shape)
            for g, v in zip(gradients, variables, strict=True)
        ]
        squares = [tf.zeros([], dtype)] * count
        for variable, gradient in zip(variables, gradients, strict=True):
            group = group_of[id(variable)]
            square = squared_norm(gradient[None])[0]
            squares[group] += tf.cast(square, dtype)
        squared_norms = tf.stack(squares)[:, None]
        factors = clipping.bounded_factors(squared_norms)
        if real is not None:
            factors = tf.where(real[i], factors, tf.zeros_like(factors))
        clipped = []
        for variable, gradient in zip(variables, gradients, strict=True):
            factor = factors[group_of[id(variable)], 0]
            factor = tf.cast(factor, gradient.dtype)
            clipped.append(
                tf.where(
                    factor != 0, factor * gradient, tf.zeros_like(gradient)
                )
            )
        return clipped, loss[0], squared_norms[:, 0], factors[:, 0]

    size = tf.shape(first_tensor(batch[0]))[0]
    sums = [tf.zeros(v.shape, dtype) for v in variables]
    rows = [
        tf.TensorArray(keras.config.floatx(), size, element_shape=[]),
        tf.TensorArray(dtype, size, element_shape=[count]),
        tf.TensorArray(dtype, size, element_shape=[count]),
    ]

    def body(i, sums, rows):
        clipped, *values = one_example(i)
        sums = [
            s + tf.cast(c, dtype) for s, c in zip(sums, clipped, strict=True)
        ]
        rows = [
            array.write(i, tf.cast(value, array.dtype))
            for array, value in zip(rows, values, strict=True)
        ]
        return i + 1, sums, rows

    _, sums, rows = tf.while_loop(
        lambda i, *_: i < size, body, (0, sums, rows), parallel_iterations=1
    )
    example_losses, squared_norms, factors = (array.stack() for array in rows)
    x = views.repeated(batch[0], count_views)
    y_pred = _keras.call_model(model, x, training)
    return (
        {id(v): s for v, s in zip(variables, sums, strict=True)},
        tf.transpose(squared_norms),
        tf.transpose(factors),
        y_pred,
        example_losses,
    )
