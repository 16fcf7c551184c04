"""Audits: how much a training run gives away, measured.

Canaries are put into the training data by independent coin flips. After one
training run, whoever looks at the result guesses the coins. No guesser can be
right too often if training is as private as claimed, so many right guesses are
a lower bound on ε, with a confidence (Steinke, Nasr & Jagielski, 2023).

Two bounds are computed from the number of right guesses:

- for any (ε, δ)-private training;
- for training with a given trade-off between the errors of a guesser
  (Mahloujifar, Melis & Chaudhuri, 2024), which is tighter. The trade-off that
  the model's ledger claims is tested as it is; and among those of Gaussian
  mechanisms the most private one is found that the guesses leave possible.

A bound from one run is not tight: right training comes out well below what it
claims. An audit finds errors; it does not measure ε, and no audit proves a
guarantee.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import dp_accounting
import keras
import numpy as np
import scipy.special
import scipy.stats
import tensorflow as tf

from keras_fastclip import _keras, _validate, accounting, losses, sampling
from keras_fastclip.accounting import Epsilon, Ledger

# Guesses are made for these shares of the canaries, the clearest ones. Which
# share shows most depends on what there is to be seen; all are paid for.
_SHARES = (1, 1 / 2, 1 / 8)
# Losses are taken of so many canaries at a time.
_ROWS = 256
_LARGEST_EPSILON = 100.0


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What an audit found; print it, or `plot` it.

    Attributes:
        canaries: "gradients" or "examples".
        epsilon: lower bound on ε at `claimed.delta`, whatever the mechanism.
        gaussian_epsilon: the same if errors of guessers trade off against each
            other as with a Gaussian mechanism, to which many steps of DP-SGD
            come close.
        claimed: ε of the training run by the model's ledger.
        refuted: whether the guesses contradict the ledger: at its confidence,
            training was not what was accounted for.
        confidence: of each of these three findings.
        guesses, correct: of the guesses that gave `epsilon`.
        included: (canaries,), whether each was in the data.
        scores: (canaries,), by which was guessed; higher for those that
            seem to have been in the data.
    """

    canaries: str
    epsilon: float
    gaussian_epsilon: float
    claimed: Epsilon
    refuted: bool
    confidence: float
    guesses: int
    correct: int
    included: np.ndarray = dataclasses.field(repr=False)
    scores: np.ndarray = dataclasses.field(repr=False)

    def __str__(self) -> str:
        verdict = "REFUTED" if self.refuted else "not refuted"
        return (
            f"Audit by {len(self.scores)} canaries ({self.canaries}), "
            f"confidence {self.confidence:g}:\n"
            f"  claimed  epsilon  = {self.claimed:.4g} at "
            f"delta = {self.claimed.delta:g}: {verdict}\n"
            f"  measured epsilon >= {self.epsilon:.4g} "
            f"({self.correct} of {self.guesses} guesses right)\n"
            f"           epsilon >= {self.gaussian_epsilon:.4g} "
            "if the mechanism is Gaussian"
        )

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Draws the scores and the bounds.

        Args:
            path: where to save the picture, if anywhere.

        Returns:
            The `matplotlib.figure.Figure`.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "Pictures need matplotlib: pip install keras-fastclip[plots]."
            ) from error
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        finite = np.isfinite(self.scores)
        edges = np.histogram_bin_edges(self.scores[finite], 40)
        for there, label in ((True, "in the data"), (False, "left out")):
            chosen = finite & (self.included == there)
            left.hist(self.scores[chosen], edges, alpha=0.6, label=label)
        left.set(xlabel="score", ylabel="canaries")
        left.legend()
        bars = {
            "measured": self.epsilon,
            "measured,\nif Gaussian": self.gaussian_epsilon,
            "claimed": self.claimed if math.isfinite(self.claimed) else 0.0,
        }
        colors = ["tab:blue", "tab:blue", "tab:gray"]
        drawn = right.barh(list(bars), list(bars.values()), color=colors)
        values = (self.epsilon, self.gaussian_epsilon, self.claimed)
        signs = ("≥ ", "≥ ", "")
        labels = [f"{s}{v:.3g}" for s, v in zip(signs, values, strict=True)]
        right.bar_label(drawn, labels, padding=3)
        right.margins(x=0.2)
        refuted = ", refuted" if self.refuted else ""
        right.set(
            xlabel=f"ε at δ = {self.claimed.delta:g}",
            title=f"confidence {self.confidence:g}{refuted}",
        )
        if path is not None:
            figure.savefig(path)
        return figure


def audit(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    delta: float,
    canaries: str | tuple[Any, Any] = "gradients",
    num_canaries: int = 1000,
    batch_size: int | None = None,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditReport:
    """Trains a private model with canaries, and tells how much they show.

    The model is trained by its own `fit`, so all of it is audited: sampling,
    clipping, noise, and the ledger. **Make a model for the audit and throw it
    away**: it has learned from canaries, and the report is not private.

    Formal guarantee: each of the three findings of the report (`epsilon`,
    `gaussian_epsilon`, `refuted`) is wrong with a probability of at most
    1 - `confidence`, over the coins and the training. Several ways to guess
    are tried, and each is tested at its share of that probability.

    Args:
        model: a private, compiled model that has made no step.
        x, y, sample_weight: training data, arrays as for `fit`.
        delta: δ at which ε is claimed and measured.
        canaries: "gradients" (white box): each canary is a gradient of norm C
            with a weight of its own, which joins the clipped sum before the
            noise when the sampler draws it; the guesser sees every update.
            Finds errors in noise, sampling and ledger, but not in clipping.
            "examples" (black box): some of the examples with wrong targets;
            the guesser sees their losses before and after. Finds errors in
            clipping too, where they are large. Or such examples of yours, as
            a pair (x, y); long gradients that share no direction show most.
        num_canaries: how many; more show more, up to some thousands. Of a
            Gaussian ε of 10 at δ = 1e-5, 1,000 show about 4 if the mechanism
            is known to be Gaussian, and 3,000 about 6; of an ε of 4.4 both
            show about 2.5. "gradients" needs as many weights.
        batch_size, epochs, steps_per_epoch: as for `fit`.
        confidence: of each finding.
        seed: of the coins and the choice of canaries.

    Returns:
        The report.

    Example:

    ```python
    report = keras_fastclip.audit(model, x, y, delta=1e-5, batch_size=256)
    print(report)
    report.plot("audit.png")
    ```
    """
    accounting.check_delta(delta)
    _validate.positive_integer(num_canaries=num_canaries)
    if not 0 < confidence < 1:
        raise ValueError(
            f"`confidence` must be between 0 and 1; received {confidence=!r}."
        )
    privacy = getattr(model, "_privacy", None)
    if privacy is None:
        raise ValueError("Only private models can be audited.")
    if privacy.ledger(model).total_steps:
        raise ValueError(
            "The model has been trained already. Audit one that has made no "
            "step, and throw it away afterwards."
        )
    if _keras.preprocessing_of(model) is not None:
        raise ValueError(
            "Audit a task without its preprocessor: preprocess the data first, "
            "and make the task with preprocessor=None."
        )
    # Other numbers than a model with the same seed draws.
    rng = np.random.default_rng(None if seed is None else [seed, *b"audit"])
    data = sampling.as_arrays((x, y, sample_weight))
    data = sampling.without_lists(data)
    if isinstance(canaries, str):
        _validate.one_of(("gradients", "examples"), canaries=canaries)
    if canaries == "gradients":
        game = _Gradients(model, data, num_canaries, rng)
    elif canaries == "examples":
        game = _Examples(model, *mislabelled(data, num_canaries, rng), rng)
    else:
        own = sampling.without_lists(sampling.as_arrays((*canaries, None)))
        game = _Examples(model, data, own, rng)
    size = sampling.num_examples_of(game.data)
    batch_size = min(32, size) if batch_size is None else batch_size
    steps = epochs * (steps_per_epoch or math.ceil(size / batch_size))
    with game.watching(steps, batch_size / size):
        model.fit(
            *game.data[:2],
            sample_weight=game.data[2],
            batch_size=batch_size,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            verbose=0,
        )
    ledger = privacy.ledger(model)
    return _report(game, ledger, delta, confidence)


# The two kinds of canaries.


class _Gradients:
    """Canaries that are gradients, each along the axis of one weight.

    A canary takes a row of the data, so that it is drawn as any example is.
    Its number travels as a negative sample weight. Before the step such rows
    are struck out; after the clipping, those that were drawn and are included
    add C to their weights.
    """

    name = "gradients"

    def __init__(self, model, data, count, rng):
        x, y, weight = data
        if keras.config.floatx() not in ("float32", "float64"):
            raise ValueError("An audit needs float32 or float64 as floatx.")
        self._model, self._privacy = model, model._privacy
        self._weighted = weight is not None
        self._rng, self.count = rng, count
        size = sampling.num_examples_of((x, y))
        if weight is None:
            weight = np.ones(size, keras.config.floatx())
        weight = np.asarray(weight)
        if weight.shape != (size,) or np.any(weight < 0):
            raise ValueError(
                "An audit takes one sample weight for each example, zero or "
                f"more; received sample_weight of shape {weight.shape}."
            )
        numbers = -1 - np.arange(count, dtype=weight.dtype)
        rows = np.concatenate([np.arange(size), np.zeros(count, np.int64)])
        self.data = (
            *_rows((x, y), rows),
            np.concatenate([weight, numbers]),
        )
        self.included = rng.random(count) < 0.5
        self._weights: np.ndarray | None = None
        self._drawn: tf.Tensor | None = None

    @contextlib.contextmanager
    def watching(self, steps, q):
        """Puts canaries into the steps of the model, and keeps what is seen.

        Args:
            steps: how many there will be.
            q: the probability that a row is in a batch.
        """
        self._q = q
        # What is seen of each canary in each step, and σ of the step.
        self._seen = tf.Variable(tf.zeros([steps, self.count]), trainable=False)
        self._sigmas = tf.Variable(tf.zeros([steps]), trainable=False)
        with (
            _exchanged(self._model, "train_step", self._train_step),
            _exchanged(self._privacy, "noised_mean", self._noised_mean),
        ):
            self._model.train_function = None
            try:
                yield
            finally:
                self._model.train_function = None

    def _train_step(self, step, data):
        (x, y, weight), real, _ = sampling.unpack(data)
        if real is None:
            real = tf.ones_like(weight, tf.bool)
        number = tf.cast(-1 - weight, tf.int32)  # Negative for examples.
        drawn = tf.math.unsorted_segment_sum(
            tf.cast(real, tf.float64), number, self.count
        )
        self._drawn = drawn * self.included
        real &= weight >= 0
        weight = tf.maximum(weight, 0) if self._weighted else None
        return step(type(data)((x, y, weight), real))

    def _noised_mean(self, noised_mean, sums, use, balance):
        step = self._privacy.steps.read_value()
        norm = self._privacy.clip_norm.at(step)
        found = noised_mean(self._with_canaries(sums, norm), use, balance)
        # The other examples, and which of them were drawn, may be known to
        # whoever guesses: for each canary the guarantee is the same then.
        moved = self._at_canaries(found) * self._privacy.denominator()
        seen = (moved - self._at_canaries(sums)) / norm
        place = tf.cast(step, tf.int32)
        self._seen.scatter_update(_slice(place, seen))
        self._sigmas.scatter_update(_slice(place, use.sigma))
        return found

    def _with_canaries(self, sums, norm):
        return sums | {
            key: tf.reshape(
                tf.tensor_scatter_nd_add(
                    tf.reshape(total, [-1]),
                    places[:, None],
                    tf.cast(norm * self._drawn[part], total.dtype),
                ),
                total.shape,
            )
            for key, total, places, part in self._places(sums)
        }

    def _at_canaries(self, tensors):
        found = [
            tf.gather(tf.reshape(tensor, [-1]), places)
            for _, tensor, places, _ in self._places(tensors)
        ]
        return tf.concat([tf.cast(part, tf.float64) for part in found], 0)

    def _places(self, tensors):
        """Key and tensor, its weights that have canaries, and these.

        Tables of which only some rows are seen in a step have none.
        """
        tensors = {
            key: tensor
            for key, tensor in tensors.items()
            if isinstance(tensor, tf.Tensor)
        }
        sizes = [t.shape.num_elements() for t in tensors.values()]
        if self._weights is None:
            if self.count > sum(sizes):
                raise ValueError(
                    f"{self.count} canaries need as many weights; the model "
                    f"has {sum(sizes)}. Pass num_canaries=."
                )
            chosen = self._rng.choice(sum(sizes), self.count, replace=False)
            self._weights = np.sort(chosen)
        ends = np.cumsum(sizes)
        borders = np.searchsorted(self._weights, [0, *ends])
        for i, (key, tensor) in enumerate(tensors.items()):
            part = slice(borders[i], borders[i + 1])
            places = self._weights[part] - (ends[i] - sizes[i])
            yield key, tensor, places, part

    def scores(self) -> list[np.ndarray]:
        """Several ways to tell canaries that were there from the others."""
        steps = int(self._privacy.steps)
        seen = self._seen.numpy()[:steps].astype("float64")
        sigmas = self._sigmas.numpy()[:steps, None].astype("float64")
        # Were noise shared by the weights, they would tell of each other.
        apart = seen - np.median(seen, axis=1, keepdims=True)
        # Were it the same in all steps, only canaries would make a change.
        changed = np.std(seen, axis=0)
        return [
            _likelihood_ratio(seen, sigmas, self._q),
            _likelihood_ratio(apart, sigmas, self._q),
            changed,
        ]


def _slice(place, values):
    values = tf.cast(values, tf.float32)
    return tf.IndexedSlices(values[None], place[None])


def _likelihood_ratio(seen, sigmas, q):
    """Σ ln(1 - q + q·exp((2u - 1)/2σ²)): of u = 0 or 1 with noise, against 0.

    The best score for steps as they are claimed to be; (steps, canaries) to
    (canaries,).
    """
    if not np.all(sigmas):
        return seen.sum(0)
    exponent = (2 * seen - 1) / (2 * sigmas**2)
    rest = np.log1p(-q) if q < 1 else -np.inf
    return np.logaddexp(rest, math.log(q) + exponent).sum(0)


class _Examples:
    """Canaries that are examples; those left out have sample weight zero."""

    name = "examples"

    def __init__(self, model, data, canaries, rng):
        if model._privacy.clip_norm.adaptive is not None:
            # An example of weight zero is still counted as a short one.
            raise ValueError(
                "Canaries that are examples need a clip norm that does not "
                'adapt. Pass canaries="gradients", or a number as l2_norm_clip.'
            )
        x, y, weight = data
        size = sampling.num_examples_of((x, y))
        self.count = sampling.num_examples_of(canaries)
        self._model, self._canaries = model, canaries
        self.included = rng.random(self.count) < 0.5
        if weight is None:
            weight = np.ones(size, keras.config.floatx())
        weight = np.asarray(weight)
        if weight.shape != (size,):
            raise ValueError(
                "An audit takes one sample weight for each example; received "
                f"sample_weight of shape {weight.shape}."
            )
        both = tf.nest.map_structure(_joined, (x, y), canaries[:2])
        coins = self.included.astype(weight.dtype)
        self.data = (*both, np.concatenate([weight, coins]))

    @contextlib.contextmanager
    def watching(self, steps, q):
        """Takes the losses of the canaries before and after."""
        del steps, q
        self._require_weights()
        before = self._losses()
        yield
        self._fell_by = before - self._losses()

    def _require_weights(self):
        """Sample weight zero must mean that an example is not there."""
        one = _rows(self._canaries[:2], np.arange(1))
        sums, _ = self._model.clipped_gradients(*one, np.zeros(1))
        if any(np.any(total) for total in sums):
            raise ValueError(
                "The loss of the model does not heed sample weights, by which "
                "canaries are left out. Multiply by sample_weight in "
                "compute_per_example_loss."
            )

    def _losses(self):
        found = []
        for start in range(0, self.count, _ROWS):
            rows = np.arange(start, min(start + _ROWS, self.count))
            x, y = tf.nest.map_structure(
                lambda leaf: (
                    None if leaf is None else tf.convert_to_tensor(leaf)
                ),
                _rows(self._canaries[:2], rows),
            )
            y_pred = _keras.call_model(self._model, x, training=False)
            found.append(
                losses.per_example_losses(self._model, x, y, y_pred, None)
            )
        return np.concatenate(found).astype("float64")

    def scores(self) -> list[np.ndarray]:
        return [self._fell_by]


def _joined(one, other):
    return None if one is None else np.concatenate([one, other])


def _rows(structure, rows):
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else np.asarray(leaf)[rows], structure
    )


def mislabelled(data, count, rng):
    """The data without some examples, and these with wrong targets."""
    size = sampling.num_examples_of(data)
    if data[1] is None or count >= size:
        raise ValueError(
            "Canaries that are examples need targets, and more examples than "
            f"canaries; received {size} examples, num_canaries={count}."
        )
    order = rng.permutation(size)
    chosen, others = order[:count], np.sort(order[count:])
    x, y = _rows(data[:2], chosen)
    classes = None
    if isinstance(y, np.ndarray) and np.issubdtype(y.dtype, np.integer):
        classes = np.unique(data[1])
    if classes is not None and len(classes) > 1:
        places = np.searchsorted(classes, y)
        places += rng.integers(1, len(classes), y.shape)
        y = classes[places % len(classes)].astype(y.dtype)
    else:
        y = _rows(y, np.roll(np.arange(count), 1))
    return _rows(data, others), (x, y, None)


@contextlib.contextmanager
def _exchanged(owner, name, method):
    """Has `method(original, ...)` in place of a method, for a while."""
    original, held = getattr(owner, name), vars(owner)
    before = held.get(name)
    held[name] = lambda *args: method(original, *args)
    try:
        yield
    finally:
        held.pop(name)
        if before is not None:
            held[name] = before


# From guesses to bounds.


def _report(game, ledger, delta, confidence):
    claimed = ledger.spent(delta)
    attempts = []
    for scores in game.scores():
        scores = np.nan_to_num(scores, nan=0.0)
        for guesses in sorted({_even(s * game.count) for s in _SHARES} - {0}):
            right = _right_guesses(scores, game.included, guesses)
            attempts.append((guesses, right, scores))
    # Whichever way shows most: all of them share the probability to be wrong.
    tau = (1 - confidence) / max(1, len(attempts))
    # A larger ε claims nothing that guesses could contradict.
    least = trade_off(ledger) if claimed < _LARGEST_EPSILON else None
    epsilon, mu, refuted, best = 0.0, 0.0, False, attempts[0]
    for attempt in attempts:
        guesses, right, _ = attempt
        counts = right, guesses, game.count
        found = largest(
            lambda e, counts=counts: (
                probability_bound(e, *counts, delta) <= tau
            ),
            above=epsilon,
        )
        if found > epsilon:
            epsilon, best = found, attempt
        mu = largest(
            lambda mu, counts=counts: is_refuted(gaussian(mu), *counts, tau),
            above=mu,
        )
        refuted |= least is not None and is_refuted(least, *counts, tau)
    return AuditReport(
        canaries=game.name,
        epsilon=epsilon,
        gaussian_epsilon=gaussian_epsilon(mu, delta),
        claimed=claimed,
        refuted=bool(refuted),
        confidence=confidence,
        guesses=best[0],
        correct=best[1],
        included=game.included,
        scores=best[2],
    )


def _even(number):
    return int(number) // 2 * 2


def _right_guesses(scores, included, guesses):
    """The highest scores are guessed to be included, the lowest not to be."""
    order = np.argsort(scores, kind="stable")
    half = guesses // 2
    right = np.count_nonzero(included[order[len(order) - half :]])
    return int(right + np.count_nonzero(~included[order[:half]]))


def probability_bound(
    epsilon: float, correct: int, guesses: int, canaries: int, delta: float
) -> float:
    """The most likely that so many guesses are right, or more.

    For any (ε, δ)-private training and any guesser who makes that many
    guesses about that many coins (Steinke et al., 2023).
    """
    tail = scipy.stats.binom.sf(
        np.arange(correct, -1, -1) - 1, guesses, scipy.special.expit(epsilon)
    )
    gains = (tail[1:] - tail[0]) / np.arange(1, correct + 1)
    alpha = max(0.0, gains.max(initial=0.0))
    return float(min(1.0, tail[0] + 2 * canaries * delta * alpha))


def is_refuted(
    least: Callable[[float], float],
    correct: int,
    guesses: int,
    canaries: int,
    tau: float,
) -> bool:
    """Whether so many right guesses have a probability below tau.

    For any training that trades errors as `least` says, and any guesser
    (Mahloujifar et al., 2024, for two possible values).

    Args:
        least: the least probability that an event of the given probability
            can have without the canary.
        correct: right guesses.
        guesses: all guesses.
        canaries: all coins.
        tau: the probability.
    """
    r, h = tau * correct / canaries, tau * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        if r + h > guesses / canaries:  # They only grow.
            return True
        higher = max(h, least(r))
        r, h = r + i / (guesses - i) * (higher - h), higher
    return r + h > guesses / canaries


def gaussian(mu: float) -> Callable[[float], float]:
    """The trade-off of a Gaussian mechanism of sensitivity over noise μ."""
    return lambda r: float(scipy.special.ndtr(scipy.special.ndtri(r) - mu))


def trade_off(ledger: Ledger) -> Callable[[float], float]:
    """The trade-off that a ledger claims, from δ at many ε.

    Each pair (ε, δ) is a bound; fewer of them claim less, never more.
    """
    epsilons = np.linspace(0, ledger.epsilon(1e-10, "rdp"), 400)
    deltas = ledger.deltas(epsilons)
    factors, shrunk = np.exp(epsilons), np.exp(-epsilons)

    def least(r):
        straight = 1 - deltas - factors * (1 - r)
        inverse = shrunk * (r - deltas)
        return max(0.0, straight.max(), inverse.max())

    return least


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of a Gaussian mechanism of sensitivity over noise μ."""
    if mu == 0:
        return 0.0
    return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))


def largest(holds: Callable[[float], bool], above: float = 0.0) -> float:
    """The largest number above the given one for which a test holds.

    It holds below that and fails beyond. Rounded down.
    """
    if not holds(above):
        return above
    low, high = above, max(1.0, 2 * above)
    while holds(high):
        if high > _LARGEST_EPSILON:
            return high
        low, high = high, 2 * high
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
