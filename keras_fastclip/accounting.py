"""What happened to the data, and what that costs in privacy.

A `Ledger` lists the steps that were taken: by which mechanism, how many, and
in how many of them a single example can have taken part. It turns into a
`DpEvent`, and `dp_accounting` turns that into epsilon; no privacy bound is
computed by code of this package.

Formal guarantee: every epsilon returned is an upper bound at the given delta
for the composition of all recorded steps, provided each step was what its
mechanism says. Data sets are neighbours if one example is added or removed
(`ADD_OR_REMOVE_ONE`) where batches are drawn by Poisson sampling, and if one
example is replaced by one that contributes nothing (`REPLACE_SPECIAL`) where
they are cut from passes over the data, since removing a row would move the
borders of the batches. The figures are the same under both.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import dp_accounting
import numpy as np

from keras_fastclip import _accountants, _validate
from keras_fastclip.statement import statement

__all__ = [
    "ACCOUNTANTS",
    "SAMPLINGS",
    "Entry",
    "Epsilon",
    "Ledger",
    "Mechanism",
    "Passes",
    "PoissonSampling",
    "Unaccounted",
    "calibrate_noise",
    "check_accountant",
    "check_delta",
    "mechanism_from_config",
    "statement",
]

ACCOUNTANTS = ("rdp", "pld")
SAMPLINGS = ("poisson", "shuffle")

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


# The mechanisms: how steps were made.


class _Mechanism:
    """Configs of the dataclasses below, told apart by `kind`."""

    kind: ClassVar[str]

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-able description."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Mechanism":
        """Makes the mechanism from `get_config()`."""
        return cls(**{k: v for k, v in config.items() if k != "kind"})


class _GaussianNoise(_Mechanism):
    """What the mechanisms with Gaussian noise on the sum have in common."""

    num_examples: int
    noise_multiplier: float

    def __post_init__(self):
        # Plain numbers whatever came in, so that configs are JSON.
        for field in dataclasses.fields(self):
            plain = operator.index if field.type is int else float
            value = plain(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        _validate.positive_integer(num_examples=self.num_examples)
        _validate.non_negative(noise_multiplier=self.noise_multiplier)

    @property
    def is_noiseless(self) -> bool:
        """Whether the noise is too small for any finite epsilon."""
        return self.noise_multiplier < _NO_NOISE

    def event(self, uses: int) -> dp_accounting.DpEvent:
        """Returns the privacy event of that many uses of one example."""
        event = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if self.sampling_probability < 1:
            event = dp_accounting.PoissonSampledDpEvent(
                self.sampling_probability, event
            )
        return dp_accounting.SelfComposedDpEvent(event, uses)


@dataclasses.dataclass(frozen=True)
class PoissonSampling(_GaussianNoise):
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
        super().__post_init__()
        n, b = self.num_examples, self.expected_batch_size
        if not 1 <= b <= n:
            raise ValueError(
                "expected_batch_size must be positive and at most "
                f"num_examples. Received: expected_batch_size={b}, "
                f"num_examples={n}."
            )

    @property
    def sampling_probability(self) -> float:
        """The probability q that one example is in one batch."""
        return self.expected_batch_size / self.num_examples


@dataclasses.dataclass(frozen=True)
class Passes(_GaussianNoise):
    """Steps on batches from passes in which each example comes once.

    Nothing is gained from the order of the examples, known or not: each use
    of an example is one Gaussian mechanism.

    Args:
        num_examples: The number of examples N.
        noise_multiplier: The standard deviation σ of the noise over the
            largest norm of one example's contribution.
    """

    kind: ClassVar[str] = "passes"

    num_examples: int
    noise_multiplier: float

    @property
    def sampling_probability(self) -> float:
        """One: a use is a use."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class Unaccounted(_Mechanism):
    """Steps for which no finite epsilon can be stated.

    Args:
        reason: Why, in words that can follow "because".
    """

    kind: ClassVar[str] = "unaccounted"

    reason: str

    def event(self, uses: int) -> dp_accounting.DpEvent:
        """Returns the privacy event: no guarantee at all."""
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.NonPrivateDpEvent(), uses
        )


Mechanism = PoissonSampling | Passes | Unaccounted

_MECHANISMS = {cls.kind: cls for cls in (PoissonSampling, Passes, Unaccounted)}


def mechanism_from_config(config: dict[str, Any]) -> Mechanism:
    """Makes a mechanism from its `get_config()`, by the key `kind`."""
    kind = config.get("kind")
    if kind not in _MECHANISMS:
        raise ValueError(
            f"kind must be one of {sorted(_MECHANISMS)}. Received: {kind=}."
        )
    return _MECHANISMS[kind].from_config(config)


# The ledger.


class Entry(NamedTuple):
    """A number of consecutive steps made by one mechanism.

    Privacy depends on `uses`, the number of these steps in which one single
    example can have taken part at most.
    """

    mechanism: Mechanism
    steps: int
    uses: int


class Epsilon(float):
    """An epsilon that knows what it is the epsilon of.

    A float in all that it does; results of arithmetic are plain floats.

    Attributes:
        delta: The delta at which it holds.
        accountant: The accountant that computed it.
        event: The `DpEvent` of all that was done.
        reasons: Why it is infinite, in words that can follow "because";
            empty if it is finite.
    """

    def __new__(
        cls,
        value: float,
        *,
        delta: float,
        accountant: str,
        event: dp_accounting.DpEvent,
        reasons: tuple[str, ...] = (),
    ):
        self = super().__new__(cls, value)
        self.delta, self.accountant = delta, accountant
        self.event, self.reasons = event, reasons
        return self

    def __getnewargs_ex__(self):  # For pickle and copy.
        return (float(self),), vars(self)


class Ledger:
    """The record of all steps taken on the data, in order.

    Example:

    >>> ledger = Ledger()
    >>> ledger.record(PoissonSampling(60_000, 256, 1.1), steps=60 * 235)
    >>> round(ledger.epsilon(1e-5), 3)
    2.6
    >>> round(ledger.epsilon(1e-5, accountant="pld"), 3)
    2.385

    The same batches cut from 60 passes over shuffled data cost more:

    >>> ledger = Ledger()
    >>> ledger.record(Passes(60_000, 1.1), steps=60 * 235, uses=60)
    >>> round(ledger.epsilon(1e-5), 3)
    54.046
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

    def record(
        self, mechanism: Mechanism, steps: int, uses: int | None = None
    ) -> None:
        """Adds steps that were taken.

        Args:
            mechanism: How the steps were made.
            steps: How many.
            uses: In how many of them one single example can have taken part
                at most; by default in all. May be given without steps, for
                steps that are on record already. Neither is no entry.
        """
        steps = operator.index(steps)
        uses = steps if uses is None else operator.index(uses)
        if steps < 0:
            raise ValueError(f"steps must not be negative. Received: {steps=}.")
        if uses < 0:
            raise ValueError(f"uses must not be negative. Received: {uses=}.")
        if steps == uses == 0:
            return
        if self._entries and self._entries[-1].mechanism == mechanism:
            before = self._entries.pop()
            steps, uses = before.steps + steps, before.uses + uses
        self._entries.append(Entry(mechanism, steps, uses))

    def plus(
        self, mechanism: Mechanism, steps: int, uses: int | None = None
    ) -> "Ledger":
        """Returns a ledger with further steps; this one stays as it is."""
        ledger = Ledger()
        ledger._entries = list(self._entries)
        ledger.record(mechanism, steps, uses)
        return ledger

    def is_part_of(self, other: "Ledger") -> bool:
        """Returns whether all that was done is on the other ledger too.

        Then epsilon of the other bounds that of this one: composition with
        further uses never lessens it, in whatever order. Never so of steps
        that cannot be accounted for.
        """
        if self.obstacles():
            return False
        uses = {part[:2]: part.uses for part in other._parts()}
        return all(part.uses <= uses.get(part[:2], 0) for part in self._parts())

    def event(self) -> dp_accounting.DpEvent:
        """Returns the composition of everything recorded."""
        events = [
            entry.mechanism.event(entry.uses)
            for entry in self._entries
            if entry.uses
        ]
        if not events:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.ComposedDpEvent(events)

    def unaccounted_reasons(self) -> tuple[str, ...]:
        """Returns the distinct reasons of unaccounted steps, in order."""
        return tuple(
            dict.fromkeys(
                mechanism.reason
                for mechanism, _, uses in self._entries
                if uses and isinstance(mechanism, Unaccounted)
            )
        )

    def obstacles(self) -> tuple[str, ...]:
        """Returns why no finite epsilon exists, if so, after "because"."""
        reasons = self.unaccounted_reasons()
        if any(
            uses
            and isinstance(mechanism, _GaussianNoise)
            and mechanism.is_noiseless
            for mechanism, _, uses in self._entries
        ):
            reasons += ("steps were taken without noise",)
        return reasons

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Returns an upper bound of epsilon for everything recorded.

        Args:
            delta: The delta of (epsilon, delta), in (0, 1).
            accountant: `"rdp"` (Rényi; milliseconds once a mechanism was
                seen) or `"pld"` (privacy loss distributions; tighter, a
                second or less). Where no step gains from sampling, both
                return the exact figure.

        Returns:
            Epsilon; 0 if nothing was recorded, infinity if some steps are
            unaccounted or had no noise.
        """
        check_delta(delta)
        check_accountant(accountant)
        if self.obstacles():
            return math.inf
        return _accountants.epsilon(self._parts(), delta, accountant)

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Returns upper bounds of delta at epsilons in rising order."""
        if self.obstacles():
            return np.ones(len(epsilons))
        if not self._parts():
            return np.zeros(len(epsilons))
        return _accountants.deltas(self._parts(), epsilons)

    def epsilon_without_amplification(self, delta: float) -> float:
        """Returns epsilon if it were known which examples each batch held."""
        check_delta(delta)
        if self.obstacles():
            return math.inf
        return _accountants.gaussian_epsilon(self._parts(), delta)

    def spent(self, delta: float, accountant: str = "pld") -> Epsilon:
        """Returns `epsilon()` with what it stands for; see `Epsilon`."""
        value = self.epsilon(delta, accountant)
        reasons = ()
        if math.isinf(value):
            reasons = self.obstacles() or (
                "the accountant finds no finite epsilon at so small a delta",
            )
        return Epsilon(
            value,
            delta=delta,
            accountant=accountant,
            event=self.event(),
            reasons=reasons,
        )

    def uses_within(
        self,
        mechanism: Mechanism,
        epsilon: float,
        delta: float,
        at_most: int,
        accountant: str = "pld",
    ) -> int:
        """Returns how many further uses of a mechanism a budget allows.

        Args:
            mechanism: How the further steps would be made.
            epsilon: The epsilon that must not be exceeded.
            delta: The delta at which it is taken, in (0, 1).
            at_most: The number beyond which the answer does not matter.
            accountant: `"rdp"` or `"pld"`, as in `epsilon`.

        Returns:
            The largest n up to `at_most` for which this ledger with n further
            uses stays at or below epsilon; 0 if there is none. With one more,
            epsilon would be exceeded.

        Example:

        >>> run = PoissonSampling(60_000, 256, 1.1)
        >>> Ledger().uses_within(run, epsilon=2, delta=1e-5, at_most=14_100)
        10206
        """
        _validate.positive(epsilon=epsilon)
        _validate.non_negative_integer(at_most=at_most)

        def cost(n, accountant=accountant):
            return self.plus(mechanism, n).epsilon(delta, accountant)

        def estimate(ratio):  # If PLD is this much of RDP everywhere.
            return largest(
                lambda n: cost(n, "rdp") * ratio <= epsilon, 0, at_most + 1
            )

        at_most = int(at_most)
        if cost(at_most) <= epsilon:
            return at_most
        if accountant == "rdp" or math.isinf(cost(1, "rdp")):
            return largest(lambda n: cost(n) <= epsilon, 0, at_most)
        # A PLD takes long, so RDP says where to look: the ratio of the two
        # changes little with n. Then by halves, should that not have led to
        # the end.
        low, high, ratio = 0, at_most, 1.0
        for _ in range(8):
            if high - low <= 1:
                break
            n = min(max(estimate(ratio), low + 1), high - 1)
            value = cost(n)
            low, high = (n, high) if value <= epsilon else (low, n)
            if 0 < value < math.inf:
                ratio = value / cost(n, "rdp")
        return largest(lambda n: cost(n) <= epsilon, low, high)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-able description."""
        return {
            "entries": [
                {**entry._asdict(), "mechanism": entry.mechanism.get_config()}
                for entry in self._entries
            ]
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Ledger":
        """Makes the ledger from `get_config()`."""
        ledger = cls()
        for entry in config["entries"]:
            ledger.record(
                mechanism_from_config(entry["mechanism"]),
                entry["steps"],
                entry.get("uses"),
            )
        return ledger

    def _parts(self) -> tuple[_accountants.Part, ...]:
        """Merges what costs the same; what was used last comes last."""
        total = {}
        for mechanism, _, uses in self._entries:
            if uses:
                key = mechanism.sampling_probability, mechanism.noise_multiplier
                total[key] = total.pop(key, 0) + uses
        return tuple(
            _accountants.Part(*key, uses) for key, uses in total.items()
        )


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low that fits, if high does not, by halves."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# Calibration.


def calibrate_noise(
    target_epsilon: float,
    delta: float,
    num_examples: int,
    batch_size: int,
    epochs: int,
    sampling: str = "poisson",
    *,
    steps_per_epoch: int | None = None,
    accountant: str = "pld",
    ledger: Ledger | None = None,
) -> float:
    """Returns the least noise that keeps a training run within a budget.

    Args:
        target_epsilon: The epsilon of the whole run, at most.
        delta: The delta at which it is taken, in (0, 1).
        num_examples: The number of examples N.
        batch_size: The batch size b; with Poisson sampling the mean.
        epochs: The number of epochs.
        sampling: `"poisson"` for batches drawn by Poisson sampling, or
            `"shuffle"` for passes in which each example comes once, where
            every epoch begins a new pass.
        steps_per_epoch: The number of steps an epoch; by default ⌈N / b⌉.
        accountant: `"pld"`, or `"rdp"`, which is faster and asks for more
            noise.
        ledger: What was spent on the same data before, if anything; it counts
            towards the target.

    Returns:
        The noise multiplier σ. Epsilon as in `Ledger.epsilon` is at or below
        the target for it, and above for one that is 0.02 per cent smaller.

    Raises:
        ValueError: If the target cannot be met, whatever the noise.

    Example:

    ```python
    sigma = keras_fastclip.calibrate_noise(
        3.0, delta=1e-5, num_examples=60_000, batch_size=256, epochs=60
    )
    print(f"{sigma:.3f}")
    ```

    ```text
    0.969
    ```
    """
    _validate.positive(target_epsilon=target_epsilon)
    check_delta(delta)
    _validate.positive_integer(
        num_examples=num_examples, batch_size=batch_size, epochs=epochs
    )
    if batch_size > num_examples:
        raise ValueError(
            "`batch_size` must be at most `num_examples`; received "
            f"batch_size={batch_size}, num_examples={num_examples}."
        )
    _validate.one_of(SAMPLINGS, sampling=sampling)
    check_accountant(accountant)
    in_a_pass = math.ceil(num_examples / batch_size)
    if steps_per_epoch is None:
        steps_per_epoch = in_a_pass
    _validate.positive_integer(steps_per_epoch=steps_per_epoch)
    before = Ledger() if ledger is None else ledger

    def planned(sigma: float) -> Ledger:
        if sampling == "poisson":
            mechanism = PoissonSampling(num_examples, batch_size, sigma)
            return before.plus(mechanism, epochs * steps_per_epoch)
        passes = epochs * math.ceil(steps_per_epoch / in_a_pass)
        return before.plus(Passes(num_examples, sigma), passes)

    spent = before.epsilon(delta, accountant)
    if spent >= target_epsilon:
        raise ValueError(
            f"target_epsilon={target_epsilon} cannot be met at {delta=}: the "
            f"steps on record have spent epsilon = {spent:.6g} already."
        )
    # RDP, which takes less time, says where to look with PLD; where it never
    # gets that low, PLD has to find its own way.
    sigma = _least_noise(planned, target_epsilon, delta, "rdp", 1.0, 1.5, 1e-6)
    if accountant == "pld" and not _accountants.is_gaussian(
        planned(1.0)._parts()
    ):
        start, factor = (sigma, 1.05) if sigma else (1.0, 1.5)
        sigma = _least_noise(
            planned, target_epsilon, delta, "pld", start, factor, 1e-4
        )
    if sigma is None:
        raise ValueError(
            f"target_epsilon={target_epsilon} cannot be met at {delta=} with "
            f"{accountant=}, whatever the noise: the steps on record have "
            f"spent epsilon = {spent:.6g}."
        )
    return sigma


def _least_noise(
    planned: Callable[[float], Ledger],
    target: float,
    delta: float,
    accountant: str,
    start: float,
    factor: float,
    tolerance: float,
) -> float | None:
    """The least noise, within a relative tolerance; None if there is none."""

    def fits(sigma):
        return planned(sigma).epsilon(delta, accountant) <= target

    low = high = start
    while not fits(high):
        low, high, factor = high, high * factor, min(factor**2, 4.0)
        if high > 1e12:
            return None
    while low == high or fits(low):
        low, high, factor = low / factor, low, min(factor**2, 4.0)
    return float(
        dp_accounting.calibrate_dp_mechanism(
            functools.partial(_Reading, accountant),
            planned,
            target,
            delta,
            dp_accounting.ExplicitBracketInterval(low, high),
            tol=tolerance * low,
        )
    )


class _Reading:
    """A ledger's epsilon where `dp_accounting` expects an accountant.

    So that what is calibrated is the very figure that will be reported.
    """

    ledger = dp_accounting.NoOpDpEvent()

    def __init__(self, accountant: str):
        self._accountant = accountant

    def compose(self, planned: Ledger) -> "_Reading":
        self._planned = planned
        return self

    def get_epsilon(self, delta: float) -> float:
        return self._planned.epsilon(delta, self._accountant)
