"""Losses and metrics of a training step, over the real rows of the batch.

What is logged here is computed from the data without noise: the guarantee does
not cover it.
"""

import inspect
from typing import Any

import keras
import tensorflow as tf

from keras_fastclip import _keras


def update(
    model: keras.Model,
    batch: tuple[Any, Any, Any],
    real: tf.Tensor | None,
    clipped: Any,
    penalty: tf.Tensor,
) -> dict[str, Any]:
    """Updates the loss tracker and the compiled metrics.

    Args:
        model: the model.
        batch: (x, y, sample_weight).
        real: (batch,), false for rows that only fill up the batch.
        clipped: losses, predictions and norms of the batch.
        penalty: of the weight regularizers.

    Returns:
        The logs of the step.
    """
    (x, y, sample_weight), y_pred = batch, clipped.y_pred
    finite = tf.reduce_all(tf.math.is_finite(clipped.squared_norms), 0)
    present = tf.ones_like(finite) if real is None else real
    lost = tf.math.count_nonzero(present & ~finite)
    model._privacy.nonfinite.assign_add(lost)
    counted = finite & present
    losses = clipped.losses + tf.cast(penalty, clipped.losses.dtype)
    losses = tf.where(counted, losses, tf.zeros_like(losses))
    model._loss_tracker.update_state(losses, tf.cast(counted, losses.dtype))
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        if real is not None:
            x, y, sample_weight, y_pred = _real_rows(
                model, (x, y, sample_weight, y_pred), real
            )
        return model.compute_metrics(x, y, y_pred, sample_weight)
    if real is None:
        return model.compute_metrics(x, y, y_pred, sample_weight)
    _update_compiled(model, y, y_pred, sample_weight, real)
    return model.get_metrics_result()


def _update_compiled(model, y, y_pred, sample_weight, real):
    flat_weights = keras.tree.flatten(sample_weight)
    for metric, target, prediction, index, weighted in _keras.compiled_metrics(
        model, y, y_pred
    ):
        weight = None
        if weighted and flat_weights[0] is not None:
            weight = flat_weights[index if len(flat_weights) > 1 else 0]
        if "sample_weight" in inspect.signature(metric.update_state).parameters:
            mask = tf.cast(real, "float32")
            if weight is not None:
                weight = tf.cast(weight, "float32")
                shape = [-1] + [1] * (weight.shape.rank - 1)
                mask = weight * tf.reshape(mask, shape)
            metric.update_state(target, prediction, sample_weight=mask)
        else:
            target, prediction = _real_rows(model, (target, prediction), real)
            metric.update_state(target, prediction)


def _real_rows(model, structure, real):
    if model.jit_compile:
        raise ValueError(
            "A metric without a `sample_weight` argument, or an overridden "
            "compute_metrics, cannot leave out padding rows under XLA. Give "
            "the metric that argument, or compile with jit_compile=False."
        )
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.boolean_mask(leaf, real),
        structure,
    )
