"""What `auto` chooses, from sizes and speeds alone."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import keras_fastclip
from keras_fastclip import methods, planner, timing
from keras_fastclip.planner import (
    Item,
    Way,
    plan,
    reference_clock,
    reference_clocks,
)
from keras_fastclip.registry.linear import Kernel
from keras_fastclip.registry.turns import IN_FLIGHT

KERNELS = st.builds(
    Kernel,
    positions=st.integers(1, 3000),
    inputs=st.integers(1, 2000),
    outputs=st.integers(1, 2000),
    blocks=st.integers(1, 4),
)
ITEMS = st.builds(Item, st.just("layer"), KERNELS, has_ghost=st.booleans())
many_cases = settings(derandomize=True, database=None, deadline=None)


def least(items, batch):
    return planner.required(planner.smallest_plan(items, batch))


@many_cases
@given(st.lists(ITEMS, max_size=3), st.integers(1, 64))
def test_no_plan_takes_less_than_the_smallest(items, batch):
    ways = [[planner.cost(i, way, batch) for way in i.ways()] for i in items]
    every = map(planner.required, itertools.product(*ways))
    assert least(items, batch) == min(every)


@many_cases
@given(st.lists(ITEMS, max_size=8), st.integers(1, 512), st.floats(0, 1e9))
def test_plan_stays_within_its_budget(items, batch, budget):
    needed = least(items, batch)
    if needed > budget:
        with pytest.raises(ValueError, match=f"{needed:,} bytes"):
            plan(items, batch, budget, reference_clocks)
        budget = needed
    chosen = plan(items, batch, budget, reference_clocks)
    assert planner.required(chosen) <= budget
    assert chosen == plan(items, batch, budget, reference_clocks)


@many_cases
@given(KERNELS, st.integers(1, 512))
def test_least_memory_is_no_more_than_the_papers(kernel, batch):
    """B · min(2T², pd) numbers, a few examples for B, and the cotangent."""
    found = least([Item("layer", kernel)], batch)
    at_a_time = min(batch, IN_FLIGHT)
    norm = at_a_time * min(kernel.gram, kernel.built)
    assert found <= 4 * (norm + batch * kernel.cotangent)


@many_cases
@given(ITEMS, st.integers(1, 512))
def test_without_limit_the_fastest_way_is_chosen(item, batch):
    (chosen,) = plan([item], batch, 1e18, reference_clocks)
    seconds = {way: reference_clock(item.kernel, way) for way in item.ways()}
    assert seconds[chosen.way] == min(seconds.values())


def test_vectors_take_the_norm_that_needs_no_product():
    item = Item("layer", Kernel(1, 1000, 1000))
    (chosen,) = plan([item], 128, 1e6, reference_clocks)
    assert chosen.way.ghost and chosen.passing == 0


def test_both_large_is_tiled():
    """T² and pd of one example are 0.5 and 1 GB."""
    item = Item("layer", Kernel(8192, 16384, 16384), frees_input=False)
    held = 4 * 4 * item.kernel.cotangent
    (chosen,) = plan([item], 4, held + 200e6, reference_clocks)
    assert str(chosen.way) == "ghost:tiles" and chosen.passing < 200e6


def test_budget_goes_where_it_saves_most_time_for_a_byte():
    """Keeping saves one product of two, at the cost of Bpd less the input."""
    items = [Item("long", Kernel(40, 100, 100))]
    items += [Item("short", Kernel(20, 100, 100))]
    kept, held = 4 * 64 * (100 * 100 - 40 * 100), 4 * 64 * 20 * 100
    budget = kept + held + 4 * IN_FLIGHT * 100 * 100

    def clock(kernel, ways):
        return [kernel.positions * (1 if way.keep else 2) for way in ways]

    chosen = plan(items, 64, budget, clock)
    assert [choice.way.keep for choice in chosen] == [True, False]


def test_what_has_a_small_share_is_not_timed():
    kernels = [Kernel(20, size, size) for size in (300, 29, 31)]
    items = [Item("", kernel) for kernel in kernels]
    seen = set()

    def clock(kernel, ways):
        seen.add(kernel)
        return reference_clocks(kernel, ways)

    plan(items, 64, 1e12, clock)
    assert seen == {kernels[0], kernels[2]}
    # Twenty of them have a larger one, and another a smaller one.
    seen.clear()
    plan([*items, *[items[1]] * 20], 64, 1e12, clock)
    assert seen == {kernels[0], kernels[1]}


def test_what_is_kept_takes_the_place_of_the_input():
    """Plain training lets go of the input at the same moment."""
    way = Way("build", "batched", keep=True)
    small, large = Kernel(100, 60, 50), Kernel(100, 60, 500)
    assert planner.cost(Item("layer", small), way, 8).more == 0
    more = 60 * 500 - 100 * 60
    assert planner.cost(Item("layer", large), way, 8).more == 4 * 8 * more
    first = planner.cost(Item("layer", large, frees_input=False), way, 8)
    assert first.more == first.kept == 4 * 8 * 60 * 500


@pytest.mark.parametrize("text", ["ghost", "build:loop", "keep", "keep:rows"])
def test_ways_are_read_as_they_are_printed(text):
    assert str(Way.parse(text)) == text


@pytest.fixture
def stopwatch(monkeypatch, request):
    """Seconds as the test gives them, by the name of the way."""

    def set_seconds(seconds):
        monkeypatch.setattr(
            timing,
            "clock",
            lambda kernel, ways, jit: [seconds[str(way)] for way in ways],
        )

    return set_seconds


def private(**settings):
    inputs = keras.Input((20, 8))
    x = layers.Dense(30, name="first")(inputs)
    model = keras_fastclip.DPModel(
        inputs,
        layers.Dense(40, name="second")(x),
        l2_norm_clip=0.1,
        noise_multiplier=0.0,
        expected_batch_size=4,
        **settings,
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 20, 8)).astype(keras.config.floatx())
    return model, tf.constant(x), tf.zeros((4, 20, 40), x.dtype)


def ways_of(model, x, y):
    printed = []
    keras_fastclip.clipping_summary(model, x, y, print_fn=printed.append)
    lines = [line.split() for line in printed[0].splitlines()]
    return [line[4] for line in lines if "Dense" in line]


def test_budget_decides(float64, stopwatch):
    """Gradients of 4 examples take 4 and 19 kB, of which 10 replace the input
    of the second layer; Gram matrices take 13.

    The cotangents that go with Gram matrices take 10 and 13.
    """
    seconds = {"keep:batched": 5, "keep:loop": 9, "build:loop": 8}
    stopwatch(seconds | {"ghost:batched": 1, "ghost:loop": 2})
    sums = []
    for budget, right in [
        (13_440, ["keep:batched", "keep:batched"]),
        (30_000, ["keep:batched", "ghost:batched"]),
        (None, ["keep:batched", "ghost:batched"]),
    ]:
        keras.utils.set_random_seed(0)
        model, x, y = private(memory_budget=budget)
        assert ways_of(model, x, y) == right
        sums.append(model.clipped_gradients(x, y)[0])
        report = keras_fastclip.check_gradients(model, x, y)
        assert report.relative_error < 1e-9
    for one, *others in zip(*sums, strict=True):
        for other in others:
            np.testing.assert_allclose(one, other, atol=1e-12)


def test_impossible_budget_says_the_least_that_would_do():
    model, x, y = private(memory_budget=1000)
    with pytest.raises(ValueError, match="13,440 bytes .* layer 'second'"):
        model.fit(x, y, batch_size=4, verbose=0)
    model, x, y = private(memory_budget=13_440)
    model.fit(x, y, batch_size=4, verbose=0)


WAYS = ["ghost", "ghost:loop", "ghost:tiles", "keep", "keep:loop", "build:loop"]


@pytest.mark.parametrize("way", WAYS)
def test_layers_take_the_way_that_the_user_chose(way, float64, tmp_path):
    model, x, y = private(ways={"second": way})
    assert ways_of(model, x, y)[1] == way
    for jit_compile in (False, True):
        graph = tf.function(model.clipped_gradients, jit_compile=jit_compile)
        plain = private()[0]
        plain.set_weights(model.get_weights())
        for mine, right in zip(
            tf.nest.flatten(graph(x, y)),
            tf.nest.flatten(plain.clipped_gradients(x, y)),
            strict=True,
        ):
            np.testing.assert_allclose(mine, right, rtol=1e-9, atol=1e-14)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again._privacy.settings.ways == {"second": way}


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        ({"third": "ghost"}, r"\['third'\].*\['first', 'second'\]"),
        ({"second": "fast"}, "'second' can be served by keep, keep:batched"),
        ({"second": "keep:rows"}, "'keep:rows'"),
        ("ghost", "must be a dict"),
        ({"second": 3}, "must be a dict"),
    ],
)
def test_ways_must_be_known(ways, message):
    with pytest.raises(ValueError, match=message):
        model, x, y = private(ways=ways)
        model.fit(x, y, batch_size=4, verbose=0)


def test_ways_are_for_auto_alone():
    with pytest.raises(ValueError, match="method='auto'"):
        private(ways={"second": "ghost"}, method="bk")


def test_other_methods_are_not_planned():
    planned = [name for name, m in methods.METHODS.items() if m.planned]
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
    def fail(*_):
        raise AssertionError("speeds were measured")

    monkeypatch.setattr(timing, "clock", fail)
    model, x, y = private(seed=1)
    ways_of(model, x, y)
    model.train_on_batch(x, y)


def test_kernels_alike_are_timed_once(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(timing, "loops_pay", lambda _: False)
    kernel, runs = Kernel(20, 8, 30), []
    seconds = timing._seconds
    monkeypatch.setattr(
        timing, "_seconds", lambda *step: runs.append(step) or seconds(*step)
    )
    ways = Item("layer", kernel).ways()
    found = timing.clock(kernel, ways, False)
    assert all(0 < each < 1 for each in found)
    # In turn, so that a slow moment meets all of them.
    number = len(set(runs))
    assert runs == runs[:number] * (len(runs) // number)
    alike, count = dataclasses.replace(kernel), len(runs)
    assert found == timing.clock(alike, ways, False)
    assert len(runs) == count > 0


@pytest.mark.parametrize("slower", [True, False])
def test_loops_that_do_not_pay_are_timed_for_one_kernel_only(
    monkeypatch, slower
):
    monkeypatch.undo()
    monkeypatch.setattr(timing, "loops_pay", lambda _: True)
    monkeypatch.setattr(timing, "_slower", {})
    timed, speeds = [], {"batched": 1.0, "loop": 2.0 if slower else 1.1}

    def seconds(kernel, way, jit_compile):
        timed.append((kernel, way))
        return 1.0 if way is None else speeds[way.form] * kernel.outputs

    monkeypatch.setattr(timing, "_timed", seconds)
    first, second = Kernel(20, 8, 31), Kernel(20, 8, 32)
    for way in (Way("build", "loop", keep=True), Way("ghost", "loop")):
        for kernel in (first, second):
            found = timing._measured(kernel, way, False)
            assert found == pytest.approx(speeds["loop"] * kernel.outputs)
        assert ((second, way) in timed) != slower
    timing._measured.cache_clear()


@pytest.mark.parametrize("norm", ["build", "ghost"])
@pytest.mark.parametrize("near", [True, False])
def test_loops_are_not_timed_beside_what_is_near_plain_training(
    monkeypatch, near, norm
):
    monkeypatch.undo()
    monkeypatch.setattr(timing, "loops_pay", lambda _: True)
    monkeypatch.setattr(timing, "_slower", {})
    timed = []
    # A ghost norm comes on top of plain training.
    at_once = (1.5 if near else 1.7) - (norm == "ghost")

    def seconds(kernel, way, jit_compile):
        timed.append(way)
        return 1.0 if way is None or way.form == "loop" else at_once

    monkeypatch.setattr(timing, "_timed", seconds)
    way = Way(norm, "loop", keep=norm == "build")
    assert timing._measured(Kernel(20, 8, 33), way, False) > 0
    assert (way in timed) != near
    timing._measured.cache_clear()


def test_with_onednn_loops_are_not_timed(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(timing._keras, "uses_onednn", lambda: True)
    monkeypatch.setattr(timing._keras, "on_cpu", lambda: True)
    assert timing.loops_pay(True) and not timing.loops_pay(False)
    timed = []
    monkeypatch.setattr(
        timing, "_timed", lambda kernel, way, _: timed.append(way) or 1.0
    )
    at_once, loop = Way("ghost", "batched"), Way("ghost", "loop")
    assert timing._measured(Kernel(20, 8, 34), loop, False) > 1
    assert timed == [at_once]
    timing._measured.cache_clear()


def test_what_is_known_to_be_beaten_is_not_timed():
    timed = []

    def clock(kernel, ways):
        timed.extend(map(str, ways))
        return [1.0] * len(ways)

    # T, d, p: kept gradients are smaller than inputs, and have no ghost norm.
    item = Item("layer", Kernel(1024, 27, 32), has_ghost=False)
    (only,) = planner.choices(item, 32, 2**30, clock, loops_pay=False)
    assert str(only.way) == "keep:batched" and not timed
    # Ghost norms take less memory, kept gradients perhaps less time.
    item = Item("layer", Kernel(100, 256, 1024))
    found = planner.choices(item, 16, 2**30, clock, loops_pay=False)
    assert {str(c.way) for c in found} >= {"ghost:batched", "keep:batched"}
    assert not {"ghost:loop", "keep:loop"} & {str(c.way) for c in found}
    # With loops that may pay, all are timed.
    timed.clear()
    everything = planner.choices(item, 16, 2**30, clock)
    assert len(everything) == len(timed) == len(item.ways())


@pytest.mark.parametrize("room", [0, 1, 1000])
def test_loops_that_do_not_pay_are_taken_where_nothing_else_fits(room):
    """Whatever would do is enough, also where a loop would be beaten."""
    items = [
        Item("first", Kernel(300, 64, 64)),
        Item("second", Kernel(100, 256, 1024)),
        Item("third", Kernel(1024, 27, 32), has_ghost=False),
    ]
    least = planner.required(planner.smallest_plan(items, 32))
    chosen = planner.plan(
        items, 32, least + room, reference_clocks, loops_pay=False
    )
    assert planner.required(chosen) <= least + room


def test_what_would_take_much_memory_is_not_timed_for_comparison(monkeypatch):
    monkeypatch.undo()
    timed = []
    monkeypatch.setattr(timing, "_slower", {})
    monkeypatch.setattr(
        timing, "_timed", lambda kernel, way, _: timed.append(way) or 1.0
    )
    way = Way("ghost", "loop")
    assert timing._measured(Kernel(4096, 8, 8), way, False) == 1.0
    assert timed == [way]
    timing._measured.cache_clear()


def test_kernels_that_take_too_long_are_not_timed(monkeypatch):
    monkeypatch.undo()
    kernel, way = Kernel(8192, 16384, 16384), Way("ghost", "loop")
    assert timing.clock(kernel, [way]) == [reference_clock(kernel, way)]


def test_timing_leaves_the_trace_of_a_step_alone(monkeypatch):
    """One trace for each shape, also in a function of one's own."""
    monkeypatch.undo()
    timing._measured.cache_clear()
    model = keras_fastclip.DPSequential(
        [keras.Input((None, 6)), layers.Dense(5), layers.Flatten()],
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        expected_batch_size=4,
    )
    model.compile("sgd", "mse")
    shapes = []

    @tf.function
    def step(x, y):
        shapes.append(tuple(x.shape))
        return model.train_step((x, y))["loss"]

    for length in (7, 9):
        x, y = tf.ones([4, length, 6]), tf.ones([4, 5 * length])
        model._privacy.prepare(model, (x, y, None), 4)
        step(x, y)
        step(x, y)
    assert shapes == [(4, 7, 6), (4, 9, 6)]


def test_convolutions_are_timed_while_the_step_is_traced(monkeypatch):
    monkeypatch.undo()
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, strides=2, padding="same")(inputs)
    x = layers.Conv2DTranspose(3, 2)(x)
    x = layers.SeparableConv2D(3, 2, data_format="channels_last")(x)
    model = keras_fastclip.DPModel(
        inputs,
        layers.Dense(1)(layers.Flatten()(x)),
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
    )
    model.compile("sgd", "mse")
    x, y = np.random.normal(size=(8, 6, 6, 2)), np.zeros((8, 1))
    model.fit(x, y, batch_size=4, verbose=0)
    assert model.privacy_spent(1e-5) > 0


@pytest.mark.parametrize("jit_compile", [False, True])
def test_with_xla_no_loop_is_taken_for_nearly_as_fast(monkeypatch, jit_compile):
    timed = []

    def time_it(kernel, way, jit_compile):
        timed.append(way and way.form)
        return 1.0

    monkeypatch.setattr(timing, "_timed", time_it)
    monkeypatch.setattr(timing, "loops_pay", lambda jit_compile: True)
    timing._measured.cache_clear()
    try:
        way = Way("build", "loop", keep=True)
        timing._measured(Kernel(41, 37, 23), way, jit_compile)
    finally:
        timing._measured.cache_clear()
    assert ("loop" in timed) == jit_compile
