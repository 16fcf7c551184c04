"""The table from layer classes to rules."""

import importlib

import keras
import pytest
from keras import layers

import keras_fastclip
from keras_fastclip.registry import LayerRegistry, default_registry, register


class PlainLayer(layers.Layer):
    def call(self, x):
        return x


class Inherits(PlainLayer):
    def build(self, shape):
        self.extra = self.add_weight(shape=())


class Overrides(PlainLayer):
    def call(self, x):
        return 2 * super().call(x)


class InheritsOverridden(Overrides):
    pass


def first_rule(layer, x):
    raise NotImplementedError


def second_rule(layer, x):
    raise NotImplementedError


@pytest.fixture
def registry():
    registry = LayerRegistry()
    registry.register(PlainLayer, first_rule)
    return registry


def test_class_finds_its_rule(registry):
    assert registry.lookup(PlainLayer()) is first_rule


def test_subclass_that_keeps_call_finds_the_rule(registry):
    assert registry.lookup(Inherits()) is first_rule


@pytest.mark.parametrize("subclass", [Overrides, InheritsOverridden])
def test_subclass_that_overrides_call_finds_none(registry, subclass):
    assert registry.lookup(subclass()) is None


def test_subclass_that_overrides_call_may_have_a_rule_of_its_own(registry):
    registry.register(Overrides, second_rule)
    assert registry.lookup(Overrides()) is second_rule
    assert registry.lookup(InheritsOverridden()) is second_rule
    assert registry.lookup(PlainLayer()) is first_rule


def test_rule_of_the_nearest_class_wins(registry):
    registry.register(Inherits, second_rule)
    assert registry.lookup(Inherits()) is second_rule


def test_instance_that_overrides_call_finds_none(registry):
    layer = PlainLayer()
    layer.call = lambda x: 2 * x
    assert registry.lookup(layer) is None
    assert registry.lookup(PlainLayer()) is first_rule


def test_unknown_class_finds_none(registry):
    assert registry.lookup(layers.Dense(1)) is None
    assert layers.Dense not in registry


def test_later_rule_replaces_the_earlier_one(registry):
    registry.register(PlainLayer, second_rule)
    assert registry.lookup(PlainLayer()) is second_rule
    assert registry.classes() == [PlainLayer]


# -- parents ------------------------------------------------------------------


def test_child_falls_back_on_its_parent(registry):
    child = LayerRegistry(parent=registry)
    assert child.lookup(PlainLayer()) is first_rule
    assert PlainLayer in child
    assert child.classes() == [PlainLayer]


def test_child_wins_over_its_parent_and_leaves_it_alone(registry):
    child = LayerRegistry(parent=registry)
    child.register(PlainLayer, second_rule)
    child.register(Overrides, second_rule)
    assert child.lookup(PlainLayer()) is second_rule
    assert registry.lookup(PlainLayer()) is first_rule
    assert Overrides in child and Overrides not in registry
    assert child.classes() == [PlainLayer, Overrides]


def test_child_of_the_default_registry_knows_the_built_in_rules():
    child = LayerRegistry(parent=default_registry())
    layer = layers.Dense(1)
    assert child.lookup(layer) is default_registry().lookup(layer)
    assert default_registry().lookup(layer) is not None


# -- registration -------------------------------------------------------------


@pytest.mark.parametrize(
    "layer_class", [int, "Dense", None, keras.Loss, keras.Variable]
)
def test_rule_is_registered_for_a_layer_class_only(registry, layer_class):
    with pytest.raises(ValueError, match="subclass of keras.Layer"):
        registry.register(layer_class, first_rule)


def test_rule_is_registered_for_a_class_not_for_a_layer(registry):
    with pytest.raises(ValueError, match="subclass of keras.Layer"):
        registry.register(PlainLayer(), first_rule)


@pytest.mark.parametrize("rule", [None, 3, "rule"])
def test_rule_must_be_callable(registry, rule):
    with pytest.raises(ValueError, match="PlainLayer must be a function"):
        registry.register(PlainLayer, rule)
    assert registry.lookup(PlainLayer()) is first_rule


def test_decorator_returns_the_function_and_keeps_to_its_registry():
    registry = LayerRegistry()
    decorated = register(PlainLayer, registry=registry)(first_rule)
    assert decorated is first_rule
    assert registry.lookup(PlainLayer()) is first_rule
    assert PlainLayer not in default_registry()


def test_decorator_without_a_registry_adds_to_the_default_one():
    class OfThisTest(PlainLayer):
        def call(self, x):
            return x

    keras_fastclip.register(OfThisTest)(first_rule)
    assert default_registry().lookup(OfThisTest()) is first_rule


@pytest.mark.parametrize(
    "make", [layers.BatchNormalization, lambda: layers.ConvLSTM1D(1, 2)]
)
def test_relatives_that_compute_something_else_have_no_rule(make):
    assert default_registry().lookup(make()) is None


# -- classes by name, and quantized layers ------------------------------------


def test_class_is_found_by_name(registry):
    name = f"{Overrides.__module__}.{Overrides.__qualname__}"
    registry.register_name(name, second_rule)
    assert registry.lookup(Overrides()) is second_rule
    assert registry.lookup(PlainLayer()) is first_rule


def test_named_classes_of_keras_hub_exist():
    names = default_registry().names()
    assert len(names) > 20
    for name in names:
        module, _, cls = name.rpartition(".")
        found = getattr(importlib.import_module(module), cls)
        assert issubclass(found, keras.Layer)


def test_rule_serves_quantized_layers_only_if_it_says_so():
    layer = layers.Dense(2)
    layer.build((None, 2))
    layer.quantize("int8")
    assert default_registry().lookup(layer) is not None
    registry = LayerRegistry()
    registry.register(layers.Dense, first_rule)
    assert registry.lookup(layer) is None
