"""Losses and metrics of a training step, over the real rows of the batch.

What is logged here is computed from the data without noise: the guarantee does
not cover it.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_fastclip import _keras, views
from keras_fastclip.losses import aligned


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
    finite = tf.reduce_all(tf.math.is_finite(clipped.squared_norms), 0)
    counted = finite if real is None else finite & real
    losses = clipped.losses + tf.cast(penalty, clipped.losses.dtype)
    losses = tf.where(counted, losses, tf.zeros_like(losses))
    model._loss_tracker.update_state(losses, tf.cast(counted, losses.dtype))
    # Metrics are of all views.
    count, y_pred = model._privacy.settings.views, clipped.y_pred
    x, y, sample_weight = views.repeated(batch, count)
    real = views.repeated(real, count)
    own = type(model).compute_metrics is not keras.Model.compute_metrics
    if real is None:
        return model.compute_metrics(x, y, y_pred, sample_weight)
    if own and model.jit_compile:
        raise ValueError(_no_weights_message("An overridden compute_metrics"))
    if own:
        rows = _real_rows((x, y, y_pred, sample_weight), real)
        return model.compute_metrics(*rows)
    metrics = _keras.compiled_metrics(model, y, y_pred, sample_weight)
    if model.jit_compile:
        _update_weighted(metrics, real)
    else:
        # Of no examples at all, a mean would be NaN.
        tf.cond(
            tf.reduce_any(real),
            lambda: _update_real_rows(metrics, real),
            lambda: False,
        )
    return model.get_metrics_result()


def _update_real_rows(metrics, real):
    for metric, *arguments in metrics:
        y, y_pred, weight = _real_rows(tuple(arguments), real)
        # Metrics need not take weights if there are none.
        weights = {} if weight is None else {"sample_weight": weight}
        metric.update_state(y, y_pred, **weights)
    return True


def _update_weighted(metrics, real):
    """XLA keeps all rows; those that are not real get weight zero."""
    for metric, y, y_pred, weight in metrics:
        rows = tf.cast(real, "float32")
        if weight is not None:
            weight = tf.cast(weight, "float32")
            rows = weight * aligned(rows, weight)
        mask = _keras.mask_of(y_pred)
        if mask is not None:
            rows = aligned(rows, mask)
        try:
            metric.update_state(y, y_pred, sample_weight=rows)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            message = _no_weights_message(f"The metric {metric.name!r}")
            raise ValueError(message) from error


def _no_weights_message(what):
    return (
        f"{what} cannot leave out padding rows under XLA, which takes a "
        "metric whose `sample_weight` may be one number for each example. "
        "Use such a metric, or compile with jit_compile=False."
    )


def _real_rows(structure, real):
    def select(leaf):
        if leaf is None:
            return None
        rows, mask = tf.boolean_mask(leaf, real), _keras.mask_of(leaf)
        if mask is not None:
            _keras.with_mask(rows, tf.boolean_mask(mask, real))
        return rows

    return keras.tree.map_structure(select, structure)
