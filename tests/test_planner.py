"""What `auto` chooses, from sizes and speeds alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import keras_fastclip
from keras_fastclip import methods, planner
from keras_fastclip.planner import Machine, Sizes, choices, plan

MACHINE = Machine(large=6e10, batched=3e10, stream=1e10)
SIZES = st.builds(
    Sizes,
    positions=st.integers(1, 500),
    inputs=st.integers(1, 2000),
    outputs=st.integers(1, 2000),
    blocks=st.integers(1, 4),
)


def memory(sizes, batch):
    """Of the way of least memory: B · min(2T², pd) numbers."""
    t, built = sizes.positions, sizes.inputs * sizes.outputs
    return 4 * batch * sizes.blocks * min(2 * t * t if t > 1 else 0, built)


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(SIZES, max_size=8), st.integers(1, 512), st.floats(0, 1e9))
def test_plan_stays_within_its_budget(kernels, batch, budget):
    chosen = plan(kernels, batch, budget, MACHINE)
    least = sum(memory(sizes, batch) for sizes in kernels)
    spent = sum(choice.memory for choice in chosen)
    assert spent <= least + budget * (1 + 1e-9)
    for sizes, choice in zip(kernels, chosen, strict=True):
        assert choice.seconds <= choices(sizes, batch, MACHINE)[0].seconds
    assert chosen == plan(kernels, batch, budget, MACHINE)


@settings(derandomize=True, database=None, deadline=None)
@given(SIZES, st.integers(1, 512))
def test_without_limit_the_fastest_way_is_chosen(sizes, batch):
    (chosen,) = plan([sizes], batch, 1e18, MACHINE)
    fastest = min(c.seconds for c in choices(sizes, batch, MACHINE))
    assert chosen.seconds == fastest


def test_vectors_take_the_norm_that_needs_no_product():
    (chosen,) = plan([Sizes(1, 1000, 1000)], 128, 1e18, MACHINE)
    assert chosen.ghost and chosen.memory == 0


def test_budget_goes_where_it_saves_most_time_for_a_byte():
    """Both kernels are built faster than by ghost norms; one fits."""
    wide, narrow = Sizes(100, 300, 300), Sizes(100, 150, 150)
    ways = [choices(sizes, 8, MACHINE) for sizes in (wide, narrow)]
    assert all(least.ghost for least, *_ in ways)
    saved = [
        least.seconds - min(w.seconds for w in all_) for least, *all_ in ways
    ]
    taken = [max(w.memory for w in all_) - all_[0].memory for all_ in ways]
    assert min(saved) > 0 and saved[0] / taken[0] < saved[1] / taken[1]
    chosen = plan([wide, narrow], 8, max(taken), MACHINE)
    assert [choice.keep for choice in chosen] == [False, True]


def test_speeds_are_measured_once():
    machine = planner.this_machine()
    assert planner.this_machine() is machine
    assert min(machine.large, machine.batched, machine.stream) > 1e7


def private(**settings):
    inputs = keras.Input((20, 8))
    model = keras_fastclip.DPModel(
        inputs,
        layers.Dense(40)(layers.Dense(30)(inputs)),
        l2_norm_clip=0.1,
        noise_multiplier=0.0,
        expected_batch_size=4,
        **settings,
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 20, 8)).astype(keras.config.floatx())
    return model, tf.constant(x), tf.zeros((4, 20, 40), x.dtype)


def norms_of(model, x, y):
    printed = []
    keras_fastclip.clipping_summary(model, x, y, print_fn=printed.append)
    lines = [line.split() for line in printed[0].splitlines()]
    return [line[4] for line in lines if "Dense" in line]


def test_budget_decides(float64, monkeypatch):
    """2T² = 800 numbers against 240 and 1200."""
    slow = Machine(large=1e9, batched=1e9, stream=1e12)
    monkeypatch.setattr(planner, "this_machine", lambda: slow)
    sums = []
    for budget, right in [
        (0, ["instantiated", "ghost"]),
        (None, ["instantiated", "instantiated"]),
    ]:
        keras.utils.set_random_seed(0)
        model, x, y = private(memory_budget=budget)
        assert norms_of(model, x, y) == right
        sums.append(model.clipped_gradients(x, y)[0])
        report = keras_fastclip.check_gradients(model, x, y)
        assert report.relative_error < 1e-9
    for one, other in zip(*sums, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_other_methods_are_not_planned():
    planned = [m for m, way in methods.METHODS.items() if way and way.planned]
    assert planned == ["auto"]


def test_budget_is_saved_with_the_model(tmp_path):
    model, x, y = private(memory_budget=12345)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again._privacy.settings.memory_budget == 12345


@pytest.mark.parametrize("budget", [-1, 0.5, "1 GB"])
def test_budget_is_a_number_of_bytes(budget):
    with pytest.raises(ValueError, match="memory_budget"):
        private(memory_budget=budget)


def test_runs_with_a_seed_do_not_depend_on_the_machine(monkeypatch):
    def fail():
        raise AssertionError("speeds were measured")

    monkeypatch.setattr(planner, "this_machine", fail)
    model, x, y = private(seed=1)
    norms_of(model, x, y)
    model.train_on_batch(x, y)
