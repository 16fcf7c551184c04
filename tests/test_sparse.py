"""Noise on selected rows of embedding tables.

Statistical bounds are exceeded with probability below 1e-9 by what is right.
"""

import math
import statistics
import time

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import AdaptiveNorm, SparseNoise, keystream
from keras_fastclip.model import clip
from keras_fastclip.sparse import Touched

ROWS, WIDTH, POSITIONS, BATCH = 500, 8, 5, 16


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model(rows=ROWS, width=WIDTH, optimizer=None, jit_compile=False, **kwargs):
    """Means of embeddings, classified."""
    inputs = keras.Input((POSITIONS,), dtype="int32")
    x = layers.Embedding(rows, width, name="table")(inputs)
    x = layers.GlobalAveragePooling1D()(layers.Dense(width, "tanh")(x))
    return private(inputs, layers.Dense(2)(x), optimizer, jit_compile, **kwargs)


def private(inputs, outputs, optimizer=None, jit_compile=False, **kwargs):
    defaults = dict(
        l2_norm_clip=0.1,
        noise_multiplier=1.0,
        expected_batch_size=BATCH,
        sparse_noise=SparseNoise(),
    )
    made = keras_fastclip.DPModel(inputs, outputs, **(defaults | kwargs))
    optimizer = optimizer or keras.optimizers.SGD(1.0)
    made.compile(optimizer, cross_entropy(), jit_compile=jit_compile)
    return made


def data(examples=BATCH, high=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, high, (examples, POSITIONS))
    # Some rows several times in an example, and some in several examples.
    x[:, 1] = x[:, 0]
    x[::2, 2] = 7
    return x, rng.integers(0, 2, examples)


def table_of(private):
    return private.get_layer("table").embeddings


def touched(private, x, y, weight=None):
    """What a batch adds to the table, and its marks, as whole tables."""
    batch = (x, y, None if weight is None else tf.constant(weight, tf.float32))
    found = clip(private, batch).sums[id(table_of(private))]
    marks = np.zeros(found.size)
    marks[found.rows.numpy()] = found.marks.numpy()
    return found.dense().numpy(), marks


def changes(private, x, y, steps=1):
    """What single steps of SGD with rate 1 add to the table, times -batch."""
    table = table_of(private)
    initial = private.get_weights()
    found = []
    for _ in range(steps):
        private.set_weights(initial)
        before = table.numpy()
        private.train_on_batch(x, y)
        found.append((before - table.numpy()) * BATCH)
    private.set_weights(initial)
    return np.array(found)


# -- what the batch adds ------------------------------------------------------


@pytest.mark.parametrize("norm", [0.5, 1.0, 1.8])
def test_marks_are_those_of_a_loop_over_examples(norm):
    x, y = data()
    made = model(sparse_noise=SparseNoise(map_norm=norm))
    right = np.zeros(ROWS)
    for i in range(BATCH):
        k = len(set(x[i]))
        own = np.zeros(ROWS)
        own[list(set(x[i]))] = min(1, norm / math.sqrt(k))
        assert np.linalg.norm(own) <= norm * (1 + 1e-12)
        right += own
    _, marks = touched(made, x, y)
    np.testing.assert_allclose(marks, right, rtol=1e-12)


@pytest.mark.parametrize("method", ["auto", "opacus", "ghost", "bk"])
@pytest.mark.parametrize("clipping", ["flat", [0.06, 0.06, 0.0529]])
def test_sums_are_those_without_the_option(method, clipping):
    x, y = data()
    norm = 0.1 if clipping == "flat" else math.hypot(0.06, 0.06, 0.0529)
    settings = dict(method=method, clipping=clipping, l2_norm_clip=norm)
    made = model(**settings)
    plain = model(sparse_noise=None, **settings)
    plain.set_weights(made.get_weights())
    for mine, right in zip(
        made.clipped_gradients(x, y)[0],
        plain.clipped_gradients(x, y)[0],
        strict=True,
    ):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-7)
    assert keras_fastclip.check_gradients(made, x, y)


def test_examples_without_a_gradient_mark_nothing():
    """Those of weight zero, and those whose gradient is not finite."""
    x, y = data()
    x[3], x[5] = 400, 401
    made = model()
    weights = np.ones(BATCH)
    weights[3], weights[5] = 0, np.nan
    sums, marks = touched(made, x, y, weights)
    assert marks[400] == marks[401] == 0 and marks[7] > 0
    assert not sums[400].any() and np.isfinite(sums).all()


def test_tables_and_calls_share_the_norm_of_the_marks():
    inputs = keras.Input((POSITIONS,), dtype="int32")
    shared = layers.Embedding(ROWS, WIDTH, name="table")
    other = layers.Embedding(2 * ROWS, WIDTH, name="other")
    x = shared(inputs) * shared((inputs * 3) % ROWS) + other(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(x))
    made = private(inputs, outputs)
    x, y = data()
    sums = clip(made, (x, y, None)).sums
    right = {"table": np.zeros(ROWS), "other": np.zeros(2 * ROWS)}
    for row in x:
        first = set(row) | set((row * 3) % ROWS)
        mark = 1 / math.sqrt(len(first) + len(set(row)))
        right["table"][list(first)] += mark
        right["other"][list(set(row))] += mark
    for name, marks in right.items():
        found = sums[id(made.get_layer(name).embeddings)]
        mine = np.zeros_like(marks)
        mine[found.rows.numpy()] = found.marks.numpy()
        np.testing.assert_allclose(mine, marks, rtol=1e-12)
    assert keras_fastclip.check_gradients(made, x, y)


# -- selection and noise ------------------------------------------------------


def within(count, trials, chance):
    """Whether a count is one of the right chance."""
    distribution = scipy.stats.binom(trials, chance)
    return min(distribution.cdf(count), distribution.sf(count - 1)) > 5e-10


@pytest.mark.parametrize("sigma, threshold", [(1.0, 2.0), (0.4, 1.0)])
def test_rows_are_selected_as_if_each_had_noise(sigma, threshold):
    """By Φ((marks - τ)/σ₁): those of one, of many and of no examples."""
    sparse = SparseNoise(threshold=threshold, noise_ratio=1.0)
    rows = 20_000
    made = model(rows, 2, noise_multiplier=sigma, sparse_noise=sparse)
    x = np.arange(BATCH * POSITIONS).reshape(BATCH, POSITIONS)
    x[:, 0] = 0
    y = np.zeros(BATCH, int)
    _, marks = touched(made, x, y)
    steps = 60
    selected = changes(made, x, y, steps).any(-1)
    for mark in np.unique(np.round(marks, 9)):
        alike = np.isclose(marks, mark)
        chance = scipy.stats.norm.sf(threshold - mark / (sigma * math.sqrt(2)))
        count = selected[:, alike].sum()
        assert within(count, steps * alike.sum(), chance)
    # No two steps select the same ones of those that nobody holds.
    both = selected[1:] & selected[:-1] & (marks == 0)
    free, alone = (marks == 0).sum(), scipy.stats.norm.sf(threshold)
    assert within(both.sum(), (steps - 1) * free, alone**2)


@pytest.mark.parametrize("ratio", [0.5, 5.0])
def test_selected_rows_have_noise_and_others_stay_as_they_are(ratio):
    sparse = SparseNoise(threshold=1.0, noise_ratio=ratio)
    made = model(4_000, 16, noise_multiplier=1.5, sparse_noise=sparse)
    x, y = data()
    sums, _ = touched(made, x, y)
    (change,) = changes(made, x, y)
    selected = change.any(-1)
    noise = (change - sums)[selected].astype("float64")
    sigma = 1.5 * math.sqrt(1 + ratio**-2)
    bounds = scipy.stats.chi2(noise.size).ppf([5e-10, 1 - 5e-10])
    total = np.sum(np.square(noise / (sigma * 0.1)))
    assert noise.size > 5_000 and bounds[0] < total < bounds[1]
    assert 0.1 < selected.mean() < 0.25
    # No row shares its noise with another one.
    assert len(np.unique(noise)) > 0.99 * noise.size


def test_other_weights_have_the_noise_of_the_gradients():
    sparse = SparseNoise(noise_ratio=0.5)
    made = model(50, 64, noise_multiplier=1.5, sparse_noise=sparse)
    x, y = data(high=50)
    kernel = made.layers[2].kernel
    index = [v is kernel for v in made.trainable_variables].index(True)
    noise, initial = [], made.get_weights()
    right = made.clipped_gradients(x, y)[0][index]
    for _ in range(2):
        made.set_weights(initial)
        before = kernel.numpy()
        made.train_on_batch(x, y)
        noise.append((before - kernel.numpy()) * BATCH - right)
    total = np.sum(np.square(np.array(noise) / (1.5 * math.sqrt(5) * 0.1)))
    bounds = scipy.stats.chi2(2 * 64 * 64).ppf([5e-10, 1 - 5e-10])
    assert bounds[0] < total < bounds[1]


@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0, 40.0])
def test_both_parts_together_have_the_noise_accounted_for(ratio):
    first, second = SparseNoise(noise_ratio=ratio).split(np.float64(1.3))
    np.testing.assert_allclose(first / second, ratio)
    np.testing.assert_allclose(first**-2 + second**-2, 1.3**-2)


def test_an_adaptive_norm_takes_its_share_as_well():
    norm = AdaptiveNorm(0.1, learning_rate=1e-9, count_stddev=2.0)
    sparse = SparseNoise(threshold=0.5, noise_ratio=1.0)
    made = model(
        4_000, 16, l2_norm_clip=norm, noise_multiplier=1.5, sparse_noise=sparse
    )
    x, y = data()
    sums, _ = touched(made, x, y)
    (change,) = changes(made, x, y)
    noise = (change - sums)[change.any(-1)].astype("float64")
    sigma = math.sqrt(2) * (1.5**-2 - 4.0**-2) ** -0.5
    bounds = scipy.stats.chi2(noise.size).ppf([5e-10, 1 - 5e-10])
    total = np.sum(np.square(noise / (sigma * 0.1)))
    assert bounds[0] < total < bounds[1]


def test_without_noise_exactly_the_rows_of_the_batch_are_selected():
    made = model(noise_multiplier=0.0)
    x, y = data()
    sums, marks = touched(made, x, y)
    (change,) = changes(made, x, y)
    np.testing.assert_array_equal(change.any(-1), marks > 0)
    np.testing.assert_allclose(change, sums, atol=2e-6)


def test_an_empty_batch_selects_rows_as_well():
    made = model(2_000, 4, sparse_noise=SparseNoise(threshold=1.0))
    x, y = data()
    made.train_on_batch(x, y)
    before = table_of(made).numpy()
    made.train_on_batch(x[:0], y[:0])
    changed = (table_of(made).numpy() != before).any(-1)
    assert within(changed.sum(), 2_000, scipy.stats.norm.sf(1.0))


def test_seeds_repeat_a_run():
    x, y = data()
    sparse = SparseNoise(threshold=0.5)
    first, second, other = (
        model(seed=seed, sparse_noise=sparse) for seed in (3, 3, 4)
    )
    second.set_weights(first.get_weights())
    other.set_weights(first.get_weights())
    for made in (first, second, other):
        made.fit(x, y, batch_size=8, verbose=0)
    for mine, same in zip(
        first.get_weights(), second.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(mine, same)
    assert np.any(first.get_weights()[0] != other.get_weights()[0])


# -- places by chance ---------------------------------------------------------


@pytest.mark.parametrize("chance", [1e-5, 3e-3, 0.3, 0.9])
def test_places_are_those_of_independent_draws(chance):
    size = 200_000
    drawn = [keystream.scattered(size, chance) for _ in range(20)]
    assert all(np.all(np.diff(places) > 0) for places in drawn)
    whole = np.concatenate(drawn)
    assert whole.min(initial=0) >= 0 and whole.max(initial=0) < size
    assert within(len(whole), 20 * size, chance)
    if chance > 1e-4:
        # Everywhere alike, and neighbours have nothing to do with each other.
        p = scipy.stats.kstest(whole / size, "uniform").pvalue
        assert p > 1e-9
        neighbours = sum(np.sum(np.diff(places) == 1) for places in drawn)
        assert within(neighbours, 20 * (size - 1), chance**2)


def test_places_by_certain_and_impossible_chances():
    assert keystream.scattered(1_000_000, 0.0).size == 0
    np.testing.assert_array_equal(keystream.scattered(9, 1.0), np.arange(9))
    ends = [keystream.scattered(3, 0.5, name=i) for i in range(200)]
    assert {place for places in ends for place in places} == {0, 1, 2}
    np.testing.assert_array_equal(ends[7], keystream.scattered(3, 0.5, name=7))


# -- training -----------------------------------------------------------------


def test_fit_learns_and_accounts_as_plain_training_does():
    """The class is whether the tokens are of the first half."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 2_000)
    x = rng.integers(0, 20, (2_000, POSITIONS)) + 20 * y[:, None]
    results = {}
    option = SparseNoise(threshold=3.5, noise_ratio=2.0)
    for name, sparse in (("sparse", option), ("plain", None)):
        made = model(
            rows=10_000,
            l2_norm_clip=1.0,
            noise_multiplier=0.5,
            expected_batch_size=None,
            sparse_noise=sparse,
        )
        untouched = table_of(made).numpy()[40:]
        made.fit(x, y, batch_size=200, epochs=2, verbose=0)
        made.compile(loss=cross_entropy(), metrics=["accuracy"])
        accuracy = made.evaluate(x, y, verbose=0)[1]
        same = np.all(table_of(made).numpy()[40:] == untouched, axis=-1)
        results[name] = made.privacy_spent(1e-5), accuracy, same.mean()
    assert results["sparse"][0] == results["plain"][0] < 20
    assert results["sparse"][1] > 0.9
    assert results["sparse"][2] > 0.99 and results["plain"][2] == 0


def test_a_model_that_is_not_built_yet_is_built_first():
    made = keras_fastclip.DPSequential(
        [
            layers.Embedding(ROWS, WIDTH, name="table"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2),
        ],
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        sparse_noise=SparseNoise(),
    )
    made.compile("sgd", cross_entropy())
    x, y = data()
    made.fit(x, y, batch_size=8, verbose=0)
    assert isinstance(
        clip(made, (x, y, None)).sums[id(table_of(made))], Touched
    )


def test_a_model_with_the_option_is_saved_and_stated(tmp_path):
    sparse = SparseNoise(["table"], threshold=3.0, noise_ratio=2.0)
    made = model(sparse_noise=sparse)
    x, y = data()
    made.fit(x, y, batch_size=8, verbose=0)
    made.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    again = loaded._privacy.settings.sparse_noise
    assert again.get_config() == sparse.get_config()
    assert loaded.privacy_spent(1e-5) == made.privacy_spent(1e-5)
    for each in (made, loaded):
        statement = " ".join(each.privacy_statement(1e-5).split())
        assert "some of the rows only" in statement


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.optimizers.Adagrad(0.1),
        keras.optimizers.Adam(0.1, clipnorm=0.1),
        keras.optimizers.RMSprop(0.1, clipvalue=0.1),
        keras.optimizers.AdamW(0.1, weight_decay=0, global_clipnorm=0.1),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_optimizers_take_selected_rows_as_others_with_zeros(optimizer):
    x, y = data()
    twin = type(optimizer).from_config(optimizer.get_config())
    made = model(optimizer=optimizer, noise_multiplier=0.0)
    plain = model(optimizer=twin, noise_multiplier=0.0, sparse_noise=None)
    plain.set_weights(made.get_weights())
    for _ in range(3):
        made.train_on_batch(x, y)
        plain.train_on_batch(x, y)
    for mine, right in zip(
        made.get_weights(), plain.get_weights(), strict=True
    ):
        np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_selects_the_same_rows(policy):
    x, y = data()
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        made = model()
        sums, marks = touched(made, x, y)
        made.fit(x, y, batch_size=8, verbose=0)
    finally:
        keras.config.set_dtype_policy(before)
    expected = np.zeros(ROWS)
    for row in x:
        expected[list(set(row))] += 1 / math.sqrt(len(set(row)))
    np.testing.assert_allclose(marks, expected, rtol=1e-12)
    assert np.isfinite(sums).all() and np.isfinite(table_of(made)).all()


@pytest.mark.parametrize("kind", ["gradients", "examples"])
def test_audits_find_nothing(kind):
    rng = np.random.default_rng(0)
    x = rng.integers(0, ROWS, (300, POSITIONS))
    y = x[:, 0] % 2
    made = model(expected_batch_size=None)
    report = keras_fastclip.audit(
        made,
        x,
        y,
        canaries=kind,
        num_canaries=80,
        batch_size=100,
        epochs=5,
        delta=1e-3,
    )
    assert not report.refuted and report.epsilon <= report.claimed


# -- cost ---------------------------------------------------------------------


def test_no_operation_of_a_step_is_as_large_as_the_table():
    made = model(123_457, 8)
    x, y = data()
    made.train_on_batch(x, y)
    step = tf.function(made.train_step)
    graphs, seen = [step.get_concrete_function((x, y)).graph], set()
    while graphs:
        graph = graphs.pop()
        for operation in graph.get_operations():
            for output in operation.outputs:
                shape = output.shape
                assert not (shape.rank and 123_457 in shape.as_list()), (
                    operation.name
                )
            for name in operation.node_def.attr:
                value = operation.node_def.attr[name]
                for called in [value.func, *value.list.func]:
                    if called.name and called.name not in seen:
                        seen.add(called.name)
                        found = graph._get_function(called.name)
                        graphs.append(found.graph)


def test_a_step_costs_what_the_batch_touches():
    """A hundred times as many rows take no more than three times as long."""
    x, y = data(64, 10_000)
    steps = {}
    for rows in (10_000, 1_000_000):
        made = model(rows, 32, expected_batch_size=64)
        made.train_on_batch(x, y)
        steps[rows] = made

    def seconds(made):
        start = time.perf_counter()
        made.train_on_batch(x, y)
        return time.perf_counter() - start

    ratios = []
    for _ in range(31):
        small, large = (seconds(made) for made in steps.values())
        ratios.append(large / small)
    assert statistics.median(ratios) <= 3


# -- refusals -----------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"sparse_noise": True}, "SparseNoise; received"),
        ({"method": "naive"}, "another method than 'naive'"),
        ({"physical_batch_size": 4}, "cannot be combined"),
        ({"physical_batch_size": "auto"}, "cannot be combined"),
    ],
)
def test_impossible_settings_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        model(**kwargs)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"threshold": 0.0}, "threshold=0.0"),
        ({"noise_ratio": -1.0}, "noise_ratio=-1.0"),
        ({"map_norm": math.inf}, "map_norm=inf"),
        ({"layers": "table"}, "list of names"),
    ],
)
def test_impossible_options_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SparseNoise(**kwargs)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"optimizer": keras.optimizers.AdamW()}, "weight_decay=0.004"),
        ({"optimizer": keras.optimizers.SGD(use_ema=True)}, "use_ema=True"),
        (
            {"optimizer": keras.optimizers.SGD(loss_scale_factor=2.0)},
            "loss_scale_factor=2.0",
        ),
        ({"jit_compile": True}, "jit_compile=True"),
        ({"sparse_noise": SparseNoise(["tabel"])}, r"not found: \['tabel'\]"),
        ({"sparse_noise": SparseNoise(["dense"])}, r"not found: \['dense'\]"),
    ],
)
def test_models_that_it_does_not_fit_are_refused(kwargs, message):
    x, y = data()
    made = model(**kwargs)
    with pytest.raises(ValueError, match=message):
        made.fit(x, y, batch_size=8, verbose=0)
    assert int(made.optimizer.iterations) == 0


def regularized(inputs):
    table = layers.Embedding(ROWS, WIDTH, embeddings_regularizer="l2")
    return layers.Dense(2)(layers.Flatten()(table(inputs)))


def constrained(inputs):
    table = layers.Embedding(ROWS, WIDTH, embeddings_constraint="unit_norm")
    return layers.Dense(2)(layers.Flatten()(table(inputs)))


def with_lora(inputs):
    table = layers.Embedding(ROWS, WIDTH)
    x = table(inputs)
    table.enable_lora(2)
    return layers.Dense(2)(layers.Flatten()(x))


def frozen(inputs):
    table = layers.Embedding(ROWS, WIDTH, trainable=False)
    return layers.Dense(2)(layers.Flatten()(table(inputs)))


def tied(inputs):
    table = layers.ReversibleEmbedding(ROWS, WIDTH)
    x = layers.GlobalAveragePooling1D()(table(inputs))
    return table(layers.Dense(WIDTH)(x), reverse=True)


@keras.saving.register_keras_serializable("tests")
class Doubled(layers.Embedding):
    def call(self, inputs):
        return 2 * super().call(inputs)


def without_rule(inputs):
    return layers.Dense(2)(layers.Flatten()(Doubled(ROWS, WIDTH)(inputs)))


@pytest.mark.filterwarnings("ignore:.*no rule")
@pytest.mark.parametrize(
    "build, message",
    [
        (regularized, "has a regularizer"),
        (constrained, "has a constraint"),
        (with_lora, "has LoRA"),
        (frozen, "any that is trained"),
        (tied, "is not only looked up"),
        (without_rule, "is not only looked up"),
    ],
)
def test_tables_that_it_is_not_for_are_refused(build, message):
    inputs = keras.Input((POSITIONS,), dtype="int32")
    made = private(inputs, build(inputs))
    x, y = data()
    with pytest.raises(ValueError, match=message):
        made.fit(x, y, batch_size=8, verbose=0)
    assert int(made.optimizer.iterations) == 0


def test_what_fits_is_not_changed_to_what_does_not():
    made = model()
    with pytest.raises(ValueError, match="cannot be combined"):
        made.set_privacy(physical_batch_size=4)
