"""What the library relies on inside Keras, one test for each private name."""

import gc
import os
import platform
import subprocess
import sys
import threading
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_fastclip import _keras


def small():
    x = keras.Input((4,))
    inner = keras.Sequential([layers.Dense(3), layers.Dropout(0.5)])
    return keras.Model(x, layers.Dense(2)(inner(x)))


def test_layers_of_reaches_nested_layers_once():
    model = small()
    found = _keras.layers_of(model)
    assert found[0] is model
    assert sum(isinstance(layer, layers.Dense) for layer in found) == 2
    assert len({id(layer) for layer in found}) == len(found)
    owned = [
        v for layer in found for v in _keras.own_trainable_variables(layer)
    ]
    assert {id(v) for v in owned} == {id(v) for v in model.trainable_variables}


def test_own_trainable_variables_leaves_out_what_is_frozen():
    dense = layers.Dense(3)
    dense.build((None, 4))
    dense.enable_lora(2)
    names = [v.name for v in _keras.own_trainable_variables(dense)]
    assert names == ["bias", "lora_kernel_a", "lora_kernel_b"]
    dense.trainable = False
    assert _keras.own_trainable_variables(dense) == []


def halved_square():
    """x² and y, with half their derivatives, to tell them from others."""

    @_keras.custom_gradient
    def run(x, y):
        return (x * x, y), lambda dx, dy: (x * dx, dy / 2)

    return run


@pytest.mark.parametrize("in_graph", [False, True])
def test_custom_gradients_are_those_of_the_tape(in_graph):
    def gradients(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            square, same = halved_square()(x, y)
            loss = 5 * square + 3 * same
        return loss, *tape.gradient(loss, [x, y])

    run = tf.function(gradients, autograph=False) if in_graph else gradients
    found = run(tf.constant(2.0), tf.constant(7.0))
    assert [float(value) for value in found] == [41.0, 10.0, 1.5]


def test_custom_gradients_with_results_that_nothing_depends_on():
    x, y = tf.constant(2.0), tf.constant(7.0)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, y])
        square, _ = halved_square()(x, y)
    assert float(tape.gradient(square, x)) == 2.0
    assert float(tape.gradient(square, y)) == 0.0


def test_custom_gradients_do_not_hold_graphs():
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            square, _ = halved_square()(x, x)
        return tape.gradient(square, x)

    step = tf.function(run, autograph=False)
    concrete = step.get_concrete_function(tf.TensorSpec([]))
    gone = weakref.ref(concrete.graph)
    del step, concrete
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("graph", [False, True])
def test_second_derivatives_of_own_gradients(graph):
    """What the forward pass holds is no constant to a second tape."""

    @_keras.custom_gradient
    def cube(x):
        square = x * x
        return x * square, lambda g: 3 * g * square

    def derivatives(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = cube(x)
            first = inner.gradient(y, x)
        return first, outer.gradient(first, x)

    run = tf.function(derivatives) if graph else derivatives
    first, second = run(tf.constant([2.0, -1.0]))
    np.testing.assert_allclose(first, [12, 3])
    np.testing.assert_allclose(second, [12, -6])


def test_calls_of_python_wait_for_each_other_unless_independent():
    def calls(independent):
        @tf.function
        def run(x):
            for _ in range(2):
                called = tf.numpy_function(lambda x: x, [x], x.dtype)
                if independent:
                    called = _keras.independent(called)
            return called

        graph = run.get_concrete_function(tf.zeros([2])).graph
        return [o for o in graph.get_operations() if o.type == "PyFunc"]

    assert [len(call.control_inputs) for call in calls(False)] == [0, 1]
    free = calls(True)
    assert [len(call.control_inputs) for call in free] == [0, 0]


def test_independent_calls_are_made_once_each_time():
    """Neither left out nor made once for all: there is a state."""
    seen = []

    @tf.function
    def run():
        x = tf.constant(1.0)
        _keras.independent(
            tf.numpy_function(lambda x: seen.append(1) or x, [x], x.dtype)
        )
        return x

    for _ in range(3):
        run()
    assert len(seen) == 3


def test_subclasses_that_normalize_otherwise_are_told_apart():
    class Plain(layers.GroupNormalization):
        pass

    class Otherwise(layers.GroupNormalization):
        def _apply_normalization(self, reshaped_inputs, input_shape):
            return 2 * super()._apply_normalization(
                reshaped_inputs, input_shape
            )

    assert _keras.normalizes_as_keras(layers.GroupNormalization(2))
    assert _keras.normalizes_as_keras(Plain(2))
    assert not _keras.normalizes_as_keras(Otherwise(2))


def test_raw_is_the_variable_that_tapes_follow():
    dense = layers.Dense(3)
    dense.build((None, 4))
    raw = _keras.raw(dense.kernel)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(raw)
        y = dense(tf.ones((2, 4)))
    assert tape.gradient(y, raw).shape == (4, 3)
    assert isinstance(raw, tf.Variable)


@pytest.mark.parametrize(
    "first, second",
    [
        ((4, 4), (4, 1)),
        ((4, 3, 4), (4, 1, 1)),
        ((4, 4, 3), (4, 1, 1)),
        ((1, 4, 4), (1, 4, 1)),
        ((1, 4, 1), (1, 1, 4)),
        ((2, 3, 5, 4), (1, 1, 1, 4)),
        ((2, 4), (4,)),
        ((4, 1), (4, 4)),
    ],
)
def test_plain_addition_broadcasts_as_numpy_does(first, second):
    rng = np.random.default_rng(0)
    x1, x2 = rng.random(first), rng.random(second)
    with _keras.plain_addition():
        found = keras.ops.add(tf.constant(x1), tf.constant(x2))
        mixed = keras.ops.add(
            tf.ones(first, "float32"), tf.ones(second, "int32")
        )
    np.testing.assert_allclose(found, x1 + x2, rtol=1e-6)
    assert mixed.dtype == "float32"


def test_addition_is_that_of_keras_elsewhere():
    x1, x2 = tf.zeros((4, 4)), tf.constant([[1.0], [2.0], [3.0], [4.0]])
    before = keras.ops.add(x1, x2).numpy()
    with _keras.plain_addition(), _keras.plain_addition():
        pass
    np.testing.assert_array_equal(keras.ops.add(x1, x2), before)
    # If this fails, Keras broadcasts as others do: no need for the above.
    assert (before != (x1 + x2).numpy()).any()


def test_operations_are_exchanged_within_and_in_one_thread_only():
    calls = []
    module = types.SimpleNamespace(double=lambda x: 2 * x)
    exchange = _keras.Exchange(module, "double")

    @exchange.by
    def other(x):
        calls.append(x)
        return exchange.original(x)

    assert module.double(1) == 2
    with exchange.on():
        assert module.double(2) == 4
        elsewhere = threading.Thread(target=lambda: module.double(3))
        elsewhere.start()
        elsewhere.join()
        with exchange.on():
            module.double(4)
        module.double(5)
    module.double(6)
    assert calls == [2, 4, 5]


@pytest.mark.parametrize("name", ["attention", "cross_entropy"])
def test_keras_calls_what_stands_in_for_an_operation(name, monkeypatch):
    exchange, calls = getattr(_keras, name), []

    def other(*args, **kwargs):
        calls.append(args)
        return exchange.original(*args, **kwargs)

    monkeypatch.setattr(exchange, "_other", other)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    attention = layers.MultiHeadAttention(2, 3)

    def run():
        x = tf.ones((2, 3, 4))
        return loss(np.zeros((2, 3)), attention(x, x, use_causal_mask=True))

    before = run()
    assert not calls
    with _keras.own_operations():
        np.testing.assert_array_equal(run(), before)
    assert len(calls) == 1


def test_logits_are_known_where_a_softmax_was_applied():
    x = tf.ones((2, 3))
    assert _keras.logits_of(x, True) is x
    assert _keras.logits_of(x, False) is None
    assert _keras.logits_of(keras.activations.softmax(x), False) is not None


def test_seed_states_move_when_dropout_draws():
    model = small()
    x = tf.ones((2, 4))
    assert _keras.draws_random_numbers(model, x)
    assert len(_keras.seed_states(model)) == 2  # the layer's and the global one
    before = _keras.values(_keras.seed_states(model))
    model(x, training=False)
    assert np.array_equal(before, _keras.values(_keras.seed_states(model)))


def test_training_phase_is_seen_inside_a_call():
    class Look(layers.Layer):
        def call(self, x):
            self.seen = _keras.training_phase(self)
            return x

    look = Look()
    model = keras.Sequential([look])
    model(tf.ones((1, 2)), training=True)
    assert look.seen is True
    model(tf.ones((1, 2)), training=False)
    assert look.seen is False


def test_training_can_be_passed_to_a_layer_without_that_argument():
    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dropout = layers.Dropout(0.999)

        def call(self, x):
            return self.dropout(x)

    block = Block()
    assert np.sum(block(tf.ones((4, 100)), training=True)) != 400
    assert np.sum(block(tf.ones((4, 100)), training=False)) == 400


def test_own_losses_hold_what_add_loss_got():
    class Extra(layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_sum(x, -1))
            return x

    extra = Extra()
    extra(tf.ones((3, 2)))
    (loss,) = _keras.own_losses(extra)
    np.testing.assert_array_equal(loss, [2, 2, 2])


def test_compiled_losses_can_be_replaced_and_come_back():
    x = keras.Input((4,))
    model = keras.Model(x, [layers.Dense(2)(x), layers.Dense(3)(x)])
    model.compile("sgd", ["mse", "mae"], loss_weights=[1.0, 10.0])
    x, y = tf.ones((5, 4)), (tf.ones((5, 2)), tf.ones((5, 3)))
    pred = model(x)
    plain = _keras.compiled_loss(model, y, pred, None)

    class Ones:
        def __call__(self, y_true, y_pred, sample_weight=None):
            return tf.ones(5)

    class Quiet:
        def update_state(self, values, sample_weight=None):
            assert values.shape == (5,)

    with _keras.compiled_losses_replaced(
        model, lambda loss: Ones(), lambda metric: Quiet()
    ) as compiled:
        np.testing.assert_array_equal(compiled(y, pred), np.full(5, 11.0))
    again = _keras.compiled_loss(model, y, pred, None)
    np.testing.assert_array_equal(plain, again)


def test_compiled_metrics_are_listed_with_their_outputs():
    x = keras.Input((4,))
    model = keras.Model(x, [layers.Dense(2)(x), layers.Dense(3)(x)])
    model.compile(
        "sgd", "mse", metrics=[["mae"], []], weighted_metrics=[[], ["mse"]]
    )
    y = (tf.ones((5, 2)), tf.ones((5, 3)))
    pred = model(tf.ones((5, 4)))
    for weights, expected in [
        (None, None),
        (tf.ones(5), tf.ones(5)),
        ([tf.zeros(5), tf.ones(5)], tf.ones(5)),
    ]:
        plain, weighted = _keras.compiled_metrics(model, y, pred, weights)
        assert [m.name for m in (plain[0], weighted[0])] == ["mae", "mse"]
        assert [m[1].shape[1] for m in (plain, weighted)] == [2, 3]
        assert plain[3] is None
        if weights is None:
            assert weighted[3] is None
        else:
            np.testing.assert_array_equal(weighted[3], expected)


def test_masks_hang_on_tensors():
    embedding = layers.Embedding(5, 2, mask_zero=True)
    output = embedding(tf.constant([[0, 1]]))
    np.testing.assert_array_equal(_keras.mask_of(output), [[False, True]])
    other = tf.ones(3)
    assert _keras.mask_of(other) is None
    _keras.with_mask(other, other > 0)
    np.testing.assert_array_equal(_keras.mask_of(other), [True] * 3)


def test_autocast_casts_weights_of_mixed_precision():
    dense = layers.Dense(3, dtype="mixed_bfloat16")
    dense.build((None, 4))
    with _keras.autocast(dense):
        assert tf.convert_to_tensor(dense.kernel).dtype == tf.bfloat16
    assert tf.convert_to_tensor(dense.kernel).dtype == tf.float32


def test_weights_as_constants_hide_from_tapes_and_nest():
    first, second = layers.Dense(3), layers.Dense(3)
    first.build((None, 3))
    second.build((None, 3))
    raws = [_keras.raw(first.kernel), _keras.raw(second.kernel)]
    with tf.GradientTape(persistent=True) as tape:
        with _keras.weights_as_constants([first.kernel]):
            y = second(first(tf.ones((1, 3))))
            with _keras.weights_as_constants([second.kernel]):
                z = second(first(tf.ones((1, 3))))
    assert tape.gradient(y, raws[0]) is None
    assert tape.gradient(y, raws[1]) is not None
    assert tape.gradient(z, raws[0]) is None
    assert tape.gradient(z, raws[1]) is None


def test_rows_of_a_table_are_read_by_themselves():
    table = keras.Variable(np.arange(12.0).reshape(6, 2))
    ids = tf.constant([[4], [1]])

    @tf.function
    def rows():
        return _keras.rows_of(table, ids)

    np.testing.assert_array_equal(rows(), [[[8, 9]], [[2, 3]]])
    graph = rows.get_concrete_function().graph
    types = {operation.type for operation in graph.get_operations()}
    assert "ResourceGather" in types and "ReadVariableOp" not in types
    with tf.GradientTape() as tape:
        with _keras.weights_as_constants([table]):
            found = _keras.rows_of(table, ids)
    np.testing.assert_array_equal(found, rows())
    assert tape.gradient(found, _keras.raw(table)) is None


@pytest.mark.parametrize("seed", [None, 7])
def test_tensorflow_seed_is_kept(seed):
    tf.random.set_seed(seed)
    expected = [float(tf.random.normal([])) for _ in range(2)]
    tf.random.set_seed(seed)
    first = float(tf.random.normal([]))
    with _keras.tensorflow_seed_kept():
        tf.random.set_seed(3)
        tf.random.normal([])
    second = float(tf.random.normal([]))
    if seed is not None:
        assert [first, second] == expected


def test_eager_scope_records_on_tapes_while_tracing():
    seen = []

    @tf.function
    def traced():
        with _keras.eager_scope():
            x = tf.constant(3.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x * x
            seen.append(float(tape.gradient(y, x)))
        return tf.constant(0.0)

    traced()
    assert seen == [6.0]


def test_functions_called_as_written_are_not_optimized():
    double = tf.function(lambda x: 2 * x)

    @tf.function
    def both(x):
        with _keras.as_written():
            first = double(x)
        return first + double(x)

    x = tf.constant(3.0)
    graph = both.get_concrete_function(x).graph
    configs = [
        tf.compat.v1.ConfigProto.FromString(call.get_attr("config_proto"))
        for call in graph.get_operations()
        if call.type == "PartitionedCall"
    ]
    assert [
        config.graph_options.rewrite_options.disable_meta_optimizer
        for config in configs
    ] == [True, False]
    assert both(x) == 12
    with _keras.as_written():
        assert both(x) == 12


def test_short_tracebacks_hold_no_frames_of_modules():
    def frames():
        function = tf.function(lambda: tf.ones([3]) + 1.0, autograph=False)
        operations = function.get_concrete_function().graph.get_operations()
        return [list(operation.traceback) for operation in operations]

    right = min(len(found) for found in frames())
    assert right > 10
    with _keras.short_tracebacks(), _keras.short_tracebacks():
        assert max(len(found) for found in frames()) <= 2
    assert min(len(found) for found in frames()) == right


def test_short_tracebacks_ask_nothing_of_modules(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise ImportError(name)

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "none", None)
    monkeypatch.setattr(_keras, "_of_thread", threading.local())
    with _keras.short_tracebacks():
        pass


def test_functional_config_round_trip():
    model = small()
    config = _keras.functional_config(model)
    inputs, outputs, name = _keras.functional_from_config(config, None)
    again = keras.Model(inputs, outputs, name=name)
    assert again.count_params() == model.count_params()
    assert name == model.name


def test_layers_with_input_keeps_the_input_layer():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    assert len(_keras.layers_with_input(model)) == 2


def test_keras_still_rewrites_bases_of_functional_subclasses():
    """The reason for DPFunctional; when this fails it may be dropped."""

    class Mine(keras.Model):
        pass

    x = keras.Input((4,))
    Mine(x, layers.Dense(2)(x))
    assert Mine.__bases__ == (_keras.Functional,)


def test_copy_graph_calls_the_copied_operations():
    x, z = keras.Input((4,), name="x"), keras.Input((4,), name="z")
    dense = layers.Dense(4)
    model = keras.Model({"x": x, "z": z}, [dense(x) + z, dense(z)])
    copies = {}

    def copy(operation):
        if id(operation) not in copies:
            made = type(operation).from_config(operation.get_config())
            copies[id(operation)] = made
        return copies[id(operation)]

    again = keras.Model(*_keras.copy_graph(model, copy))
    again.set_weights(model.get_weights())
    data = {"x": tf.ones((2, 4)), "z": 2 * tf.ones((2, 4))}
    for a, b in zip(model(data), again(data), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [type(x) for x in again.layers] == [type(x) for x in model.layers]


def test_copy_lambda():
    layer = layers.Lambda(
        lambda x, factor: x * factor,
        output_shape=(4,),
        mask=lambda x, mask: mask,
        arguments={"factor": 3.0},
        name="mine",
    )
    copy = _keras.copy_lambda(layer)
    assert copy.name == "mine" and copy.mask is layer.mask
    assert copy.compute_output_shape((None, 4)) == (None, 4)
    np.testing.assert_array_equal(copy(tf.ones((2, 4))), 3 * np.ones((2, 4)))


def test_turned_layer_keeps_its_place_in_graphs():
    layer = layers.BatchNormalization(name="mine")
    x = keras.Input((3, 4))
    y = layers.Masking()(x)
    model = keras.Model(x, layer(layer(y)))
    inner = keras.Model(x, layer(y))
    new = layers.GroupNormalization(2, name="mine")
    new.build((None, 3, 4))
    _keras.turn_into(layer, new)
    assert type(layer) is layers.GroupNormalization
    assert model.layers[-1] is inner.layers[-1] is layer
    assert len(model.weights) == len(inner.weights) == 2
    data = tf.random.normal((2, 3, 4))
    np.testing.assert_array_equal(model(data), new(new(data)))
    again = keras.Model.from_config(model.get_config())
    assert type(again.layers[-1]) is layers.GroupNormalization


def test_turned_layer_is_built_later():
    layer = layers.BatchNormalization()
    _keras.turn_into(layer, layers.GroupNormalization(2))
    model = keras.Sequential([layer])
    assert not layer.built
    assert model(tf.ones((2, 3, 4))).shape == (2, 3, 4)
    assert layer.built and layer.gamma.shape == (4,)
    assert layer.weights == [layer.gamma, layer.beta]
    assert layer.get_build_config() == {"input_shape": (2, 3, 4)}


def test_holders_hold_a_layer_directly():
    model = small()
    inner = model.layers[1]
    assert _keras.holders_of(model, inner.layers[0]) == [inner]
    assert _keras.holders_of(model, inner) == [model]


def test_values_take_the_place_of_variables():
    variable = keras.Variable([1.0, 2.0])
    (args, kwargs) = _keras.with_values(((variable, 3), {"a": [variable]}))
    assert isinstance(args[0], tf.Tensor) and args[1] == 3
    np.testing.assert_array_equal(kwargs["a"][0], [1.0, 2.0])


@pytest.mark.parametrize("mode", [None, "int8"])
def test_up_to_activation(mode):
    layer = layers.Dense(3, activation="relu")
    x = tf.random.normal((2, 4))
    layer(x)
    if mode:
        layer.quantize(mode)
    found = _keras.up_to_activation(layer, x)
    assert np.any(np.array(found) < 0)
    np.testing.assert_array_equal(tf.nn.relu(found), layer(x))
    assert layer.activation is keras.activations.relu


@pytest.mark.parametrize("kind", [layers.Attention, layers.AdditiveAttention])
def test_attention_is_its_scores_and_what_follows(kind):
    layer = kind(use_scale=True)
    x = [tf.random.normal((2, 3, 4)), tf.random.normal((2, 5, 4))]
    right = layer(x)
    scores = _keras.attention_scores(layer, *x)
    assert scores.shape == (2, 3, 5)
    found = _keras.attention_from_scores(layer, scores, x)
    np.testing.assert_allclose(found, right, rtol=1e-6)
    assert "_calculate_scores" not in vars(layer)


def test_arguments_of_call():
    assert _keras.has_mask_argument(layers.LSTM(1))
    assert not _keras.has_mask_argument(layers.Dense(1))
    assert _keras.has_training_argument(layers.Dropout(0.1))
    assert not _keras.has_training_argument(layers.Flatten())


def test_directions_are_not_fused():
    layer = layers.Bidirectional(layers.LSTM(2))
    x = tf.random.normal((3, 4, 5))
    right = layer(x)
    assert layer._can_attempt_fused_lstm(None)
    assert not layer._can_attempt_fused_gru(None)
    with _keras.fused_directions_off(layer):
        assert not layer._can_attempt_fused_lstm(None)
        np.testing.assert_array_equal(layer(x), right)
    assert layer._can_attempt_fused_lstm(None)


def test_quantized_layers_are_told():
    layer = layers.Dense(2, name="mine")
    layer.build((None, 2))
    assert not _keras.is_quantized(layer)
    layer.quantize("int8")
    assert _keras.is_quantized(layer)
    assert not _keras.is_quantized(layers.Flatten())
    assert _keras.described(layer) == "Layer 'mine' (Dense)"


def saved(path):
    """A model with a saveable object among its attributes, in a file."""

    class Note(_keras.KerasSaveable):
        def _obj_type(self):
            return "Layer"

        def save_own_variables(self, store):
            store["text"] = np.frombuffer(b"note", np.uint8)

    model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    model.note = Note()
    if path.suffix == ".keras":
        model.save(path)
    elif path.suffix == ".json":
        model.save_weights(path, max_shard_size=1)
    else:
        model.save_weights(path)


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "m.weights.json"])
def test_saveable_attributes_are_in_the_file_and_passed_over(name, tmp_path):
    saved(tmp_path / name)
    with _keras.weights_store(tmp_path / name) as store:
        assert bytes(store.get("note")["text"]) == b"note"
        assert "text" not in store.get("other").keys()
    plain = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    plain.load_weights(tmp_path / name)


def test_weights_are_saved_as_keras_saves_them(tmp_path, monkeypatch):
    def model():
        made = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
        made.compile("adam", "mse")
        made.optimizer.build(made.trainable_variables)
        return made

    saved, path = model(), tmp_path / "own.weights.h5"
    _keras.save_weights(saved, path)
    saved.save_weights(tmp_path / "keras.weights.h5")
    own, theirs = model(), model()
    own.load_weights(path)
    theirs.load_weights(tmp_path / "keras.weights.h5")
    for loaded in (own, theirs):
        for kept, found in zip(saved.variables, loaded.variables, strict=True):
            np.testing.assert_array_equal(kept, found)
    answers = iter([False, True])
    monkeypatch.setattr(
        _keras, "ask_to_proceed_with_overwrite", lambda _: next(answers)
    )
    for answered in (False, True):
        path.write_bytes(b"old")
        _keras.save_weights(model(), path, overwrite=False)
        assert (path.read_bytes() != b"old") == answered
    with pytest.raises(ValueError, match="must end in `.weights.h5`"):
        _keras.save_weights(saved, tmp_path / "own.h5")
    with pytest.raises(ValueError, match="not yet been built"):
        _keras.save_weights(keras.Sequential([layers.Dense(1)]), path)


def test_a_step_can_be_made_on_any_data():
    seen = []

    class Model(keras.Sequential):
        def train_step(self, data):
            seen.append(data)
            return {"loss": tf.constant(3.0)}

    model = Model([layers.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    logs = _keras.train_on(model, {"any": tf.constant(1)}, return_dict=True)
    assert logs == {"loss": 3.0} and int(seen[0]["any"]) == 1
    assert _keras.train_on(model, 1, return_dict=False) == 3.0


def test_backups_go_by_two_paths(tmp_path):
    callback = keras.callbacks.BackupAndRestore(tmp_path)
    names = {callback._weights_path, callback._training_metadata_path}
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    callback.set_model(model)
    callback._save_model()
    assert {str(path) for path in tmp_path.iterdir()} == set(map(str, names))


def test_it_is_known_what_xla_compiles():
    seen = []

    def look():
        seen.append(_keras.on_cpu())
        return tf.cond(tf.constant(True), inner, inner)

    def inner():
        seen.append(_keras.on_cpu())
        return 0.0

    tf.function(look, jit_compile=True)()
    compiled = len(seen)
    tf.function(look)()
    look()
    assert seen[:compiled] == [False] * compiled
    cpu_only = not tf.config.list_logical_devices("GPU")
    assert set(seen[compiled:]) == {cpu_only}


@pytest.mark.parametrize("graph", [False, True])
def test_what_others_need_is_not_changed_in_place(graph):
    def run(x):
        before = 2 * x
        after = _keras.added_in_place(before, [[0, 1]], tf.ones(1))
        return before, after

    before, after = (tf.function(run) if graph else run)(tf.ones([2, 2]))
    np.testing.assert_array_equal(before, [[2, 2], [2, 2]])
    np.testing.assert_array_equal(after, [[2, 3], [2, 2]])


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("leading", [(), (1,), (3,)])
def test_vectorized_products_with_one_matrix_are_one_product(leading, adjoint):
    x = tf.random.stateless_normal([4, *leading, 6, 4], [1, 2])
    matrix = tf.random.stateless_normal([8, 4] if adjoint else [4, 8], [3, 4])

    def one(x):
        return tf.raw_ops.BatchMatMulV2(x=x, y=matrix, adj_y=adjoint)

    @tf.function
    def all_of_them(x):
        return _keras.vectorized_map(one, x)

    expected = tf.stack([tf.matmul(row, matrix, False, adjoint) for row in x])
    np.testing.assert_allclose(all_of_them(x), expected, rtol=1e-5, atol=1e-6)
    graph = all_of_them.get_concrete_function(x).graph
    loop = [op for op in graph.get_operations() if "pfor" in op.name]
    assert "BatchMatMulV2" not in {op.type for op in loop}


def test_other_vectorized_products_are_left_alone():
    x = tf.random.stateless_normal([4, 2, 6, 5], [1, 2])
    y = tf.random.stateless_normal([2, 6, 3], [3, 4])
    found = _keras.vectorized_map(lambda x: tf.matmul(x, y, True), x)
    np.testing.assert_allclose(
        found, tf.matmul(x, y[None], True), rtol=1e-5, atol=1e-6
    )
    own = tf.vectorized_map(lambda x: tf.matmul(x, y, True), x)
    np.testing.assert_array_equal(found, own)


@pytest.mark.parametrize("setting", ["0", "1"])
def test_tensorflow_tells_whether_it_uses_onednn(setting):
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("TensorFlow has oneDNN on x86 processors only.")
    code = "from keras_fastclip import _keras; print(_keras.uses_onednn())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": setting},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(setting == "1")


def test_state_of_models_that_begin_with_reshape_is_made_later():
    model = keras.Sequential([layers.Reshape((2, 2)), layers.Flatten()])
    model.compile("sgd", "mse", metrics=["mae"])
    x = tf.zeros((3, 4))
    model(x)
    _keras.make_state(model, x, x)
    assert model.optimizer.built


# -- tf.distribute -----------------------------------------------------------


@pytest.fixture
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0"])


def test_variable_is_of_this_process_also_under_a_strategy(strategy):
    with strategy.scope():
        plain = _keras.variable(np.int64(3))
        mirrored = tf.Variable(3)
    assert isinstance(mirrored, tf.distribute.DistributedValues)
    assert not isinstance(plain, tf.distribute.DistributedValues)
    assert isinstance(plain, tf.Variable) and not plain.trainable
    assert plain.dtype == tf.int64 and plain.numpy() == 3


def test_raw_of_a_mirrored_variable_is_the_copy_that_is_read(strategy):
    with strategy.scope():
        model = small()
        raw = _keras.raw(model.trainable_variables[0])
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(raw)  # That takes no mirrored variable here.
            y = model(tf.ones((2, 4)))
        assert tape.gradient(y, raw) is not None
        with pytest.raises(ValueError, match="replica context"):
            tape.watch(model.trainable_variables[0]._value)
    assert not isinstance(raw, tf.distribute.DistributedValues)


def test_strategy_of_a_model_and_of_its_variables(strategy):
    alone = small()
    with strategy.scope():
        model = small()
        assert _keras.strategy_of(alone) is None
    assert _keras.strategy_of(model) is strategy
    assert _keras.is_mirrored(model.variables[0], strategy)
    assert not _keras.is_mirrored(alone.variables[0], strategy)
    other = tf.distribute.MirroredStrategy(["CPU:0"])
    assert not _keras.is_mirrored(model.variables[0], other)


def test_keras_takes_a_batch_to_build_a_model_that_is_built(
    strategy, monkeypatch
):
    with strategy.scope():
        model = small()
        model.compile("sgd", "mse")
    calls = []
    monkeypatch.setattr(
        model, "_symbolic_build", lambda data_batch: calls.append(data_batch)
    )
    data = tf.data.Dataset.from_tensors((tf.ones((2, 4)), tf.ones((2, 2))))
    with _keras.built_already(model):
        model.fit(data, verbose=0)
    assert calls == []
    model.fit(data, verbose=0)
    assert len(calls) == 1
    assert "_maybe_symbolic_build" not in vars(model)


def test_cross_replica_function_gives_a_step_the_next_batch():
    model = small()
    model.compile("sgd", "mse")
    traces = []

    def step(data):
        traces.append(data)
        return data + 1

    batches = iter([tf.constant(1), tf.constant(2)])
    run = _keras.cross_replica_function(model, step)
    assert [int(run(batches)), int(run(batches))] == [2, 3]
    assert len(traces) == 1
    with pytest.raises(StopIteration):
        run(batches)
