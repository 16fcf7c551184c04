"""The oracle: clipped sums by a loop over single examples, and a comparison.

`loop_over_examples` shares nothing with the engine but the clipping function:
it runs the model on batches of one example, takes the loss that Keras computes
for such a batch, and differentiates it by the weights.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.clipping import Clipping
from keras_fastclip.methods import groups_of_weights
from keras_fastclip.model import clip
from keras_fastclip.sampling import as_arrays, num_examples_of


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """How far a model's clipped gradients are from the loop's.

    Attributes:
        relative_error: the largest of all the errors below.
        norm_error: the largest relative error of an example's norm.
        by_layer: for each layer, the error of its part of the clipped sum
            relative to the loop's.
    """

    relative_error: float
    norm_error: float
    by_layer: dict[str, float]

    def __str__(self) -> str:
        width = max(len(path) for path in self.by_layer)
        rows = [f"{p:<{width}}  {e:.1e}" for p, e in self.by_layer.items()]
        head = (
            f"largest relative error {self.relative_error:.1e}, "
            f"of norms {self.norm_error:.1e}"
        )
        return "\n".join([head, *rows])


def check_gradients(
    model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None
) -> GradientReport:
    """Compares a private model's gradients with a loop over single examples.

    Run it on a few examples of your own model, and whenever you wrote a rule.
    Layers that draw random numbers in training (dropout) are compared in
    inference mode, since two runs would draw different ones.

    Args:
        model: a private, compiled model.
        x: inputs; a few examples are enough.
        y: targets.
        sample_weight: weights of the examples.

    Returns:
        The report; print it for a table by layer.
    """
    privacy = model._privacy
    batch = as_arrays((x, y, sample_weight))
    batch = tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch
    )
    plan = privacy.plan(model, batch)
    training = not _keras.draws_random_numbers(model, batch[0])
    owner = {
        id(variable): unit.path
        for unit in reversed(plan.units)
        for variable in unit.variables
    }
    group_of = groups_of_weights(plan, privacy.clipping)
    # Some layers move on in every forward pass, whatever the data.
    state = model.non_trainable_variables
    saved = _keras.values(state)
    found = clip(model, batch, training=training)
    _keras.assign(state, saved)
    right_sums, right_norms = loop_over_examples(
        model, batch, privacy.clipping_now(), group_of, training=training
    )
    gaps, sizes = {}, {}
    for variable, right in zip(
        model.trainable_variables, right_sums, strict=True
    ):
        path = owner[id(variable)]
        mine = np.array(found.dense_sum(variable))
        gap = np.sum(np.square(mine.astype("float64") - right))
        gaps[path] = gaps.get(path, 0.0) + gap
        sizes[path] = sizes.get(path, 0.0) + np.sum(np.square(right))
    by_layer = {
        path: _ratio(np.sqrt(gaps[path]), np.sqrt(sizes[path])) for path in gaps
    }
    mine = np.sqrt(np.sum(found.squared_norms, 0, dtype="float64"))
    right = np.sqrt(right_norms)
    norm_error = max(
        _ratio(abs(m - r), r) for m, r in zip(mine, right, strict=True)
    )
    error = max([norm_error, *by_layer.values()])
    return GradientReport(float(error), float(norm_error), by_layer)


@_keras.plain_addition()
def loop_over_examples(
    model: keras.Model,
    batch: tuple[Any, Any, Any],
    clipping: Clipping,
    group_of: dict[int, int] | None = None,
    training: bool = True,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Clipped sums and squared norms, one example at a time.

    Args:
        model: a compiled model, private or not.
        batch: (x, y, sample_weight).
        clipping: norms to factors.
        group_of: by id of a weight, its group; all in one if None.
        training: the phase in which the model is run.

    Returns:
        For each trainable variable the clipped sum, and for each example its
        squared norm; in float64.
    """
    variables = model.trainable_variables
    group_of = group_of or {id(v): 0 for v in variables}
    count = max(group_of.values()) + 1
    state = model.non_trainable_variables
    saved = _keras.values(state)
    sums = [np.zeros(v.shape) for v in variables]
    totals = []
    for i in range(num_examples_of(batch)):
        one = tf.nest.map_structure(
            lambda leaf, i=i: None if leaf is None else leaf[i : i + 1], batch
        )
        gradients = _plain_gradient(model, one, training)
        _keras.assign(state, saved)
        squares = np.zeros(count)
        for variable, gradient in zip(variables, gradients, strict=True):
            group = group_of.get(id(variable), 0)
            squares[group] += np.sum(np.square(gradient))
        factors = np.array(
            clipping.factors(tf.constant(squares[:, None], tf.float64))
        )
        for variable, total, gradient in zip(
            variables, sums, gradients, strict=True
        ):
            total += factors[group_of.get(id(variable), 0), 0] * gradient
        totals.append(squares.sum())
    return sums, np.array(totals)


def _plain_gradient(model, one, training):
    """The gradient of Keras's loss of a batch, without regularizers."""
    x, y, sample_weight = one
    raw = [_keras.raw(v) for v in model.trainable_variables]
    custom = getattr(model, "compute_per_example_loss", None)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(raw)
        y_pred = _keras.call_model(model, x, training)
        if custom is not None:
            loss = tf.reduce_sum(custom(x, y, y_pred, sample_weight))
        else:
            loss = _keras.compiled_loss(model, y, y_pred, sample_weight)
        for layer in _keras.layers_of(model):
            for extra in _keras.own_losses(layer):
                loss += tf.cast(tf.reduce_sum(extra), loss.dtype)
    gradients = tape.gradient(loss, raw)
    return [
        np.zeros(v.shape)
        if gradient is None
        else np.array(tf.convert_to_tensor(gradient)).astype("float64")
        for v, gradient in zip(raw, gradients, strict=True)
    ]


def _ratio(gap, size):
    return float(gap / size) if size else float(gap)
