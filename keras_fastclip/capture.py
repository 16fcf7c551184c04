"""Interception of layer calls: the forward pass that leaves a record.

While a `Recording` is open, every layer that owns trained weights runs through
its rule, and ζ of each call is watched by the tape. The tape watches nothing
else, so the one backward pass yields the cotangents of the ζ's and never a
weight gradient; but for methods with a second backward pass, whose tape
watches the weights as well.
"""

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_fastclip import _keras
from keras_fastclip.registry.activation import with_own_derivative
from keras_fastclip.registry.fallback import (
    OPAQUE,
    LayerLocal,
    UserRule,
    float_tensors,
    tensors,
    with_tensors,
)
from keras_fastclip.registry.lookup import LayerRegistry
from keras_fastclip.registry.terms import ONE_ROW, Rows, Term
from keras_fastclip.registry.wrappers import rewrite_of


@dataclasses.dataclass(frozen=True)
class Unit:
    """A layer whose calls are captured.

    Attributes:
        layer: the layer.
        path: its name in messages; unique within the model.
        variables: the trained weights that its calls account for: its own,
            or all weights below it if it is opaque.
        rule: its rule, or None for the fallback.
        random: whether it draws random numbers when called; known after the
            probe, and of interest for the fallback only.
    """

    layer: keras.Layer
    path: str
    variables: tuple
    rule: Callable | None
    random: bool = False

    @property
    def call_name(self) -> str:
        """Keras runs quantized layers through another method."""
        return "quantized_call" if _keras.is_quantized(self.layer) else "call"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which rows of a call's tensors belong to which example.

    Attributes:
        inputs: for each tensor among the call's arguments its rows, or None
            if all examples share it.
        outputs: the rows of each floating-point tensor that is returned.
        repeat: how to give a batch axis to a call that has none, such as the
            lookup of a position table: "tile" the leading axis of size one,
            "stack" a new one, or None.
    """

    inputs: tuple[Rows | None, ...]
    outputs: tuple[Rows, ...]
    repeat: str | None = None


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is told of a layer in `clipping_summary`.

    Attributes:
        rule: "closed form", "own" for a user's, or "fallback".
        calls: how often it is called in a forward pass.
        sizes: T, d and p of its largest term; None where there are none.
    """

    rule: str
    calls: int
    sizes: tuple[int | None, int | None, int | None] = (None, None, None)


Rewrites = tuple[tuple[keras.Layer, Callable], ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the probe found out about a model; see `probe.py`.

    Attributes:
        units: the layers to capture.
        rewrites: layers that are run in another way, with that way.
        layouts: by (path, number of the call), the layout of each call.
        reached: the calls that the losses depend on; None while the probe is
            finding out.
        facts: the units that are called, with facts about them.
        traits: what the ways to serve the weights depend on, by part.
        numbers: of weights, and of activations of an example.
    """

    units: tuple[Unit, ...]
    rewrites: Rewrites
    layouts: dict[tuple[str, int], Layout]
    reached: frozenset[tuple[str, int]] | None
    facts: tuple[tuple[Unit, Facts], ...] = ()
    traits: tuple[Any, ...] = ()
    numbers: tuple[int, int] = (0, 0)

    @property
    def multiplications(self) -> int:
        """By kernels, in the forward pass of an example."""
        items = [part.item for part in self.traits if part.item is not None]
        return sum(item.multiplications for item in items)


@dataclasses.dataclass(frozen=True)
class Call:
    """One captured call.

    Attributes:
        unit: the layer.
        key: (path, number of the call in this forward pass).
        zetas: the tensors through which the weights act.
        rows: the rows of the first of them.
        terms: how the weights act on them.
        single: whether g is one tensor (a rule) or a list (the fallback).
    """

    unit: Unit
    key: tuple[str, int]
    zetas: list[tf.Tensor]
    rows: Rows
    terms: list[Term]
    single: bool


@dataclasses.dataclass(frozen=True)
class Use:
    """A term with the cotangent that the backward pass brought it."""

    term: Term
    g: Any
    rows: Rows
    unit: Unit


def find_units(
    model: keras.Model,
    registry: LayerRegistry,
    opaque: frozenset[int] = frozenset(),
    random: frozenset[int] = frozenset(),
    adopted: Mapping[int, keras.Layer] = types.MappingProxyType({}),
) -> tuple[Unit, ...]:
    """The layers of a model that own trained weights.

    Args:
        model: the model, built.
        registry: where to look for rules.
        opaque: ids of layers to treat as one piece with all below them.
        random: ids of layers known to draw random numbers.
        adopted: by id of a layer whose calls cannot be captured, the layer
            around it whose calls account for its weights, by the fallback.
    """
    units, inside, seen, children = [], set(), {}, {}
    layers = _keras.layers_of(model)
    for layer in layers:
        if id(layer) in adopted:
            holder = adopted[id(layer)]
            children.setdefault(id(holder), []).append(layer)
    for layer in layers:
        if id(layer) in inside or id(layer) in adopted:
            continue
        whole = isinstance(layer, OPAQUE) and rewrite_of(layer) is None
        if whole or id(layer) in opaque:
            below = _keras.layers_of(layer)
            inside.update(id(sublayer) for sublayer in below)
            variables = layer.trainable_variables
        else:
            variables = [
                variable
                for owner in [layer, *children.get(id(layer), [])]
                for variable in _keras.own_trainable_variables(owner)
            ]
        forced = id(layer) in children or id(layer) in opaque
        rule = None if forced else registry.lookup(layer)
        if not variables:
            continue
        path = layer.path or layer.name
        seen[path] = seen.get(path, 0) + 1
        if seen[path] > 1:
            path = f"{path}#{seen[path]}"
        units.append(
            Unit(layer, path, tuple(variables), rule, id(layer) in random)
        )
    return tuple(units)


def find_rewrites(
    model: keras.Model, opaque: frozenset[int] = frozenset()
) -> Rewrites:
    """The layers to be run in another way, unless they are opaque."""
    found = [
        (layer, rewrite_of(layer))
        for layer in _keras.layers_of(model)
        if id(layer) not in opaque and layer.trainable_variables
    ]
    return tuple(pair for pair in found if pair[1] is not None)


Handler = Callable[[Unit, tuple[str, int], Callable, tuple, dict], Any]


@contextlib.contextmanager
def intercept(
    units: tuple[Unit, ...], handler: Handler, rewrites: Rewrites = ()
) -> Iterator[None]:
    """Routes the calls of the units' layers through a handler.

    The handler gets the unit, the key of the call, the layer's own method and
    its arguments, and returns what the layer is to return. A layer that calls
    itself again inside its handler is not intercepted a second time.
    """
    counts, running = {}, set()

    def route(unit, method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            if unit.path in running:
                return method(*args, **kwargs)
            args, kwargs = _keras.with_values((args, kwargs))
            number = counts.get(unit.path, 0)
            counts[unit.path] = number + 1
            running.add(unit.path)
            try:
                key = (unit.path, number)
                return handler(unit, key, method, args, kwargs)
            finally:
                running.remove(unit.path)

        return call

    changed = []

    def exchange(layer, name, method):
        held = vars(layer)
        changed.append((held, name, held.get(name)))
        held[name] = method

    try:
        for layer, rewrite in rewrites:
            other = functools.partial(rewrite, layer)
            exchange(layer, "call", functools.wraps(layer.call)(other))
        for unit in units:
            method = getattr(unit.layer, unit.call_name)
            exchange(unit.layer, unit.call_name, route(unit, method))
        yield
    finally:
        for held, name, before in reversed(changed):
            if before is None:
                held.pop(name, None)
            else:
                held[name] = before


class Recording:
    """The forward pass of a private step.

    Example:

    ```python
    with Recording(plan, batch_size) as recording:
        losses = per_example_losses(model(x, training=True), y)
    uses, _ = recording.backward(losses)
    ```

    Args:
        plan: what the probe found out.
        batch_size: the number of rows that go through the model.
        twice: whether there will be a second backward pass, to the weights.
            Only then are they on the tape, and only then do their gradients
            come to be.
    """

    def __init__(self, plan: Plan, batch_size: tf.Tensor, twice: bool = False):
        self.calls: list[Call] = []
        self._plan = plan
        self._batch_size = batch_size
        self._twice = twice
        self._tape = tf.GradientTape(
            persistent=twice, watch_accessed_variables=False
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Recording":
        plan = self._plan
        self._stack.enter_context(_keras.own_operations())
        self._stack.enter_context(
            intercept(plan.units, self._on_call, plan.rewrites)
        )
        self._stack.enter_context(self._tape)
        if self._twice:
            weights = [v for unit in plan.units for v in unit.variables]
            self._tape.watch([_keras.raw(v) for v in weights])
        return self

    def __exit__(self, *exception):
        return self._stack.__exit__(*exception)

    def _on_call(self, unit, key, method, args, kwargs):
        call, finish = captured(
            unit, key, self._layout(key), method, args, kwargs, self._batch_size
        )
        self.calls.append(call)
        self._tape.watch(call.zetas)
        return finish(call.zetas)

    def _layout(self, key):
        layout = self._plan.layouts.get(key)
        if layout is None:
            raise RuntimeError(
                f"Layer {key[0]!r} was called {key[1] + 1} times or more in "
                "this forward pass, fewer when the model was checked. A model "
                "whose layers are called a varying number of times cannot be "
                "clipped exactly: pad its inputs to one length."
            )
        return layout

    def backward(
        self, losses: tf.Tensor, scale: float = 1.0
    ) -> tuple[list[Use], set[tuple[str, int]]]:
        """One backward pass, to the ζ's only.

        Args:
            losses: one loss for each example.
            scale: what losses, and so cotangents, are multiplied by.

        Returns:
            The terms of all calls that the losses depend on, with their
            cotangents, and the keys of these calls.
        """
        zetas = [zeta for call in self.calls for zeta in call.zetas]
        scales = None if scale == 1 else scale * tf.ones_like(losses)
        gradients = iter(
            self._tape.gradient(losses, zetas, output_gradients=scales)
        )
        uses, reached = [], set()
        for call in self.calls:
            g = [next(gradients) for _ in call.zetas]
            if all(part is None for part in g):
                continue
            reached.add(call.key)
            g = [
                tf.zeros_like(zeta) if part is None else _shaped(part, zeta)
                for zeta, part in zip(call.zetas, g, strict=True)
            ]
            g = g[0] if call.single else g
            uses += [Use(term, g, call.rows, call.unit) for term in call.terms]
        expected = self._plan.reached
        if expected is not None and reached != expected:
            paths = sorted({key[0] for key in reached ^ expected})
            raise RuntimeError(
                f"The calls of {paths} do not reach the losses as they did "
                "when the model was checked; this happens to a layer that is "
                "called inside a loop. Register a rule for the layer that "
                "runs the loop, or unroll it."
            )
        return uses, reached

    def backward_again(
        self, losses: tf.Tensor, factors: tf.Tensor, weights: list
    ) -> list[tf.Tensor]:
        """The gradients of Σᵢ cᵢ·lossᵢ by weights that it depends on."""
        found = self._tape.gradient(
            losses,
            [_keras.raw(weight) for weight in weights],
            output_gradients=tf.cast(factors, losses.dtype),
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.convert_to_tensor(gradient) for gradient in found]


def _shaped(g, zeta):
    """g as a tensor with the shape of ζ; a backward pass may have lost it."""
    g = tf.convert_to_tensor(g)
    known = g.shape.rank is not None
    if known and g.shape.as_list() == zeta.shape.as_list():
        return g  # Some rules know the very tensor again.
    return tf.ensure_shape(g, zeta.shape)


def facts_of(calls: list[Call]) -> tuple[tuple[Unit, Facts], ...]:
    """Facts about the layers that made some calls, in order of the calls."""
    by_path: dict[str, list[Call]] = {}
    for call in calls:
        by_path.setdefault(call.unit.path, []).append(call)
    return tuple((c[0].unit, _facts(c)) for c in by_path.values())


def _facts(calls):
    first = calls[0]
    terms = [term for term in first.terms if term.sizes(first.rows)]
    if not first.single:
        return Facts("fallback", len(calls))
    if any(isinstance(term, UserRule) for term in first.terms):
        return Facts("own", len(calls))
    if not terms:
        return Facts("closed form", len(calls))
    largest = max(terms, key=lambda term: math.prod(term.variables[0].shape))
    return Facts("closed form", len(calls), largest.sizes(first.rows))


def captured(
    unit: Unit,
    key: tuple[str, int],
    layout: Layout,
    method: Callable,
    args: tuple,
    kwargs: dict,
    batch_size: tf.Tensor,
) -> tuple[Call, Callable]:
    """Runs a call up to ζ.

    Returns:
        The captured call, and a function from ζ's to what the layer returns.
    """
    arguments = (args, kwargs)
    if layout.repeat:
        arguments = repeated(arguments, layout.repeat, batch_size)
    if unit.rule is not None:
        found = _by_rule(unit, key, layout, arguments)
        if found is not None:
            return found
    return _by_fallback(unit, key, layout, method, arguments)


def _by_rule(unit, key, layout, arguments):
    args, kwargs = arguments
    result = unit.rule(unit.layer, *args, **kwargs)
    if result is NotImplemented:
        return None
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ValueError(
            f"The rule for layer {unit.path!r} must return (zeta, omega) or "
            f"(zeta, omega, psi); it returned {result!r}."
        )
    zeta, omega, *rest = result
    psi = getattr(unit.layer, "activation", None)
    psi = rest[0] if rest else with_own_derivative(psi)
    rows = layout.outputs[0] if layout.outputs else ONE_ROW
    if callable(omega):
        if rows != ONE_ROW or unit.random:
            # A user's Ω knows one row an example, and the derivative of ζ
            # would be taken with other random numbers than ζ itself.
            return None

        def to_zeta(*args, **kwargs):
            with _keras.autocast(unit.layer):
                return unit.rule(unit.layer, *args, **kwargs)[0]

        terms = [
            UserRule(
                to_zeta,
                unit.variables,
                arguments,
                layout.inputs,
                layout.outputs,
                omega=omega,
            )
        ]
    else:
        trained = {id(v) for v in unit.variables}
        terms = [t for t in omega if id(t.variables[0]) in trained]
    # A tensor of its own, for the tape to watch.
    zetas = [_keras.identity(zeta)]
    call = Call(unit, key, zetas, rows, terms, single=True)
    return call, lambda zetas: psi(zetas[0]) if psi else zetas[0]


def _by_fallback(unit, key, layout, method, arguments):
    layer, training = unit.layer, _keras.training_phase(unit.layer)
    leaves = tensors(arguments)
    masked = [
        i for i, leaf in enumerate(leaves) if _keras.mask_of(leaf) is not None
    ]

    def again(masks, args, kwargs):
        for i, mask in zip(masked, masks, strict=True):
            tensors((args, kwargs))[i]._keras_mask = mask
        if training is not None:
            kwargs = {**kwargs, "training": training}
        return layer(*args, **kwargs)

    seeds = _seeds_by_example(layer, arguments, layout) if unit.random else ()
    term = LayerLocal(
        again,
        unit.variables,
        (([_keras.mask_of(leaves[i]) for i in masked], *arguments), {}),
        (*(layout.inputs[i] for i in masked), *layout.inputs),
        layout.outputs,
        seeds,
    )
    args, kwargs = arguments
    outputs = term.forward() if unit.random else method(*args, **kwargs)
    zetas = [_keras.identity(output) for output in float_tensors(outputs)]

    def finish(zetas):
        zetas = iter(zetas)
        return with_tensors(
            outputs,
            [
                next(zetas) if leaf.dtype.is_floating else leaf
                for leaf in tensors(outputs)
            ],
        )

    return Call(unit, key, zetas, ONE_ROW, [term], single=False), finish


def _seeds_by_example(layer, arguments, layout):
    """Fresh states of the layer's random generators for each example."""
    examples = next(
        tf.shape(leaf)[0] // rows.per_example
        for leaf, rows in zip(tensors(arguments), layout.inputs, strict=True)
        if rows is not None
    )
    seeds = []
    for state in _keras.seed_states(layer):
        value = tf.convert_to_tensor(_keras.raw(state))
        fresh = tf.random.stateless_uniform(
            [examples, *state.shape],
            tf.cast(value, tf.int64),
            minval=None,
            maxval=None,
            dtype=tf.int32,
        )
        seeds.append((state, tf.cast(fresh, value.dtype)))
        state.assign_add(tf.constant([0, 1], value.dtype))
    return seeds


def repeated(arguments, repeat, batch_size):
    """Gives the tensors of a call without a batch axis one."""

    def tile(leaf):
        if repeat == "stack":
            leaf = leaf[None]
        shape = tf.concat([[batch_size], tf.shape(leaf)[1:]], 0)
        return tf.broadcast_to(leaf, shape)

    return with_tensors(arguments, [tile(leaf) for leaf in tensors(arguments)])
