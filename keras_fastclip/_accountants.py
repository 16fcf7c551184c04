"""Epsilon of what a ledger adds up to, by `dp_accounting`.

No bound is computed here; this module chooses which of the library's functions
serve, and keeps what they would compute again and again.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

_PLD = pld.privacy_loss_distribution.PrivacyLossDistribution

# REPLACE_SPECIAL, under which one example is replaced by one that contributes
# nothing, gives the same figures.
_NEIGHBORS = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

# The grid of privacy loss distributions. Any grid gives an upper bound, so a
# coarser one is right wherever this one would take too long:
# - beyond an epsilon of 5, since the number of points grows with epsilon (no
#   answer within minutes at a noise multiplier of 0.01);
# - for more than 8 distinct mechanisms, since each has a distribution of its
#   own. The variance that the grid adds to the privacy loss is below its
#   square for each use, and in all it stays below 0.01 that way (one per cent
#   of epsilon, or less, where epsilon is around 2).
# It goes by powers of two, so that a distribution serves again and again.
_PLD_INTERVAL = 1e-4
_PLD_INTERVAL_UP_TO = 5.0
_PLD_MANY = 8
_PLD_ADDED_VARIANCE = 0.01
# Beyond this epsilon, distributions overflow; other bounds will do.
_PLD_UP_TO = 1e6
# The Rényi orders that tell the size of epsilon well enough to choose the grid.
_ROUGH_ORDERS = (1.1, 1.5, 2, 4, 8, 16, 32, 64)


class Part(NamedTuple):
    """All that the cost of some uses depends on."""

    sampling_probability: float
    noise_multiplier: float
    uses: int


def epsilon(parts: tuple[Part, ...], delta: float, accountant: str) -> float:
    """An upper bound of epsilon for all parts; they must have noise."""
    if is_gaussian(parts):
        return gaussian_epsilon(parts, delta)
    if accountant == "rdp":
        return _rdp_epsilon(parts, delta)
    return _pld_epsilon(parts, delta)


def is_gaussian(parts: tuple[Part, ...]) -> bool:
    """Whether no part gains from sampling; so it is if there is none."""
    return all(part.sampling_probability == 1 for part in parts)


def _as_one_gaussian(parts: Sequence[Part]) -> float:
    """The noise multiplier of the one Gaussian that Gaussians compose to."""
    return 1 / math.hypot(
        *(math.sqrt(part.uses) / part.noise_multiplier for part in parts)
    )


def gaussian_epsilon(parts: tuple[Part, ...], delta: float) -> float:
    """Epsilon if every use is a Gaussian mechanism; exact in that case.

    (A PLD would take seconds at the epsilons that this comes to.)
    """
    if not parts:
        return 0.0
    sigma = _as_one_gaussian(parts)
    return float(dp_accounting.get_epsilon_gaussian(sigma, delta))


@functools.lru_cache(maxsize=1024)
def _rdp_orders_and_curve(
    sampling_probability: float,
    noise_multiplier: float,
    orders: tuple[float, ...] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the Rényi orders and the divergences of one step.

    Divergences add up over steps, so one curve serves any number of them; it
    takes 0.1 s to compute and is needed again at every report.
    """
    step = dp_accounting.PoissonSampledDpEvent(
        sampling_probability, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    accountant = rdp.RdpAccountant(orders, _NEIGHBORS)
    with _quiet():
        accountant.compose(step)
    return accountant.orders, accountant.rdp


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps quiet about orders that the accountant leaves out.

    The bound is the least over the orders, so leaving some out is harmless;
    so are divergences that rounding takes to just below zero.
    """
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _rdp_epsilon(
    parts: tuple[Part, ...],
    delta: float,
    orders: tuple[float, ...] | None = None,
) -> float:
    curves = [_rdp_orders_and_curve(q, sigma, orders) for q, sigma, _ in parts]
    total = sum(
        part.uses * curve
        for part, (_, curve) in zip(parts, curves, strict=True)
    )
    with _quiet():
        epsilon, _ = rdp.compute_epsilon(curves[0][0], total, delta)
    return float(epsilon)


@functools.lru_cache(maxsize=128)
def _pld_epsilon(parts: tuple[Part, ...], delta: float) -> float:
    rough = _rdp_epsilon(parts, delta, _ROUGH_ORDERS)
    if rough > _PLD_UP_TO:
        return min(_rdp_epsilon(parts, delta), gaussian_epsilon(parts, delta))
    total = _total_pld(parts, _pld_interval(parts, rough))
    return float(total.get_epsilon_for_delta(delta))


def deltas(parts: tuple[Part, ...], epsilons: np.ndarray) -> np.ndarray:
    """Upper bounds of delta at each epsilon, in rising order."""
    total = _total_pld(parts, _pld_interval(parts, epsilons[-1]))
    return np.array(total.get_delta_for_epsilon(epsilons))


def _total_pld(parts: tuple[Part, ...], interval: float) -> _PLD:
    *before, last = _with_one_gaussian(parts)
    total = _pld(last, interval)
    if before:
        total = _composed_pld(tuple(before), interval).compose(total)
    return total


def _pld_interval(parts: tuple[Part, ...], epsilon: float) -> float:
    """The grid for these parts; see `_PLD_INTERVAL`."""
    large = max(1.0, epsilon / _PLD_INTERVAL_UP_TO)
    sampled = [part for part in parts if part.sampling_probability < 1]
    uses = max(1, sum(part.uses for part in sampled))
    coarsest = math.sqrt(_PLD_ADDED_VARIANCE / uses) / _PLD_INTERVAL
    many = max(1.0, min(len(sampled) / _PLD_MANY, coarsest))
    power = max(math.ceil(math.log2(large)), math.floor(math.log2(many)))
    return _PLD_INTERVAL * 2.0**power


def _with_one_gaussian(parts: tuple[Part, ...]) -> list[Part]:
    """Puts what is not sampled into one part; the last stays the last."""
    sampled = [part for part in parts if part.sampling_probability < 1]
    others = [part for part in parts if part.sampling_probability == 1]
    if not others:
        return sampled
    gaussian = Part(1.0, _as_one_gaussian(others), 1)
    if parts[-1] in others:
        return [*sampled, gaussian]
    return [gaussian, *sampled]


# While a model is trained, or a budget is searched, only the count of the last
# part changes.
@functools.lru_cache(maxsize=4)
def _composed_pld(parts: tuple[Part, ...], interval: float) -> _PLD:
    return functools.reduce(
        lambda total, other: total.compose(other),
        (_pld(part, interval) for part in parts),
    )


def _pld(part: Part, interval: float) -> _PLD:
    one = _one_step_pld(
        part.sampling_probability, part.noise_multiplier, interval
    )
    return one.self_compose(part.uses) if part.uses > 1 else one


@functools.lru_cache(maxsize=256)
def _one_step_pld(
    sampling_probability: float, noise_multiplier: float, interval: float
) -> _PLD:
    """Takes longer than anything that is done with it afterwards."""
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=sampling_probability,
        neighboring_relation=_NEIGHBORS,
    )
