"""The check of a model before its first step: refuse it, or know it exactly.

The probe runs the model on a few examples of its own data, on as few as will
tell one from another: every run delays the first step. It runs it eagerly, but
for the many runs in which one example after the other is exchanged. It asks:

1. *Layout.* Which rows of each layer's tensors belong to which example? Calls
   without a batch axis and calls with other axes folded into it are found by
   running batches of two sizes.
2. *State.* Does the forward pass write anything about the data into variables?
3. *Mixing.* Does the loss of an example depend on another example, by value or
   by derivative, or on how many there are?
4. *Coverage.* With the weights held constant inside the captured calls, does
   any trained weight still reach the losses?
5. *Rules.* Do they compute what their layers compute, and do they give the
   norms and sums that plain automatic differentiation gives, example by
   example?

A model that passes is clipped exactly; one that does not is refused with the
name of the layer and a remedy. Nothing the probe does changes the model: all
variables that it touches get their values back.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, capture, heap, methods
from keras_fastclip.capture import Layout, Plan, Recording, Unit
from keras_fastclip.losses import first_tensor
from keras_fastclip.parts import make_parts
from keras_fastclip.registry.fallback import (
    UserRule,
    float_tensors,
    tensors,
    with_tensors,
)
from keras_fastclip.registry.lookup import LayerRegistry
from keras_fastclip.registry.terms import (
    ONE_ROW,
    Rows,
    at_least_float32,
    squared_norm,
)
from keras_fastclip.views import forward

# One example, and another that must not matter to it.
FEW = 2
# To see what the number of examples changes.
MORE = 3
# To see them mix: losses may compare an example with one of its class and two
# of others, and a random shuffle must not leave all in place.
MANY = 4
# Of the gradients in the sum that is compared: all different.
FACTORS = (1.0, 0.5)

# Rounding that the comparison of norms and sums allows for. The rules are
# right or wrong, and wrong ones are off by far more. Some models compute parts
# in float32 whatever their type.
NORM_TOLERANCE = {
    "float64": 1e-6,
    "float32": 2e-3,
    "bfloat16": 0.1,
    "float16": 0.1,
}


class NotPrivateError(ValueError):
    """A model that cannot be trained privately as it is."""


class _NotCaptured(NotPrivateError):
    """Calls of a layer, or a weight of it, that cannot be captured."""

    def __init__(self, layer, message):
        super().__init__(message)
        self.layer = layer


@_keras.plain_addition()
def probe(
    model: keras.Model,
    batch: tuple[Any, Any, Any],
    registry: LayerRegistry,
    *,
    strict: bool = False,
    views: int = 1,
) -> Plan:
    """Checks a model and finds out how to capture its calls.

    Args:
        model: a compiled model.
        batch: (x, y, sample_weight); a few examples are enough.
        registry: where to look for rules.
        strict: refuse layers without a rule.
        views: how often each example goes through the model.

    Returns:
        The plan for `Recording`.

    Raises:
        NotPrivateError: the model mixes examples, keeps statistics of the
            data, or reads a weight in a way that cannot be captured.
    """
    seed_kept = _keras.tensorflow_seed_kept
    with heap.tidied(), _keras.eager_scope(), seed_kept():
        return _Probe(model, batch, registry, strict, views).run()


class _Probe:
    def __init__(self, model, batch, registry, strict, views):
        self.model, self.registry, self.strict = model, registry, strict
        self.views = views
        self.data = _usable(batch)
        self.many = _examples(self.data, MANY)
        self.more = _first(self.many, MORE)
        self.batch = _first(self.many, FEW)
        kept = [*model.non_trainable_variables, *_keras.seed_states(model)]
        saved = _keras.values(kept)
        # Builds what is not built yet.
        _keras.call_model(model, self.batch[0], training=False)
        _keras.assign(kept, saved)
        self.state = _State(model)
        self.rewrites, self.opaque = (), frozenset()
        self.adopted = {}
        self.looks = {}
        self.graph = None

    def run(self) -> Plan:
        with self.state.unchanged():
            self._check_loss_and_randomness()
            for run in self._runs():
                self._check_values(self.many, run)
                self._check_other_random_numbers(run)
                self._check_integers(run)
            self.graph = None  # It holds the probe, which it is part of.
            self._check_size()
            while True:
                try:
                    return self._plan()
                except _NotCaptured as error:
                    self._adopt(error)

    def _plan(self):
        units = self._find_units()
        plan = Plan(units, self.rewrites, self._layouts(units), None)
        self._check_coverage_and_rules(plan)
        return self._check_derivatives(plan)

    def _adopt(self, error):
        """Lets the layer around account for a layer that is not captured.

        The layer around goes to the fallback, which takes the gradients of
        all that is read inside its call. If that does not work either, the
        layer around that one does. A weight that is read outside of all
        layers is refused.
        """
        layer = error.layer
        present = self.adopted.get(id(layer), layer)
        holders = _keras.holders_of(self.model, present)
        if len(holders) != 1 or holders[0] is self.model:
            raise NotPrivateError(str(error)) from None
        for child, holder in list(self.adopted.items()):
            if holder is layer:
                self.adopted[child] = holders[0]
        self.adopted[id(layer)] = holders[0]

    # -- running the model -------------------------------------------------

    def _losses(self, batch, training=True):
        return forward(self.model, batch, self.views, training)[1]

    def _run(self, batch, units=(), handler=None, training=True, rewrites=None):
        """Losses from a fresh start, with calls of the units intercepted."""
        self.state.restore()
        if rewrites is None:
            rewrites = self.rewrites if units else ()
        with capture.intercept(units, handler, rewrites):
            return self._losses(batch, training)

    def _traced(self, batch):
        """`_run` of one of many batches of one shape, which is traced once."""
        self.state.restore()
        with _keras.as_written():
            return self.graph(batch)

    def _runs(self):
        """How losses of many batches are found: traced, which is faster.

        A model that cannot be traced runs eagerly, and so does one that draws
        random numbers whose seed would be that of the trace. One that computes
        something else when it is traced has to pass in both ways.
        """
        if self.model.run_eagerly or self.state.seed_tensorflow:
            return [self._run]
        self.graph = tf.function(self._losses, autograph=False)
        try:
            found = self._traced(self.many)
        except Exception:
            return [self._run]
        right = self._run(self.many)
        same = _close(found, right, _tolerance(right))
        return [self._traced] if same else [self._traced, self._run]

    # -- 2 and 3: state and mixing, by value --------------------------------

    def _check_loss_and_randomness(self):
        weights = _held(self.model.trainable_variables)
        self.base = self._run(self.batch)
        self._check_weights(weights)
        if not np.array_equal(self.base, self._again()):
            self.state.seed_tensorflow = True
            self.base = self._run(self.batch)
            if not np.array_equal(self.base, self._run(self.batch)):
                layer = self._culprit(self.batch, self.batch, _differ)
                raise NotPrivateError(
                    f"{_described(layer)} draws random numbers that cannot be "
                    "repeated, so the model cannot be checked. Draw them with "
                    "keras.random and a keras.random.SeedGenerator."
                )
        self.after = self.state.current()
        self.random = self.state.seed_tensorflow or self.state.seeds_moved()
        if self.views > 1 and not self.random:
            raise ValueError(
                f"views={self.views} would be {self.views} times the same: "
                "the model draws no random numbers in training. Begin it with "
                "layers that do, such as keras.layers.RandomTranslation, or "
                "leave out `views`."
            )

    def _again(self):
        """Losses of another run, which serves for a look if it can."""
        if capture.find_rewrites(self.model):
            # Run in another way, layers round otherwise.
            return self._run(self.batch)
        return self._look(self.batch).losses

    def _check_values(self, batch, run):
        """Exchanges one example after the other and looks at the rest."""
        base, state = run(batch), self.state.current()
        count = _count(batch)
        for j in range(count):
            changed = _with_other_example(batch, j, self.data)
            losses = run(changed)
            self._check_state(state)
            others = [i for i in range(count) if i != j]
            if not _close(
                np.take(losses, others), np.take(base, others), _tolerance(base)
            ):
                raise NotPrivateError(self._mixing_message(batch, changed, j))

    def _check_other_random_numbers(self, run):
        """As above: what mixes examples may do so now and then only."""
        for shift in range(1, 4) if self.random else ():
            self.state.seed_shift = shift
            self._check_values(self.many, run)
        self.state.seed_shift = 0

    def _check_integers(self, run):
        """As above, with integers that tell the examples apart."""
        if any(t.dtype.is_integer for t in tensors(self.batch[0])):
            # Made-up numbers need not be ones that the model takes.
            spread = _with_spread_integers(self.many, self.data)
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                self._check_values(spread, run)

    def _check_size(self):
        """Adds an example and looks at the rest."""
        if self.random:
            # With more rows, other random numbers are drawn.
            base = self._run(self.batch, training=False)
            state = self.state.current()
            losses = self._run(self.more, training=False)
            self._check_state(state)
        else:
            base, look = self.base, self._look(self.more)
            losses = look.losses
            self._check_state(self.after, look.after)
        tolerance = _rounding(_keras.layers_of(self.model))
        if not _close(losses[:FEW], base, tolerance):
            raise NotPrivateError(
                "The loss of one example changes with the number of examples "
                "in the batch, so no bound on the influence of a single "
                f"example holds. {_remedy(None)}"
            )

    def _check_state(self, right, found=None):
        found = self.state.current() if found is None else found
        for variable, before, after in zip(
            self.state.variables, right, found, strict=True
        ):
            if not _same(before, after):
                layer = self._owner(variable)
                raise NotPrivateError(
                    f"{_described(layer)} writes statistics of the data into "
                    f"its variable {_name(variable)!r} during training, where "
                    f"no noise protects them. {_remedy(layer)}"
                )

    def _check_weights(self, saved):
        """Refuses a forward pass that changed trained weights."""
        weights = self.model.trainable_variables
        pairs = zip(weights, saved, _held(weights), strict=True)
        changed = [v for v, old, new in pairs if not _same(old, new)]
        if changed:
            _keras.assign(weights, saved)
            # A wrapper that writes a weight of its layer holds it as well.
            layer = next(
                layer
                for layer in _keras.layers_of(self.model)
                if any(
                    v is changed[0]
                    for v in _keras.own_trainable_variables(layer)
                )
            )
            raise NotPrivateError(
                f"{_described(layer)} changes its trained weight "
                f"{_name(changed[0])!r} in the forward pass, before its "
                "gradient is taken. Use the layer inside it alone, or freeze "
                "it: layer.trainable = False."
            )

    def _owner(self, variable):
        for layer in reversed(_keras.layers_of(self.model)):
            held = [*layer.variables, *_keras.untracked_variables(layer)]
            if any(v is variable for v in held):
                return layer
        return self.model

    def _mixing_message(self, batch, changed, j):
        rows = _count(batch) * self.views

        def leak(before, after):
            """Whether other examples than j differ."""
            return any(
                b.shape.rank
                and b.shape[0] == rows
                and any(
                    not np.array_equal(b[i], a[i])
                    for i in range(rows)
                    if i // self.views != j
                )
                for b, a in zip(before, after, strict=False)
            )

        layer = self._culprit(batch, changed, leak)
        where = _described(layer) if layer else "The model or its loss"
        return (
            f"{where} mixes examples: the loss of one example changes with "
            "the data of another, so no bound on the influence of a single "
            f"example holds. {_remedy(layer)}"
        )

    def _culprit(self, batch, changed, differ):
        """The first layer whose outputs differ, but not its inputs."""
        layers = [
            Unit(layer, f"{index}", (), None)
            for index, layer in enumerate(_keras.layers_of(self.model))
            if layer is not self.model
        ]
        seen = {}

        def note(unit, key, method, args, kwargs):
            inputs = tensors((args, kwargs))  # The call may change a dict.
            outputs = method(*args, **kwargs)
            pair = (inputs, tensors(outputs))
            seen.setdefault(key, (unit.layer, []))[1].append(pair)
            return outputs

        self._run(batch, layers, note)
        self._run(changed, layers, note)
        culprits = [
            layer
            for layer, pairs in seen.values()
            if len(pairs) == 2
            and not differ(pairs[0][0], pairs[1][0])
            and differ(pairs[0][1], pairs[1][1])
        ]
        # A model that mixes does so through the innermost of its layers.
        return culprits[0] if culprits else None

    # -- 1: layout ----------------------------------------------------------

    def _look(self, batch, opaque=frozenset(), repeats=None):
        """Runs the layers as they are, once, and notes what they do.

        Args:
            batch: the data, of which only the number of examples counts.
            opaque: layers whose calls are one piece.
            repeats: how calls without a batch axis get one.
        """
        repeats = repeats or {}
        adopted = {child: id(layer) for child, layer in self.adopted.items()}
        key = _count(batch), opaque, *map(_frozen, (repeats, adopted))
        if key not in self.looks:
            self.looks[key] = self._new_look(batch, opaque, repeats)
        return self.looks[key]

    def _new_look(self, batch, opaque, repeats):
        units = capture.find_units(
            self.model, self.registry, opaque, adopted=self.adopted
        )
        rewrites = capture.find_rewrites(self.model, opaque)
        rewritten = tuple(
            Unit(layer, f"all of {layer.path}", (), None)
            for layer, _ in rewrites
        )
        shapes, drew = {}, set()
        rows = _count(batch) * self.views

        def note(unit, key, method, args, kwargs):
            if key in repeats:
                args, kwargs = capture.repeated(
                    (args, kwargs), repeats[key], rows
                )
            inputs = _shapes(tensors((args, kwargs)))
            states = _keras.seed_states(unit.layer)
            before = _keras.values(states)
            outputs = method(*args, **kwargs)
            if not np.array_equal(before, _keras.values(states)):
                drew.add(id(unit.layer))
            if unit.variables:
                shapes[key] = inputs, _shapes(float_tensors(outputs))
            return outputs

        losses = self._run(batch, units + rewritten, note, rewrites=rewrites)
        return _Look(
            units, rewrites, losses, self.state.current(), shapes, drew
        )

    def _find_units(self):
        """Units, with those that draw random numbers marked.

        A layer that draws random numbers and has no rule is run example by
        example, so nothing below it can be captured on its own.
        """
        opaque = frozenset()
        while True:
            look = self._look(self.batch, opaque)
            captured = {id(unit.layer) for unit in look.units}
            containers = {
                id(unit.layer)
                for unit in look.units
                if id(unit.layer) in look.drew
                and unit.rule is None
                and any(
                    id(layer) in captured
                    for layer in _keras.layers_of(unit.layer)[1:]
                )
            }
            containers |= {id(layer) for layer, _ in look.rewrites} & look.drew
            if containers <= opaque:
                self.rewrites, self.opaque = look.rewrites, opaque
                return capture.find_units(
                    self.model,
                    self.registry,
                    opaque,
                    frozenset(look.drew),
                    self.adopted,
                )
            opaque |= containers

    def _layouts(self, units):
        """Rows of each call, from batches of two sizes."""
        repeats = {}
        while True:
            large = self._look(self.more, self.opaque, repeats).shapes
            small = self._look(self.batch, self.opaque, repeats).shapes
            layouts, without_batch = {}, None
            for key, (inputs, outputs) in large.items():
                unit = next(u for u in units if u.path == key[0])
                if key not in small:
                    raise NotPrivateError(
                        f"{_described(unit.layer)} is called another number "
                        "of times when the batch has another size. Call it on "
                        "the whole batch, not in a loop over the examples."
                    )
                rows = [
                    _rows_of(unit, big, little)
                    for big, little in zip(
                        [*inputs, *outputs],
                        [*small[key][0], *small[key][1]],
                        strict=True,
                    )
                ]
                inputs, outputs = rows[: len(inputs)], rows[len(inputs) :]
                if None in outputs:
                    if any(r is not None for r in inputs) or not inputs:
                        raise _NotCaptured(unit.layer, _no_batch_message(unit))
                    without_batch = without_batch or key
                layouts[key] = Layout(
                    tuple(inputs), tuple(outputs), repeats.get(key)
                )
            if without_batch is None:
                return self._with_order(units, layouts)
            # One at a time: what follows a call gets its batch axis from it.
            if without_batch in repeats:
                unit = next(u for u in units if u.path == without_batch[0])
                raise _NotCaptured(unit.layer, _no_batch_message(unit))
            repeats[without_batch] = self._repeat(
                units, repeats, without_batch, large[without_batch][0]
            )

    def _repeat(self, units, repeats, key, inputs):
        """How to give a call without a batch axis one.

        Args:
            units: of the model.
            repeats: how other calls were given one.
            key: of the call.
            inputs: their shapes.
        """
        ones = all(shape.rank and shape[0] == 1 for shape in inputs)
        for repeat in ["tile", "stack"] if ones else ["stack"]:
            with contextlib.suppress(Exception):
                losses = self._look(
                    self.batch, self.opaque, {**repeats, key: repeat}
                ).losses
                if np.allclose(losses, self.base, rtol=_tolerance(self.base)):
                    return repeat
        unit = next(u for u in units if u.path == key[0])
        raise _NotCaptured(unit.layer, _no_batch_message(unit))

    def _observe(self, units, batch, repeats):
        """Runs the layers as they are and notes their tensors by call.

        Args:
            units: of the model.
            batch: the data.
            repeats: how calls without a batch axis get one.
        """
        seen, rows = {}, _count(batch) * self.views

        def note(unit, key, method, args, kwargs):
            if key in repeats:
                args, kwargs = capture.repeated(
                    (args, kwargs), repeats[key], rows
                )
            inputs = tensors((args, kwargs))  # The call may change a dict.
            outputs = method(*args, **kwargs)
            seen[key] = inputs, float_tensors(outputs)
            return outputs

        self._run(batch, units, note)
        return seen

    def _with_order(self, units, layouts):
        """Tells rows [i·k, (i+1)·k) of an example from rows i, i+B, ..."""
        folded = [
            key
            for key, layout in layouts.items()
            if any(
                r is not None and r.per_example > 1
                for r in (*layout.inputs, *layout.outputs)
            )
        ]
        if not folded:
            return layouts
        repeats = {key: layout.repeat for key, layout in layouts.items()}
        repeats = {key: repeat for key, repeat in repeats.items() if repeat}
        base = self._observe(units, self.many, repeats)
        changed = [
            _with_other_example(self.many, j, self.data) for j in range(MANY)
        ]
        runs = [self._observe(units, batch, repeats) for batch in changed]
        for key in folded:
            moved = [_moved_rows(base[key], run[key]) for run in runs]
            unit = next(u for u in units if u.path == key[0])
            layouts[key] = _ordered(unit, layouts[key], moved)
        return layouts

    # -- 4 and 5: coverage, and what rules compute ---------------------------

    def _check_coverage_and_rules(self, plan):
        """Holds weights constant up to ζ; none may reach the losses.

        Only the weights: a ζ that is cut would also hide every weight that
        reaches it through the layer's inputs. On the way, what a rule computes
        is compared with its layer, call by call.
        """
        variables = self.model.trainable_variables
        raw = [_keras.raw(v) for v in variables]
        wrong, small, rows = [], [], FEW * self.views
        stopped = []

        def hold(unit, key, method, args, kwargs):
            seeds = _keras.seed_states(unit.layer)
            drawn = [tf.convert_to_tensor(seed) for seed in seeds]
            # A rematerialized layer is called again in the backward pass, and
            # a layer inside one with a rule once more below.
            layout = plan.layouts.get(key)
            if unit.rule is not None and layout is not None:
                with _keras.weights_as_constants(unit.variables):
                    call, finish = capture.captured(
                        unit, key, layout, method, args, kwargs, rows
                    )
                if call.single:
                    outputs = finish(call.zetas)
                    _keras.assign(seeds, drawn)
                    with _stopped(tape, stopped):
                        right = method(*args, **kwargs)
                        if not self._same_output(unit, outputs, right):
                            wrong.append(unit)
                        small.extend(
                            self._small_call(call, layout, method, args, kwargs)
                        )
                    return outputs
                _keras.assign(seeds, drawn)
            # The fallback accounts for all that is read inside the call.
            with _keras.weights_as_constants(unit.variables):
                return method(*args, **kwargs)

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(raw)
            losses = self._run(self.batch, plan.units, hold)
        gradients = tape.gradient(losses, raw)
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                raise self._uncovered(variable)
        for unit in wrong:
            raise NotPrivateError(
                f"The rule for layer {unit.path!r} computes another output "
                "than the layer. Compare its zeta, and its psi or the layer's "
                "activation, with the layer's call."
            )
        for call in small:
            self._check_omega(call)

    def _small_call(self, call, layout, method, args, kwargs):
        """The call of a user's rule on small inputs.

        What is small beside large inputs shows there.
        """
        if any(isinstance(term, UserRule) for term in call.terms):
            args, kwargs = _small((args, kwargs))
            yield capture.captured(
                call.unit,
                call.key,
                layout,
                method,
                args,
                kwargs,
                FEW * self.views,
            )[0]

    def _uncovered(self, variable):
        return _NotCaptured(self._owner(variable), _uncovered_message(variable))

    def _same_output(self, unit, found, outputs):
        pairs = zip(float_tensors(found), float_tensors(outputs), strict=True)
        for mine, right in pairs:
            # A call without a batch axis may have been given one.
            mine, right = np.broadcast_arrays(_float64(mine), _float64(right))
            if not _close(mine, right, _rounding([unit.layer])):
                return False
        return True

    def _check_omega(self, call):
        """Ω of a user against the gradients of the user's ζ."""
        zeta, (term,) = call.zetas[0], call.terms
        g = tf.cast(tf.random.stateless_normal(zeta.shape, [1, 2]), zeta.dtype)
        found = _float64(term.omega(g, call.rows))
        right = sum(
            _float64(squared_norm(gradients))
            for gradients in term.per_example(g, call.rows)
        )
        if not _close(found, right, _rounding([call.unit.layer])):
            raise NotPrivateError(_wrong_rule_message("norms", call.unit.path))

    # -- 3 and 5: derivatives -----------------------------------------------

    def _check_derivatives(self, plan):
        """Norms and sums of the rules against plain differentiation."""
        raw = [_keras.raw(v) for v in self.model.trainable_variables]
        self.state.restore()
        with tf.GradientTape(persistent=True) as reference:
            reference.watch(raw)
            recording = Recording(plan, tf.constant(FEW * self.views))
            with recording:
                losses = self._losses(self.batch)
            each = tf.unstack(losses)
        calls = recording.calls
        self._check_same_model(calls, losses)
        self._report_fallbacks(calls)
        squares, total = self._differentiated(reference, each, calls)
        del reference
        uses, reached = recording.backward(losses)
        if not uses:
            raise NotPrivateError(
                "The loss depends on no trained weight. Check that the loss "
                "uses the model's outputs, and that layers which are to be "
                "trained have trainable=True."
            )
        parts = make_parts(uses)
        checked = dataclasses.replace(
            plan,
            reached=frozenset(reached),
            facts=capture.facts_of(calls),
            traits=tuple(part.traits for part in parts),
            numbers=methods.numbers(parts),
        )
        self._check_parts(parts, squares, total)
        return checked

    def _differentiated(self, reference, each, calls):
        """Plain differentiation, one example at a time.

        In the types of the gradients, or float32 if that is wider, and no
        tensor longer than it is needed: TensorFlow may keep for good what the
        check takes, and there may be as many numbers as the model has weights.

        Returns:
            For each example, the squared norms of its gradients by id of the
            weight; and the sums of the gradients times `FACTORS`.
        """
        variables = self.model.trainable_variables
        raw = [_keras.raw(v) for v in variables]
        zetas = [zeta for call in calls for zeta in call.zetas]
        squares, total = [], {}
        for j, (loss, factor) in enumerate(zip(each, FACTORS, strict=True)):
            gradients = reference.gradient(loss, [*zetas, *raw])
            self._check_rows(calls, iter(gradients[: len(zetas)]), j)
            gradients = gradients[: -1 - len(raw) : -1]
            squares.append({})
            for variable in variables:
                gradient = gradients.pop()
                if gradient is None:
                    continue
                gradient = at_least_float32(tf.convert_to_tensor(gradient))
                squares[j][id(variable)] = _sum_of_squares(gradient)
                # By NumPy, which gives memory back to the system.
                gradient = factor * gradient.numpy()
                if id(variable) in total:
                    gradient += total[id(variable)]
                total[id(variable)] = gradient
        return squares, total

    def _check_parts(self, parts, squares, total):
        """Takes the parts off their list, with the gradients that they keep."""
        covered = {id(v) for part in parts for v in part.variables}
        for variable in self.model.trainable_variables:
            reached = any(found.get(id(variable), 0) for found in squares)
            if reached and id(variable) not in covered:
                raise self._uncovered(variable)
        whole = sum(map(_sum_of_squares, total.values()))
        known = set()
        while parts:
            part = parts.pop(0)
            form, tells = part.ghost_form, part.ghost_form is not None
            # Once a ghost norm is right for a layer, it is for those of the
            # same sizes if what it is made from is right, which the norm of
            # their gradients shows in less time.
            again = form in known
            norms = part.built_norms() if again else part.squared_norms()
            for norm, found in zip(norms, squares, strict=True):
                right = sum(found.get(id(v), 0.0) for v in part.variables)
                least = 1e-4 * sum(found.values())
                scale = max(right, least)
                self._require_close(part, norm - right, scale, "norms")
                tells &= least < right < np.inf
            if tells:
                known.add(form)
            sums = part.weighted_sum(tf.constant(FACTORS, norms.dtype))
            for variable in part.variables:
                right = total.pop(id(variable), np.zeros([], "float32"))
                found = at_least_float32(sums.pop(id(variable))).numpy()
                gap = _sum_of_squares(found - right)
                scale = max(_sum_of_squares(right), 1e-4 * whole)
                self._require_close(part, gap, scale, "sums")

    def _check_same_model(self, calls, losses):
        """Rules must compute what their layers compute."""
        if any(call.unit.random and not call.single for call in calls):
            return  # other random numbers, so other losses
        tolerance = max(
            _tolerance(losses), 1e-2 * _keras.computes_in_half(self.model)
        )
        if not np.allclose(losses, self.base, rtol=tolerance, atol=tolerance):
            raise NotPrivateError(
                "With rules in place of its layers' `call` the model computes "
                "other losses. A rule returns a zeta (or psi) that is not what "
                "its layer computes."
            )

    def _check_rows(self, calls, gradients, j):
        for call in calls:
            outputs = self._zeta_rows(call)
            for rows in outputs:
                gradient = next(gradients)
                if gradient is None:
                    continue
                folded = rows.fold(tf.convert_to_tensor(gradient))
                by_example = folded.numpy()
                for i in range(FEW):
                    if i != j and np.any(by_example[i] != 0):
                        raise NotPrivateError(
                            f"The loss of one example depends on rows of "
                            f"{_described(call.unit.layer)} that belong to "
                            "another. Examples must not mix in a private "
                            "model."
                        )

    def _zeta_rows(self, call):
        if call.single:
            return [call.rows]
        return call.terms[0].output_rows

    def _require_close(self, part, gap, scale, what):
        dtypes = {use.unit.layer.compute_dtype for use in part.uses}
        dtypes |= {variable.dtype for variable in part.variables}
        tolerance = max(NORM_TOLERANCE.get(dtype, 0) for dtype in dtypes)
        if what == "sums":
            tolerance = tolerance**2
        elif gap > 0:
            # Ghost norms are rounded up, by more for longer sequences.
            tolerance = min(25 * tolerance, 0.1)
        if abs(float(gap)) > tolerance * scale + 1e-30 and np.isfinite(scale):
            layers = sorted({use.unit.path for use in part.uses})
            raise NotPrivateError(_wrong_rule_message(what, *layers))

    def _report_fallbacks(self, calls):
        paths = {}
        for call in calls:
            if not call.single:
                paths[call.unit.path] = call.unit
        if not paths:
            return
        described = [
            f"{path} ({type(unit.layer).__name__}, "
            f"{_size(unit):,} weights, {4 * _size(unit) / 2**20:.1f} MiB for "
            "each example of a batch)"
            for path, unit in paths.items()
        ]
        if self.strict:
            raise NotPrivateError(
                f"No rule is registered for {'; '.join(described)}, and "
                "strict=True. Register one with keras_fastclip.register, or "
                "use strict=False to take gradients of single examples in "
                "these layers."
            )
        warnings.warn(
            "No rule is registered for these layers, whose gradients are "
            "taken example by example (exact, but slower and with more "
            f"memory): {'; '.join(described)}. See keras_fastclip.register.",
            stacklevel=2,
        )


class _State:
    """The variables that a forward pass may write, and their values."""

    def __init__(self, model):
        seeds = {id(state) for state in _keras.seed_states(model)}
        trained = {id(v) for v in model.trainable_variables}
        self._metrics = [v for m in model.metrics for v in m.variables]
        metrics = {id(v) for v in self._metrics}
        others = [
            v for v in model.variables if id(v) not in trained | seeds | metrics
        ]
        for layer in _keras.layers_of(model):
            others += _keras.untracked_variables(layer)
        self.variables = others
        self._seeds = _keras.seed_states(model)
        self._model = model
        self._saved = _held(self.variables)
        self._saved_seeds = _keras.values(self._seeds)
        self._saved_metrics = _keras.values(self._metrics)
        self.seed_tensorflow = False
        self.seed_shift = 0

    def current(self):
        return _held(self.variables)

    def seeds_moved(self):
        now = _keras.values(self._seeds)
        return not np.array_equal(self._saved_seeds, now)

    def restore(self):
        """Back to the start; with a shift, to other random numbers."""
        _keras.assign(self.variables, self._saved)
        shifted = [value + self.seed_shift for value in self._saved_seeds]
        _keras.assign(self._seeds, shifted)
        if self.seed_tensorflow:
            tf.random.set_seed(self.seed_shift)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.seed_shift = 0
            self.restore()
            # Those of the losses of outputs are made by the first call.
            self._model.reset_metrics()
            _keras.assign(self._metrics, self._saved_metrics)


@dataclasses.dataclass(frozen=True)
class _Look:
    """What a run of the model showed.

    Attributes:
        units: whose calls were intercepted.
        rewrites: layers that were run in another way.
        losses: of the examples.
        after: the state after the run.
        shapes: of the tensors of each call, by its key.
        drew: ids of the layers that drew random numbers.
    """

    units: tuple[Unit, ...]
    rewrites: capture.Rewrites
    losses: tf.Tensor
    after: list[tf.Tensor]
    shapes: dict[tuple[str, int], tuple[list, list]]
    drew: set[int]


@contextlib.contextmanager
def _stopped(tape, stopped):
    """Keeps a tape from recording; a list tells if that is so already."""
    if stopped:
        yield
        return
    stopped.append(True)
    with tape.stop_recording():
        yield
    stopped.clear()


def _held(variables):
    """Present values, without a copy: whoever writes a variable makes one."""
    return [tf.convert_to_tensor(_keras.raw(v)) for v in variables]


def _same(before, after):
    """Whether values are equal; those at one place are."""
    before, after = np.asarray(before), np.asarray(after)
    if before.ctypes.data == after.ctypes.data:
        return True
    return np.array_equal(before, after, equal_nan=True)


def _frozen(dictionary):
    return frozenset(dictionary.items())


def _differ(before, after):
    return any(
        not np.array_equal(b, a) for b, a in zip(before, after, strict=False)
    )


def _map(function, *structures):
    return keras.tree.map_structure(
        lambda *leaves: None if leaves[0] is None else function(*leaves),
        *structures,
    )


def _usable(batch):
    """The first examples, without those that are not finite."""
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    size = min(min(len(leaf) for leaf in leaves), 256)
    if size == 0:
        raise ValueError("There are no examples to train on.")
    finite = np.ones(size, bool)
    for leaf in leaves:
        leaf = tf.convert_to_tensor(leaf[:size])
        if leaf.dtype.is_floating:
            flat = leaf.numpy().reshape(size, -1)
            finite &= np.isfinite(flat).all(-1)
    rows = np.flatnonzero(finite)
    if not len(rows):
        raise ValueError(
            "None of the first examples is finite: the data hold NaN or inf. "
            "Remove these examples, or put numbers in place of what is missing."
        )
    return _map(lambda leaf: tf.gather(leaf, rows), batch)


def _count(batch):
    return len(first_tensor(batch))


def _first(batch, count):
    return _map(lambda leaf: leaf[:count], batch)


def _examples(batch, count):
    """A few examples from all over the batch, repeated if there are too few.

    A weight of zero would hide what happens to its example.
    """
    size = _count(batch)
    rows = np.resize(np.arange(size), max(size, count))
    rows = rows[np.linspace(0, len(rows) - 1, count).astype(int)]
    # The first two are the farthest apart.
    rows = [rows[0], rows[-1], *rows[1:-1]]
    x, y, sample_weight = _map(lambda leaf: tf.gather(leaf, rows), batch)
    sample_weight = _map(
        lambda w: tf.where(tf.cast(w, tf.bool), w, tf.ones_like(w)),
        sample_weight,
    )
    return x, y, sample_weight


def _with_other_example(batch, j, data):
    """The batch with other data in place of example j.

    Each input and target is that of the next example or, if that is the same,
    of some example that differs in it.
    """
    x, y, sample_weight = batch
    rng = np.random.default_rng(j)
    count = _count(batch)
    chosen = np.arange(count) == j

    def column(values, leaf):
        return tf.reshape(values, [-1] + [1] * (leaf.shape.rank - 1))

    def other(leaf, pool):
        row = leaf[(j + 1) % count]
        if np.array_equal(row, leaf[j]):
            differ = np.reshape(pool != leaf[j], [len(pool), -1]).any(-1)
            row = pool[int(np.argmax(differ))]
        return tf.where(column(chosen, leaf), row, leaf)

    def other_input(leaf, pool):
        leaf = other(leaf, pool)
        if not leaf.dtype.is_floating:
            return leaf
        noise = np.zeros(leaf.shape)
        noise[j] = 0.1 * rng.standard_normal(noise[j].shape)
        return leaf + tf.cast(noise, leaf.dtype)

    def other_weight(leaf):
        if leaf.dtype == tf.bool:
            return tf.gather(leaf, order)
        factors = column(np.where(chosen, 2, 1), leaf)
        return tf.gather(leaf, order) * tf.cast(factors, leaf.dtype)

    order = np.where(chosen, (j + 1) % count, np.arange(count))
    return (
        _map(other_input, x, data[0]),
        _map(other, y, data[1]),
        _map(other_weight, sample_weight),
    )


def _with_spread_integers(batch, data):
    """The batch with integer inputs that differ as much as the data's do.

    Many examples may share the least and the greatest number of the data.
    Here the first example gets small numbers and the last one large ones.
    """
    rng = np.random.default_rng(0)
    x, y, sample_weight = batch

    def spread(leaf, pool):
        if not leaf.dtype.is_integer:
            return leaf
        values = np.unique(pool)
        rows, count = [], len(leaf)
        for i in range(count):
            first = i * len(values) // count
            last = max((i + 1) * len(values) // count, first + 1)
            rows.append(rng.choice(values[first:last], leaf.shape[1:]))
        return tf.constant(np.stack(rows), leaf.dtype)

    return _map(spread, x, data[0]), y, sample_weight


def _small(arguments):
    """The arguments of a call with numbers of at most 0.01."""

    def small(tensor):
        if not tensor.dtype.is_floating:
            return tensor
        largest = tf.reduce_max(tf.abs(tensor))
        return tf.math.divide_no_nan(tensor, 100 * largest)

    return with_tensors(arguments, [small(t) for t in tensors(arguments)])


def _shapes(tensors):
    return [tensor.shape for tensor in tensors]


def _rows_of(unit, large, small):
    """Rows of an example by two shapes, or None if there is no batch axis."""
    if large.rank == 0:
        return None
    n, m = large[0], small[0]
    if n * FEW == m * MORE and n:
        return Rows(n // MORE) if n > MORE else ONE_ROW
    if n == m:
        return None
    raise _NotCaptured(
        unit.layer,
        f"{_described(unit.layer)} is called with {n} rows for {MORE} "
        f"examples and {m} for {FEW}: rows cannot be told apart by "
        "example. Give each example the same number of rows.",
    )


def _moved_rows(before, after):
    """For each tensor of a call, the rows that differ between two runs."""
    pairs = zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True)
    moved = []
    for b, a in pairs:
        b, a = np.array(b), np.array(a)
        if not b.ndim:
            moved.append(set())
            continue
        different = (b != a).reshape(len(b), -1).any(-1)
        moved.append(set(np.flatnonzero(different)))
    return moved


def _ordered(unit, layout, moved):
    rows, count = [*layout.inputs, *layout.outputs], len(layout.inputs)
    result = []
    for index, row in enumerate(rows):
        if row is None or row.per_example == 1:
            result.append(row)
            continue
        k = row.per_example
        major = all(
            run[index] <= set(range(j * k, (j + 1) * k))
            for j, run in enumerate(moved)
        )
        minor = all(
            run[index] <= set(range(j, MANY * k, MANY))
            for j, run in enumerate(moved)
        )
        if not (major or minor):
            raise _NotCaptured(
                unit.layer,
                f"{_described(unit.layer)} is called with {k} rows for each "
                "example, in an order in which they cannot be told apart.",
            )
        result.append(Rows(k, example_major=major))
    return Layout(tuple(result[:count]), tuple(result[count:]), layout.repeat)


def _tolerance(losses):
    return 1e-9 if losses.dtype == tf.float64 else 2e-5


def _rounding(layers):
    """What results of the layers may differ by, relative to the largest."""
    dtypes = {layer.compute_dtype for layer in layers}
    return max(NORM_TOLERANCE.get(dtype, 0) for dtype in dtypes)


def _close(found, right, tolerance):
    """Whether arrays are equal to rounding; what is not finite must agree."""
    finite = np.abs(right)[np.isfinite(right)]
    largest = float(np.max(finite)) if finite.size else 0.0
    return np.allclose(
        found, right, rtol=tolerance, atol=tolerance * largest, equal_nan=True
    )


def _float64(gradient):
    return tf.convert_to_tensor(gradient).numpy().astype("float64")


def _sum_of_squares(tensor):
    """In float64, without an array of the squares."""
    flat = np.ravel(np.asarray(tensor))
    return np.einsum("i,i->", flat, flat, dtype="float64", casting="safe")


def _size(unit):
    return sum(int(np.prod(v.shape)) for v in unit.variables)


def _name(variable):
    return getattr(variable, "path", variable.name)


def _described(layer):
    return "The model" if layer is None else _keras.described(layer)


def _remedy(layer):
    if isinstance(layer, keras.layers.BatchNormalization):
        return (
            "Before the model is made private, put GroupNormalization in its "
            "place with keras_fastclip.replace_batch_normalization(model), or "
            "freeze it: layer.trainable = False."
        )
    if isinstance(layer, keras.layers.RNN):
        return "Use stateful=False."
    return (
        "Let every example be computed from its own data alone, without sums, "
        "means, sorting or statistics over the batch axis."
    )


def _uncovered_message(variable):
    return (
        f"The weight {variable.path!r} reaches the loss in a way that cannot "
        "be captured: it is read outside the call of the layer that owns it, "
        "or inside a compiled function or rematerialized block. Use it only "
        "inside its own layer (call the layer again to tie weights), or "
        "freeze it."
    )


def _wrong_rule_message(what, *layers):
    return (
        f"The {what} that the rule for {', '.join(map(repr, layers))} gives "
        "are not those of plain differentiation. If the rule is yours, compare "
        "its zeta and omega with the layer's call; otherwise please report the "
        "model."
    )


def _no_batch_message(unit):
    return (
        f"{_described(unit.layer)} returns a tensor without a batch axis, and "
        "none can be given to it. Call it on a tensor whose first axis is the "
        "batch, for example positions repeated for every example."
    )
