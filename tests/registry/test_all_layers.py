"""Every layer of Keras that owns weights, with its options, against the loop.

Each case is one call of one layer. The loss of an example is a random linear
function of what the layer returns for it. The norms and the weighted sum that
the layer's rule gives, both by ghost norms and by building the gradients, must
be those of automatic differentiation of the plain layer, example by example:
eagerly and compiled by XLA, in float64.
"""

import functools
import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import _keras, capture
from keras_fastclip.parts import make_parts
from keras_fastclip.planner import Way
from keras_fastclip.registry import default_registry
from keras_fastclip.registry.fallback import float_tensors, tensors
from keras_fastclip.registry.terms import ONE_ROW

pytestmark = pytest.mark.usefixtures("float64")

EXAMPLES = 3
CASES = {}


def case(make, *shapes, prepare=None, xla=True, **call):
    """Adds a case.

    Args:
        make: the layer class with its arguments bound.
        *shapes: of the inputs, without the batch axis. A function makes an
            input of its own kind from a generator of random numbers.
        prepare: what to do with the built layer.
        xla: whether XLA can run the layer.
        **call: other arguments of the call; functions as above.
    """
    options = [str(v) for v in make.args]
    options += [f"{k}={v}" for k, v in make.keywords.items()]
    options += [getattr(prepare, "__name__", "")] if prepare else []
    options += [getattr(s, "__name__", str(s)) for s in shapes]
    options += [f"{k}={getattr(v, '__name__', v)}" for k, v in call.items()]
    name = f"{make.func.__name__}-{'-'.join(options)}".replace(" ", "")
    assert name not in CASES, name
    CASES[name] = (make, shapes, prepare, xla, call)


def each(**options):
    """All combinations of options, as keyword arguments."""
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


bind = functools.partial


# -- inputs other than normal numbers -----------------------------------------


def ids(rng):
    return rng.integers(0, 5, (EXAMPLES, 4))


def negative_ids(rng):
    return rng.integers(-5, 5, (EXAMPLES, 2, 3))


def mask(rng):
    kept = np.ones((EXAMPLES, 4), bool)
    kept[0, 2:] = kept[1, :2] = kept[2, 1] = False
    return kept


def all_masked(rng):
    return mask(rng) & (np.arange(EXAMPLES) != 1)[:, None]


def state(rng):
    return tf.constant(rng.normal(size=(EXAMPLES, 2)))


def two_states(rng):
    return [state(rng), state(rng)]


def two_tensors(rng):
    return [tf.constant(rng.normal(size=(EXAMPLES, t, 3))) for t in (2, 4)]


def three_tensors(rng):
    sizes = [(2, 3), (4, 5), (4, 3)]
    return [tf.constant(rng.normal(size=(EXAMPLES, *s))) for s in sizes]


def two_masks(rng):
    return [tf.constant(mask(rng)[:, 1:3]), tf.constant(mask(rng))]


# -- preparations -------------------------------------------------------------


def lora(layer):
    layer.enable_lora(2)


def lora_with_alpha(layer):
    layer.enable_lora(2, lora_alpha=3)


def int8(layer):
    layer.quantize("int8")


def int8_lora(layer):
    layer.quantize("int8")
    layer.enable_lora(2)


def int4_lora(layer):
    layer.quantize("int4")
    layer.enable_lora(2)


def bias_only(layer):
    for variable in layer.trainable_variables:
        variable.trainable = variable.name == "bias"


def kernel_frozen(layer):
    cell = getattr(layer, "cell", layer)
    cell.kernel.trainable = False


# -- linear -------------------------------------------------------------------

for shape in [(5,), (4, 5), (2, 3, 5), (2, 1, 2, 5)]:
    case(bind(layers.Dense, 3, activation="tanh"), shape)
case(bind(layers.Dense, 3, use_bias=False), (4, 5))
for prepare in (lora, lora_with_alpha, int8, int8_lora, int4_lora, bias_only):
    case(bind(layers.Dense, 4, activation="tanh"), (4, 6), prepare=prepare)
case(bind(layers.Dense, 4), (6,), prepare=lora)

EQUATIONS = [
    ("ab,bc->ac", (5,), 4, "c"),
    ("ab,b->a", (5,), (), None),
    ("ab,bcd->adc", (5,), (3, 4), "cd"),
    ("abc,cd->abd", (2, 5), (2, 4), "bd"),
    ("abc,cd->adb", (2, 5), (4, 2), "d"),
    ("abc,bcd->ad", (2, 5), 4, "d"),
    ("abc,cde->abde", (2, 5), (2, 4, 3), "de"),
    ("abcd,cde->abe", (2, 3, 5), (2, 4), "e"),
    ("abcd,dce->abe", (2, 3, 5), (2, 4), "e"),
    ("abc,bcd->abd", (2, 5), (2, 4), "bd"),
    ("abc,cbd->adb", (2, 5), (4, 2), "b"),
    ("abcd,bde->abce", (2, 3, 5), (2, 3, 4), "be"),
    ("abc,c->abc", (2, 5), (2, 5), "c"),
    ("abc,bc->abc", (2, 5), (2, 5), "bc"),
    ("abc,d->abcd", (2, 5), (2, 5, 4), "d"),
    ("abc,bd->ad", (2, 5), 4, "d"),
    ("...x,xy->...y", (2, 3, 5), 4, "y"),
    ("...xy,yz->...xz", (2, 3, 5), (3, 4), "xz"),
]
for equation, shape, output, axes in EQUATIONS:
    make = bind(layers.EinsumDense, equation, output, bias_axes=axes)
    case(make, shape)
for prepare in (lora, int8_lora, int4_lora, bias_only):
    for equation, shape, output, axes in [EQUATIONS[6], EQUATIONS[7]]:
        make = bind(layers.EinsumDense, equation, output, bias_axes=axes)
        case(bind(make, activation="tanh"), shape, prepare=prepare)
case(bind(layers.EinsumDense, "abc,cd->adb", (4, 2)), (2, 5), prepare=lora)
case(bind(layers.EinsumDense, "abc,bcd->abd", (2, 4)), (2, 5), prepare=lora)

# -- embeddings ---------------------------------------------------------------

for source in (ids, negative_ids):
    case(bind(layers.Embedding, 5, 3), source)
    case(bind(layers.ReversibleEmbedding, 5, 3), source)
for prepare in (lora, lora_with_alpha, int8_lora, int4_lora):
    case(bind(layers.Embedding, 5, 4), ids, prepare=prepare)
    case(bind(layers.ReversibleEmbedding, 5, 4), ids, prepare=prepare)
case(bind(layers.ReversibleEmbedding, 5, 3, mask_zero=True), ids)
for tied, cap in itertools.product((True, False), (None, 2.0)):
    make = bind(layers.ReversibleEmbedding, 5, 3, tied, logit_soft_cap=cap)
    case(make, (4, 3), reverse=True)
case(bind(layers.ReversibleEmbedding, 5, 3), (4, 3), prepare=lora, reverse=True)

# -- convolutions -------------------------------------------------------------

IMAGES = {1: (7, 4), 2: (5, 4, 4), 3: (4, 3, 3, 4)}
KERNELS = {1: 3, 2: (3, 2), 3: (2, 1, 2)}
STRIDES = [{"strides": 1}, {"strides": 2}, {"dilation_rate": 2}]


def conv(kind, rank):
    return getattr(layers, kind.format(rank))


for rank in IMAGES:
    for options in each(padding=["valid", "same"], s=STRIDES, groups=[1, 2]):
        options |= options.pop("s")
        if rank == 3 and options["groups"] > 1:
            continue  # TensorFlow has no such kernel on CPUs.
        make = bind(conv("Conv{}D", rank), 6, KERNELS[rank], **options)
        case(make, IMAGES[rank])
    make = bind(conv("Conv{}D", rank), 2, 2, activation="tanh")
    case(make, IMAGES[rank])
    for prepare in (lora, lora_with_alpha, bias_only):
        case(make, IMAGES[rank], prepare=prepare)
    case(bind(make, use_bias=False), IMAGES[rank])
    for options in [
        *each(padding=["valid", "same"], strides=[1, 2, 3]),
        {"strides": 3, "output_padding": 1},
        {"strides": 2, "padding": "same", "output_padding": 1},
        {"use_bias": False, "activation": "tanh"},
    ]:
        make = bind(conv("Conv{}DTranspose", rank), 3, 2, **options)
        case(make, IMAGES[rank])
for options in [{}, {"strides": 2}, {"dilation_rate": 2}]:
    case(bind(layers.Conv1D, 6, 3, padding="causal", **options), IMAGES[1])
case(bind(layers.Conv2D, 6, 2, groups=2), IMAGES[2], prepare=lora)
case(bind(layers.Conv2D, 4, 3, groups=4, padding="same"), IMAGES[2])
case(bind(layers.Conv2D, 8, 3, groups=4, strides=2), IMAGES[2])
case(bind(layers.Conv1D, 8, 3, groups=4), IMAGES[1])
for rank in (1, 2):
    for options in [
        *each(
            padding=["valid", "same"],
            strides=[1, 2],
            depth_multiplier=[1, 2],
        ),
        {"dilation_rate": 2},
        {"padding": "same", "dilation_rate": 2, "strides": 2},
        {"use_bias": False, "activation": "tanh"},
        {"data_format": "channels_first"},
    ]:
        make = bind(conv("DepthwiseConv{}D", rank), 2, **options)
        case(make, IMAGES[rank])
        make = bind(conv("SeparableConv{}D", rank), 6, 2, **options)
        case(make, IMAGES[rank])

# -- normalizations, slopes, scales -------------------------------------------

for shape, axis in [((4,), -1), ((3, 4), -1), ((3, 4), 1), ((3, 4), [1, 2])]:
    case(bind(layers.LayerNormalization, axis), shape)
for options in each(scale=[True, False], center=[True, False]):
    if any(options.values()):
        case(bind(layers.LayerNormalization, **options), (2, 3, 4))
        case(bind(layers.GroupNormalization, 2, **options), (2, 3, 4))
for shape in [(4,), (3, 4), (2, 3, 4)]:
    case(bind(layers.RMSNormalization), shape)
for groups, axis in itertools.product((1, 2, -1), (-1, 1)):
    case(bind(layers.GroupNormalization, groups, axis), (4, 3, 4))
for axes in (None, [1], [1, 2]):
    case(bind(layers.PReLU, shared_axes=axes), (3, 2, 4))
case(bind(layers.PReLU), (4,))
for make in [
    bind(layers.Attention, use_scale=True),
    bind(layers.Attention, use_scale=True, score_mode="concat"),
    bind(layers.Attention, score_mode="concat"),
    bind(layers.AdditiveAttention),
]:
    case(make, two_tensors)
    case(make, three_tensors)
    case(make, two_tensors, mask=two_masks)
    case(make, two_tensors, use_causal_mask=True, return_attention_scores=True)

# -- recurrent layers ---------------------------------------------------------

STEPS = (4, 3)
for kind in (layers.SimpleRNN, layers.LSTM, layers.GRU):
    states = two_states if kind is layers.LSTM else state
    for options in each(
        return_sequences=[False, True],
        go_backwards=[False, True],
        unroll=[False, True],
    ):
        make = bind(kind, 2, **options)
        case(make, STEPS)
        case(make, STEPS, mask=mask)
    case(bind(kind, 2, use_bias=False), STEPS)
    case(bind(kind, 2, activation="relu"), STEPS, mask=mask)
    case(bind(kind, 2, activation="softsign"), STEPS, mask=mask)
    case(bind(kind, 2, return_state=True), STEPS, initial_state=states)
    make = bind(kind, 2, return_sequences=True, return_state=True)
    case(make, STEPS, initial_state=states, mask=all_masked)
    make = bind(make, zero_output_for_mask=True)
    case(make, STEPS, initial_state=states, mask=mask)
    case(bind(kind, 2), STEPS, prepare=kernel_frozen)
    case(bind(kind, 2), STEPS, prepare=bias_only)
for options in each(use_bias=[True, False], go_backwards=[True, False]):
    case(bind(layers.GRU, 2, reset_after=False, **options), STEPS, mask=mask)
for kind in (layers.LSTM, layers.GRU):
    case(bind(kind, 2, implementation=1), STEPS)
    case(bind(kind, 2, recurrent_activation="hard_sigmoid"), STEPS)


# -- the tests ----------------------------------------------------------------


def build(name):
    """The layer of a case, with random weights, and its arguments."""
    make, shapes, prepare, _, call = CASES[name]
    rng = np.random.default_rng(0)

    def value(given):
        if callable(given):
            given = given(rng)
        elif isinstance(given, tuple):
            given = rng.normal(size=(EXAMPLES, *given))
        else:
            return given
        return keras.tree.map_structure(tf.convert_to_tensor, given)

    args = [value(shape) for shape in shapes]
    kwargs = {key: value(given) for key, given in call.items()}
    layer = make()
    if isinstance(layer, layers.ReversibleEmbedding):
        layer.build(None)
    layer(*args, **kwargs)
    for variable in layer.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    if prepare is not None:
        prepare(layer)
        for variable in layer.trainable_variables:
            variable.assign(rng.normal(size=variable.shape))
    return layer, args, kwargs


def losses_of(outputs):
    """A random linear function of what the layer returns, by example."""
    total = 0.0
    for seed, output in enumerate(float_tensors(outputs)):
        rng = np.random.default_rng(seed)
        weights = tf.constant(rng.normal(size=(EXAMPLES, *output.shape[1:])))
        axes = list(range(1, output.shape.rank))
        weights = weights[:1] if output.shape[0] == 1 else weights
        total += tf.reduce_sum(output * tf.cast(weights, output.dtype), axes)
    return total


def by_loop(layer, args, kwargs):
    """For each weight the gradients of all examples."""
    raw = [_keras.raw(v) for v in layer.trainable_variables]
    gradients = []
    for i in range(EXAMPLES):
        # A batch of copies of one example, of which one counts.
        one = keras.tree.map_structure(
            lambda leaf, i=i: (
                tf.gather(leaf, [i] * EXAMPLES)
                if isinstance(leaf, tf.Tensor)
                else leaf
            ),
            (args, kwargs),
        )
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(raw)
            loss = losses_of(layer(*one[0], **one[1]))[i]
        found = tape.gradient(
            loss, raw, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        gradients.append([tf.convert_to_tensor(g).numpy() for g in found])
    return [np.stack(parts) for parts in zip(*gradients, strict=True)]


def by_rule(layer, factors, way, args, kwargs):
    """Squared norms, and for each weight the weighted sum.

    Parts that cannot be served in the way are served in the usual one.
    """
    unit = capture.Unit(
        layer,
        "layer",
        tuple(v for v in layer.trainable_variables if v.trainable),
        default_registry().lookup(layer),
    )
    arguments = (tuple(args), kwargs)
    layout = capture.Layout((ONE_ROW,) * len(tensors(arguments)), (ONE_ROW,))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        call, finish = capture.captured(
            unit, ("layer", 0), layout, None, *arguments, EXAMPLES
        )
        assert call.single, "the rule left the call to the fallback"
        tape.watch(call.zetas)
        losses = losses_of(finish(call.zetas))
    (g,) = tape.gradient(losses, call.zetas)
    uses = [capture.Use(term, g, call.rows, unit) for term in call.terms]
    parts = make_parts(uses)
    for part in parts:
        if part.traits.item and way in part.traits.item.all_ways():
            part.way = way
    norms = tf.add_n([part.squared_norms() for part in parts])
    sums = {}
    for part in parts:
        sums |= part.weighted_sum(tf.cast(factors, norms.dtype))
    zero = tf.zeros([], norms.dtype)
    return norms, [sums.get(id(v), zero) for v in unit.variables]


# Each case is run in the first two and in one of the others. That one is
# compiled by XLA, which takes a second, for the first case of each layer and
# every third one.
WAYS = [
    "ghost",
    "keep",
    "ghost:loop",
    "ghost:tiles",
    "keep:loop",
    "build:loop",
    "keep:blocks",
    "ghost:blocks",
    "keep:rows",
    "build:patches",
]


@pytest.mark.parametrize("name", CASES)
def test_rule_equals_loop(name):
    layer, args, kwargs = build(name)
    right = by_loop(layer, args, kwargs)
    # Keras holds LoRA's weights in float32 always.
    low_rank = getattr(layer, "lora_enabled", False)
    tolerance = 1e-5 if low_rank else 1e-9
    norms = sum(np.sum(r**2, tuple(range(1, r.ndim))) for r in right)
    assert np.any(norms > 0)
    factors = tf.constant([0.5, 2.0, 0.0], tf.float64)
    totals = [np.tensordot(factors, r, 1) for r in right]
    size = math.sqrt(sum(np.sum(total**2) for total in totals))
    names = sorted(CASES)
    index = names.index(name)
    is_first = names[index - 1].split("-")[0] != name.split("-")[0]
    compiled = CASES[name][3] and (is_first or index % 3 == 0)
    other = WAYS[2 + index % (len(WAYS) - 2)]
    for way in (*WAYS[:2], other):
        run = functools.partial(by_rule, layer, factors, Way.parse(way))
        if way == other and compiled:
            run = tf.function(run, jit_compile=True, autograph=False)
        found_norms, found_sums = run(args, kwargs)
        # A norm of zero is rounded up too.
        np.testing.assert_allclose(found_norms, norms, tolerance, atol=1e-30)
        for found, total in zip(found_sums, totals, strict=True):
            np.testing.assert_allclose(found, total, atol=tolerance * size)


def test_every_layer_that_owns_weights_is_a_case():
    """What has no rule is listed here, with its reason."""
    without = {
        "BatchNormalization",  # mixes examples
        "Normalization",  # trains nothing
        "STFTSpectrogram",  # by the fallback; its kernels are rarely trained
        "SpectralNormalization",  # changes its weights in the forward pass
        # run by the layers that hold them
        "GRUCell",
        "LSTMCell",
        "SimpleRNNCell",
    }
    owners = {
        name
        for name in dir(layers)
        if isinstance(kind := getattr(layers, name), type)
        and kind.__name__ == name
        and any(
            "add_weight" in getattr(method, "__code__", _none).co_names
            for base in kind.__mro__
            if base is not layers.Layer
            and base.__module__.startswith("keras.src.layers")
            for method in vars(base).values()
        )
    }
    tested = {name.partition("-")[0] for name in CASES}
    assert owners - tested == without & owners
    assert len(owners) > 25 and len(CASES) > 300


_none = (lambda: None).__code__


# -- layers that hold others --------------------------------------------------


def self_attention(kind, **options):
    def attend(x):
        return kind(**options)(x, x)

    return attend


HOLDERS = {
    "MultiHeadAttention": self_attention(
        layers.MultiHeadAttention, num_heads=2, key_dim=3
    ),
    "MultiHeadAttention-value_dim": self_attention(
        layers.MultiHeadAttention, num_heads=2, key_dim=3, value_dim=2
    ),
    "GroupQueryAttention": self_attention(
        layers.GroupQueryAttention,
        head_dim=2,
        num_query_heads=4,
        num_key_value_heads=2,
    ),
    "TimeDistributed-Dense": layers.TimeDistributed(layers.Dense(2)),
    "TimeDistributed-model": layers.TimeDistributed(
        keras.Sequential([layers.Dense(2, "tanh"), layers.LayerNormalization()])
    ),
    "RNN-LSTMCell": layers.RNN(layers.LSTMCell(2), return_sequences=True),
    **{
        f"Bidirectional-{kind.__name__}-{merge}": layers.Bidirectional(
            kind(2, return_sequences=True), merge_mode=merge
        )
        for kind in (layers.SimpleRNN, layers.LSTM, layers.GRU)
        for merge in ("concat", "mul")
    },
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", HOLDERS)
def test_layers_that_hold_others_equal_loop(name, masked):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3, 4))
    if masked:
        x[0, 2:] = x[1, 1:] = x[2, 0] = 0
    inputs = keras.Input((3, 4))
    hidden = layers.Masking()(inputs) if masked else inputs
    # Layers made while tests are collected have the type of that time.
    hold = HOLDERS[name]
    if isinstance(hold, layers.Layer):
        hold = _in_float64(hold)
    hidden = layers.Dense(3)(hold(hidden))
    model = keras_fastclip.DPModel(
        inputs, hidden, l2_norm_clip=0.3, noise_multiplier=0.0, strict=True
    )
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    model.compile("sgd", "mse")
    y = rng.normal(size=(4, 3, 3))
    report = keras_fastclip.check_gradients(model, x, y)
    assert report.relative_error < 1e-9, report


def _in_float64(layer):
    """A copy of a layer made now."""
    config = keras.saving.serialize_keras_object(layer)

    def change(node):
        if isinstance(node, dict):
            if "dtype" in node:
                node["dtype"] = "float64"
            for value in node.values():
                change(value)
        elif isinstance(node, list):
            for value in node:
                change(value)

    change(config)
    return keras.saving.deserialize_keras_object(config)
