"""The privacy guarantee of a training run in plain English.

Written from the `Ledger` alone, so that it cannot say anything that was not
accounted for.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_fastclip.accounting import Entry, Epsilon, Ledger

# More entries of one kind, on as many examples, are told in one bullet.
_AT_MOST_BULLETS = 8

_SECURE = (
    "The noise was secure noise: sums and noise were rounded to a grid and "
    "added as integers, exactly, the noise being larger by what rounding can "
    "add to the influence of an example. So floating-point arithmetic leaves "
    "no trace of a sum in the result. The random bits came from a cipher "
    "(AES) with keys of the operating system."
)


def statement(
    ledger: "Ledger",
    delta: float,
    *,
    l2_norm_clip: float | None,
    seeded: bool = False,
    secure: bool = False,
    notes: Sequence[str] = (),
) -> str:
    """Writes the privacy guarantee of a training run in plain English.

    Args:
        ledger: The steps that were taken.
        delta: The delta at which epsilon is stated, in (0, 1).
        l2_norm_clip: The bound C on the norm of one example's gradient; None
            if it was not the same for all steps.
        seeded: Whether the noise came from a fixed seed.
        secure: Whether the noise of all steps was made with
            `noise="secure"`.
        notes: Further paragraphs on what was done; one that begins with
            `"- "` is a bullet.

    Returns:
        Text of several paragraphs: what was done, what is guaranteed, what
        the figures mean and what is not covered.
    """
    epsilon = ledger.spent(delta)
    paragraphs = [
        "PRIVACY STATEMENT",
        *_what_was_done(ledger, l2_norm_clip),
        *([_SECURE] if secure and ledger.entries else []),
        *notes,
        *_what_is_guaranteed(ledger, epsilon),
    ]
    if math.isfinite(epsilon):
        paragraphs += _what_it_means(ledger, epsilon)
    if seeded:
        paragraphs.append(
            "Warning. The noise came from a fixed seed. Whoever knows the seed "
            "can take the noise away again: against them there is no guarantee."
        )
    paragraphs += [*_what_is_not_covered(), _flaws(secure)]
    return "\n\n".join(_wrap(paragraph) for paragraph in paragraphs) + "\n"


def _what_was_done(ledger: "Ledger", l2_norm_clip: float | None) -> list[str]:
    if not ledger.entries:
        return [
            "What was done. No training step was taken, so the model has not "
            "used the data."
        ]
    limit = "limited"
    if l2_norm_clip is not None:
        limit = f"limited to at most {l2_norm_clip:g}"
    return [
        "What was done. The model was trained step by step on batches of "
        "examples. In each step the influence of every single example on the "
        f"model (the Euclidean norm of its gradient) was {limit}, the limited "
        "contributions were added up, and random noise was added to the sum. "
        "The noise multiplier below is the standard deviation of that noise "
        "divided by the limit. The "
        f"steps taken, {ledger.total_steps:,} in all:",
        *_bullets(ledger),
    ]


def _bullets(ledger: "Ledger") -> list[str]:
    """A bullet an entry, or one for all that are alike if they are many."""
    alike = {}
    for entry in ledger.entries:
        mechanism = entry.mechanism
        size = getattr(mechanism, "num_examples", None)
        reason = getattr(mechanism, "reason", None)
        alike.setdefault((mechanism.kind, size, reason), []).append(entry)
    bullets = []
    for (kind, *_), entries in alike.items():
        together = len(entries) > _AT_MOST_BULLETS or kind == "unaccounted"
        groups = [entries] if together else [[entry] for entry in entries]
        bullets += [_DESCRIBE[kind](group) for group in groups]
    return bullets


def _unaccounted(entries: list["Entry"]) -> str:
    count = f"{_steps(entries):,} steps" if _steps(entries) else "Steps"
    return (
        f"- {count} that cannot be accounted for, because "
        f"{entries[0].mechanism.reason}."
    )


def _poisson_sampling(entries: list["Entry"]) -> str:
    mechanisms = [entry.mechanism for entry in entries]
    steps, uses = _steps(entries), _uses(entries)
    q = _range((m.sampling_probability for m in mechanisms), ".6g")
    batch_size = _range((m.expected_batch_size for m in mechanisms), ",")
    text = (
        f"- {steps:,} steps with Poisson sampling of "
        f"{mechanisms[0].num_examples:,} examples with an expected batch size "
        f"{batch_size} (in each step every example was chosen independently "
        f"of the others with a probability {q}), and Gaussian noise with "
        f"{_noise(entries)}."
    )
    if uses != steps:
        text += f" One example can have taken part in at most {uses:,} of them."
    return text


def _passes(entries: list["Entry"]) -> str:
    return (
        f"- {_steps(entries):,} steps in passes over "
        f"{entries[0].mechanism.num_examples:,} examples (each example came "
        "once in a pass, so that it took part in at most "
        f"{_uses(entries):,} of these steps), and Gaussian noise with "
        f"{_noise(entries)}."
    )


_DESCRIBE = {
    "poisson_sampling": _poisson_sampling,
    "passes": _passes,
    "unaccounted": _unaccounted,
}


def _steps(entries: list["Entry"]) -> int:
    return sum(entry.steps for entry in entries)


def _uses(entries: list["Entry"]) -> int:
    return sum(entry.uses for entry in entries)


def _noise(entries: list["Entry"]) -> str:
    sigmas = {entry.mechanism.noise_multiplier for entry in entries}
    name = "noise multipliers" if len(sigmas) > 1 else "a noise multiplier"
    return f"{name} {_range(sigmas, 'g')}"


def _range(values: Iterable[float], spec: str) -> str:
    values = list(values)
    low, high = f"{min(values):{spec}}", f"{max(values):{spec}}"
    return f"of {low}" if low == high else f"between {low} and {high}"


def _what_is_guaranteed(ledger: "Ledger", epsilon: "Epsilon") -> list[str]:
    delta = epsilon.delta
    if math.isinf(epsilon):
        return [
            "What is guaranteed. Epsilon is infinite: no privacy guarantee "
            f"can be stated at delta = {delta:g}, because:",
            *(f"- {reason}." for reason in epsilon.reasons),
        ]
    paragraphs = [
        "What is guaranteed. The trained weights, and every earlier version "
        "of them during this training, are (epsilon, delta)-differentially "
        f"private with epsilon = {_round_up(epsilon)} at delta = {delta:g}. "
        f"{_neighbours(ledger)}"
    ]
    used = [entry.mechanism for entry in ledger.entries if entry.uses]
    if any(mechanism.sampling_probability < 1 for mechanism in used):
        plain = ledger.epsilon_without_amplification(delta)
        paragraphs[0] += (
            " Epsilon is an upper bound computed with privacy loss "
            "distributions (PLD) for all steps together, by the dp_accounting "
            "library."
        )
        paragraphs.append(
            "This figure relies on amplification by sampling: on the fact "
            "that nobody learns which examples were in which batch. Without "
            "amplification by sampling, counting every example as if it had "
            "been in every batch that it can have been in, "
            f"epsilon = {_round_up(plain)} at the same delta."
        )
    elif used:
        paragraphs[0] += (
            " Epsilon is the exact figure for Gaussian noise and all steps "
            "together, computed by the dp_accounting library."
        )
        paragraphs.append(
            "There is no amplification by sampling in this figure: it holds "
            "even if it is known which examples were in which batch."
        )
    return paragraphs


def _neighbours(ledger: "Ledger") -> str:
    kinds = {entry.mechanism.kind for entry in ledger.entries if entry.uses}
    if "passes" not in kinds:
        return (
            "Two data sets count as neighbours if they differ by one example "
            "added or removed. The number of examples and the sampling "
            "probability count as public."
        )
    text = (
        "Two data sets count as neighbours if one example of the one is "
        "replaced in the other by an example that contributes nothing. "
        "(Were it removed instead, the examples behind it would move up and "
        "fall into other batches.) "
    )
    if "poisson_sampling" in kinds:
        text += (
            "For the steps with Poisson sampling that is the same as one "
            "example added or removed. "
        )
    public = ["the number of examples", "the borders of the batches"]
    if "poisson_sampling" in kinds:
        public.insert(1, "the sampling probability")
    listed = ", ".join(public[:-1]) + " and " + public[-1]
    return text + f"{listed[0].upper()}{listed[1:]} count as public."


def _what_it_means(ledger: "Ledger", epsilon: "Epsilon") -> list[str]:
    delta = epsilon.delta
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
        (e.mechanism.num_examples for e in ledger.entries if e.uses),
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
    ]


def _flaws(secure: bool) -> str:
    if secure:
        return (
            "- Flaws of the cipher behind the noise, and what rounding does to "
            "sums of limited contributions while they are added up, before "
            "they are rounded to the grid."
        )
    return (
        "- Flaws of the random number generator and of floating-point "
        "arithmetic: the figures are for ideal Gaussian noise."
    )


def _round_up(value: float) -> str:
    """Formats a bound; a bound must not shrink when it is printed."""
    return f"{math.ceil(value * 1e4) / 1e4:,.4f}"


def _wrap(paragraph: str) -> str:
    indent = "  " if paragraph.startswith("- ") else ""
    return textwrap.fill(
        paragraph, width=79, subsequent_indent=indent, break_on_hyphens=False
    )
