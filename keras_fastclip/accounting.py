"""What happened to the data, and what that costs in privacy.

A `Ledger` lists the steps that were taken and how each was made: a mechanism
and a number of steps. It turns into a `DpEvent`, and `dp_accounting` turns
that into epsilon; no privacy bound is computed by code of this package.

Formal guarantee: data sets are neighbours if one example is added or removed
(`ADD_OR_REMOVE_ONE`), and every epsilon returned is an upper bound at the
given delta for the composition of all recorded steps, provided each step was
what its mechanism says.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import operator
import textwrap
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

_NEIGHBORS = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

ACCOUNTANTS = ("rdp", "pld")

# The grid of the privacy loss distribution. It is that fine up to an epsilon
# of 20 and grows with epsilon beyond: a fixed grid would have a number of
# points that grows with epsilon too (no answer within minutes at a noise
# multiplier of 0.01). Any grid gives an upper bound.
_PLD_INTERVAL = 1e-4
_PLD_INTERVAL_UP_TO = 20.0

# Below this, epsilon is beyond 1e11 and the accountants overflow or fail to
# converge. Such a step counts as one without noise.
_NO_NOISE = 1e-6


def check_delta(delta: float) -> None:
    """Raises `ValueError` unless delta is in (0, 1)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1). Received: {delta=}.")


def check_accountant(accountant: str) -> None:
    """Raises `ValueError` unless the accountant is known."""
    if accountant not in ACCOUNTANTS:
        raise ValueError(
            f"accountant must be one of {ACCOUNTANTS}. Received: {accountant=}."
        )


@dataclasses.dataclass(frozen=True)
class PoissonSampling:
    """Steps on Poisson-sampled batches, with Gaussian noise on the sum.

    Args:
        num_examples: The number of examples N.
        expected_batch_size: The mean batch size b; each example is in a batch
            with probability q = b / N.
        noise_multiplier: The standard deviation σ of the noise over the
            largest norm of one example's contribution.
    """

    kind: ClassVar[str] = "poisson_sampling"

    num_examples: int
    expected_batch_size: int
    noise_multiplier: float

    def __post_init__(self):
        # Plain numbers whatever came in, so that configs are JSON.
        n = operator.index(self.num_examples)
        b = operator.index(self.expected_batch_size)
        sigma = float(self.noise_multiplier)
        if not 1 <= b <= n:
            raise ValueError(
                "expected_batch_size must be positive and at most "
                f"num_examples. Received: expected_batch_size={b}, "
                f"num_examples={n}."
            )
        if not 0 <= sigma < math.inf:
            raise ValueError(
                "noise_multiplier must be finite and not negative. "
                f"Received: noise_multiplier={sigma}."
            )
        object.__setattr__(self, "num_examples", n)
        object.__setattr__(self, "expected_batch_size", b)
        object.__setattr__(self, "noise_multiplier", sigma)

    @property
    def sampling_probability(self) -> float:
        """The probability q that one example is in one batch."""
        return self.expected_batch_size / self.num_examples

    @property
    def is_noiseless(self) -> bool:
        """Whether the noise is too small for any finite epsilon."""
        return self.noise_multiplier < _NO_NOISE

    def event(self, steps: int) -> dp_accounting.DpEvent:
        """Returns the privacy event of that many steps."""
        event = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if self.sampling_probability < 1:
            event = dp_accounting.PoissonSampledDpEvent(
                self.sampling_probability, event
            )
        return dp_accounting.SelfComposedDpEvent(event, steps)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-able description."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PoissonSampling":
        """Makes the mechanism from `get_config()`."""
        return cls(**_without_kind(config))


@dataclasses.dataclass(frozen=True)
class Unaccounted:
    """Steps for which no finite epsilon can be stated.

    Args:
        reason: Why, in words that can follow "because".
    """

    kind: ClassVar[str] = "unaccounted"

    reason: str

    def event(self, steps: int) -> dp_accounting.DpEvent:
        """Returns the privacy event: no guarantee at all."""
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.NonPrivateDpEvent(), steps
        )

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-able description."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Unaccounted":
        """Makes the mechanism from `get_config()`."""
        return cls(**_without_kind(config))


Mechanism = PoissonSampling | Unaccounted

_MECHANISMS = {cls.kind: cls for cls in (PoissonSampling, Unaccounted)}


def mechanism_from_config(config: dict[str, Any]) -> Mechanism:
    """Makes a mechanism from its `get_config()`, by the key `kind`."""
    kind = config.get("kind")
    if kind not in _MECHANISMS:
        raise ValueError(
            f"kind must be one of {sorted(_MECHANISMS)}. Received: {kind=}."
        )
    return _MECHANISMS[kind].from_config(config)


class Entry(NamedTuple):
    """A number of consecutive steps made by one mechanism."""

    mechanism: Mechanism
    steps: int


class Ledger:
    """The record of all steps taken on the data, in order.

    Example:

    >>> ledger = Ledger()
    >>> ledger.record(PoissonSampling(60_000, 256, 1.1), steps=60 * 235)
    >>> round(ledger.epsilon(1e-5), 3)
    2.6
    >>> round(ledger.epsilon(1e-5, accountant="pld"), 3)
    2.385
    """

    def __init__(self):
        self._entries: list[Entry] = []

    def __repr__(self) -> str:
        return f"Ledger({self._entries})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ledger):
            return NotImplemented
        return self.entries == other.entries

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries in order; neighbours have different mechanisms."""
        return tuple(self._entries)

    @property
    def total_steps(self) -> int:
        """The number of steps recorded, by whatever mechanism."""
        return sum(entry.steps for entry in self._entries)

    def record(self, mechanism: Mechanism, steps: int) -> None:
        """Adds steps that were taken.

        Args:
            mechanism: How the steps were made.
            steps: How many. Zero is no entry.
        """
        steps = operator.index(steps)
        if steps < 0:
            raise ValueError(f"steps must not be negative. Received: {steps=}.")
        if steps == 0:
            return
        if self._entries and self._entries[-1].mechanism == mechanism:
            steps += self._entries.pop().steps
        self._entries.append(Entry(mechanism, steps))

    def event(self) -> dp_accounting.DpEvent:
        """Returns the composition of everything recorded."""
        events = [mechanism.event(n) for mechanism, n in self._entries]
        if not events:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.ComposedDpEvent(events)

    def unaccounted_reasons(self) -> tuple[str, ...]:
        """Returns the distinct reasons of unaccounted steps, in order."""
        return tuple(
            dict.fromkeys(
                mechanism.reason
                for mechanism, _ in self._entries
                if isinstance(mechanism, Unaccounted)
            )
        )

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Returns an upper bound of epsilon for everything recorded.

        Args:
            delta: The delta of (epsilon, delta), in (0, 1).
            accountant: `"rdp"` (Rényi; milliseconds once a mechanism was
                seen) or `"pld"` (privacy loss distributions; tighter, a
                second or more).

        Returns:
            Epsilon; 0 if nothing was recorded, infinity if some steps are
            unaccounted or had no noise.
        """
        check_delta(delta)
        check_accountant(accountant)
        if not self._entries:
            return 0.0
        if _obstacles(self):
            return math.inf
        if accountant == "rdp":
            return _rdp_epsilon(self.entries, delta)
        return _pld_epsilon(self.entries, delta)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-able description."""
        return {
            "entries": [
                {"mechanism": mechanism.get_config(), "steps": steps}
                for mechanism, steps in self._entries
            ]
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Ledger":
        """Makes the ledger from `get_config()`."""
        ledger = cls()
        for entry in config["entries"]:
            ledger.record(
                mechanism_from_config(entry["mechanism"]), entry["steps"]
            )
        return ledger


def statement(
    ledger: Ledger, delta: float, *, l2_norm_clip: float, seeded: bool = False
) -> str:
    """Writes the privacy guarantee of a training run in plain English.

    Args:
        ledger: The steps that were taken.
        delta: The delta at which epsilon is stated, in (0, 1).
        l2_norm_clip: The bound C on the norm of one example's gradient.
        seeded: Whether the noise came from a fixed seed.

    Returns:
        Text of several paragraphs: what was done, what is guaranteed, what
        the figures mean and what is not covered.
    """
    check_delta(delta)
    epsilon = ledger.epsilon(delta, accountant="pld")
    paragraphs = [
        "PRIVACY STATEMENT",
        *_what_was_done(ledger, l2_norm_clip),
        *_what_is_guaranteed(ledger, delta, epsilon),
    ]
    if math.isfinite(epsilon):
        paragraphs += _what_it_means(ledger, delta, epsilon)
    if seeded:
        paragraphs.append(
            "Warning. The noise came from a fixed seed. Whoever knows the seed "
            "can take the noise away again: against them there is no guarantee."
        )
    paragraphs += _what_is_not_covered()
    return "\n\n".join(_wrap(paragraph) for paragraph in paragraphs) + "\n"


def _without_kind(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "kind"}


def _obstacles(ledger: Ledger) -> list[str]:
    """Reasons why no finite epsilon exists, each following "because"."""
    reasons = list(ledger.unaccounted_reasons())
    if any(
        isinstance(mechanism, PoissonSampling) and mechanism.is_noiseless
        for mechanism, _ in ledger.entries
    ):
        reasons.append("steps were taken without noise")
    return reasons


# The accountants. Both see only entries with noise, and at least one.


@functools.lru_cache(maxsize=1024)
def _rdp_orders_and_curve(
    sampling_probability: float, noise_multiplier: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the Rényi orders and the divergences of one step.

    Divergences add up over steps, so one curve serves any number of them; it
    takes 0.1 s to compute and is needed again at every report.
    """
    step = dp_accounting.PoissonSampledDpEvent(
        sampling_probability, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    accountant = rdp.RdpAccountant(neighboring_relation=_NEIGHBORS)
    with _quiet():
        accountant.compose(step)
    return accountant.orders, accountant.rdp


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps quiet about orders that the accountant leaves out.

    The bound is the least over the orders, so leaving some out is harmless.
    """
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _rdp_epsilon(entries: tuple[Entry, ...], delta: float) -> float:
    total = 0.0
    for mechanism, steps in entries:
        orders, curve = _rdp_orders_and_curve(
            mechanism.sampling_probability, mechanism.noise_multiplier
        )
        total = total + steps * curve
    epsilon, _ = rdp.compute_epsilon(orders, total, delta)
    return float(epsilon)


@functools.lru_cache(maxsize=128)
def _pld_epsilon(entries: tuple[Entry, ...], delta: float) -> float:
    scale = max(1.0, _rdp_epsilon(entries, delta) / _PLD_INTERVAL_UP_TO)
    accountant = pld.PLDAccountant(
        _NEIGHBORS, value_discretization_interval=_PLD_INTERVAL * scale
    )
    for mechanism, steps in entries:
        accountant.compose(mechanism.event(steps))
    return float(accountant.get_epsilon(delta))


def _epsilon_without_amplification(
    entries: tuple[Entry, ...], delta: float
) -> float:
    """Epsilon if it were known which examples each batch held.

    The composition of Gaussian mechanisms is a Gaussian mechanism, so this is
    exact.
    """
    precision = sum(n / m.noise_multiplier**2 for m, n in entries)
    return float(
        dp_accounting.get_epsilon_gaussian(1 / math.sqrt(precision), delta)
    )


# The paragraphs of the statement.


def _what_was_done(ledger: Ledger, l2_norm_clip: float) -> list[str]:
    if not ledger.entries:
        return [
            "What was done. No training step was taken, so the model has not "
            "used the data."
        ]
    return [
        "What was done. The model was trained step by step on batches of "
        "examples. In each step the influence of every single example on the "
        "model (the Euclidean norm of its gradient) was limited to "
        f"at most {l2_norm_clip:g}, the limited contributions were added up, "
        "and random noise was added to the sum. The noise multiplier below "
        "is the standard deviation of that noise divided by the limit. The "
        f"steps taken, {ledger.total_steps:,} in all:",
        *(_describe(mechanism, steps) for mechanism, steps in ledger.entries),
    ]


def _describe(mechanism: Mechanism, steps: int) -> str:
    if isinstance(mechanism, Unaccounted):
        return (
            f"- {steps:,} steps that cannot be accounted for, because "
            f"{mechanism.reason}."
        )
    return (
        f"- {steps:,} steps with Poisson sampling of "
        f"{mechanism.num_examples:,} examples with an expected batch size of "
        f"{mechanism.expected_batch_size:,} (in each step every example was "
        "chosen independently of the others with probability "
        f"{mechanism.sampling_probability:.6g}), and Gaussian noise with a "
        f"noise multiplier of {mechanism.noise_multiplier:g}."
    )


def _what_is_guaranteed(
    ledger: Ledger, delta: float, epsilon: float
) -> list[str]:
    if math.isinf(epsilon):
        reasons = _obstacles(ledger) or [
            "the accountant finds no finite epsilon at so small a delta"
        ]
        return [
            "What is guaranteed. Epsilon is infinite: no privacy guarantee "
            f"can be stated at delta = {delta:g}, because:",
            *(f"- {reason}." for reason in reasons),
        ]
    paragraphs = [
        "What is guaranteed. The trained weights, and every earlier version "
        "of them during this training, are (epsilon, delta)-differentially "
        f"private with epsilon = {_round_up(epsilon)} at delta = {delta:g}. "
        "Two data sets count as neighbours if they differ by one example "
        "added or removed. Epsilon is an upper bound computed with privacy "
        "loss distributions (PLD) for all steps together, by the "
        "dp_accounting library. The number of examples and the sampling "
        "probability count as public."
    ]
    if ledger.entries:
        plain = _epsilon_without_amplification(ledger.entries, delta)
        paragraphs.append(
            "This figure relies on amplification by sampling: on the fact "
            "that nobody learns which examples were in which batch. Without "
            "amplification by sampling, counting every example as if it had "
            f"been in every batch, epsilon = {_round_up(plain)} at the same "
            "delta."
        )
    return paragraphs


def _what_it_means(ledger: Ledger, delta: float, epsilon: float) -> list[str]:
    if epsilon <= 20:
        factor = f" (here by a factor of at most {_round_up(math.exp(epsilon))}"
        factor += ", which is e to the power epsilon)"
    else:
        factor = " (a value above 20 sets no practical limit)"
    paragraphs = [
        "What the figures mean. Epsilon limits how much more or less likely "
        "any outcome of the training, and any conclusion drawn from the "
        "model, can become because one particular example was in the data"
        f"{factor}. Smaller is more private. Delta is an allowance on top: "
        "the probability of an outcome may exceed the limit set by epsilon "
        f"by at most {delta:g}. Delta should be well below one divided by "
        "the number of examples."
    ]
    smallest = min(
        (mechanism.num_examples for mechanism, _ in ledger.entries),
        default=None,
    )
    if smallest is not None and delta * smallest >= 1:
        paragraphs.append(
            f"Warning: delta = {delta:g} is not below one divided by the "
            f"number of examples ({smallest:,}). At such a delta, publishing "
            "an example chosen at random would be allowed. The guarantee is "
            "too weak to rely on."
        )
    return paragraphs


def _what_is_not_covered() -> list[str]:
    return [
        "What is not covered:",
        "- Metrics and losses logged during training: they are computed on "
        "the training data and no noise is added to them.",
        "- Validation and test data, and results computed from them.",
        "- The choice of hyper-parameters: every further training run on the "
        "same data spends privacy of its own.",
        "- Preprocessing computed on the data, such as normalisation "
        "statistics, vocabularies or the selection of features or examples.",
        "- Several examples of one person: the guarantee is for one example. "
        "For a person with k examples it is weaker.",
        "- What is learned about a person from the other examples: a model "
        "may show facts about a population whether or not one member of it "
        "took part.",
        "- Flaws of the random number generator and of floating-point "
        "arithmetic: the figures are for ideal Gaussian noise.",
    ]


def _round_up(value: float) -> str:
    """Formats a bound; a bound must not shrink when it is printed."""
    return f"{math.ceil(value * 1e4) / 1e4:,.4f}"


def _wrap(paragraph: str) -> str:
    indent = "  " if paragraph.startswith("- ") else ""
    return textwrap.fill(
        paragraph, width=79, subsequent_indent=indent, break_on_hyphens=False
    )
