"""Epsilon is that of dp_accounting for what the ledger says happened."""

import copy
import doctest
import json
import math
import pickle
import time

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from dp_accounting import pld, rdp

from keras_fastclip import _accountants, accounting
from keras_fastclip import statement as statements

N, B, SIGMA, STEPS, DELTA = 60_000, 256, 1.1, 60 * 235, 1e-5
RUN = accounting.PoissonSampling(N, B, SIGMA)
PASSES = accounting.Passes(N, SIGMA)
SMALL = accounting.PoissonSampling(1_000, 10, 2.0)


def ledger_of(*entries):
    """A ledger of (mechanism, steps) or (mechanism, steps, uses)."""
    ledger = accounting.Ledger()
    for entry in entries:
        ledger.record(*entry)
    return ledger


def by_dp_accounting(ledger, accountant):
    """Epsilon by an accountant of dp_accounting that is given the event."""
    reference = {"rdp": rdp.RdpAccountant, "pld": pld.PLDAccountant}[accountant]
    return reference().compose(ledger.event()).get_epsilon(DELTA)


def words(text):
    """The text on one line, so that wrapping does not hide a phrase."""
    return " ".join(text.split())


# Figures.


@pytest.mark.parametrize(
    "entry, accountant, figure",
    [
        ((RUN, STEPS), "rdp", 2.60034),
        ((RUN, STEPS), "pld", 2.38521),
        ((PASSES, STEPS, 60), "rdp", 54.0458),
        ((PASSES, STEPS, 60), "pld", 54.0458),
    ],
)
def test_known_figures(entry, accountant, figure):
    epsilon = ledger_of(entry).epsilon(DELTA, accountant)
    assert type(epsilon) is float
    assert epsilon == pytest.approx(figure, rel=2e-6)


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize(
    "mechanism",
    [accounting.PoissonSampling(100, 100, 4.0), accounting.Passes(100, 4.0)],
)
def test_steps_that_gain_nothing_from_sampling_are_exact(mechanism, accountant):
    ledger = ledger_of((mechanism, 9))
    exact = dp_accounting.get_epsilon_gaussian(4.0 / 3.0, DELTA)
    assert ledger.epsilon(DELTA, accountant) == pytest.approx(exact, rel=1e-12)
    assert ledger.epsilon_without_amplification(DELTA) == (
        ledger.epsilon(DELTA, accountant)
    )
    assert exact <= by_dp_accounting(ledger, accountant) < 1.1 * exact


def test_events_are_those_of_dp_accounting():
    gaussian = dp_accounting.GaussianDpEvent(SIGMA)
    repeated = dp_accounting.SelfComposedDpEvent
    assert PASSES.event(60) == repeated(gaussian, 60)
    assert accounting.PoissonSampling(5, 5, SIGMA).event(3) == (
        repeated(gaussian, 3)
    )
    sampled = dp_accounting.PoissonSampledDpEvent(B / N, gaussian)
    assert RUN.event(7) == repeated(sampled, 7)
    assert ledger_of((RUN, 7), (PASSES, 9, 2), (RUN, 4, 0)).event() == (
        dp_accounting.ComposedDpEvent(
            [repeated(sampled, 7), repeated(gaussian, 2)]
        )
    )


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_mixed_steps_compose_as_in_dp_accounting(accountant):
    ledger = ledger_of(
        (accounting.PoissonSampling(1_000, 10, 1.0), 100),
        (accounting.PoissonSampling(1_000, 50, 2.0), 30),
        (accounting.PoissonSampling(1_000, 1_000, 8.0), 5),
        (accounting.Passes(1_000, 9.0), 400, 4),
        (accounting.PoissonSampling(1_000, 10, 1.0), 7),
        (accounting.Passes(700, 9.0), 1),
    )
    epsilon = ledger.epsilon(DELTA, accountant)
    expected = by_dp_accounting(ledger, accountant)
    # A PLD of one Gaussian for all passes has fewer errors of the grid.
    assert epsilon == pytest.approx(
        expected, rel=1e-6 if accountant == "pld" else 1e-12
    )


@pytest.mark.parametrize(
    "mechanism, steps",
    [(RUN, 1), (RUN, 2), (RUN, STEPS), (SMALL, 10_000)],
)
def test_cached_distributions_give_the_figure_of_the_accountant(
    mechanism, steps
):
    ledger = ledger_of((mechanism, steps))
    expected = by_dp_accounting(ledger, "pld")
    assert ledger.epsilon(DELTA, "pld") == pytest.approx(expected, abs=1e-9)


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    accounting.PoissonSampling(100, 10, 1.0),
                    accounting.PoissonSampling(200, 20, 1.0),
                    accounting.PoissonSampling(200, 20, 3.0),
                    accounting.Passes(100, 1.0),
                    accounting.Passes(200, 3.0),
                ]
            ),
            st.integers(0, 100),
            st.integers(0, 100),
        ),
        max_size=5,
    )
)
def test_epsilon_is_that_of_the_event_whatever_the_order(entries):
    ledger = ledger_of(*entries)
    expected = by_dp_accounting(ledger, "rdp")
    epsilon = ledger.epsilon(DELTA)
    if any(m.sampling_probability < 1 and uses for m, _, uses in entries):
        assert epsilon == pytest.approx(expected, rel=1e-9)
    else:
        assert epsilon <= expected
    backwards = ledger_of(*reversed(entries)).epsilon(DELTA)
    assert backwards == pytest.approx(epsilon, rel=1e-9)
    assert epsilon <= 1.2 * ledger.epsilon_without_amplification(DELTA)


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_small_noise_gives_a_large_bound_in_little_time(accountant):
    ledger = ledger_of((accounting.PoissonSampling(100, 10, 0.01), 100))
    start = time.monotonic()
    epsilon = ledger.epsilon(DELTA, accountant)
    assert time.monotonic() - start < 30
    assert 1e4 < epsilon < 1e6


@pytest.mark.parametrize(
    "sigma, steps", [(1e-5, 1), (1e-3, 10**6), (0.1, 10**6)]
)
def test_figures_beyond_all_use_are_figures_still(sigma, steps):
    ledger = ledger_of((accounting.PoissonSampling(100, 10, sigma), steps))
    bounds = ledger.epsilon(DELTA), ledger.epsilon_without_amplification(DELTA)
    assert 1e6 < ledger.epsilon(DELTA, "pld") <= min(bounds)


def test_pld_on_a_coarser_grid_is_still_a_close_bound():
    # Sampling that hardly gains, so that the exact figure is known nearly.
    ledger = ledger_of(
        (accounting.PoissonSampling(10**6, 10**6 - 1, 0.5), 50),
        (accounting.Passes(10**6, 0.5), 50),
    )
    exact = dp_accounting.get_epsilon_gaussian(0.5 / math.sqrt(100), DELTA)
    assert exact > 10 * _accountants._PLD_INTERVAL_UP_TO
    assert 0.9999 * exact <= ledger.epsilon(DELTA, "pld") < 1.0001 * exact


def test_many_noise_multipliers_are_a_close_bound(monkeypatch):
    sigmas = [4 * 1.01**k for k in range(20)]
    schedule = [
        (accounting.PoissonSampling(N, B, sigma), 9) for sigma in sigmas
    ]
    grids = []
    one_step = _accountants._one_step_pld

    def counting(q, sigma, interval):
        grids.append(interval)
        return one_step(q, sigma, interval)

    monkeypatch.setattr(_accountants, "_one_step_pld", counting)
    epsilon = ledger_of(*schedule, *schedule).epsilon(DELTA, "pld")
    # What comes again in the ledger is composed once.
    assert grids == 20 * [2 * _accountants._PLD_INTERVAL]

    def constant(sigma):
        ledger = ledger_of((accounting.PoissonSampling(N, B, sigma), 360))
        return ledger.epsilon(DELTA, "pld")

    assert constant(sigmas[-1]) < epsilon < constant(sigmas[0])
    assert constant(sigmas[10]) == pytest.approx(epsilon, rel=0.02)


def test_grid_for_many_mechanisms_adds_little_variance():
    for count, uses in [(1, 1), (8, 10**6), (100, 141), (100, 10**5), (400, 1)]:
        parts = tuple(
            _accountants.Part(0.01, 1 + k / 100, uses) for k in range(count)
        )
        interval = _accountants._pld_interval(parts, epsilon=1.0)
        finest = _accountants._PLD_INTERVAL
        assert interval == finest or count * uses * interval**2 <= 0.01
        assert finest <= interval <= max(finest, finest * count / 8)


def test_reports_of_a_known_mechanism_compute_nothing_anew():
    ledger = ledger_of((RUN, STEPS), (PASSES, 235, 1))
    for accountant in accounting.ACCOUNTANTS:
        ledger.epsilon(DELTA, accountant)
    curves = _accountants._rdp_orders_and_curve
    distributions = _accountants._one_step_pld
    misses = curves.cache_info().misses, distributions.cache_info().misses
    for epoch in range(1, 61):
        ledger.record(RUN, 235)
        ledger.epsilon(DELTA / epoch)
    ledger.epsilon(DELTA, "pld")
    assert misses == (
        curves.cache_info().misses,
        distributions.cache_info().misses,
    )


def test_more_steps_and_smaller_delta_cost_more():
    mechanism = accounting.PoissonSampling(10_000, 100, 1.0)
    few, many = ledger_of((mechanism, 10)), ledger_of((mechanism, 100))
    assert few.epsilon(1e-5) < many.epsilon(1e-5)
    assert few.epsilon(1e-5) < few.epsilon(1e-6)


# The ledger.


def test_an_empty_ledger_costs_nothing():
    ledger = accounting.Ledger()
    ledger.record(RUN, 0)
    assert ledger.entries == ()
    assert ledger.total_steps == 0
    assert ledger.event() == dp_accounting.NoOpDpEvent()
    for accountant in accounting.ACCOUNTANTS:
        epsilon = ledger.epsilon(DELTA, accountant)
        assert epsilon == 0.0 and isinstance(epsilon, float)


def test_equal_neighbours_are_merged_and_order_is_kept():
    other = accounting.PoissonSampling(N, B, 2.0)
    same = accounting.PoissonSampling(np.int64(N), np.int32(B), SIGMA)
    ledger = ledger_of((RUN, 3), (same, 4), (other, 5), (other, 0), (RUN, 6))
    assert ledger.entries == ((RUN, 7, 7), (other, 5, 5), (RUN, 6, 6))
    assert ledger.total_steps == 18


def test_uses_are_counted_beside_steps():
    ledger = ledger_of((PASSES, 100, 1), (PASSES, 135, 0), (PASSES, 0, 2))
    assert ledger.entries == ((PASSES, 235, 3),)
    ledger = ledger_of((PASSES, 0, 0), (PASSES, 0, 2))
    assert ledger.entries == ((PASSES, 0, 2),)
    assert ledger.total_steps == 0
    assert ledger.epsilon(DELTA) == ledger_of((PASSES, 2)).epsilon(DELTA)


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_what_no_example_took_part_in_costs_nothing(accountant):
    ledger = ledger_of(
        (RUN, 10, 0),
        (accounting.Passes(N, 0.0), 5, 0),
        (accounting.Unaccounted("nothing is known"), 5, 0),
    )
    assert len(ledger.entries) == 3
    assert ledger.epsilon(DELTA, accountant) == 0.0
    assert ledger.event() == dp_accounting.NoOpDpEvent()
    assert ledger.obstacles() == ledger.unaccounted_reasons() == ()


def test_plus_leaves_the_ledger_as_it_is():
    ledger = ledger_of((RUN, 3))
    more = ledger.plus(RUN, 4).plus(PASSES, 9, 2)
    assert ledger.entries == ((RUN, 3, 3),)
    assert more.entries == ((RUN, 7, 7), (PASSES, 9, 2))


def test_what_is_part_of_a_ledger():
    some = ledger_of((RUN, 10), (SMALL, 3))
    assert some.is_part_of(some)
    assert some.is_part_of(ledger_of((SMALL, 1), (RUN, 11), (SMALL, 2)))
    assert accounting.Ledger().is_part_of(some)
    assert not some.is_part_of(accounting.Ledger())
    assert not some.is_part_of(ledger_of((RUN, 10), (SMALL, 2)))
    assert not some.is_part_of(ledger_of((RUN, 1000)))
    unknown = some.plus(accounting.Unaccounted("of the moon"), 1)
    assert not unknown.is_part_of(unknown.plus(RUN, 1000))


def test_entries_are_a_snapshot():
    ledger = ledger_of((RUN, 3))
    before = ledger.entries
    ledger.record(RUN, 1)
    assert before == ((RUN, 3, 3),)


def test_steps_may_be_numpy_integers_but_not_fractions():
    ledger = ledger_of((RUN, np.int64(3), np.int32(2)))
    assert type(ledger.entries[0].steps) is int
    assert type(ledger.entries[0].uses) is int
    with pytest.raises(TypeError):
        ledger.record(RUN, 1.5)
    with pytest.raises(TypeError):
        ledger.record(RUN, 1, 1.5)


def test_negative_steps_are_refused():
    with pytest.raises(ValueError, match="steps=-1"):
        accounting.Ledger().record(RUN, -1)
    with pytest.raises(ValueError, match="uses=-2"):
        accounting.Ledger().record(RUN, 1, -2)


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_unaccounted_steps_make_epsilon_infinite(accountant):
    unaccounted = accounting.Unaccounted("the sampling is not known")
    other = accounting.Unaccounted("the batches were given by the user")
    ledger = ledger_of(
        (RUN, 10), (unaccounted, 1), (other, 2), (RUN, 5), (unaccounted, 3)
    )
    assert ledger.epsilon(DELTA, accountant) == math.inf
    assert ledger.unaccounted_reasons() == (
        "the sampling is not known",
        "the batches were given by the user",
    )
    assert rdp.RdpAccountant().compose(ledger.event()).get_epsilon(0.1) == (
        math.inf
    )
    assert ledger_of((unaccounted, 0)).epsilon(DELTA, accountant) == 0.0
    assert ledger_of((RUN, 1)).unaccounted_reasons() == ()


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("sigma", [0, 1e-200, 1e-7])
def test_steps_without_noise_make_epsilon_infinite(accountant, sigma):
    for mechanism in (
        accounting.PoissonSampling(N, B, sigma),
        accounting.Passes(N, sigma),
    ):
        ledger = ledger_of((RUN, 1), (mechanism, 1))
        assert ledger.epsilon(DELTA, accountant) == math.inf
        assert ledger.epsilon_without_amplification(DELTA) == math.inf
        assert ledger.unaccounted_reasons() == ()
        assert ledger.obstacles() == ("steps were taken without noise",)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 1.5, float("nan")])
def test_delta_outside_the_unit_interval_is_refused(delta):
    ledger = accounting.Ledger()
    with pytest.raises(ValueError, match=f"delta={delta}"):
        ledger.epsilon(delta)
    with pytest.raises(ValueError, match=f"delta={delta}"):
        accounting.statement(ledger, delta, l2_norm_clip=1.0)


def test_unknown_accountant_is_refused():
    with pytest.raises(ValueError, match="accountant='moments'"):
        ledger_of((RUN, 1)).epsilon(DELTA, "moments")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((10, 11, 1.0), "expected_batch_size=11, num_examples=10"),
        ((10, 0, 1.0), "expected_batch_size=0"),
        ((10, 1, -1.0), "noise_multiplier=-1.0"),
        ((10, 1, math.inf), "noise_multiplier=inf"),
        ((10, 1, math.nan), "noise_multiplier=nan"),
    ],
)
def test_impossible_mechanisms_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        accounting.PoissonSampling(*arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 1.0), "num_examples=0"),
        ((10, -1.0), "noise_multiplier=-1.0"),
        ((10, math.nan), "noise_multiplier=nan"),
    ],
)
def test_impossible_passes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        accounting.Passes(*arguments)


def test_configs_round_trip_through_json():
    ledger = ledger_of(
        (accounting.PoissonSampling(np.int64(N), B, np.float32(0.5)), 10),
        (accounting.Unaccounted("ünknown"), 2),
        (RUN, np.int64(7)),
        (accounting.Passes(np.int64(N), np.float32(0.5)), 10, 2),
    )
    config = json.loads(json.dumps(ledger.get_config()))
    restored = accounting.Ledger.from_config(config)
    assert restored == ledger
    assert restored.entries == ledger.entries
    assert restored.get_config() == ledger.get_config()
    for mechanism, _, _ in ledger.entries:
        config = mechanism.get_config()
        assert accounting.mechanism_from_config(config) == mechanism
        assert type(mechanism).from_config(config) == mechanism
    assert RUN.get_config() == {
        "kind": "poisson_sampling",
        "num_examples": N,
        "expected_batch_size": B,
        "noise_multiplier": SIGMA,
    }
    assert PASSES.get_config() == {
        "kind": "passes",
        "num_examples": N,
        "noise_multiplier": SIGMA,
    }


def test_configs_without_uses_are_of_steps_that_may_all_be_uses():
    config = {"entries": [{"mechanism": RUN.get_config(), "steps": 5}]}
    assert accounting.Ledger.from_config(config).entries == ((RUN, 5, 5),)


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind='shuffled'"):
        accounting.mechanism_from_config({"kind": "shuffled"})


def test_mechanisms_are_immutable():
    with pytest.raises(AttributeError):
        RUN.noise_multiplier = 2.0


# Epsilon with what it stands for.


def test_spent_knows_what_it_stands_for():
    ledger = ledger_of((RUN, STEPS))
    for accountant in accounting.ACCOUNTANTS:
        spent = ledger.spent(DELTA, accountant)
        assert spent == ledger.epsilon(DELTA, accountant)
        assert (spent.delta, spent.accountant) == (DELTA, accountant)
        assert spent.event == ledger.event()
        assert spent.reasons == ()
    assert ledger.spent(DELTA) == ledger.epsilon(DELTA, "pld")


def test_spent_is_a_float_in_all_that_it_does():
    ledger = ledger_of((SMALL, 5), (PASSES, 3))
    spent, value = ledger.spent(DELTA), ledger.epsilon(DELTA, "pld")
    assert isinstance(spent, float)
    assert spent == value and hash(spent) == hash(value)
    assert spent < value + 1 and type(spent + 1) is float
    assert repr(spent) == repr(value) and f"{spent:.3f}" == f"{value:.3f}"
    assert json.loads(json.dumps({"epsilon": spent})) == {"epsilon": value}
    for same in (
        pickle.loads(pickle.dumps(spent)),
        copy.copy(spent),
        copy.deepcopy(spent),
    ):
        assert type(same) is accounting.Epsilon
        assert same == spent
        assert vars(same) == vars(spent)


def test_infinite_spent_gives_the_reasons():
    unaccounted = accounting.Unaccounted("the batches were given by the user")
    ledger = ledger_of((unaccounted, 1), (accounting.Passes(N, 0.0), 1))
    spent = ledger.spent(DELTA)
    assert spent == math.inf
    assert spent.reasons == (
        "the batches were given by the user",
        "steps were taken without noise",
    )
    (reason,) = ledger_of((RUN, 100)).spent(1e-18).reasons
    assert "so small a delta" in reason


# Budgets.


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize(
    "before",
    [
        [],
        [(SMALL, 100)],
        [(SMALL, 100), (accounting.Passes(1_000, 9.0), 50, 2)],
    ],
)
@pytest.mark.parametrize(
    "mechanism",
    [SMALL, accounting.Passes(1_000, 20.0)],
    ids=["poisson", "passes"],
)
def test_uses_within_a_budget_are_all_that_fit(accountant, before, mechanism):
    ledger = ledger_of(*before)
    n = ledger.uses_within(mechanism, 1.5, DELTA, 100_000, accountant)
    assert type(n) is int and 0 < n < 100_000
    assert ledger.plus(mechanism, n).epsilon(DELTA, accountant) <= 1.5
    assert ledger.plus(mechanism, n + 1).epsilon(DELTA, accountant) > 1.5
    assert ledger.entries == ledger_of(*before).entries


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_uses_within_a_budget_at_its_ends(accountant):
    ledger = ledger_of((SMALL, 100))
    spent = ledger.epsilon(DELTA, accountant)
    after = ledger.plus(SMALL, 7).epsilon(DELTA, accountant)

    def within(epsilon, at_most, mechanism=SMALL, ledger=ledger):
        return ledger.uses_within(
            mechanism, epsilon, DELTA, at_most, accountant
        )

    assert within(after, 7) == 7
    assert within(after, 100) == 7
    assert within(after, 8) == 7
    assert within(after, 6) == 6
    assert within(after, 0) == 0
    assert within(spent, 100) == 0
    assert within(spent / 2, 100) == within(spent / 2, 0) == 0
    assert within(100.0, 100, accounting.Unaccounted("so")) == 0
    assert within(100.0, 100, accounting.Passes(10, 0.0)) == 0
    lost = ledger.plus(accounting.Unaccounted("so"), 1)
    assert within(100.0, 100, ledger=lost) == 0


def test_uses_within_a_budget_take_few_distributions(monkeypatch):
    before = _accountants._pld_epsilon.cache_info().misses
    n = accounting.Ledger().uses_within(RUN, 2.0, DELTA, 10**6)
    assert n == 10206
    assert _accountants._pld_epsilon.cache_info().misses <= before + 7


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
    steps=st.integers(0, 1_000),
    at_most=st.integers(0, 10_000),
    epsilon=st.floats(0.01, 20),
)
def test_uses_within_a_budget_are_exact(steps, at_most, epsilon):
    ledger = ledger_of((SMALL, steps))
    n = ledger.uses_within(SMALL, epsilon, DELTA, at_most, "rdp")
    assert 0 <= n <= at_most
    assert n == 0 or ledger.plus(SMALL, n).epsilon(DELTA) <= epsilon
    assert n == at_most or ledger.plus(SMALL, n + 1).epsilon(DELTA) > epsilon


@pytest.mark.parametrize(
    "change, message",
    [
        ({"epsilon": 0}, "epsilon=0"),
        ({"epsilon": math.inf}, "epsilon=inf"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"at_most": -1}, "at_most=-1"),
        ({"at_most": 1.5}, "at_most=1.5"),
        ({"accountant": "moments"}, "accountant='moments'"),
    ],
)
def test_impossible_budgets_are_refused(change, message):
    arguments = {"epsilon": 1.0, "delta": DELTA, "at_most": 5} | change
    with pytest.raises(ValueError, match=message):
        accounting.Ledger().uses_within(RUN, **arguments)


# Calibration.


@pytest.mark.parametrize(
    "sampling, accountant, figure",
    [
        ("poisson", "rdp", 1.01480),
        ("poisson", "pld", 0.96916),
        ("shuffle", "rdp", 10.7715),
        ("shuffle", "pld", 10.7715),
    ],
)
def test_known_noise_multipliers(sampling, accountant, figure):
    sigma = accounting.calibrate_noise(
        3.0, DELTA, N, B, 60, sampling=sampling, accountant=accountant
    )
    assert type(sigma) is float
    close = accountant == "pld" and sampling == "poisson"
    assert sigma == pytest.approx(figure, rel=2e-4 if close else 1e-5)


@pytest.mark.parametrize("target", [0.1, 8.0, 300.0])
@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("sampling", accounting.SAMPLINGS)
@pytest.mark.parametrize("resumed", [False, True])
def test_calibrated_noise_is_the_least_that_meets_the_target(
    target, accountant, sampling, resumed
):
    ledger = accounting.Ledger()
    if resumed:
        ledger.record(accounting.PoissonSampling(1_000, 10, 50.0), 30)
        ledger.record(accounting.Passes(1_000, 200.0), 100, 1)
    sigma = accounting.calibrate_noise(
        target,
        DELTA,
        1_000,
        64,
        3,
        sampling=sampling,
        accountant=accountant,
        ledger=ledger if resumed else None,
    )

    def epsilon(sigma):
        if sampling == "poisson":
            mechanism = accounting.PoissonSampling(1_000, 64, sigma)
            planned = ledger.plus(mechanism, 48)
        else:
            planned = ledger.plus(accounting.Passes(1_000, sigma), 48, 3)
        return planned.epsilon(DELTA, accountant)

    assert epsilon(sigma) <= target < epsilon(sigma * (1 - 3e-4))


def test_calibration_goes_by_the_number_of_steps():
    def sigma(sampling, **keywords):
        return accounting.calibrate_noise(
            1.0,
            DELTA,
            1_000,
            64,
            **keywords,
            sampling=sampling,
            accountant="rdp",
        )

    assert sigma("poisson", epochs=3, steps_per_epoch=8) == (
        pytest.approx(sigma("poisson", epochs=4, steps_per_epoch=6))
    )
    # Each epoch begins a pass, and a longer one goes over the data again.
    assert sigma("shuffle", epochs=4, steps_per_epoch=8) == (
        sigma("shuffle", epochs=4)
    )
    assert sigma("shuffle", epochs=4, steps_per_epoch=17) == (
        sigma("shuffle", epochs=8)
    )


def test_targets_that_were_spent_are_refused():
    ledger = ledger_of((SMALL, 1_000))
    spent = ledger.epsilon(DELTA, "rdp")

    def calibrate(target, ledger=ledger):
        return accounting.calibrate_noise(
            target, DELTA, 1_000, 10, 1, accountant="rdp", ledger=ledger
        )

    with pytest.raises(ValueError, match=f"epsilon = {spent:.6g} already"):
        calibrate(spent / 2)
    with pytest.raises(ValueError, match=f"epsilon = {spent:.6g}"):
        calibrate(spent)
    with pytest.raises(ValueError, match="epsilon = inf already"):
        calibrate(3.0, ledger_of((accounting.Unaccounted("so"), 1)))
    assert calibrate(1.1 * spent) > 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_epsilon": 0}, "target_epsilon=0"),
        ({"target_epsilon": math.inf}, "target_epsilon=inf"),
        ({"delta": 0}, "delta=0"),
        ({"num_examples": 0}, "num_examples=0"),
        ({"batch_size": 101}, "batch_size=101, num_examples=100"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"epochs": 0}, "epochs=0"),
        ({"sampling": "fixed"}, "sampling='fixed'"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ({"accountant": "moments"}, "accountant='moments'"),
    ],
)
def test_impossible_calibrations_are_refused(change, message):
    arguments = {
        "target_epsilon": 1.0,
        "delta": DELTA,
        "num_examples": 100,
        "batch_size": 10,
        "epochs": 1,
    }
    with pytest.raises(ValueError, match=message):
        accounting.calibrate_noise(**(arguments | change))


def test_examples_of_the_docstrings():
    assert doctest.testmod(accounting).failed == 0


# The statement.


def test_statement_says_what_was_done_and_what_it_means():
    ledger = ledger_of((RUN, STEPS))
    text = accounting.statement(ledger, DELTA, l2_norm_clip=1.5)
    assert max(map(len, text.splitlines())) < 80
    text = words(text)
    plain = dp_accounting.get_epsilon_gaussian(SIGMA / STEPS**0.5, DELTA)
    for phrase in (
        "at most 1.5,",
        "14,100 steps with Poisson sampling of 60,000 examples",
        "expected batch size of 256",
        "noise multiplier of 1.1",
        "one example added or removed",
        "epsilon = 2.3853 at delta = 1e-05",
        "PLD",
        "Without amplification by sampling",
        f"epsilon = {math.ceil(plain * 1e4) / 1e4:,.4f} at the same delta",
        "Delta is an allowance",
        "Metrics and losses logged during training",
        "Validation",
        "hyper-parameters",
        "Preprocessing computed on the data",
        "Several examples of one person",
    ):
        assert phrase in text
    assert "infinite" not in text
    assert "Warning" not in text


def test_statement_lists_every_entry():
    other = accounting.PoissonSampling(500, 20, 3.0)
    ledger = ledger_of(
        (accounting.PoissonSampling(500, 20, 2.0), 8), (other, 9)
    )
    text = words(accounting.statement(ledger, 1e-4, l2_norm_clip=1))
    assert "17 in all" in text
    assert "8 steps" in text and "noise multiplier of 2." in text
    assert "9 steps" in text and "noise multiplier of 3." in text


def test_statement_of_passes_names_its_neighbours():
    text = accounting.statement(
        ledger_of((PASSES, STEPS, 60)), DELTA, l2_norm_clip=1.0
    )
    assert max(map(len, text.splitlines())) < 80
    text = words(text)
    for phrase in (
        "14,100 steps in passes over 60,000 examples",
        "took part in at most 60 of these steps",
        "noise multiplier of 1.1.",
        "replaced in the other by an example that contributes nothing",
        "The number of examples and the borders of the batches count as public",
        "epsilon = 54.0459 at delta = 1e-05",
        "There is no amplification by sampling in this figure",
    ):
        assert phrase in text
    for phrase in (
        "added or removed",
        "Without amplification",
        "Poisson",
        "PLD",
    ):
        assert phrase not in text


def test_statement_of_both_kinds_of_steps():
    ledger = ledger_of((RUN, 235), (PASSES, 470, 2), (SMALL, 9, 4))
    text = words(accounting.statement(ledger, DELTA, l2_norm_clip=1.0))
    plain = ledger.epsilon_without_amplification(DELTA)
    for phrase in (
        "714 in all",
        "235 steps with Poisson sampling",
        "470 steps in passes",
        "One example can have taken part in at most 4 of them.",
        "by an example that contributes nothing",
        "For the steps with Poisson sampling that is the same as one example "
        "added or removed.",
        "The number of examples, the sampling probability and the borders of "
        "the batches count as public.",
        f"epsilon = {statements._round_up(plain)} at the same delta",
    ):
        assert phrase in text


@pytest.mark.parametrize("count", [8, 9])
def test_statement_tells_many_noise_multipliers_in_one_bullet(count):
    sigmas = [1 + k / 10 for k in range(count)]
    ledger = ledger_of(
        (accounting.Passes(77, 3.0), 5, 1),
        *((accounting.PoissonSampling(500, 20, sigma), 2) for sigma in sigmas),
        *((accounting.Passes(500, sigma), 3, 1) for sigma in sigmas),
    )
    text = words(accounting.statement(ledger, 1e-4, l2_norm_clip=1))
    few = count == 8
    assert text.split("What is guaranteed")[0].count(" - ") == (
        17 if few else 3
    )
    assert ("noise multipliers between" in text) != few
    if not few:
        assert "- 18 steps with Poisson sampling of 500 examples" in text
        assert "- 27 steps in passes over 500 examples" in text
        assert "at most 9 of these steps" in text
        assert "noise multipliers between 1 and 1.8." in text
        assert "expected batch size of 20 (" in text


def test_statement_shows_notes_after_what_was_done():
    notes = ["The limit was adapted.", "- In 3 steps " + "of many " * 20]
    text = accounting.statement(
        ledger_of((RUN, 5)), DELTA, l2_norm_clip=1.0, notes=notes
    )
    assert max(map(len, text.splitlines())) < 80
    assert "\n\nThe limit was adapted.\n\n- In 3 steps of many" in text
    done, guaranteed = text.split("What is guaranteed.")
    assert "The limit was adapted." in done
    assert "adapted" not in guaranteed


def test_statement_of_infinite_epsilon_gives_the_reasons():
    ledger = ledger_of(
        (RUN, 4),
        (accounting.Unaccounted("the batches were given by the user"), 6),
        (accounting.PoissonSampling(N, B, 0.0), 1),
    )
    text = words(accounting.statement(ledger, DELTA, l2_norm_clip=1.0))
    assert "Epsilon is infinite" in text
    assert "- the batches were given by the user." in text
    assert "- steps were taken without noise." in text
    assert "6 steps that cannot be accounted for" in text
    assert "epsilon = " not in text
    assert "What is not covered" in text


def test_statement_before_training():
    text = words(
        accounting.statement(accounting.Ledger(), DELTA, l2_norm_clip=1.0)
    )
    assert "No training step was taken" in text
    assert "epsilon = 0.0000" in text


def test_statement_warns_of_a_delta_that_allows_publishing_an_example():
    ledger = ledger_of((accounting.PoissonSampling(1_000, 10, 2.0), 5))
    text = words(accounting.statement(ledger, 1e-3, l2_norm_clip=1.0))
    assert "Warning: delta = 0.001" in text


def test_printed_bounds_are_rounded_up():
    assert statements._round_up(2.38521) == "2.3853"
    assert statements._round_up(6285.85431) == "6,285.8544"
    assert statements._round_up(0.0) == "0.0000"
