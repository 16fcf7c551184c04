"""Epsilon is that of dp_accounting for what the ledger says happened."""

import json
import math
import time

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp

from keras_fastclip import accounting

N, B, SIGMA, STEPS, DELTA = 60_000, 256, 1.1, 60 * 235, 1e-5
RUN = accounting.PoissonSampling(N, B, SIGMA)


def ledger_of(*entries):
    ledger = accounting.Ledger()
    for mechanism, steps in entries:
        ledger.record(mechanism, steps)
    return ledger


def words(text):
    """The text on one line, so that wrapping does not hide a phrase."""
    return " ".join(text.split())


# Figures.


def test_known_figure_rdp():
    epsilon = ledger_of((RUN, STEPS)).epsilon(DELTA)
    assert isinstance(epsilon, float)
    assert epsilon == pytest.approx(2.60034, abs=1e-5)


def test_known_figure_pld():
    epsilon = ledger_of((RUN, STEPS)).epsilon(DELTA, accountant="pld")
    assert isinstance(epsilon, float)
    assert epsilon == pytest.approx(2.38521, abs=1e-5)


def test_sampling_probability_one_is_the_plain_gaussian():
    ledger = ledger_of((accounting.PoissonSampling(100, 100, 4.0), 9))
    exact = dp_accounting.get_epsilon_gaussian(4.0 / 3.0, DELTA)
    assert ledger.epsilon(DELTA, "pld") == pytest.approx(exact, rel=1e-4)
    assert exact < ledger.epsilon(DELTA, "rdp") < 1.1 * exact
    assert RUN.event(1) == dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            B / N, dp_accounting.GaussianDpEvent(SIGMA)
        ),
        1,
    )
    assert ledger.entries[0].mechanism.event(9) == (
        dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(4.0), 9)
    )


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_mixed_steps_compose_as_in_dp_accounting(accountant):
    entries = [
        (accounting.PoissonSampling(1_000, 10, 1.0), 100),
        (accounting.PoissonSampling(1_000, 50, 2.0), 30),
        (accounting.PoissonSampling(1_000, 1_000, 8.0), 5),
        (accounting.PoissonSampling(1_000, 10, 1.0), 7),
    ]
    ledger = ledger_of(*entries)
    one_by_one = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(
                    m.expected_batch_size / m.num_examples,
                    dp_accounting.GaussianDpEvent(m.noise_multiplier),
                ),
                steps,
            )
            for m, steps in entries
        ]
    )
    reference = {
        "rdp": rdp.RdpAccountant,
        "pld": lambda: pld.PLDAccountant(value_discretization_interval=1e-4),
    }[accountant]
    # PLD discretizes sampling with q = 1 and no sampling differently.
    expected = reference().compose(one_by_one).get_epsilon(DELTA)
    assert ledger.epsilon(DELTA, accountant) == pytest.approx(
        expected, rel=1e-6
    )
    if accountant == "rdp":
        expected = reference().compose(ledger.event()).get_epsilon(DELTA)
        assert ledger.epsilon(DELTA) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_small_noise_gives_a_large_bound_in_little_time(accountant):
    ledger = ledger_of((accounting.PoissonSampling(100, 10, 0.01), 100))
    start = time.monotonic()
    epsilon = ledger.epsilon(DELTA, accountant)
    assert time.monotonic() - start < 30
    assert 1e4 < epsilon < 1e6


def test_pld_on_a_coarser_grid_is_still_a_close_bound():
    mechanism = accounting.PoissonSampling(1_000, 1_000, 0.5)
    exact = dp_accounting.get_epsilon_gaussian(0.5 / math.sqrt(100), DELTA)
    assert exact > 10 * accounting._PLD_INTERVAL_UP_TO
    epsilon = ledger_of((mechanism, 100)).epsilon(DELTA, "pld")
    assert exact <= epsilon < 1.0001 * exact


def test_rdp_of_a_known_mechanism_is_cheap():
    ledger = ledger_of((RUN, STEPS))
    ledger.epsilon(DELTA)
    misses = accounting._rdp_orders_and_curve.cache_info().misses
    for epoch in range(1, 61):
        ledger.record(RUN, 235)
        ledger.epsilon(DELTA / epoch)
    assert accounting._rdp_orders_and_curve.cache_info().misses == misses


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
    assert ledger.entries == ((RUN, 7), (other, 5), (RUN, 6))
    assert ledger.total_steps == 18


def test_entries_are_a_snapshot():
    ledger = ledger_of((RUN, 3))
    before = ledger.entries
    ledger.record(RUN, 1)
    assert before == ((RUN, 3),)


def test_steps_may_be_numpy_integers_but_not_fractions():
    ledger = ledger_of((RUN, np.int64(3)))
    assert type(ledger.entries[0].steps) is int
    with pytest.raises(TypeError):
        ledger.record(RUN, 1.5)


def test_negative_steps_are_refused():
    with pytest.raises(ValueError, match="steps=-1"):
        accounting.Ledger().record(RUN, -1)


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
    ledger = ledger_of((RUN, 1), (accounting.PoissonSampling(N, B, sigma), 1))
    assert ledger.epsilon(DELTA, accountant) == math.inf
    assert ledger.unaccounted_reasons() == ()


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


def test_configs_round_trip_through_json():
    ledger = ledger_of(
        (accounting.PoissonSampling(np.int64(N), B, np.float32(0.5)), 10),
        (accounting.Unaccounted("ünknown"), 2),
        (RUN, np.int64(7)),
    )
    config = json.loads(json.dumps(ledger.get_config()))
    restored = accounting.Ledger.from_config(config)
    assert restored == ledger
    assert restored.entries == ledger.entries
    assert restored.get_config() == ledger.get_config()
    for mechanism, _ in ledger.entries:
        config = mechanism.get_config()
        assert accounting.mechanism_from_config(config) == mechanism
        assert type(mechanism).from_config(config) == mechanism
    assert RUN.get_config() == {
        "kind": "poisson_sampling",
        "num_examples": N,
        "expected_batch_size": B,
        "noise_multiplier": SIGMA,
    }


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind='shuffled'"):
        accounting.mechanism_from_config({"kind": "shuffled"})


def test_mechanisms_are_immutable():
    with pytest.raises(AttributeError):
        RUN.noise_multiplier = 2.0


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


def test_statement_without_amplification_composes_different_noise():
    ledger = ledger_of(
        (accounting.PoissonSampling(500, 20, 2.0), 8),
        (accounting.PoissonSampling(500, 20, 3.0), 9),
    )
    composed = pld.PLDAccountant().compose(
        dp_accounting.ComposedDpEvent(
            [
                dp_accounting.SelfComposedDpEvent(
                    dp_accounting.GaussianDpEvent(m.noise_multiplier), steps
                )
                for m, steps in ledger.entries
            ]
        )
    )
    plain = accounting._epsilon_without_amplification(ledger.entries, DELTA)
    assert plain == pytest.approx(composed.get_epsilon(DELTA), rel=1e-4)


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
    assert accounting._round_up(2.38521) == "2.3853"
    assert accounting._round_up(6285.85431) == "6,285.8544"
    assert accounting._round_up(0.0) == "0.0000"
