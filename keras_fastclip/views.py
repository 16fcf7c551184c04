"""Several views of each example (De et al., 2022).

Each example goes through the model several times, as rows of one batch, for
each of which augmentation and dropout layers draw random numbers of their own.
The loss of the example is the mean of the losses of its rows, so its gradient
is the mean over the views, and it is that mean which is clipped. One example
moves the sum by no more than before, whatever the number of views.

The rows of example i are [i·k, (i+1)·k), as for a layer that folds other axes
into the first one; the probe finds such rows in every call.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.losses import per_example_losses


def repeated(structure: Any, views: int) -> Any:
    """Tensors (B, ...) with every row repeated, (B·views, ...)."""
    if views == 1:
        return structure
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.repeat(leaf, views, axis=0),
        structure,
    )


def forward(
    model: keras.Model,
    batch: tuple[Any, Any, Any],
    views: int = 1,
    training: bool = True,
    counted: tf.Tensor | None = None,
) -> tuple[Any, tf.Tensor]:
    """The forward pass of a private step.

    Args:
        model: a compiled model.
        batch: (x, y, sample_weight).
        views: how often each example goes through the model.
        training: the phase in which the layers run.
        counted: as for `per_example_losses`, (batch,).

    Returns:
        The predictions for all views, and the loss of each example, (batch,).
    """
    x, y, sample_weight = repeated(batch, views)
    y_pred = _keras.call_model(model, x, training)
    losses = per_example_losses(
        model, x, y, y_pred, sample_weight, repeated(counted, views)
    )
    if views > 1:
        losses = tf.reduce_mean(tf.reshape(losses, [-1, views]), -1)
    return y_pred, losses
