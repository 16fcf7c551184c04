"""Rules for normalizations whose scale and offset act by broadcasting.

ζ is the output x̂·γ + β, where x̂, the normalized input, depends on no weight.
The layer itself computes x̂, with γ = 1 and β = 0 in place of its weights. But
for groups of channels and for the last axis there are faster ways, which share
with the backward pass what the gradients of γ and β by example are made of.
With x̂ = d·r, d = x - mean(x), r = 1/σ and h = g·γ, the cotangent of x is

    r·(h - mean(h) - x̂·mean(h·x̂)) .
"""

import keras
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry.dense import positions
from keras_fastclip.registry.lookup import register
from keras_fastclip.registry.once import of_any_size
from keras_fastclip.registry.terms import (
    Small,
    at_least_float32,
    shaped_as,
    size_of,
)


@register(keras.layers.LayerNormalization)
def layer_normalization(layer, inputs):
    if layer.rms_scaling:
        return NotImplemented
    if not _is_last_axis(layer, inputs):
        return _affine(layer, inputs, layer.gamma, layer.beta)
    return _normalized(layer, _LastAxis(layer, at_least_float32(inputs)))


@register(keras.layers.RMSNormalization)
def rms_normalization(layer, x):
    # Keras aligns the scale with the last axes, whichever it normalizes.
    axes = _axes(layer.axis, x.shape.rank)
    if axes != list(range(x.shape.rank - len(axes), x.shape.rank)):
        return NotImplemented
    return _affine(layer, x, layer.scale, None)


@register(keras.layers.GroupNormalization)
def group_normalization(layer, inputs):
    if not _keras.normalizes_as_keras(layer):
        return NotImplemented
    if not _is_last_axis(layer, inputs):
        return _affine(layer, inputs, layer.gamma, layer.beta)
    return _normalized(layer, _Groups(layer, at_least_float32(inputs)))


def _normalized(layer, found):
    """ζ and terms of a layer."""
    zeta = tf.cast(found.zeta, layer.compute_dtype)
    terms = [
        Small(weight, lambda g, i=i: found.sums(g)[i])
        for i, weight in enumerate((layer.gamma, layer.beta))
        if weight is not None
    ]
    return zeta, terms


def _is_last_axis(layer, inputs):
    """Whether `_LastAxis` is for these inputs, or `_Groups`."""
    return (
        _axes(layer.axis, inputs.shape.rank) == [inputs.shape.rank - 1]
        and inputs.shape[-1] is not None
        # Keras leaves inputs of other types as they are.
        and inputs.dtype == layer.compute_dtype
    )


class _WithDerivative:
    """A normalization with a derivative of its own.

    Attributes:
        zeta: the output.
    """

    def __init__(self, layer, inputs):
        self._fixed, self._latest = self._fixed_of(layer), None
        width = inputs.shape[-1]
        gamma, beta = (
            tf.fill([width], tf.constant(neutral, inputs.dtype))
            if weight is None
            else tf.cast(tf.convert_to_tensor(weight), inputs.dtype)
            for weight, neutral in ((layer.gamma, 1), (layer.beta, 0))
        )
        run = _keras.custom_gradient(self._normalized)
        self.zeta = run(inputs, gamma, beta)

    def _fixed_of(self, layer):
        """What `forward` and the others depend on beside tensors."""
        raise NotImplementedError

    def _normalized(self, inputs, gamma, beta):
        """The output, and the function that its cotangent goes back by."""
        forward = of_any_size(self.forward, *self._fixed)
        zeta, *held = forward(inputs, gamma, beta)
        zeta.set_shape(inputs.shape)
        self._held = held

        def back(cotangent):
            g = tf.ensure_shape(cotangent, inputs.shape)
            # Known again when the gradients of γ and β are asked for.
            sums = self._sums(g)
            self._latest = cotangent, sums
            by_input = self._by_input(g, gamma, sums)
            by_input.set_shape(inputs.shape)
            return by_input, *(tf.reduce_sum(each, 0) for each in sums)

        return zeta, back

    def sums(self, g):
        """Σg·x̂ and Σg over the positions of each row, (rows, channels)."""
        if self._latest is not None and self._latest[0] is g:
            return self._latest[1]
        return self._sums(g)

    def _sums(self, g):
        sums = of_any_size(self.sums_of, *self._fixed)(g, *self._held)
        for each in sums:
            each.set_shape([None, g.shape[-1]])
        return sums

    @staticmethod
    def forward(*args):
        """Maps this, inputs, γ and β to ζ and what the others need of it."""
        raise NotImplementedError

    @staticmethod
    def sums_of(*args):
        """Maps this, g and what `forward` found to what `sums` returns."""
        raise NotImplementedError

    def _by_input(self, g, gamma, sums):
        """The cotangent of the inputs."""
        raise NotImplementedError


class _LastAxis(_WithDerivative):
    """All positions, each normalized over its channels."""

    def _fixed_of(self, layer):
        epsilon = layer.epsilon
        # As in Keras.
        return (keras.config.epsilon() if epsilon is None else epsilon,)

    @staticmethod
    def forward(epsilon, inputs, gamma, beta):
        d = inputs - tf.reduce_mean(inputs, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(d), -1, keepdims=True)
        r = tf.math.rsqrt(variance + epsilon)
        normal = d * r
        return normal * gamma + beta, normal, r

    @staticmethod
    def sums_of(_, g, normal, r):
        of_gamma = tf.reduce_sum(positions(g * normal), 1)
        return of_gamma, tf.reduce_sum(positions(g), 1)

    def _by_input(self, g, gamma, sums):
        return of_any_size(self.backward)(g, gamma, *self._held)

    @staticmethod
    def backward(g, gamma, normal, r):
        h = g * gamma
        mean = tf.reduce_mean(h, -1, keepdims=True)
        slope = tf.reduce_mean(h * normal, -1, keepdims=True)
        return r * (h - mean - normal * slope)


class _Groups(_WithDerivative):
    """Groups of channels, normalized over all positions; channels come last.

    Both means follow from Σg·x̂ and Σg over the positions, which are the
    gradients of γ and β by example: they are taken once for both. And a sum
    over positions first, then over the channels of a group, takes a CPU less
    time than a sum over both at once.
    """

    def _fixed_of(self, layer):
        return layer.groups, layer.epsilon

    @staticmethod
    def forward(groups, epsilon, inputs, gamma, beta):
        x = positions(inputs)
        d = x - _mean(groups, tf.reduce_mean(x, 1))[:, None]
        variance = _mean(groups, tf.reduce_mean(tf.square(d), 1))
        r = tf.math.rsqrt(variance + epsilon)
        zeta = d * (r * gamma)[:, None] + beta
        return shaped_as(inputs, zeta), d, r

    @staticmethod
    def sums_of(groups, _, g, d, r):
        g = positions(g)
        return r * tf.reduce_sum(g * d, 1), tf.reduce_sum(g, 1)

    def _by_input(self, g, gamma, sums):
        of_small = of_any_size(self.factors, *self._fixed)
        factor, slope, mean = of_small(gamma, *sums, *self._held)
        # Not in a function: what that is given, it cannot write over.
        away = self._held[0] * slope + mean
        return shaped_as(g, positions(g) * factor - away)

    @staticmethod
    def factors(groups, _, gamma, of_gamma, of_beta, d, r):
        """Of g, of d, and what is left of the cotangent; (rows, 1, C) each."""
        count = tf.cast(tf.shape(d)[1], d.dtype)
        mean = r * _mean(groups, gamma * of_beta) / count
        slope = r * r * _mean(groups, gamma * of_gamma) / count
        return [each[:, None] for each in (r * gamma, slope, mean)]


def _mean(groups, by_channel):
    """(rows, channels), means over the channels of a group for each."""
    width = size_of(by_channel, -1)
    each = width // groups
    parts = tf.reshape(by_channel, [-1, groups, each])
    means = tf.reduce_mean(parts, -1, keepdims=True)
    return tf.reshape(tf.tile(means, [1, 1, each]), [-1, width])


def _affine(layer, inputs, gamma, beta):
    axes = _axes(layer.axis, inputs.shape.rank)
    if 0 in axes or axes != sorted(axes):
        return NotImplemented
    neutral = []
    if gamma is not None:
        neutral.append((gamma, tf.ones(gamma.shape, gamma.dtype)))
    if beta is not None:
        neutral.append((beta, tf.zeros(beta.shape, beta.dtype)))
    with keras.StatelessScope(neutral):
        normalized = type(layer).call(layer, inputs)

    others = [i for i in range(1, inputs.shape.rank) if i not in axes]

    def broadcast(weight):
        sizes = iter(weight.shape)
        shape = [
            next(sizes) if i in axes else 1 for i in range(inputs.shape.rank)
        ]
        return keras.ops.reshape(weight, shape)

    def to_weight(rows):
        return tf.reduce_sum(rows, others) if others else rows

    zeta, terms = normalized, []
    if gamma is not None:
        zeta = zeta * keras.ops.cast(broadcast(gamma), zeta.dtype)
        unscaled = at_least_float32(normalized)
        terms.append(Small(gamma, lambda g: to_weight(g * unscaled)))
    if beta is not None:
        zeta = zeta + keras.ops.cast(broadcast(beta), zeta.dtype)
        terms.append(Small(beta, to_weight))
    return zeta, terms


def _axes(axis, rank):
    axes = [axis] if isinstance(axis, int) else list(axis)
    return [a % rank for a in axes]
