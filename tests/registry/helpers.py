"""A rule against automatic differentiation of the layer, example by example."""

import keras
import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, settings

from keras_fastclip import _keras, capture
from keras_fastclip.registry import default_registry
from keras_fastclip.registry.terms import ONE_ROW

TOLERANCE = 1e-9

# The same few cases in every run; fixtures may last for all of them.
few_cases = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def random(*shape, seed=0):
    """Normal numbers of the present floating-point type."""
    rng = np.random.default_rng(seed)
    return tf.constant(rng.normal(size=shape), keras.config.floatx())


def built(layer, *inputs):
    """The layer with random weights: zeros and ones would hide mistakes."""
    layer(*inputs)
    for seed, variable in enumerate(layer.weights):
        rng = np.random.default_rng(100 + seed)
        variable.assign(rng.normal(size=variable.shape))
    return layer


def captured(layer, *inputs, rows=ONE_ROW, input_rows=None, rule=None):
    """The call as a private step captures it, and what follows ζ.

    Without a rule that takes the call, the fallback takes it, and `single` of
    the call is false.
    """
    unit = capture.Unit(
        layer,
        "layer",
        tuple(_keras.own_trainable_variables(layer)),
        rule or default_registry().lookup(layer),
    )
    layout = capture.Layout((input_rows or rows,) * len(inputs), (rows,))
    examples = tf.shape(inputs[0])[0] // (input_rows or rows).per_example
    return capture.captured(
        unit, ("layer", 0), layout, layer.call, inputs, {}, examples
    )


def takes(layer, *inputs):
    """Whether a rule takes the call, rather than the fallback."""
    return captured(layer, *inputs)[0].single


def up_to_zeta(layer, *inputs):
    """The layer's own call without its activation."""
    if getattr(layer, "activation", None) is None:
        return layer(*inputs)
    activation, layer.activation = layer.activation, keras.activations.linear
    try:
        return layer(*inputs)
    finally:
        layer.activation = activation


def true_gradients(layer, inputs, g, rows, input_rows=None):
    """For each trained weight by id, the gradients of all examples.

    Each example is run on its own, by automatic differentiation.
    """
    variables = _keras.own_trainable_variables(layer)
    raw = [_keras.raw(v) for v in variables]
    gradients = []
    input_rows = input_rows or rows
    members = rows.fold(tf.range(len(g)))
    input_members = input_rows.fold(tf.range(len(inputs[0])))
    for mine, mine_in in zip(members, input_members, strict=True):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(raw)
            zeta = up_to_zeta(layer, *[tf.gather(x, mine_in) for x in inputs])
        gradient = tape.gradient(zeta, raw, tf.gather(g, mine))
        gradients.append([tf.convert_to_tensor(part) for part in gradient])
    return {
        id(v): np.stack(parts)
        for v, parts in zip(
            variables, zip(*gradients, strict=True), strict=True
        )
    }


def assert_close(found, right, tolerance=TOLERANCE):
    """Equal up to rounding, relative to the largest of all entries."""
    found, right = np.array(found), np.array(right)
    assert found.shape == right.shape
    error = np.max(np.abs(found - right), initial=0)
    assert error <= tolerance * np.max(np.abs(right), initial=0)


def check_rule(layer, *inputs, rows=ONE_ROW):
    """Compares all that the rule of a built layer says with the truth.

    ζ and what follows it give the layer's output; every trained weight has
    its term; gradients of the examples, their norms and their sums are those
    of automatic differentiation.

    Returns:
        The captured call.
    """
    call, finish = captured(layer, *inputs, rows=rows)
    assert call.single, "the rule left the call to the fallback"
    assert_close(finish(call.zetas), layer(*inputs))
    g = random(*call.zetas[0].shape, seed=1)
    right = true_gradients(layer, inputs, g, rows)
    covered = [id(v) for term in call.terms for v in term.variables]
    assert sorted(covered) == sorted(right)
    examples = len(next(iter(right.values()))) if right else 0
    factors = tf.cast(tf.range(examples) % 3, g.dtype)
    weighted = g * _column(rows.spread(factors), g)
    keep = rows.spread(factors != 0)
    for term in call.terms:
        exact = [right[id(v)] for v in term.variables]
        each = term.per_example(g, rows)
        sums = term.adjoint(weighted, keep)
        for found, total, gradients in zip(each, sums, exact, strict=True):
            assert_close(found, gradients)
            assert_close(total, np.tensordot(factors, gradients, 1))
        if term.has_omega:
            norms = sum(
                np.sum(np.square(e), tuple(range(1, e.ndim))) for e in exact
            )
            assert_close(term.omega(g, rows), norms)
    return call


def check_rule_in_graph(layer, x, shape, rows=ONE_ROW, jit_compile=False):
    """A graph that knows only `shape` of the input gives the eager results."""
    call = captured(layer, x, rows=rows)[0]
    g = random(*call.zetas[0].shape, seed=1)

    def results(x, g):
        call = captured(layer, x, rows=rows)[0]
        assert call.single, "the rule left the call to the fallback"
        g = tf.ensure_shape(g, call.zetas[0].shape)
        keep = tf.fill([tf.shape(g)[0]], True)
        return call.zetas, [
            [
                term.per_example(g, rows),
                term.adjoint(g, keep),
                term.omega(g, rows) if term.has_omega else (),
            ]
            for term in call.terms
        ]

    graph = tf.function(
        results,
        input_signature=[
            tf.TensorSpec(shape, x.dtype),
            tf.TensorSpec(None, g.dtype),
        ],
        jit_compile=jit_compile,
        autograph=False,
    )
    tf.nest.map_structure(assert_close, graph(x, g), results(x, g))


def check_dropped_examples(
    layer, x, bad, dropped, rows=ONE_ROW, input_rows=None, rule=None
):
    """Examples that are left out may hold anything, and count as zero.

    Args:
        layer: built.
        x: inputs, finite.
        bad: what the rows of the examples left out hold.
        dropped: numbers of these examples.
        rows: rows of an example in ζ.
        input_rows: rows of an example in x, if they are others.
        rule: another rule than the registered one.
    """
    input_rows = input_rows or rows
    examples = len(x) // input_rows.per_example
    kept = tf.constant([i not in dropped for i in range(examples)])
    keep = rows.spread(kept)
    fill = tf.fill(x.shape, tf.cast(bad, x.dtype))
    x_bad = tf.where(_column(input_rows.spread(kept), x), x, fill)
    call, _ = captured(
        layer, x_bad, rows=rows, input_rows=input_rows, rule=rule
    )
    assert call.single
    g = random(*call.zetas[0].shape, seed=1)
    g = tf.where(_column(keep, g), g, tf.zeros_like(g))
    right = true_gradients(layer, [x], g, rows, input_rows)
    for term in call.terms:
        sums = term.adjoint(g, keep)
        for variable, total in zip(term.variables, sums, strict=True):
            assert np.all(np.isfinite(total))
            assert_close(total, right[id(variable)].sum(0))


def _column(values, tensor):
    """One value a row, in a shape that broadcasts against the tensor."""
    return tf.reshape(values, [-1] + [1] * (tensor.shape.rank - 1))
