"""Sampler, counter and accountant agree, whatever `fit` is given."""

import collections
import math

import dp_accounting
import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import keras_fastclip
from keras_fastclip import (
    AdaptiveNorm,
    DPModel,
    DPSequential,
    PoissonDataset,
    counting,
    dials,
)
from tests.zoo import cross_entropy, labels, random

N, DELTA = 48, 1e-3
SETTINGS = {"l2_norm_clip": 0.5, "noise_multiplier": 1.0}


def data(n=N):
    return random(n, 5), labels(n)


def model(names=None, jit_compile=False, **kwargs):
    """The same weights every time; with names, inputs by name."""
    keras.utils.set_random_seed(1)
    x = keras.Input((5,))
    inputs, whole = x, x
    if names is not None:
        inputs = [keras.Input((2,), name="a"), keras.Input((3,), name="b")]
        whole = layers.Concatenate()(inputs)
        inputs = dict(zip("ab", inputs, strict=True)) if names else inputs
    y = layers.Dense(3)(layers.Dense(4, activation="tanh")(whole))
    made = DPModel(inputs, y, **{**SETTINGS, **kwargs})
    made.compile(
        keras.optimizers.SGD(1.0),
        cross_entropy(),
        metrics=["accuracy"],
        jit_compile=jit_compile,
    )
    return made


def entries(private):
    return list(private._privacy.ledger(private).entries)


def steps_by_kind(private):
    kinds = collections.Counter()
    for entry in entries(private):
        kinds[entry.mechanism.kind] += entry.steps
    return dict(kinds)


# -- all kinds of input ------------------------------------------------------


class Batches(keras.utils.PyDataset):
    """The data in batches, first to last."""

    def __init__(self, x, y, batch_size):
        super().__init__()
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return math.ceil(len(self.x) / self.batch_size)

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.x[rows], self.y[rows]


def generator(x, y, batch_size):
    while True:
        for start in range(0, len(x), batch_size):
            rows = slice(start, start + batch_size)
            yield x[rows], y[rows]


def stream(x, y, batch_size):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)


def loaded(x, y, batch_size):
    return PoissonDataset(
        lambda rows: (x[rows], y[rows]),
        num_examples=len(x),
        batch_size=batch_size,
    )


ARRAYS = {
    "arrays": lambda x, y: (x, y),
    "tensors": lambda x, y: (tf.constant(x), tf.constant(y)),
    "frames": lambda x, y: (pd.DataFrame(x), pd.Series(y)),
    "lists": lambda x, y: (x, y.tolist()),
    "several": lambda x, y: ([x[:, :2], x[:, 2:]], y),
    "by name": lambda x, y: ({"a": x[:, :2], "b": x[:, 2:]}, y),
}
STREAMS = {"tf.data": stream, "PyDataset": Batches, "generator": generator}
DRAWN = {
    "PoissonDataset": lambda x, y, b: PoissonDataset(x, y, batch_size=b),
    "mapped": lambda x, y, b: PoissonDataset(x / 2, y, batch_size=b).map(
        lambda x, y: (2 * x, y)
    ),
    "loaded": loaded,
}


def fitted(kind, batch_size, epochs, **kwargs):
    x, y = data()
    steps = math.ceil(N / batch_size)
    private = model(
        names={"several": False, "by name": True}.get(kind),
        expected_batch_size=batch_size,
        **kwargs,
    )
    options = {"epochs": epochs, "verbose": 0}
    if kind in ARRAYS:
        private.fit(*ARRAYS[kind](x, y), batch_size=batch_size, **options)
    elif kind in DRAWN:
        private.fit(DRAWN[kind](x, y, batch_size), **options)
    else:
        if kind == "generator":
            options["steps_per_epoch"] = steps
        batches = STREAMS[kind](x, y, batch_size)
        private.fit(batches, num_examples=N, **options)
    return private


@pytest.mark.parametrize("kind", [*ARRAYS, *DRAWN, *STREAMS, "shuffle"])
def test_one_batch_of_everything_is_the_same_for_all_kinds(kind):
    x, y = data()
    right = model(expected_batch_size=N)
    start = right.get_weights()
    sums, _ = right.clipped_gradients(x, y)
    sampling = "shuffle" if kind == "shuffle" else "poisson"
    kind = "arrays" if kind == "shuffle" else kind
    private = fitted(kind, N, 1, noise_multiplier=0.0, sampling=sampling)
    for before, after, total in zip(
        start, private.get_weights(), sums, strict=True
    ):
        np.testing.assert_allclose(before - after, total / N, atol=1e-6)


@pytest.mark.parametrize("kind", [*ARRAYS, *DRAWN])
def test_what_is_drawn_here_is_accounted_as_drawn(kind):
    private = fitted(kind, 20, 2)
    (entry,) = entries(private)
    assert (entry.mechanism.num_examples, entry.steps, entry.uses) == (N, 6, 6)
    assert entry.mechanism.sampling_probability == 20 / N
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            20 / N, dp_accounting.GaussianDpEvent(1.0)
        ),
        6,
    )
    accountant = dp_accounting.rdp.RdpAccountant().compose(event)
    spent = private.privacy_spent(DELTA, "rdp")
    assert spent == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
    assert spent.event.events == [event]


@pytest.mark.parametrize("kind", [*STREAMS, "shuffle"])
def test_passes_are_accounted_without_amplification(kind):
    shuffle = {"sampling": "shuffle"} if kind == "shuffle" else {}
    kind = "arrays" if kind == "shuffle" else kind
    private = fitted(kind, 20, 3, **shuffle)
    (entry,) = entries(private)
    assert (entry.mechanism.num_examples, entry.steps, entry.uses) == (N, 9, 3)
    right = dp_accounting.get_epsilon_gaussian(3**-0.5, DELTA)
    assert private.privacy_spent(DELTA) == pytest.approx(right, rel=1e-12)
    assert "no amplification" in private.privacy_statement(DELTA)


def test_shuffled_passes_hold_every_example_once():
    x = np.arange(23)
    passes = PoissonDataset(x, batch_size=5).passes(np.random.default_rng(0))
    orders = []
    batches = iter(passes)
    for _ in range(3):
        rows = [next(batches) for _ in range(5)]
        assert [int(b.real.numpy().sum()) for b in rows] == [5, 5, 5, 5, 3]
        orders.append(np.concatenate([b.batch[0].numpy() for b in rows]))
        np.testing.assert_array_equal(np.sort(orders[-1]), x)
    assert not np.array_equal(orders[0], orders[1])
    padded = PoissonDataset(x, batch_size=5).passes(
        np.random.default_rng(0), static_shapes=True
    )
    for batch in padded.take(5):
        assert batch.real.shape == (5,)


def test_a_short_epoch_is_part_of_a_pass():
    x, y = data()
    private = model(sampling="shuffle")
    private.fit(x, y, batch_size=8, epochs=4, steps_per_epoch=3, verbose=0)
    assert [(e.steps, e.uses) for e in entries(private)] == [(12, 2)]
    # A data set that is cut off starts anew with every epoch.
    private = model(expected_batch_size=8)
    private.fit(
        stream(x, y, 8).take(3),
        epochs=4,
        num_examples=N,
        verbose=0,
        steps_per_epoch=3,
    )
    assert [(e.steps, e.uses) for e in entries(private)] == [(12, 4)]


def test_an_endless_stream_is_counted_by_its_examples():
    x, y = data()
    private = model(expected_batch_size=8)
    batches = stream(x, y, 8).repeat()
    private.fit(
        batches, epochs=2, steps_per_epoch=10, num_examples=N, verbose=0
    )
    # 160 examples are three passes and a third.
    assert [(e.steps, e.uses) for e in entries(private)] == [(20, 4)]


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_of_unknown_size_are_told_what_to_pass(kind):
    x, y = data()
    private = model(expected_batch_size=8)
    before = private.get_weights()
    with pytest.raises(ValueError, match="num_examples=.*PoissonDataset"):
        private.fit(STREAMS[kind](x, y, 8), verbose=0, steps_per_epoch=2)
    for old, new in zip(before, private.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    with pytest.raises(ValueError, match="`num_examples` is for data"):
        private.fit(x, y, num_examples=N)
    with pytest.raises(ValueError, match="num_examples=0"):
        private.fit(STREAMS[kind](x, y, 8), num_examples=0)


def test_poisson_batches_in_a_loop_of_ones_own():
    x, y = data()
    private = model()
    batches = iter(PoissonDataset(x, y, batch_size=16))
    for _ in range(5):
        logs = private.train_on_batch(next(batches), return_dict=True)
    assert set(logs) == {"loss", "accuracy"}
    (entry,) = entries(private)
    assert (entry.steps, entry.mechanism.expected_batch_size) == (5, 16)
    assert private.privacy_spent(DELTA, "rdp") < math.inf
    private.train_on_batch(x[:8], y[:8])
    spent = private.privacy_spent(DELTA)
    assert spent == math.inf and "outside `fit`" in spent.reasons[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"x": np.zeros((3, 2)), "batch_size": 4}, "batch_size=4 is larger"),
        ({"x": np.zeros((3, 2)), "batch_size": 0}, "batch_size=0"),
        ({"x": lambda rows: rows, "batch_size": 1}, "pass num_examples="),
        (
            {"x": np.zeros(3), "batch_size": 1, "num_examples": 4},
            "3 examples; received num_examples=4",
        ),
    ],
)
def test_impossible_data_sets_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PoissonDataset(**arguments)


def test_a_function_that_loads_too_few_examples_is_refused():
    short = PoissonDataset(
        lambda rows: np.zeros((1, 2)), num_examples=9, batch_size=9
    )
    with pytest.raises(ValueError, match="9 indices and returned 1"):
        short.some()


# -- how often an example is used --------------------------------------------


def most_uses(size, rows, phase):
    """The most that Σ (times in a batch)² of an example can be.

    It comes once in each pass, anywhere; the first pass began `phase` examples
    before. By dynamic programming over the passes.
    """
    batch_of = [None] * phase
    batch_of += [batch for batch, n in enumerate(rows) for _ in range(n)]
    passes = [
        sorted({b for b in batch_of[i : i + size] if b is not None})
        for i in range(0, len(batch_of), size)
    ]
    best = {None: [(0, 0)]}  # by last batch: sums before it, times in it
    for batches in passes:
        following = {}
        for last, options in best.items():
            for batch in batches or [last]:
                for total, times in options:
                    option = (total + times**2, 1)
                    if batch == last:
                        option = (total, times + 1)
                    if not batches:
                        option = (total, times)
                    following.setdefault(batch, set()).add(option)
        best = following
    return max(t + k * k for options in best.values() for t, k in options)


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(1, 10),
    phase=st.integers(0, 9),
    rows=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    aligned=st.booleans(),
)
def test_uses_bound_what_any_example_contributes(size, phase, rows, aligned):
    phase = 0 if aligned else phase % size
    counter = counting.Counter(1)
    counter.pass_size.assign(size)
    counter.new_pass(aligned)
    for count in rows:
        counter.count(counter.cost(False, tf.constant(count), tf.constant(0)))
    uses = int(counter.uses.numpy().sum())
    assert uses >= most_uses(size, rows, phase)
    # And no more than that where batches do not span passes.
    if aligned and set(rows) == {size}:
        assert uses == len(rows)


def test_another_noise_within_a_pass_counts_anew():
    counter = counting.Counter(2)
    counter.pass_size.assign(10)
    for slot in (0, 0, 1, 1):
        counter.count(counter.cost(False, tf.constant(4), tf.constant(slot)))
    # Two passes began, the second in a batch that spans the border.
    assert counter.uses.numpy()[counting.PASSES].tolist() == [1, 4]
    counter.new_pass()
    counter.count(counter.cost(False, tf.constant(4), tf.constant(1)))
    assert counter.uses.numpy()[counting.PASSES].tolist() == [1, 5]


# -- noise multipliers and clip norms that change ----------------------------


def test_changes_between_fits_compose():
    x, y = data()
    private = model()
    private.fit(x, y, batch_size=16, verbose=0)
    private.set_privacy(noise_multiplier=2.0, l2_norm_clip=0.1)
    private.fit(x, y, batch_size=24, verbose=0)
    private.set_privacy(sampling="shuffle")
    private.fit(x, y, batch_size=24, verbose=0)
    found = [(e.mechanism.noise_multiplier, e.uses) for e in entries(private)]
    assert found == [(1.0, 3), (2.0, 2), (2.0, 1)]
    assert private._privacy.clip_norm.value == 0.1
    assert private.privacy_spent(DELTA, "rdp") < math.inf


@pytest.mark.parametrize(
    "kwargs, changes, message",
    [
        ({}, {"noise": 3.0}, "'noise'"),
        ({}, {"method": "bk"}, "'method'"),
        ({}, {"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({}, {"l2_norm_clip": keras_fastclip.AdaptiveNorm()}, "Only numbers"),
        (
            {"l2_norm_clip": keras_fastclip.AdaptiveNorm()},
            {"l2_norm_clip": 1.0},
            "Only numbers",
        ),
        (
            {"l2_norm_clip": 5.0, "clipping": [3, 4]},
            {"l2_norm_clip": 1.0},
            "norms by layer",
        ),
    ],
)
def test_impossible_changes_are_refused(kwargs, changes, message):
    private = model(**kwargs)
    before = private._privacy.settings
    with pytest.raises(ValueError, match=message):
        private.set_privacy(**changes)
    assert private._privacy.settings == before


def test_a_step_traced_before_a_change_follows_it():
    """In a loop of one's own: clip norm, noise and record."""
    private = wide(expected_batch_size=1, l2_norm_clip=1.0)
    x = random(4, 10_000)
    private.build(x.shape)
    real = keras_fastclip.sampling.PoissonBatch(
        (tf.constant(x), tf.zeros([4], tf.int32), None), tf.range(4) < 1
    )
    step, kernel = tf.function(private.train_step), private.layers[0].kernel

    def moved():
        before = kernel.numpy()
        step(real)
        return before - kernel.numpy()

    assert abs(np.std(moved()) - 1.0) < 0.02
    private.set_privacy(noise_multiplier=0.0, l2_norm_clip=0.01)
    assert np.linalg.norm(moved()) <= 0.01 * (1 + 1e-6)
    private.set_privacy(noise_multiplier=3.0)
    assert abs(np.std(moved()) / 0.03 - 1) < 0.02
    assert private._privacy.ledger(private).total_steps == 3


def test_steps_in_callbacks_are_not_part_of_a_pass():
    x, y = data()
    private = model(expected_batch_size=8)

    class Sneak(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            private.train_on_batch(x[:8], y[:8])

        def on_train_batch_end(self, batch, logs=None):
            private.train_step((tf.constant(x[:8]), tf.constant(y[:8])))

    options = {"verbose": 0, "callbacks": [Sneak()]}
    private.fit(stream(x, y, 8), num_examples=N, **options)
    assert steps_by_kind(private) == {"passes": 6, "unaccounted": 12}
    assert private.privacy_spent(DELTA) == math.inf


def test_steps_after_a_stream_has_run_out_are_not_part_of_a_pass():
    x, y = data()
    private = model(expected_batch_size=8)
    batches = stream(x, y, 8).filter(lambda x, y: True)

    class Sneak(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            private.train_step((tf.constant(x[:8]), tf.constant(y[:8])))

    private.fit(batches, num_examples=N, verbose=0, callbacks=[Sneak()])
    assert steps_by_kind(private) == {"passes": 6, "unaccounted": 1}
    assert int(private.optimizer.iterations) == 7
    assert private.privacy_spent(DELTA) == math.inf


def test_streams_that_go_on_are_counted_at_any_phase():
    """Against the true order of the examples."""
    n = 4

    def rows():
        order = [i for _ in range(9) for i in range(n)]
        for start in range(0, len(order), 3):
            yield order[start : start + 3]

    private = model(expected_batch_size=3)

    def endless():
        x, y = random(n, 5), labels(n)
        for chosen in rows():
            yield x[chosen], y[chosen]

    batches = endless()
    for fits in range(1, 7):
        private.fit(batches, steps_per_epoch=1, num_examples=n, verbose=0)
        times = np.zeros(n)
        for chosen in list(rows())[:fits]:
            times += np.bincount(chosen, minlength=n) ** 2
        (entry,) = entries(private)
        assert entry.steps == fits and entry.uses >= times.max()
    assert entry.uses <= 1 + 4 * 5


def test_a_finite_stream_read_in_short_epochs_goes_on():
    x, y = data(4)
    private = model(expected_batch_size=3)
    whole = tf.data.Dataset.from_tensor_slices((x, y)).repeat(9).batch(3)
    private.fit(whole, epochs=6, steps_per_epoch=1, num_examples=4, verbose=0)
    # 18 examples: five passes, and three batches that span a border.
    assert [(e.steps, e.uses) for e in entries(private)] == [(6, 5 + 3 * 2)]


def test_noise_changed_within_a_pass_counts_anew():
    x, y = data()
    private = model(sampling="shuffle", expected_batch_size=8)

    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                private.set_privacy(noise_multiplier=0.5)

    private.fit(x, y, batch_size=8, verbose=0, callbacks=[Change()])
    first, second = entries(private)
    assert (first.mechanism.noise_multiplier, first.uses) == (1.0, 1)
    assert (second.mechanism.noise_multiplier, second.steps) == (0.5, 5)
    assert second.uses >= 1


def test_a_fit_within_a_fit_leaves_the_outer_one_as_it_was():
    x, y = data()
    private = model()

    class Inner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            private.fit(x, y, batch_size=1, steps_per_epoch=1, verbose=0)
            assert private._privacy.expected_batch_size == 16

    private.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[Inner()])
    found = [
        (e.mechanism.expected_batch_size, e.steps) for e in entries(private)
    ]
    assert found == [(16, 3), (1, 1), (16, 3), (1, 1)]


def test_an_empty_batch_gets_noise_in_chunks_too():
    x, y = data(8)
    private = wide(expected_batch_size=1, physical_batch_size=2)
    private.build(x.shape)
    before = private.get_weights()
    private.train_step(
        keras_fastclip.sampling.PoissonBatch(
            (tf.constant(x), tf.constant(y), None), tf.zeros([8], tf.bool)
        )
    )
    for old, new in zip(before, private.get_weights(), strict=True):
        assert np.all(old != new)


def test_the_statement_names_a_clip_norm_only_if_it_was_one():
    x, y = data()
    private = model(l2_norm_clip=5.0)
    private.fit(x, y, batch_size=24, verbose=0)
    assert "at most 5" in private.privacy_statement(DELTA)
    private.set_privacy(l2_norm_clip=0.1)
    assert "at most" not in private.privacy_statement(DELTA).split("\n\n")[1]


def test_a_drawn_batch_is_trained_on_once():
    x, y = data()
    private = model()
    batch = next(iter(PoissonDataset(x, y, batch_size=16)))
    private.train_on_batch(batch)
    with pytest.raises(ValueError, match="once only"):
        private.train_on_batch(batch)
    assert private._privacy.ledger(private).total_steps == 1


def test_a_changed_clip_norm_is_what_clips():
    x, y = data()
    private = model(noise_multiplier=0.0)
    private.clipped_gradients(x[:1], y[:1])
    private.set_privacy(l2_norm_clip=0.01)
    sums, _ = private.clipped_gradients(x[:1], y[:1])
    norm = np.sqrt(sum(np.sum(np.square(s)) for s in sums))
    np.testing.assert_allclose(norm, 0.01, rtol=1e-5)


def decay(start, rate=0.5, steps=4):
    return keras.optimizers.schedules.ExponentialDecay(start, steps, rate)


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_scheduled_noise_is_accounted_as_used(sampling):
    x, y = data()
    private = model(noise_multiplier=decay(2.0), sampling=sampling)
    private.fit(x, y, batch_size=16, epochs=2, verbose=0)
    wanted = sorted(2.0 * 0.5 ** (step / 4) for step in range(6))
    found = sorted(
        entry.mechanism.noise_multiplier
        for entry in entries(private)
        for _ in range(entry.steps)
    )
    for used, asked in zip(found, wanted, strict=True):
        assert asked * (1 - 1e-6) <= used <= asked * 1.0101
    assert private._privacy.ledger(private).total_steps == 6
    assert private.privacy_spent(DELTA, "rdp") < math.inf


def noise_of_steps(private, steps, x):
    """Noise on the sums of steps on rows that are not real."""
    private.build(x.shape)
    kernel = private.trainable_variables[0]
    y = np.zeros(len(x), "int32")
    batch = keras_fastclip.sampling.PoissonBatch(
        (tf.constant(x), tf.constant(y), None), tf.zeros([len(x)], tf.bool)
    )
    step = tf.function(private.train_step)
    found = []
    for _ in range(steps):
        before = kernel.numpy()
        step(batch)
        found.append(before - kernel.numpy())
    return found


def wide(**kwargs):
    private = DPSequential([layers.Dense(3)], **{**SETTINGS, **kwargs})
    private.compile(keras.optimizers.SGD(1.0), cross_entropy())
    return private


def test_the_noise_follows_both_schedules():
    private = wide(
        noise_multiplier=decay(4.0),
        l2_norm_clip=decay(1.0, 0.25),
        expected_batch_size=1,
    )
    x = random(4, 20_000)
    values = [0.01 * 1.01**k for k in range(1400)]
    for step, noise in enumerate(noise_of_steps(private, 3, x)):
        asked = 4.0 * 0.5 ** (step / 4)
        sigma = min(v for v in values if v >= asked * (1 - 1e-9))
        right = sigma * 0.25 ** (step / 4)
        # 60,000 values: the bound fails with a probability below 1e-9.
        assert abs(np.std(noise) / right - 1) < 0.02


@pytest.mark.parametrize("clipping", ["flat", "automatic", "global", [3, 4]])
def test_a_scheduled_norm_bounds_every_example(clipping):
    x, y = data()
    norm = 5.0 if isinstance(clipping, list) else 1.0
    private = model(
        noise_multiplier=0.0, l2_norm_clip=decay(norm), clipping=clipping
    )
    for step in range(3):
        limit = norm * 0.5 ** (step / 4)
        for i in range(4):
            sums, squared = private.clipped_gradients(
                99 * x[i : i + 1], y[i : i + 1]
            )
            total = np.sqrt(sum(np.sum(np.square(s)) for s in sums))
            assert total <= limit * (1 + 1e-6)
            if clipping == "flat":
                right = min(limit, np.sqrt(squared[0]))
                np.testing.assert_allclose(total, right, rtol=1e-5)
        private.fit(x, y, batch_size=N, verbose=0)


@pytest.mark.parametrize("given", [decay(1e-30), AdaptiveNorm(1.0), 1.0])
def test_no_clip_norm_is_so_small_that_squares_are_lost(given):
    norm = dials.ClipNorm(given)
    norm.set(1e-30)  # where it might come to
    assert norm.at(tf.constant(0)).numpy() == dials.LEAST


def test_an_adaptive_norm_finds_its_quantile():
    x, y = data(2000)
    norm = keras_fastclip.AdaptiveNorm(50.0, quantile=0.7, learning_rate=0.5)
    private = model(noise_multiplier=0.5, l2_norm_clip=norm)
    private.compile(keras.optimizers.SGD(0.0), cross_entropy())
    private.fit(x, y, batch_size=1000, epochs=15, verbose=0)
    _, squared = private.clipped_gradients(x, y)
    found = private._privacy.clip_norm.value
    within = np.mean(np.sqrt(squared) <= found)
    assert abs(within - 0.7) < 0.1
    (entry,) = entries(private)
    assert entry.mechanism.noise_multiplier == 0.5 and entry.steps == 30
    assert "adapted" in private.privacy_statement(DELTA)


def test_gradients_and_count_together_have_the_noise_accounted_for():
    """1/σ² = 1/σ'² + 1/(2s)², with σ' and s as measured."""
    norm = keras_fastclip.AdaptiveNorm(1.0, learning_rate=1e-3, count_stddev=2)
    private = wide(
        noise_multiplier=1.5, l2_norm_clip=norm, expected_batch_size=1
    )
    clip_norm = private._privacy.clip_norm
    original = clip_norm.adapt
    log = tf.Variable(tf.zeros([40]))

    def adapt(balance, batch_size):
        log.assign(tf.concat([log[1:], [balance]], 0))
        original(balance, batch_size)

    clip_norm.adapt = adapt
    x = random(4, 5_000)
    noises = noise_of_steps(private, 40, x)
    # C stays within e^(±40·0.001·few); 600,000 values.
    measured = np.sqrt(np.mean(np.square(np.concatenate(noises, axis=None))))
    sigma = (1.5**-2 - 4.0**-2) ** -0.5
    assert abs(measured / sigma - 1) < 0.15
    # Chi-square of 40 values: between 0.4 and 1.8 but for 1e-9.
    assert 0.4 < np.sqrt(np.mean(np.square(log))) / 2 < 1.8


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"noise_multiplier": None}, "either noise_multiplier, or target"),
        ({"target_epsilon": 1.0, "delta": 1e-5}, "either noise_multiplier"),
        ({"max_epsilon": 1.0}, "`max_epsilon` needs `delta`"),
        ({"max_epsilon": -1.0, "delta": 1e-5}, "max_epsilon=-1.0"),
        ({"max_epsilon": 1.0, "delta": 2.0}, "delta=2.0"),
        ({"sampling": "magic"}, "sampling='magic'"),
        ({"physical_batch_size": 0}, "physical_batch_size=0"),
        ({"l2_norm_clip": decay(-1.0)}, "l2_norm_clip=-1.0"),
        (
            {
                "l2_norm_clip": keras_fastclip.AdaptiveNorm(),
                "noise_multiplier": decay(1.0),
            },
            "needs a noise_multiplier that is a number",
        ),
        (
            {"l2_norm_clip": keras_fastclip.AdaptiveNorm(count_stddev=0.4)},
            "count_stddev=0.4",
        ),
    ],
)
def test_impossible_settings_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        model(**kwargs)


# -- physical batches --------------------------------------------------------


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("size", [1, 7, "auto"])
def test_physical_batches_change_nothing(size, jit_compile):
    x, y = data()
    weights = np.linspace(0.5, 2, N).astype("float32")
    results = []
    for physical in (None, size):
        private = model(
            jit_compile=jit_compile,
            noise_multiplier=0.3,
            physical_batch_size=physical,
            seed=3,
        )
        logs = private.fit(
            x, y, batch_size=20, epochs=2, sample_weight=weights, verbose=0
        )
        results.append((private.get_weights(), logs.history))
    (right, right_logs), (found, logs) = results
    for a, b in zip(right, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for name, values in right_logs.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5)


@pytest.mark.parametrize("method", keras_fastclip.methods.METHODS)
def test_physical_batches_serve_every_method(method):
    x, y = data()
    private = model(noise_multiplier=0.0, physical_batch_size=5, method=method)
    before = private.get_weights()
    sums, _ = private.clipped_gradients(x[:13], y[:13])
    private.set_privacy(expected_batch_size=1)
    private.train_on_batch(x[:13], y[:13])
    for old, new, total in zip(
        before, private.get_weights(), sums, strict=True
    ):
        np.testing.assert_allclose(old - new, total, rtol=1e-4, atol=1e-6)


def test_chunks_without_a_real_row_are_left_out():
    private, calls = model(), tf.Variable(0)
    x = tf.reshape(tf.range(40.0), (20, 2))

    def add(batch, real):
        calls.assign_add(1)
        rows = tf.where(real[:, None], batch[0], 0.0)
        assert batch[0].shape == (6, 2)
        return {}, tf.reduce_sum(rows)

    chunks = tf.function(keras_fastclip.physical.in_chunks)
    for last, expected in ((20, 4), (12, 2), (1, 1), (0, 1)):
        calls.assign(0)
        real = tf.range(20) < last
        _, total = chunks(private, (x, None, None), real, 6, add)
        assert float(total) == float(tf.reduce_sum(x[:last]))
        assert int(calls) == expected
    calls.assign(0)
    _, total = chunks(private, (x, None, None), None, 6, add)
    assert float(total) == float(tf.reduce_sum(x)) and int(calls) == 4


def test_physical_batches_draw_dropout_anew_and_count_once():
    x, y = data()
    inputs = keras.Input((5,))
    outputs = layers.Dense(3)(layers.Dropout(0.5)(inputs))
    private = DPModel(inputs, outputs, **SETTINGS, physical_batch_size=8)
    private.compile("adam", cross_entropy())
    private.fit(x, y, batch_size=24, epochs=2, verbose=0)
    assert [(e.steps, e.uses) for e in entries(private)] == [(4, 4)]
    assert int(private.optimizer.iterations) == 4
