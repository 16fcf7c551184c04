"""One loss for each example, from whatever was given to `compile`.

The loss of an example is what Keras computes for a batch that holds it alone.
For a loss with several values an example (tokens, pixels) and Keras's default
reduction that is their mean, over the values that the example's own mask lets
through. So it never depends on the other examples of the batch, as Keras's
mean over a masked batch does. There is one exception: a mean that is divided
by the sample weights keeps a weight that belongs to a whole example, which in
a batch of one would be divided by itself.
"""

import functools
import math
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras


def per_example_losses(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    counted: tf.Tensor | None = None,
) -> tf.Tensor:
    """The training loss of each example, shape (batch,).

    Regularizers of weights are not in it: they depend on no example, and their
    gradient is added after the noise.

    Args:
        model: a compiled model, just after its forward pass.
        x, y, y_pred, sample_weight: the batch and its predictions.
        counted: (batch,), which rows go into the logged losses of single
            outputs; all if None.
    """
    batch_size = tf.shape(first_tensor(x))[0]
    custom = getattr(model, "compute_per_example_loss", None)
    if custom is not None:
        losses = custom(x, y, y_pred, sample_weight)
        _require_batch_axis(losses, batch_size, "compute_per_example_loss")
        total = _sum_but_first(losses)
    else:
        total = _compiled(model, y, y_pred, sample_weight, batch_size, counted)
    for layer in _keras.layers_of(model):
        for extra in _keras.own_losses(layer):
            if extra.shape.rank == 0:
                _require_zero(extra, layer)
                continue
            path = layer.path or layer.name
            _require_batch_axis(extra, batch_size, f"add_loss of {path!r}")
            total += tf.cast(_sum_but_first(extra), total.dtype)
    return total


def first_tensor(structure: Any) -> tf.Tensor:
    """The first tensor of a batch; its first axis counts the examples."""
    leaves = keras.tree.flatten(structure)
    return next(leaf for leaf in leaves if leaf is not None)


def _compiled(model, y, y_pred, sample_weight, batch_size, counted):
    compiled = model._compile_loss
    if not compiled.built:
        # Building matches outputs and losses by name, which needs a call.
        compiled(y, y_pred)

    def wrap(loss):
        return _PerExample(loss, batch_size)

    def wrap_metric(metric):
        return _CountedRows(metric, counted)

    with _keras.compiled_losses_replaced(model, wrap, wrap_metric) as compiled:
        return compiled(y, y_pred, sample_weight)


class _PerExample:
    """Stands in for a Keras loss and reduces over one example at a time."""

    def __init__(self, loss: keras.Loss, batch_size: tf.Tensor):
        if type(loss).__call__ is not keras.Loss.__call__:
            raise ValueError(
                f"Loss {loss.name!r} overrides `__call__`, so the loss of a "
                "single example cannot be told. Override `call` instead."
            )
        self._loss = loss
        self._batch_size = batch_size

    def __call__(self, y_true, y_pred, sample_weight=None):
        loss = self._loss
        masks = [_keras.mask_of(y_pred)]
        y_true, y_pred = keras.tree.map_structure(
            lambda leaf: keras.ops.convert_to_tensor(leaf, dtype=loss.dtype),
            (y_true, y_pred),
        )
        values = loss.call(y_true, y_pred)
        masks.append(_keras.mask_of(values))
        _require_batch_axis(values, self._batch_size, f"loss {loss.name!r}")
        return reduce_examples(
            tf.cast(values, loss.dtype),
            sample_weight,
            [mask for mask in masks if mask is not None],
            loss.reduction,
        )


# Among fewer classes, the operation of TensorFlow takes no time to speak of.
_MANY_CLASSES = 256
# Smaller shares may have been rounded to none, or be of what is no number.
_LEAST_SHARE = 1e-30


@_keras.cross_entropy.by
def _cross_entropy(target, output, from_logits=False, axis=-1):
    """Keras's, in fewer passes over logits of many classes.

    Both the losses and their derivative follow from one softmax, for which
    oneDNN has an operation of its own.
    """
    original = _keras.cross_entropy.original
    if not (_keras.on_cpu() and _keras.uses_onednn()):
        return original(target, output, from_logits, axis)
    logits = _keras.logits_of(output, from_logits)
    labels = tf.cast(tf.convert_to_tensor(target), tf.int64)
    if (
        logits is None
        or logits.dtype != tf.float32
        or (logits.shape[-1] or 0) < _MANY_CLASSES
        or axis not in (-1, logits.shape.rank - 1)
        or not labels.shape.is_compatible_with(logits.shape[:-1])
    ):
        return original(target, output, from_logits, axis)
    flat = tf.reshape(logits, [-1, logits.shape[-1]])
    losses = _SparseCrossEntropy(tf.reshape(labels, [-1])).of(flat)
    return tf.ensure_shape(
        tf.reshape(losses, tf.shape(labels)), logits.shape[:-1]
    )


class _SparseCrossEntropy:
    """-ln pₖ with p = softmax(z) and k the label, for every row.

    Its derivative by z is p, less one at the label.

    Args:
        labels: (rows,).
    """

    def __init__(self, labels):
        self._labels = labels

    def of(self, logits):
        """Losses of logits (rows, classes)."""
        plain = functools.partial(
            tf.nn.sparse_softmax_cross_entropy_with_logits, self._labels
        )
        return _keras.custom_gradient(self._with_derivative, plain)(logits)

    def _with_derivative(self, logits):
        largest = tf.reduce_max(logits, -1)
        logit = tf.gather(logits, self._labels, batch_dims=1)
        # Nobody else needs the logits, of which there are many: the shares
        # take their place in memory, and the slopes that of the shares.
        with tf.control_dependencies([largest, logit]):
            shares = tf.nn.softmax(logits)
        share = tf.gather(shares, self._labels, batch_dims=1)
        held = (share > _LEAST_SHARE) & tf.math.is_finite(largest + logit)

        def otherwise():
            """-ln pₖ = zⱼ - zₖ - ln pⱼ, with the largest for j."""
            rest = -tf.math.log(tf.reduce_max(shares, -1))
            return tf.where(
                held,
                -tf.math.log(tf.where(held, share, 1)),
                (largest - logit) + rest,
            )

        losses = tf.cond(
            tf.reduce_all(held), lambda: -tf.math.log(share), otherwise
        )

        def backward(cotangent):
            with tf.control_dependencies([losses]):
                rows = tf.range(tf.size(self._labels, tf.int64))
                places = tf.stack([rows, self._labels], 1)
            slopes = _keras.added_in_place(
                shares, places, -tf.ones_like(cotangent)
            )
            # oneDNN finds shares where logits are no numbers.
            unknown = tf.cast(np.nan, cotangent.dtype)
            known = tf.where(tf.math.is_nan(losses), unknown, cotangent)
            return slopes * known[:, None]

        return losses, backward


class _CountedRows:
    """A metric of an output's loss without padding and non-finite rows."""

    def __init__(self, metric, counted):
        self._metric, self._counted = metric, counted

    def update_state(self, values, sample_weight=None):
        del sample_weight  # The batch size, for a loss reduced over the batch.
        counted = tf.math.is_finite(values)
        if self._counted is not None:
            counted &= self._counted
        values = tf.where(counted, values, tf.zeros_like(values))
        self._metric.update_state(values, tf.cast(counted, values.dtype))


def reduce_examples(
    values: tf.Tensor,
    sample_weight: Any,
    masks: list[tf.Tensor],
    reduction: str | None,
) -> tf.Tensor:
    """Keras's reduction of a loss, within each example.

    Args:
        values: (batch, ...).
        sample_weight: (batch, ...) with as many axes as `values` or fewer.
        masks: as `sample_weight`, of booleans.
        reduction: a name that Keras knows.
    """
    weights = tf.ones_like(values)
    for mask in masks:
        weights *= aligned(tf.cast(mask, values.dtype), values)
    if masks and reduction in ("mean", "sum_over_batch_size"):
        # The mean is over the values that the mask lets through.
        total = _sum_but_first(tf.ones_like(values))
        share = tf.math.divide_no_nan(total, _sum_but_first(weights))
        weights *= aligned(share, values)
    by_example = None
    if sample_weight is not None:
        given = tf.cast(tf.convert_to_tensor(sample_weight), values.dtype)
        of_examples = all(size == 1 for size in given.shape[1:])
        if of_examples and reduction == "mean_with_sample_weight":
            # Divided by itself it would vanish.
            by_example = tf.reshape(given, [-1])
        else:
            weights *= aligned(given, values)
    # A value that is masked out may be anything, also NaN.
    values = tf.where(weights == 0, tf.zeros_like(values), values)
    result = _sum_but_first(values * weights)
    if reduction in ("mean", "sum_over_batch_size"):
        result /= _sum_but_first(tf.ones_like(values))
    elif reduction == "mean_with_sample_weight":
        result = tf.math.divide_no_nan(result, _sum_but_first(weights))
    return result if by_example is None else result * by_example


def aligned(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Gives weights the rank of values; both start with the batch."""
    while weights.shape.rank > values.shape.rank and weights.shape[-1] == 1:
        weights = weights[..., 0]
    missing = values.shape.rank - weights.shape.rank
    if missing < 0:
        raise ValueError(
            f"Sample weights or a mask of shape {weights.shape} do not fit "
            f"losses of shape {values.shape}."
        )
    ones = tf.ones([missing], tf.int32)
    return tf.reshape(weights, tf.concat([tf.shape(weights), ones], 0))


def _sum_but_first(values):
    return tf.reduce_sum(values, list(range(1, values.shape.rank)))


def _require_batch_axis(values, batch_size, name):
    known = tf.get_static_value(batch_size)
    rank = values.shape.rank
    wrong_size = (
        rank
        and None not in (known, values.shape[0])
        and known != values.shape[0]
    )
    if rank == 0 or wrong_size:
        raise ValueError(
            f"The {name} returned a value of shape {tuple(values.shape)} for "
            "the batch. Private training needs the loss of each example: "
            "return a tensor whose first axis is the batch, without a mean or "
            "sum over it."
        )


def _require_zero(extra, layer):
    """Refuses a loss of the whole batch, unless it is switched off.

    Some layers add their loss also where its coefficient is zero. It is left
    out then. The check of the model, which runs eagerly, has seen to it before
    any graph is made.
    """
    if not tf.executing_eagerly():
        return
    if extra.numpy() != 0:
        raise ValueError(_scalar_loss_message(layer))
    warnings.warn(
        f"Layer {layer.path or layer.name!r} called add_loss with a loss of "
        "the whole batch, which is zero now and is left out of training.",
        stacklevel=2,
    )


def _scalar_loss_message(layer):
    path = layer.path or layer.name
    if getattr(layer, "activity_regularizer", None) is not None:
        return (
            f"Layer {path!r} has an activity_regularizer, which is one number "
            "for the whole batch and cannot be clipped by example. Remove it, "
            "or call add_loss with one value for each example, shape (batch,)."
        )
    return (
        f"Layer {path!r} called add_loss with one number for the whole batch, "
        "which cannot be clipped by example. Give one value for each example, "
        "shape (batch,), or set the coefficient of this loss to zero."
    )


def scale_of(model: keras.Model, batch_size: int) -> float:
    """What the loss of an example is multiplied by before the backward pass.

    In float16 small cotangents would be lost otherwise. The scale is the first
    one of Keras's `LossScaleOptimizer` (`initial_scale`), or the optimizer's
    `loss_scale_factor`. Those are for the mean over a batch, so the scale is
    divided by the expected batch size; and it is rounded down to a power of
    two, so that taking it out again rounds nothing. It never changes: one that
    follows the data, as Keras's does, would let an example act through the
    rounding of others.
    """
    optimizer = model.optimizer
    if not _keras.computes_in_half(model):
        return 1.0
    given = optimizer.loss_scale_factor
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        given = optimizer.initial_scale
    scale = (given or 1.0) / batch_size
    # The square of the scale must be a number of float32, too.
    return min(max(1.0, 2.0 ** math.floor(math.log2(scale))), 2.0**32)


def unscaled_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """The optimizer to which gradients go whose scale was taken out.

    A `LossScaleOptimizer` leaves out steps, and changes its scale, where a
    gradient is not finite; here that is seen to for each example by itself.
    """
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def regularization(
    model: keras.Model,
) -> tuple[tf.Tensor, dict[int, tf.Tensor]]:
    """Penalties on weights: their sum, and its gradient by id of the variable.

    They depend on no example, so they are neither clipped nor noised.
    """
    variables = [v for v in model.trainable_variables if v.regularizer]
    raw = [_keras.raw(v) for v in variables]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(raw)
        penalties = [v.regularizer(v) for v in variables]
        total = tf.add_n(penalties) if penalties else tf.zeros([])
    gradients = tape.gradient(total, raw) if raw else []
    pairs = zip(variables, gradients, strict=True)
    return total, {
        id(v): tf.convert_to_tensor(g) for v, g in pairs if g is not None
    }
