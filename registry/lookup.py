"""The table from layer classes to rules."""

from collections.abc import Callable
from typing import Any

import keras

from keras_fastclip import _keras


class LayerRegistry:
    """Maps layer classes to rules.

    A rule is a function with the arguments of the layer's `call`, preceded by
    the layer itself. It returns `(zeta, omega)`, or `(zeta, omega, psi)`:

    - `zeta`: the tensor through which the layer's weights act, usually the
      pre-activation; its first axis is the batch;
    - `omega`: maps the cotangent g of `zeta` to the squared norm of every
      example's gradient, shape `(batch,)`;
    - `psi`: what the layer does after `zeta`. Without it, that is the layer's
      `activation` if it has one, otherwise nothing.

    It may return `NotImplemented` to leave a call to the layer-local fallback.

    Args:
        parent: another registry in which to look for classes that this one
            does not hold.
    """

    def __init__(self, parent: "LayerRegistry | None" = None):
        self._rules: dict[type, Callable] = {}
        self._named: dict[str, Callable] = {}
        self._parent = parent

    def register(self, layer_class: type, rule: Callable) -> None:
        """Adds a rule; a class that has one already gets the new one."""
        if not isinstance(layer_class, type) or not issubclass(
            layer_class, keras.Layer
        ):
            raise ValueError(
                "A rule is registered for a subclass of keras.Layer; "
                f"received layer_class={layer_class!r}."
            )
        if not callable(rule):
            raise ValueError(
                f"The rule for {layer_class.__name__} must be a function; "
                f"received {rule!r}."
            )
        self._rules[layer_class] = rule

    def register_name(self, name: str, rule: Callable) -> None:
        """Adds a rule for a class of a package that may not be installed.

        Args:
            name: of the module and the class, "package.module.Class".
            rule: the rule.
        """
        self._named[name] = rule

    def lookup(self, layer: Any) -> Callable | None:
        """The rule for a layer, or None.

        A rule for a class serves a subclass only where `call` is not
        overridden, neither in the subclass nor on the instance: what a
        changed `call` computes is not what the rule knows.
        """
        if "call" in vars(layer):
            return None
        for base in type(layer).__mro__:
            rule = self._rules.get(base) or self._named.get(_full_name(base))
            if rule is not None:
                same = type(layer).call is base.call
                known = not _keras.is_quantized(layer) or serves_quantized(rule)
                return rule if same and known else None
        return self._parent.lookup(layer) if self._parent else None

    def __contains__(self, layer_class: type) -> bool:
        inherited = self._parent is not None and layer_class in self._parent
        return layer_class in self._rules or inherited

    def classes(self) -> list[type]:
        """The classes that have a rule, in order of registration."""
        inherited = self._parent.classes() if self._parent else []
        own = [c for c in self._rules if c not in inherited]
        return inherited + own

    def names(self) -> list[str]:
        """The names of classes that were registered by name."""
        return list(self._named)


def _full_name(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


def for_quantized(rule: Callable) -> Callable:
    """Marks a rule that also serves layers of quantized weights.

    Keras runs these through another method than `call`.
    """
    rule.for_quantized = True
    return rule


def serves_quantized(rule: Callable) -> bool:
    return getattr(rule, "for_quantized", False)


_default = LayerRegistry()


def default_registry() -> LayerRegistry:
    """The registry that holds the built-in rules.

    `register` without a registry adds to it, for the whole process.
    """
    return _default


def register(
    layer_class: type, registry: LayerRegistry | None = None
) -> Callable[[Callable], Callable]:
    """Registers a function as the rule of a layer class.

    Args:
        layer_class: a subclass of `keras.Layer`.
        registry: where to register; by default the registry that all models
            use, so the rule holds for the whole process.

    Returns:
        A decorator that returns the function unchanged.

    Example:

    ```python
    @keras_fastclip.register(MyLayer)  # its call returns x * self.scale
    def my_layer(layer, x):
        zeta = x * layer.scale

        def omega(g):
            return tf.reduce_sum((g * x) ** 2, axis=-1)

        return zeta, omega
    ```
    """
    table = _default if registry is None else registry

    def decorate(rule):
        table.register(layer_class, rule)
        return rule

    return decorate
