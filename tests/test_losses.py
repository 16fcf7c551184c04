"""The loss of an example is what Keras computes for a batch of it alone."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_fastclip
from keras_fastclip import _keras
from keras_fastclip.checking import loop_over_examples
from keras_fastclip.losses import reduce_examples
from keras_fastclip.sampling import PoissonBatch, poisson_indices
from tests.zoo import BATCH, labels, random

CLIP = 0.3
LENGTH = 5
SETTINGS = {"l2_norm_clip": CLIP, "noise_multiplier": 0.0}


# -- models --------------------------------------------------------------------


def vector(make, width=3):
    x = keras.Input((4,))
    y = layers.Dense(5, activation="tanh")(x)
    return make(x, layers.Dense(width)(y))


def single(make):
    return vector(make, width=1)


def tokens(make):
    x = keras.Input((LENGTH, 4))
    return make(x, layers.Dense(3)(layers.Dense(5, activation="tanh")(x)))


def image(make):
    x = keras.Input((4, 3, 2))
    return make(x, layers.Conv2D(2, 2, padding="same")(x))


def masked(make):
    x = keras.Input((LENGTH,), dtype="int32")
    y = layers.Embedding(9, 4, mask_zero=True)(x)
    return make(x, layers.Dense(3)(y))


def masking(make):
    x = keras.Input((LENGTH, 4))
    y = layers.Masking()(x)
    return make(x, layers.Dense(3)(y))


def two(make, structure):
    x = keras.Input((4,))
    y = layers.Dense(5, activation="tanh")(x)
    a, b = layers.Dense(3, name="a")(y), layers.Dense(2, name="b")(y)
    return make(x, structure(a, b))


def two_in_list(make):
    return two(make, lambda a, b: [a, b])


def two_in_dict(make):
    return two(make, lambda a, b: {"b": b, "a": a})


def two_nested(make):
    return two(make, lambda a, b: {"u": {"a": a}, "v": [b]})


def inputs(build):
    """Data for one of the models above."""
    if build is masked:
        # Zeros are padding, so the examples have lengths from 1 to 5.
        x = labels(BATCH, LENGTH, high=8) + 1
        for i in range(BATCH):
            x[i, 1 + i % LENGTH :] = 0
        return x
    if build is masking:
        x = random(BATCH, LENGTH, 4)
        for i in range(BATCH):
            x[i, 1 + i % LENGTH :] = 0
        return x
    shapes = {tokens: (LENGTH, 4), image: (4, 3, 2)}
    return random(BATCH, *shapes.get(build, (4,)))


def positive(*shape, seed=5):
    return np.exp(random(*shape, seed=seed))


# -- losses --------------------------------------------------------------------


def squared(y_true, y_pred):
    """As many values as outputs."""
    return ops.square(y_true - y_pred)


class Quartic(keras.Loss):
    def call(self, y_true, y_pred):
        return ops.sum((y_true - y_pred) ** 4, axis=-1)


def cross_entropy(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **kwargs
    )


def binary_cross_entropy(**kwargs):
    return keras.losses.BinaryCrossentropy(from_logits=True, **kwargs)


def target(*shape, seed=2):
    return lambda: random(BATCH, *shape, seed=seed)


def classes(*shape):
    return lambda: labels(BATCH, *shape)


def bits(*shape):
    return lambda: labels(BATCH, *shape, high=2).astype(keras.config.floatx())


def a_and_b(structure):
    return lambda: structure(random(BATCH, 3, seed=2), random(BATCH, 2, seed=3))


LIST = a_and_b(lambda a, b: [a, b])
DICT = a_and_b(lambda a, b: {"a": a, "b": b})
NESTED = a_and_b(lambda a, b: {"u": {"a": a}, "v": [b]})


def mse(**kwargs):
    return keras.losses.MeanSquaredError(**kwargs)


# name: model, targets, sample weights, arguments of `compile`
CASES = {
    "string": (vector, target(3), None, lambda: {"loss": "mse"}),
    "function": (
        vector,
        target(3),
        None,
        lambda: {"loss": keras.losses.mean_absolute_error},
    ),
    "own_function": (vector, target(3), None, lambda: {"loss": squared}),
    "object": (vector, classes(), None, lambda: {"loss": cross_entropy()}),
    "own_class": (vector, target(3), None, lambda: {"loss": Quartic()}),
    "one_loss_for_all_outputs": (
        two_in_list,
        LIST,
        None,
        lambda: {"loss": "mse"},
    ),
    "list": (two_in_list, LIST, None, lambda: {"loss": ["mse", Quartic()]}),
    "dict_for_list": (
        two_in_list,
        DICT,
        None,
        lambda: {"loss": {"a": "mae", "b": squared}},
    ),
    "dict": (
        two_in_dict,
        DICT,
        None,
        lambda: {"loss": {"a": "mse", "b": Quartic()}},
    ),
    "nested": (
        two_nested,
        NESTED,
        None,
        lambda: {"loss": {"u": {"a": "mse"}, "v": [Quartic()]}},
    ),
    "list_with_none": (
        two_in_list,
        LIST,
        None,
        lambda: {"loss": [None, "mse"]},
    ),
    "dict_with_none": (
        two_in_dict,
        DICT,
        None,
        lambda: {"loss": {"a": "mse", "b": None}},
    ),
    "loss_weight_of_one_output": (
        vector,
        target(3),
        None,
        lambda: {"loss": "mse", "loss_weights": 0.3},
    ),
    "loss_weights_in_list": (
        two_in_list,
        LIST,
        None,
        lambda: {"loss": ["mse", "mae"], "loss_weights": [0.3, 2.0]},
    ),
    "loss_weights_in_dict": (
        two_in_dict,
        DICT,
        None,
        lambda: {
            "loss": {"a": "mse", "b": "mae"},
            "loss_weights": {"a": 0.3, "b": 2.0},
        },
    ),
    "sample_weight": (
        vector,
        target(3),
        lambda: positive(BATCH),
        lambda: {"loss": "mse"},
    ),
    "sample_weight_of_zero": (
        vector,
        target(3),
        lambda: positive(BATCH) * (np.arange(BATCH) != 1),
        lambda: {"loss": "mse"},
    ),
    "sample_weight_column": (
        vector,
        target(3),
        lambda: positive(BATCH, 1),
        lambda: {"loss": "mse"},
    ),
    "sample_weight_with_one_output": (
        single,
        target(1),
        lambda: positive(BATCH),
        lambda: {"loss": "mse"},
    ),
    "sample_weight_with_column_of_losses": (
        single,
        target(1),
        lambda: positive(BATCH),
        lambda: {"loss": squared},
    ),
    "sample_weight_with_tokens": (
        tokens,
        classes(LENGTH),
        lambda: positive(BATCH),
        lambda: {"loss": cross_entropy()},
    ),
    "sample_weight_of_tokens": (
        tokens,
        classes(LENGTH),
        lambda: positive(BATCH, LENGTH),
        lambda: {"loss": cross_entropy()},
    ),
    "sample_weight_of_booleans": (
        tokens,
        classes(LENGTH),
        lambda: random(BATCH, LENGTH) > 0,
        lambda: {"loss": cross_entropy()},
    ),
    "one_sample_weight_for_two_outputs": (
        two_in_list,
        LIST,
        lambda: positive(BATCH),
        lambda: {"loss": ["mse", "mae"]},
    ),
    "sample_weights_by_output_in_list": (
        two_in_list,
        LIST,
        lambda: [positive(BATCH), positive(BATCH, seed=6)],
        lambda: {"loss": ["mse", "mae"]},
    ),
    "sample_weights_by_output_in_dict": (
        two_in_dict,
        DICT,
        lambda: {"a": positive(BATCH), "b": positive(BATCH, seed=6)},
        lambda: {"loss": {"a": "mse", "b": "mae"}},
    ),
    "column_of_losses": (single, target(1), None, lambda: {"loss": squared}),
    "tokens": (
        tokens,
        classes(LENGTH),
        None,
        lambda: {"loss": cross_entropy()},
    ),
    "pixels": (image, target(4, 3, 2), None, lambda: {"loss": "mse"}),
    "binary_column": (
        single,
        bits(1),
        None,
        lambda: {"loss": binary_cross_entropy()},
    ),
    "binary_vector_of_targets": (
        single,
        bits(),
        None,
        lambda: {"loss": binary_cross_entropy()},
    ),
    "mask_of_embedding": (
        masked,
        classes(LENGTH),
        None,
        lambda: {"loss": cross_entropy()},
    ),
    "mask_and_sample_weight": (
        masked,
        classes(LENGTH),
        lambda: positive(BATCH),
        lambda: {"loss": cross_entropy()},
    ),
    "mask_and_sample_weight_of_tokens": (
        masked,
        classes(LENGTH),
        lambda: positive(BATCH, LENGTH),
        lambda: {"loss": cross_entropy()},
    ),
    "masking": (masking, target(LENGTH, 3), None, lambda: {"loss": "mse"}),
    "ignored_class": (
        tokens,
        classes(LENGTH),
        None,
        lambda: {"loss": cross_entropy(ignore_class=1)},
    ),
    "ignored_class_and_mask": (
        masked,
        classes(LENGTH),
        None,
        lambda: {"loss": cross_entropy(ignore_class=1)},
    ),
}


def compiled(build, loss="mse", optimizer=None, settings=SETTINGS, **kwargs):
    """A private model with what `compile` gets."""
    model = build(lambda x, y: keras_fastclip.DPModel(x, y, **settings))
    optimizer = optimizer or keras.optimizers.SGD(1.0)
    model.compile(optimizer, loss, **kwargs)
    return model


def as_tensors(*batch):
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.constant(leaf), batch
    )


def relative_error(found, right):
    pairs = zip(found, right, strict=True)
    gap = sum(np.sum(np.square(f - r)) for f, r in pairs)
    return np.sqrt(gap / sum(np.sum(np.square(r)) for r in right))


def require_equal_to_loop(model, x, y=None, sample_weight=None):
    batch = as_tensors(x, y, sample_weight)
    sums, norms = loop_over_examples(model, batch, model._privacy.clipping)
    assert np.max(norms) > CLIP**2  # otherwise nothing is clipped
    found_sums, found_norms = model.clipped_gradients(*batch)
    assert relative_error(found_sums, sums) < 1e-9
    np.testing.assert_allclose(found_norms, norms, rtol=1e-9, atol=1e-20)


# -- every kind of loss --------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_keras_for_single_examples(name, float64):
    build, y, sample_weight, kwargs = CASES[name]
    sample_weight = sample_weight and sample_weight()
    model = compiled(build, **kwargs())
    require_equal_to_loop(model, inputs(build), y(), sample_weight)


REDUCTIONS = [
    "sum_over_batch_size",
    "mean",
    "sum",
    "mean_with_sample_weight",
    None,
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_are_those_of_keras(reduction, weighted, float64):
    weights = positive(BATCH, LENGTH) if weighted else None
    model = compiled(masked, cross_entropy(reduction=reduction))
    require_equal_to_loop(model, inputs(masked), labels(BATCH, LENGTH), weights)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_do_not_need_to_know_the_batch_size(reduction):
    values = random(BATCH, LENGTH)
    masks = [inputs(masked) > 0]
    for shape in [(BATCH,), (BATCH, 1), (BATCH, LENGTH)]:
        weights = positive(*shape)

        def reduce(values, weights, mask):
            return reduce_examples(values, weights, [mask], reduction)

        traced = tf.function(
            reduce,
            input_signature=[
                tf.TensorSpec([None, LENGTH], values.dtype),
                tf.TensorSpec([None, *shape[1:]], weights.dtype),
                tf.TensorSpec([None, LENGTH], tf.bool),
            ],
        )
        found = traced(values, weights, *masks)
        right = reduce(*as_tensors(values, weights, *masks))
        assert right.shape == (BATCH,)
        np.testing.assert_allclose(found, right, rtol=1e-5)


@pytest.mark.parametrize("shape", [(BATCH,), (BATCH, 1)])
def test_a_mean_by_sample_weight_keeps_the_weight_of_an_example(shape, float64):
    # In a batch of one the weight would be divided by itself.
    x, y = inputs(vector), random(BATCH, 3, seed=2)
    weights = positive(*shape)
    found = compiled(vector, mse(reduction="mean_with_sample_weight"))
    plain = compiled(vector, mse())
    plain.set_weights(found.get_weights())
    _, norms = found.clipped_gradients(x, y, weights)
    _, unweighted = plain.clipped_gradients(x, y)
    expected = unweighted * np.square(weights.reshape(-1))
    np.testing.assert_allclose(norms, expected, rtol=1e-9)


def test_class_weights_are_sample_weights(float64):
    x, y = inputs(vector), labels(BATCH)
    class_weight = {0: 0.2, 1: 1.0, 2: 3.0}
    model = compiled(vector, cross_entropy())
    before = model.get_weights()
    weights = np.array([class_weight[label] for label in y])
    batch = as_tensors(x, y, weights)
    sums, _ = loop_over_examples(model, batch, model._privacy.clipping)
    # Every example is drawn with probability one.
    model.fit(x, y, batch_size=BATCH, class_weight=class_weight, verbose=0)
    update = [b - a for b, a in zip(before, model.get_weights(), strict=True)]
    assert relative_error(update, [s / BATCH for s in sums]) < 1e-9


def test_loss_of_an_example_does_not_depend_on_the_lengths_of_others(float64):
    model = compiled(masked, cross_entropy())
    x, y = inputs(masked), labels(BATCH, LENGTH)
    other = x.copy()
    other[1:] = labels(BATCH - 1, LENGTH, high=8) + 1
    assert not np.array_equal(x[1:] == 0, other[1:] == 0)
    _, norms = model.clipped_gradients(x, y)
    _, with_others = model.clipped_gradients(other, y)
    np.testing.assert_allclose(norms[0], with_others[0], rtol=1e-12)
    assert np.all(np.abs(norms[1:] - with_others[1:]) > 1e-6)


def test_an_example_that_is_masked_out_contributes_nothing(float64):
    model = compiled(masked, cross_entropy())
    x, y = inputs(masked), labels(BATCH, LENGTH)
    x[2] = 0
    sums, norms = model.clipped_gradients(x, y)
    assert norms[2] == 0
    rest = np.arange(BATCH) != 2
    without, _ = model.clipped_gradients(x[rest], y[rest])
    assert relative_error(sums, without) < 1e-12


# -- losses from elsewhere -----------------------------------------------------


class Penalty(layers.Layer):
    """Adds a loss of one value for each example."""

    def __init__(self, keepdims=False):
        super().__init__()
        self.keepdims = keepdims

    def call(self, x):
        self.add_loss(ops.sum(x**2, axis=-1, keepdims=self.keepdims))
        return x


@pytest.mark.parametrize("keepdims", [False, True])
def test_add_loss_by_example_is_clipped_with_the_loss(keepdims, float64):
    def build(make):
        x = keras.Input((4,))
        penalty = Penalty(keepdims)
        y = penalty(layers.Dense(5, activation="tanh")(x))
        return make(x, layers.Dense(3)(penalty(y + 1)))

    model = compiled(build)
    require_equal_to_loop(model, inputs(vector), random(BATCH, 3, seed=2))
    plain = compiled(vector)
    plain.set_weights(model.get_weights())
    batch = inputs(vector), random(BATCH, 3, seed=2)
    with_penalty, without = (
        m.clipped_gradients(*batch) for m in (model, plain)
    )
    assert np.all(np.abs(with_penalty[1] - without[1]) > 1e-3)


class OwnLoss(keras_fastclip.DPModel):
    def compute_per_example_loss(self, x, y, y_pred, sample_weight=None):
        losses = ops.sum((y - y_pred) ** 2 * x[:, :1], axis=-1)
        return losses if sample_weight is None else losses * sample_weight


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", ["mae", None])
def test_compute_per_example_loss_replaces_the_loss(loss, weighted, float64):
    model = vector(lambda x, y: OwnLoss(x, y, **SETTINGS))
    model.compile(keras.optimizers.SGD(1.0), loss)
    weights = positive(BATCH) if weighted else None
    x, y = inputs(vector), random(BATCH, 3, seed=2)
    require_equal_to_loop(model, x, y, weights)
    logs = model.fit(
        x, y, sample_weight=weights, batch_size=BATCH, verbose=0
    ).history
    assert np.isfinite(logs["loss"][0])


def regularized(make):
    x = keras.Input((4,))
    l1, l2 = keras.regularizers.L1(0.125), keras.regularizers.L2(0.25)
    y = layers.Dense(5, "tanh", kernel_regularizer=l2)(x)
    return make(x, layers.Dense(3, bias_regularizer=l1)(y))


def test_weight_penalties_are_added_after_clipping(float64):
    model = compiled(regularized)
    model.set_weights([w + 0.5 for w in model.get_weights()])
    x, y = inputs(vector), random(BATCH, 3, seed=2)
    require_equal_to_loop(model, x, y)
    first, _, _, bias = before = model.get_weights()
    sums, _ = model.clipped_gradients(x, y)
    expected = [s / BATCH for s in sums]
    expected[0] = expected[0] + 2 * 0.25 * first
    expected[3] = expected[3] + 0.125 * np.sign(bias)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    update = [b - a for b, a in zip(before, model.get_weights(), strict=True)]
    assert relative_error(update, expected) < 1e-9


# -- logs ----------------------------------------------------------------------

REAL = np.array([True, True, False, True, False, True, True, False])
ROWS = len(REAL)


def logs_of(model, x, y, sample_weight=None, real=REAL):
    """What a step logs for a batch in which some rows only fill it up."""
    batch = as_tensors(x, y, sample_weight)
    model.reset_metrics()
    logs = model.train_step(PoissonBatch(batch, tf.constant(real)))
    return {name: float(value) for name, value in logs.items()}


def still(build, loss, **kwargs):
    """A model whose weights stay as they are."""
    return compiled(
        build,
        loss,
        keras.optimizers.SGD(0.0),
        {**SETTINGS, "expected_batch_size": 4},
        run_eagerly=True,
        **kwargs,
    )


def evaluated(model, x, y, sample_weight=None, real=REAL):
    """What Keras reports for the real rows, as one batch."""
    x, y, sample_weight = keras.tree.map_structure(
        lambda leaf: None if leaf is None else leaf[real], (x, y, sample_weight)
    )
    return model.evaluate(
        x,
        y,
        sample_weight=sample_weight,
        batch_size=ROWS,
        return_dict=True,
        verbose=0,
    )


def require_same(found, right):
    assert found.keys() == right.keys()
    for name in right:
        np.testing.assert_allclose(found[name], right[name], rtol=1e-5)


def test_logged_loss_is_the_mean_over_real_rows_with_penalties():
    model = still(regularized, "mse")
    x, y = random(ROWS, 4), random(ROWS, 3, seed=2)
    logs = logs_of(model, x, y)
    require_same(logs, evaluated(model, x, y))
    errors = np.mean((model(x) - y)[REAL] ** 2)
    penalty = float(sum(model.losses))
    assert penalty > 0.01
    np.testing.assert_allclose(logs["loss"], errors + penalty, rtol=1e-5)


def test_logged_losses_of_outputs_are_over_real_rows():
    model = still(two_in_dict, {"a": "mse", "b": "mae"}, loss_weights=None)
    x = random(ROWS, 4)
    y = {"a": random(ROWS, 3, seed=2), "b": random(ROWS, 2, seed=3)}
    weights = {"a": positive(ROWS), "b": positive(ROWS, seed=6)}
    logs = logs_of(model, x, y, weights)
    assert {"a_loss", "b_loss"} < set(logs)
    require_same(logs, evaluated(model, x, y, weights))


def test_logged_losses_leave_out_examples_that_are_not_finite():
    model = still(two_in_list, ["mse", "mae"])
    x, y = random(ROWS, 4), [random(ROWS, 3, seed=2), random(ROWS, 2, seed=3)]
    model._privacy.plan(model, as_tensors(x, y, None))
    x[0] = np.nan
    logs = logs_of(model, x, y)
    rest = REAL & (np.arange(ROWS) > 0)
    require_same(logs, evaluated(model, x, y, real=rest))
    assert model.nonfinite_examples() == 1


class LargestError(keras.metrics.Metric):
    """A metric that takes no sample weights."""

    def __init__(self, name="largest_error"):
        super().__init__(name=name)
        self.largest = self.add_variable(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred):
        error = ops.max(ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred))
        self.largest.assign(ops.maximum(self.largest, error))

    def result(self):
        return self.largest


def mean_error(y_true, y_pred):
    """A metric function of one number for the batch."""
    return ops.mean(ops.abs(y_true - y_pred))


METRICS = {
    "accuracy": (
        vector,
        cross_entropy,
        lambda: labels(ROWS),
        lambda: ["accuracy"],
    ),
    "mean_error": (
        vector,
        mse,
        lambda: random(ROWS, 3, seed=2),
        lambda: ["mae"],
    ),
    "function_of_the_batch": (
        vector,
        mse,
        lambda: random(ROWS, 3, seed=2),
        lambda: [mean_error],
    ),
    "auc": (
        single,
        binary_cross_entropy,
        lambda: labels(ROWS, 1, high=2),
        lambda: [
            keras.metrics.AUC(from_logits=True),
            keras.metrics.Precision(),
        ],
    ),
    "tokens": (
        tokens,
        cross_entropy,
        lambda: labels(ROWS, LENGTH),
        lambda: ["accuracy"],
    ),
    "masked_tokens": (
        masked,
        cross_entropy,
        lambda: labels(ROWS, LENGTH),
        lambda: ["accuracy"],
    ),
}


def rows_for(build):
    data = inputs(build)
    return np.concatenate([data, data[::-1]])[:ROWS]


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_over_real_rows(name):
    build, loss, y, metrics = METRICS[name]
    model = still(build, loss(), metrics=metrics())
    x, y = rows_for(build), y()
    right = evaluated(model, x, y)
    if name == "masked_tokens":
        # Keras's own loss of a batch depends on its mask.
        del right["loss"]
    for jit_compile in [False, True]:
        model.jit_compile = jit_compile
        if jit_compile and name == "function_of_the_batch":
            continue  # See below.
        logs = logs_of(model, x, y)
        require_same({metric: logs[metric] for metric in right}, right)
        assert logs != logs_of(model, x, y, real=~REAL)


def test_a_metric_without_sample_weights_is_over_real_rows():
    model = still(vector, "mse", metrics=[LargestError()])
    x, y = random(ROWS, 4), random(ROWS, 3, seed=2)
    y[~REAL] += 100
    errors = np.abs(model(x) - y)[REAL]
    found = logs_of(model, x, y)["largest_error"]
    np.testing.assert_allclose(found, np.max(errors), rtol=1e-5)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, LENGTH)])
def test_weighted_metrics_are_over_real_rows(shape):
    model = still(
        tokens,
        cross_entropy(),
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2)],
    )
    x, y = rows_for(tokens), labels(ROWS, LENGTH)
    weights = positive(*shape)
    # Keras takes weights of tokens only, for losses of tokens.
    full = np.broadcast_to(weights.reshape(ROWS, -1), (ROWS, LENGTH))
    right = evaluated(model, x, y, full)
    for jit_compile in [False, True]:
        model.jit_compile = jit_compile
        require_same(logs_of(model, x, y, weights), right)


def test_weighted_metrics_take_the_weights_of_their_output():
    model = still(
        two_in_dict,
        {"a": "mse", "b": "mae"},
        weighted_metrics={"a": ["mae"], "b": ["mse"]},
    )
    x = random(ROWS, 4)
    y = {"a": random(ROWS, 3, seed=2), "b": random(ROWS, 2, seed=3)}
    weights = {"a": positive(ROWS), "b": positive(ROWS, seed=6)}
    right = evaluated(model, x, y, weights)
    for jit_compile in [False, True]:
        model.jit_compile = jit_compile
        require_same(logs_of(model, x, y, weights), right)


class OwnMetrics(keras_fastclip.DPModel):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "largest_input": ops.max(x)}


def test_an_overridden_compute_metrics_sees_the_real_rows_only():
    model = vector(
        lambda x, y: OwnMetrics(x, y, expected_batch_size=4, **SETTINGS)
    )
    model.compile(
        keras.optimizers.SGD(0.0), "mse", metrics=["mae"], run_eagerly=True
    )
    x, y = random(ROWS, 4), random(ROWS, 3, seed=2)
    x[~REAL] += 100
    logs = logs_of(model, x, y)
    assert logs["largest_input"] == np.max(x[REAL])
    require_same(logs, evaluated(model, x, y))


@pytest.mark.parametrize("metric", ["mae", mean_error, LargestError])
def test_an_empty_batch_leaves_losses_and_metrics_as_they_are(metric):
    metric = metric() if metric is LargestError else metric
    model = still(two_in_list, "mse", metrics=[[metric], []])
    x, y = random(ROWS, 4), [random(ROWS, 3, seed=2), random(ROWS, 2, seed=3)]
    before = logs_of(model, x, y)
    empty = PoissonBatch(as_tensors(x, y, None), tf.constant([False] * ROWS))
    after = {k: float(v) for k, v in model.train_step(empty).items()}
    assert before == after


def drawn(examples, batch_size, seed):
    rng = np.random.default_rng(seed)
    return poisson_indices(examples, batch_size, rng)


def test_logs_of_fit_under_xla_leave_out_padding():
    def build(make):
        x = keras.Input((LENGTH,), dtype="int32")
        y = layers.Embedding(9, 4, mask_zero=True, embeddings_regularizer="l2")(
            x
        )
        word = layers.Dense(3, name="word")(y)
        y = layers.GlobalAveragePooling1D()(y)
        return make(x, {"all": layers.Dense(3, name="all")(y), "word": word})

    seed, examples, size = 3, 24, 4
    model = build(
        lambda x, y: keras_fastclip.DPModel(x, y, seed=seed, **SETTINGS)
    )
    compile_model = functools.partial(
        model.compile,
        keras.optimizers.SGD(0.0),
        {"all": cross_entropy(), "word": cross_entropy(reduction="sum")},
        metrics={"all": ["accuracy"], "word": ["accuracy"]},
    )
    compile_model(jit_compile=True)
    x = labels(examples, LENGTH, high=9)
    x[:, 0] = 1 + np.arange(examples) % 8
    y = {
        "all": labels(examples, seed=2),
        "word": labels(examples, LENGTH, seed=3),
    }
    found = model.fit(
        x, y, batch_size=size, steps_per_epoch=1, verbose=0
    ).history
    compile_model(run_eagerly=True)
    rows = drawn(examples, size, seed)
    assert 0 < len(rows) < examples
    loss = 0.0
    total = np.zeros(2)
    for i in rows:
        logs = model.evaluate(
            x[i : i + 1],
            {k: v[i : i + 1] for k, v in y.items()},
            return_dict=True,
            verbose=0,
        )
        loss += logs["loss"] / len(rows)
        total += [logs["all_loss"], logs["word_loss"]]
    np.testing.assert_allclose(found["loss"], [loss], rtol=1e-5)
    means = total / len(rows)
    np.testing.assert_allclose(found["all_loss"], means[:1], rtol=1e-5)
    np.testing.assert_allclose(found["word_loss"], means[1:], rtol=1e-5)
    right = model.evaluate(
        x[rows],
        {k: v[rows] for k, v in y.items()},
        batch_size=examples,
        return_dict=True,
        verbose=0,
    )
    for name in ("all_accuracy", "word_accuracy"):
        np.testing.assert_allclose(found[name], [right[name]], rtol=1e-5)


@pytest.mark.parametrize("metric", [LargestError, mean_error])
def test_a_metric_that_cannot_leave_out_padding_is_refused_under_xla(metric):
    metric = metric() if metric is LargestError else metric
    model = compiled(vector, "mse", metrics=[metric], jit_compile=True)
    before = model.get_weights()
    with pytest.raises(ValueError, match="sample_weight.*jit_compile=False"):
        model.fit(random(24, 4), random(24, 3), batch_size=4, verbose=0)
    for b, a in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(b, a)


# -- many classes --------------------------------------------------------------

CLASSES = 300


def sparse_losses(logits, classes, g, **options):
    with tf.GradientTape() as tape:
        tape.watch(logits)
        found = ops.sparse_categorical_crossentropy(classes, logits, **options)
    return found, tape.gradient(found, logits, g)


def own_sparse_losses(*args, **options):
    with _keras.own_operations():
        return sparse_losses(*args, **options)


def logits_of(*shape, scale=1.0):
    return tf.constant(scale * random(*shape, CLASSES), tf.float32)


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 2)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3, 1e30])
@pytest.mark.parametrize("graph", [False, True])
def test_losses_of_many_classes_are_those_of_keras(shape, scale, graph):
    run = tf.function(own_sparse_losses) if graph else own_sparse_losses
    logits, classes = logits_of(*shape, scale=scale), labels(*shape, high=300)
    g = tf.constant(random(*shape), tf.float32)
    found = run(logits, classes, g, from_logits=True)
    right = sparse_losses(logits, classes, g, from_logits=True)
    np.testing.assert_allclose(found[0], right[0], 2e-6, 1e-6)
    np.testing.assert_allclose(found[1], right[1], 2e-6, 1e-6)
    assert found[0].shape == right[0].shape


@pytest.mark.parametrize("where", ["label", "elsewhere", "both", "all"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_with_its_own_row(where, value):
    places = {"label": [2], "elsewhere": [40], "both": [2, 40], "all": ...}
    logits = logits_of(4).numpy()
    logits[1, places[where]] = value
    logits, classes, g = tf.constant(logits), np.array([1, 2, 3, 4]), tf.ones(4)
    found = own_sparse_losses(logits, classes, g, from_logits=True)
    right = sparse_losses(logits, classes, g, from_logits=True)
    for mine, exact in zip(found, right, strict=True):
        np.testing.assert_allclose(mine, exact, 2e-6, 1e-6)
    alone = own_sparse_losses(logits_of(4), classes, g, from_logits=True)
    others = np.array([0, 2, 3])
    for mine, exact in zip(found, alone, strict=True):
        np.testing.assert_array_equal(
            mine.numpy()[others], exact.numpy()[others]
        )


@pytest.mark.parametrize("label", [-1, CLASSES])
@pytest.mark.parametrize("run", [sparse_losses, own_sparse_losses])
def test_a_label_that_is_no_class_is_an_error(label, run):
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(logits_of(2), np.array([0, label]), tf.ones(2), from_logits=True)


@pytest.mark.parametrize(
    "dtype, classes, from_logits",
    [("float64", 300, True), ("float32", 30, True), ("float32", 300, False)],
)
def test_other_losses_are_left_to_keras(dtype, classes, from_logits):
    logits = tf.nn.softmax(tf.cast(random(4, classes), dtype))
    targets, g = labels(4, 1), tf.ones(4, dtype)
    found = own_sparse_losses(logits, targets, g, from_logits=from_logits)
    right = sparse_losses(logits, targets, g, from_logits=from_logits)
    for mine, exact in zip(found, right, strict=True):
        np.testing.assert_array_equal(mine, exact)


def test_second_derivatives_of_losses_are_those_of_keras():
    logits, classes = logits_of(5).numpy(), labels(5, high=300)
    # Two shares that are equal, of logits that are not, and a label far below.
    logits[4, :3], classes[4] = [1e-8, 0, -100], 2
    logits[4, 3:] = -50
    logits = tf.constant(logits)

    def second(run):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            first = run(logits, classes, tf.ones(5), from_logits=True)[1]
            first = tf.reduce_sum(first**2)
        return tape.gradient(first, logits)

    exact = second(sparse_losses)
    np.testing.assert_allclose(second(own_sparse_losses), exact, 1e-4, 1e-6)


@pytest.mark.parametrize("activation", [None, "softmax"])
def test_gradients_with_many_classes_are_those_of_a_loop(activation):
    model = keras_fastclip.DPSequential(
        [
            keras.Input((5, 4)),
            layers.Dense(8, "tanh"),
            layers.Dense(CLASSES, activation),
        ],
        method="opacus",  # Others add a margin to norms.
        **SETTINGS,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=activation is None,
        # With softmax, Keras would take logarithms of shares.
        ignore_class=None if activation else 7,
    )
    model.compile("sgd", loss)
    x, y = random(6, 5, 4), labels(6, 5, high=CLASSES)
    y[:, 0] = 7
    report = keras_fastclip.check_gradients(model, x, y)
    assert report.relative_error < 1e-5
    step = tf.function(model.clipped_gradients).get_concrete_function(
        tf.constant(x), tf.constant(y)
    )
    kinds = {op.type for op in step.graph.get_operations()}
    fused = "SparseSoftmaxCrossEntropyWithLogits" in kinds
    assert fused != _keras.uses_onednn()
