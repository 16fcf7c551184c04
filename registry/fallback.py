"""The layer-local fallback: exact for any layer, by brute force on that layer.

A layer without a rule runs as it is, and ζ is what it returns. The gradients
of its examples are vector-Jacobian products of this one layer, vectorized over
the examples: the layer is called again on the rows of a single example, with
the example's part of g. Memory is B times the layer's own weights.

A layer that draws random numbers would draw others when it is called again.
Such a layer is therefore run example by example in the forward pass too, each
example with a random seed of its own, which the second call repeats.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry.terms import (
    Rows,
    Term,
    at_least_float32,
)

# Layers that call their sublayers in a loop, where nothing can be captured:
# all weights below them are theirs.
OPAQUE = (
    keras.layers.RNN,
    keras.layers.TimeDistributed,
    keras.layers.SpectralNormalization,
)


class LayerLocal(Term):
    """Gradients of the examples by calling a function again on each.

    Args:
        function: the layer, or the part of it that ends in ζ.
        variables: the weights that the term is about.
        arguments: the call's `(args, kwargs)`.
        inputs: for each tensor in `arguments`, its rows, or None if all
            examples share it.
        outputs: the rows of each floating-point tensor that is returned.
        seeds: for a layer that draws random numbers, pairs of the state of a
            generator and its value for each example, (B, *state shape).
    """

    def __init__(
        self,
        function: Callable,
        variables: Sequence,
        arguments: Any,
        inputs: Sequence[Rows | None],
        outputs: Sequence[Rows],
        seeds: Sequence[tuple[Any, tf.Tensor]] = (),
    ):
        self.variables = tuple(variables)
        self._function = function
        self._arguments = arguments
        self._inputs = inputs
        self.output_rows = outputs
        self._seeds = seeds

    def _call(self, folded, states, values):
        """Calls the function on one example."""
        generators = [generator for generator, _ in self._seeds]
        mapping = list(zip(generators, states, strict=True))
        mapping += zip(self.variables, values, strict=True)
        folded = iter(folded)
        leaves = [
            leaf if rows is None else next(folded)
            for leaf, rows in self._leaves()
        ]
        args, kwargs = with_tensors(self._arguments, leaves)
        with keras.StatelessScope(mapping):
            return self._function(*args, **kwargs)

    def _leaves(self):
        return zip(tensors(self._arguments), self._inputs, strict=True)

    def _examples(self):
        """What differs between examples: rows of tensors, and seeds."""
        folded = [
            rows.fold(leaf) for leaf, rows in self._leaves() if rows is not None
        ]
        return folded, [states for _, states in self._seeds]

    def _values(self):
        return [tf.convert_to_tensor(_keras.raw(v)) for v in self.variables]

    def has_adjoint_for(self, g):
        return False

    def forward(self) -> Any:
        """What the function returns, computed example by example."""
        values = self._values()
        outputs = _keras.vectorized_map(
            lambda one: self._call(*one, values), self._examples()
        )
        leaves = [
            rows.unfold(leaf)
            for rows, leaf in zip(
                self.output_rows, tensors(outputs), strict=True
            )
        ]
        return with_tensors(outputs, leaves)

    def per_example(self, g, rows, form=None):
        del rows  # Every tensor of the call has its own.
        values = self._values()
        cotangents = [
            rows.fold(c) for rows, c in zip(self.output_rows, g, strict=True)
        ]

        def one_example(one):
            folded, states, cotangents = one
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(values)
                outputs = self._call(folded, states, values)
            gradients = tape.gradient(
                float_tensors(outputs),
                values,
                output_gradients=cotangents,
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return [tf.convert_to_tensor(gradient) for gradient in gradients]

        gradients = _keras.vectorized_map(
            one_example, (*self._examples(), cotangents)
        )
        return tuple(at_least_float32(gradient) for gradient in gradients)


class UserRule(LayerLocal):
    """A rule that gives ζ and Ω only; 𝒜* is the derivative of its ζ."""

    has_omega = True

    def __init__(
        self, *args, omega: Callable[[tf.Tensor], tf.Tensor], **kwargs
    ):
        super().__init__(*args, **kwargs)
        self._omega = omega

    def has_adjoint_for(self, g):
        # The rule computes ζ, and its derivative, in the layer's precision.
        return at_least_float32(g).dtype == g.dtype

    def adjoint(self, g, keep):
        # A kept example stands in for those left out: ζ may have no finite
        # derivative at theirs, nor at zeros, and 0·inf is NaN.
        leaves = [
            leaf if rows is None else _stand_in(rows.spread(keep), leaf)
            for leaf, rows in self._leaves()
        ]
        args, kwargs = with_tensors(self._arguments, leaves)
        variables = [_keras.raw(v) for v in self.variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            zeta = self._function(*args, **kwargs)
        gradients = tape.gradient(
            zeta,
            variables,
            output_gradients=g,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        some = tf.reduce_any(keep)
        return tuple(
            tf.where(some, gradient, tf.zeros_like(gradient))
            for gradient in gradients
        )

    def per_example(self, g, rows, form=None):
        return super().per_example([g], rows)

    def omega(self, g, rows, form=None):
        norms = self._omega(g)
        if norms.shape.rank != 1:
            raise ValueError(
                "omega must return one squared norm for each example, shape "
                f"(batch,); for weights {[v.path for v in self.variables]} "
                f"it returned shape {norms.shape}."
            )
        return at_least_float32(norms)

    def prefers_omega(self, rows):
        return True


def _stand_in(keep, tensor):
    """The first row to keep in place of every row not to keep."""
    own = tf.range(tf.shape(tensor)[0])
    first = tf.argmax(tf.cast(keep, tf.float32), output_type=own.dtype)
    return tf.gather(tensor, tf.where(keep, own, first))


def tensors(structure: Any) -> list[tf.Tensor]:
    """The tensors in a nested structure."""
    return [leaf for leaf in keras.tree.flatten(structure) if _is_tensor(leaf)]


def float_tensors(structure: Any) -> list[tf.Tensor]:
    """The tensors in a nested structure that have a derivative."""
    return [t for t in tensors(structure) if t.dtype.is_floating]


def with_tensors(structure: Any, leaves: Sequence[tf.Tensor]) -> Any:
    """The structure with other tensors in place of its own."""
    leaves = iter(leaves)
    return keras.tree.map_structure(
        lambda leaf: next(leaves) if _is_tensor(leaf) else leaf, structure
    )


def _is_tensor(leaf):
    return isinstance(leaf, tf.Tensor)
