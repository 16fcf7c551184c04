"""What a private model carries beside its layers: noise, ledger, budgets."""

import contextlib
import dataclasses
import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import (
    _keras,
    _validate,
    accounting,
    clipping,
    counting,
    dials,
    losses,
    methods,
    noise,
    physical,
    replicas,
    sharing,
    sparse,
)
from keras_fastclip.accounting import (
    Ledger,
    Passes,
    PoissonSampling,
    Unaccounted,
)
from keras_fastclip.capture import Plan
from keras_fastclip.probe import probe
from keras_fastclip.registry.lookup import default_registry
from keras_fastclip.settings import Settings

UNKNOWN_BATCHES = Unaccounted(
    "steps were made outside `fit`, or by `fit` on data of which it is not "
    "known how it was drawn"
)
LOST_STEPS = Unaccounted(
    "the optimizer has made more steps than the model has a record of: its "
    "state was loaded without the record (make_private takes the file with "
    "record=), or it was used otherwise (after training on public data, "
    "compile the model anew)"
)


SHARED = (
    "layers were trained by the private model {!r} as well, whose steps are on "
    "the record of that model only"
)
# So many steps ahead, at least, a budget is looked at outside `fit`.
_AHEAD = 64
# How often this process was made by a fork, from the first one on.
_forks = 0


def _forked():
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class Source(NamedTuple):
    """Where the batches of a `fit` come from.

    Attributes:
        poisson: drawn by Poisson sampling; else in passes over the data.
        num_examples: of the data.
        batch_size: as expected.
    """

    poisson: bool
    num_examples: int
    batch_size: int | None

    def mechanism(self, noise_multiplier: float) -> PoissonSampling | Passes:
        """What the accountant is told of a step."""
        if self.poisson:
            return PoissonSampling(
                self.num_examples, self.batch_size, noise_multiplier
            )
        return Passes(self.num_examples, noise_multiplier)


class Budget(NamedTuple):
    """A limit on ε.

    Attributes:
        epsilon, delta: the limit.
        at_most: so many further uses, at most, are looked for; 0 for any
            number.
        accountant: by which it is measured.
    """

    epsilon: float
    delta: float
    at_most: int = 0
    accountant: str = "pld"


class BudgetExceededError(RuntimeError):
    """Raised instead of a step that would exceed the model's budget."""


class Privacy:
    """The state of a private model.

    A plain object, so that Keras does not take it for a part of the model:
    neither the key of the noise nor anything else here is saved with weights,
    but for what `record` returns.
    """

    def __init__(self, settings: Settings):
        self.noise = noise.get(settings.noise, settings.seed)
        self._sampling_rng = np.random.default_rng(settings.seed)
        self._forks = _forks
        self._owner = sharing.new_owner()
        self.nonfinite = _keras.variable(np.int64(0))
        # Whether something stops training when a step was refused.
        self._stops = _keras.variable(np.bool_(False))
        # Public, and the same for all records that continue one another.
        self._run = secrets.token_hex(8)
        self._ledger = Ledger()
        self._source: Source | None = None
        self._training = threading.RLock()
        self._running = 0  # calls of `fit`, one within the other
        self._streams_read: weakref.WeakSet = weakref.WeakSet()
        self._budgets: list[Budget] = []
        # What was found to be within a budget, steps ahead included.
        self._within: dict[Budget, Ledger] = {}
        self._gated = settings.budget is not None
        self.monitor: Any = None
        self._plan: Plan | None = None
        self._signature: tuple | None = None
        self.settings = settings
        self.expected_batch_size = settings.expected_batch_size
        norm = dials.first_norm(settings.l2_norm_clip)
        self.clipping = clipping.get(settings.clipping, norm)
        self.clip_norm = dials.ClipNorm(settings.l2_norm_clip)
        self.multiplier = dials.Multiplier(settings.noise_multiplier)
        self.method = methods.METHODS[settings.method]
        self.sparse = settings.sparse_noise
        self.registry = settings.registry or default_registry()
        self.counter = counting.Counter(dials.SLOTS)
        self._recorded = self.counter.taken()
        self._norm_varied = settings.l2_norm_clip != norm
        # Whether that is so of all steps.
        self.secure = settings.noise == "secure"
        self._norm_at_hand: tf.Tensor | None = None
        self._allow()

    @property
    def sampling_rng(self) -> np.random.Generator:
        """What batches are drawn by."""
        self._renew_after_fork()
        return self._sampling_rng

    def _renew_after_fork(self):
        """Nothing is drawn that another process draws, too."""
        if self._forks == _forks:
            return
        self._forks, self._run = _forks, secrets.token_hex(8)
        self.noise.renew()
        if self.settings.seed is None:
            self._sampling_rng = np.random.default_rng()

    @property
    def steps(self) -> tf.Variable:
        """The number of steps of the model's life."""
        return self.counter.total

    # Numbers that may change are variables of the step, wherever it was
    # traced; so noise, clip norm and record never disagree.
    CHANGEABLE = (
        "noise_multiplier",
        "l2_norm_clip",
        "sampling",
        "max_epsilon",
        "delta",
        "expected_batch_size",
        "physical_batch_size",
    )

    def change(self, model: keras.Model, **changes) -> None:
        """Other settings from now on; the steps so far keep theirs."""
        for name in changes:
            _validate.one_of(self.CHANGEABLE, argument=name)
        dial = {"noise_multiplier", "l2_norm_clip"} & set(changes)
        given = [getattr(self.settings, name) for name in dial]
        given += [changes[name] for name in dial]
        traced = set(changes) != dial
        if any(hasattr(value, "get_config") for value in given):
            raise ValueError(
                "Only numbers can be exchanged for numbers: noise_multiplier "
                "and l2_norm_clip cannot be changed from or to a schedule or "
                "an AdaptiveNorm."
            )
        if "l2_norm_clip" in changes and not isinstance(
            self.settings.clipping, str
        ):
            raise ValueError(
                "l2_norm_clip cannot be changed with norms by layer or a "
                "Clipping of your own, which fix it."
            )
        if "noise_multiplier" in changes:
            # What was a target stays a budget.
            kept = {"target_epsilon": None, "max_epsilon": self.settings.budget}
            changes = {**kept, **changes}
        settings = dataclasses.replace(self.settings, **changes)
        self.ledger(model)
        self.settings = settings
        if "expected_batch_size" in changes:
            self.expected_batch_size = settings.expected_batch_size
        if "noise_multiplier" in changes:
            self.multiplier.set(settings.noise_multiplier)
            self.counter.new_pass(aligned=False)
        if "l2_norm_clip" in changes:
            self.clip_norm.set(settings.l2_norm_clip)
            self._norm_varied |= self._ledger.total_steps > 0
        traced |= not self._gated and settings.budget is not None
        self._gated |= settings.budget is not None
        self._allow()
        if traced:
            self._trace_anew(model)

    def _trace_anew(self, model):
        """Keras holds a train function while it runs `fit`."""
        model.train_function = None
        if self._running:
            model.make_train_function()

    # -- the ledger ---------------------------------------------------------

    def ledger(self, model: keras.Model) -> Ledger:
        """All steps so far, each with how its batch was drawn."""
        self._enter_steps()
        # A ledger that knows of all steps has at least as many as the
        # optimizer of the moment has made.
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            made = int(optimizer.iterations.numpy())
            missing = max(0, made - self._ledger.total_steps)
            self._ledger.record(LOST_STEPS, missing)
        other = sharing.other_owner(model.weights, self._owner)
        if other is not None:
            unknown = Unaccounted(SHARED.format(other))
            if unknown.reason not in self._ledger.unaccounted_reasons():
                self._ledger.record(unknown, 0, uses=1)
        return self._ledger

    def own_weights(self, model: keras.Model) -> None:
        """Before steps: refuses weights that another private model trained."""
        other = sharing.other_owner(model.weights, self._owner)
        # Without noise there is no guarantee that could be wrong.
        if other is not None and self.multiplier.values[0] != 0:
            raise ValueError(
                f"The model {model.name!r} shares layers with the private "
                f"model {other!r}, which trained them: their steps would be on "
                "the record of that model only. Build the layers anew, load "
                "weights that were saved by that model, and name the file: "
                "make_private(..., record=file)."
            )
        sharing.claim(model.trainable_variables, self._owner, model.name)

    def _enter_steps(self):
        """Enters what was counted since the last time into the ledger."""
        steps, uses = self.counter.taken()
        new_steps, new_uses = (
            steps - self._recorded[0],
            uses - self._recorded[1],
        )
        values = self.multiplier.values
        for kind, slot in np.argwhere(new_steps):
            mechanism = UNKNOWN_BATCHES
            if kind != counting.UNKNOWN and self._source is not None:
                mechanism = self._source.mechanism(values[slot])
            self._ledger.record(
                mechanism, int(new_steps[kind, slot]), int(new_uses[kind, slot])
            )
        self._recorded = steps, uses

    def record(self, model: keras.Model) -> dict[str, Any]:
        """What is saved with the weights; nothing of it is secret."""
        constant = self.multiplier.schedule is None and self.multiplier.known
        return {
            "ledger": self.ledger(model).get_config(),
            "noise_multiplier": (
                self.multiplier.values[0] if constant else None
            ),
            "clip_norm": self.clip_norm.value,
            "clip_norm_varied": self._norm_varied,
            "secure": self.secure,
            "run": self._run,
        }

    def continue_from(self, record: dict[str, Any]) -> None:
        """Takes over the record that came with weights.

        Steps of this model that are not on that record stay counted: its
        earlier weights may have been seen.
        """
        # The optimizer may have been loaded already: its steps are on record.
        self._enter_steps()
        saved, settings = Ledger.from_config(record["ledger"]), self.settings
        same = record["run"] == self._run
        if not self._ledger.entries:
            same, self._run = True, record["run"]
        self._ledger = _joined(self._ledger, saved, same)
        self.counter.total.assign(self._ledger.total_steps)
        self.counter.new_pass(aligned=False)
        saved_sigma = record["noise_multiplier"]
        if settings.noise_multiplier is None and saved_sigma is not None:
            self.multiplier.set(saved_sigma)
        if self.clip_norm.adaptive is not None:
            self.clip_norm.set(record["clip_norm"])
        elif record["clip_norm"] != self.clip_norm.value:
            self._norm_varied |= bool(self._ledger.entries)
        self._norm_varied |= record["clip_norm_varied"]
        if saved.entries:
            self.secure &= record.get("secure", False)
        if settings.seed is not None:
            # What was drawn before must not be drawn again.
            self._sampling_rng = np.random.default_rng(
                [settings.seed, self._ledger.total_steps]
            )
        self._allow()

    def take_run(self, run: str) -> None:
        """Takes part in a run of several workers, with records like this."""
        self._run = run

    def the_clip_norm(self) -> float | None:
        """The clip norm of all steps; None if it was not the same for all."""
        return None if self._norm_varied else self.clip_norm.value

    @contextlib.contextmanager
    def batches_from(self, model: keras.Model, source: Source | None):
        """Steps made inside are entered as on batches of that source."""
        with self._only_thread():
            self._renew_after_fork()
            self.own_weights(model)
            self.ledger(model)  # enters what came before
            before = self._source
            with self.counter.other_batches():
                self._source = source
                self._allow()
                try:
                    yield
                finally:
                    self.ledger(model)
                    self._source = before
            self._allow()

    @contextlib.contextmanager
    def _only_thread(self):
        """Steps of another thread would be taken for those of this one."""
        if not self._training.acquire(blocking=False):
            raise RuntimeError(
                "The model is being trained in another thread. Train it in "
                "one thread at a time."
            )
        try:
            yield
        finally:
            self._training.release()

    @contextlib.contextmanager
    def fitting(self, model: keras.Model, source: Source | None):
        """Surrounds a `fit`: what callbacks set up ends with it."""
        before = self._budgets, self.monitor, bool(self._stops)
        size, known = self.expected_batch_size, self.multiplier.known
        steps = int(self.steps)
        with self.batches_from(model, source):
            self._budgets, self.monitor = list(self._budgets), None
            self._stops.assign(True)
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1
                monitored = self.monitor is not None
                self._budgets, self.monitor, stops = before
                self._stops.assign(stops)
                if not known and int(self.steps) == steps:
                    # The next fit may be for another number of steps.
                    self.multiplier.set(None)
                if self._running:  # That fit has a batch size of its own.
                    self.expected_batch_size = size
                if self._running or monitored:
                    self._trace_anew(model)

    @property
    def in_passes(self) -> bool:
        """Whether the batches at hand come in passes over the data."""
        return self._source is not None and not self._source.poisson

    def pass_goes_on(self, going: bool) -> None:
        """Whether batches of unknown origin are those of the pass at hand.

        They are while Keras runs a step of `fit`, but not while it runs
        callbacks, which may make steps of their own.
        """
        going = going and self.in_passes
        size = self._source.num_examples if going else 0
        self.counter.pass_size.assign(size)

    def has_read(self, stream: Any) -> bool:
        """Whether an iterator may have been read from, by an earlier `fit`."""
        if not hasattr(stream, "__next__"):
            return False
        try:
            seen = stream in self._streams_read
            self._streams_read.add(stream)
        except TypeError:  # That cannot be told of it.
            return True
        return seen

    # -- budgets ------------------------------------------------------------

    def add_budget(self, model: keras.Model, budget: "Budget") -> None:
        """Steps that would exceed the budget are not made, until `fit` ends."""
        self.ledger(model)
        self._budgets.append(budget)
        self._allow()
        if not self._gated:
            # The step has to be traced with a look at the budget.
            self._gated = True
            self._trace_anew(model)

    def _allow(self):
        """Finds out how many further uses the budgets allow."""
        allowed = [self._allowed_by(budget) for budget in self._budgets]
        if not allowed and self.settings.budget is not None:
            allowed = [0]  # until `fit` or train_on_batch look at it
        self.counter.allow(min(allowed, default=None))

    def _allowed_by(self, budget):
        """How many further uses a budget allows."""
        if self._source is None:
            return 0
        mechanism, ledger = self._source.mechanism, self._ledger
        # For passes, uses are not steps; but their figure is quickly found.
        any_number = self.in_passes or not budget.at_most
        at_most = 1_000_000 if any_number else budget.at_most
        if self.multiplier.schedule is None:
            return ledger.uses_within(
                mechanism(self.multiplier.values[0]),
                budget.epsilon,
                budget.delta,
                at_most,
                budget.accountant,
            )
        if self.in_passes:
            raise ValueError(
                "A privacy budget with a schedule of noise multipliers needs "
                "Poisson sampling: in a pass over the data, one example meets "
                "the noise of one step, another that of another."
            )
        sigmas = self._coming_sigmas(at_most)

        def fits(steps):
            planned = self._planned(sigmas[:steps])
            spent = planned.epsilon(budget.delta, budget.accountant)
            return spent <= budget.epsilon

        if fits(at_most):
            return at_most
        return accounting.largest(fits, 0, at_most)

    def _planned(self, sigmas):
        """The ledger with further steps of these noise multipliers."""
        planned = self._ledger
        for sigma, steps in itertools.groupby(sigmas):
            mechanism = self._source.mechanism(float(sigma))
            planned = planned.plus(mechanism, len(list(steps)))
        return planned

    def _coming_sigmas(self, count):
        """The noise multipliers of the coming steps."""
        if self.multiplier.schedule is None:
            return np.full(count, self.multiplier.values[0])

        def sigmas(steps):
            return tf.map_fn(
                lambda step: self.multiplier.at(step)[1],
                steps,
                fn_output_signature=tf.float64,
            )

        sigmas = tf.function(sigmas, autograph=False)
        return sigmas(self.steps + tf.range(count, dtype=tf.int64)).numpy()

    def require_room(self, model: keras.Model) -> None:
        """Allows one step outside `fit`, or raises if a budget forbids it."""
        budgets = [*self._budgets]
        if self.settings.budget is not None:
            budgets.append(Budget(self.settings.budget, self.settings.delta))
        if not budgets:
            return
        self._require_multiplier()
        for budget in budgets:
            if not self._has_room(budget):
                reasons = list(self._ledger.obstacles())
                if self._source is None:
                    reasons.append(UNKNOWN_BATCHES.reason)
                because = "".join(f" ({reason})" for reason in reasons)
                raise BudgetExceededError(
                    "A further step would exceed the privacy budget of "
                    f"epsilon = {budget.epsilon:g} at "
                    f"delta = {budget.delta:g}{because}."
                )
        self.counter.allow(1)

    def _has_room(self, budget):
        """Whether a budget allows one step more.

        A PLD takes longer than many a step, so there is none for each: as many
        steps ahead are looked at as were made, and those that fit are kept
        with the ledger. Whatever is part of that costs no more than it does.
        """
        if self._source is None:
            return False
        limit = budget._replace(at_most=0)
        sigma = self.multiplier.at(self.steps)[1].numpy()
        known = self._within.get(limit)
        if known is not None and self._planned([sigma]).is_part_of(known):
            return True
        ahead = max(_AHEAD, self._ledger.total_steps)
        allowed = self._allowed_by(budget._replace(at_most=ahead))
        if allowed:
            self._within[limit] = self._planned(self._coming_sigmas(allowed))
        return allowed > 0

    def within_budget(self, use: counting.Use, step, otherwise):
        """Makes a step, unless a budget forbids it."""
        if not self._gated:
            return step()

        def refused():
            # In `fit`, a callback sees to it that training stops.
            message = "A further step would exceed the privacy budget."
            tf.debugging.Assert(self._stops, [message])
            return otherwise()

        return tf.cond(self.counter.within(use), step, refused)

    def state(self) -> list[tf.Tensor]:
        """What workers must agree on in every step."""
        return [self.counter.total.read_value(), self.counter.room()]

    def calibrate(self, epochs: int, steps_per_epoch: int | None) -> None:
        """Sets the noise multiplier that the target asks for, once."""
        settings, source = self.settings, self._source
        if self.multiplier.known or source is None:
            return
        sigma = accounting.calibrate_noise(
            settings.target_epsilon,
            settings.delta,
            num_examples=source.num_examples,
            batch_size=source.batch_size or self.expected_batch_size,
            epochs=epochs,
            sampling="poisson" if source.poisson else "shuffle",
            steps_per_epoch=steps_per_epoch,
            ledger=self._ledger,
        )
        dials.validate(settings.l2_norm_clip, sigma)
        self.multiplier.set(sigma)

    def _require_multiplier(self):
        if not self.multiplier.known:
            raise ValueError(
                "The noise multiplier is calibrated to target_epsilon by the "
                "first `fit`, which knows how many steps there will be. Call "
                "`fit` first, or give noise_multiplier "
                "(keras_fastclip.calibrate_noise finds one)."
            )

    # -- a step -------------------------------------------------------------

    def cost(self, poisson: bool, real: tf.Tensor | None, rows: tf.Tensor):
        """What a step on a batch would cost, for `within_budget`."""
        self._renew_after_fork()
        self.denominator()  # If either is not known, there is no step.
        self._require_multiplier()
        if real is not None:
            rows = tf.math.count_nonzero(real)
        slot, sigma = self.multiplier.at(self.counter.total)
        use = self.counter.cost(poisson, rows, slot)
        return dataclasses.replace(use, sigma=sigma)

    @contextlib.contextmanager
    def step_at_hand(self):
        """Inside, the clip norm is read once, where its variable is.

        Functions that XLA compiles for a device read variables of that
        device only.
        """
        self._norm_at_hand = self.clip_norm.at(self.counter.total)
        try:
            yield
        finally:
            self._norm_at_hand = None

    def _norm_now(self):
        """The clip norm of the coming step."""
        if self._norm_at_hand is not None:
            return self._norm_at_hand
        return self.clip_norm.at(self.counter.total)

    def clipping_now(self) -> clipping.Scaled:
        """The clipping function at the clip norm of the coming step."""
        norm = self._norm_now()
        return clipping.Scaled(self.clipping, norm / self.clipping.sensitivity)

    def tally(self, squared_norms: tf.Tensor, real: Any) -> tf.Tensor:
        """What else a step needs to know of its examples, to be added up.

        Returns:
            The balance, ½ for each gradient within the clip norm and -½ for
            each other one; how many are not finite; and counts of norms, if
            something monitors them.
        """
        total, limit = tf.reduce_sum(squared_norms, 0), self._norm_now()
        if real is None:
            real = tf.ones(tf.shape(total), tf.bool)
        finite = tf.reduce_all(tf.math.is_finite(squared_norms), 0)
        lost = tf.math.count_nonzero(real & ~finite, dtype=tf.float32)
        within = tf.cast(total, limit.dtype) <= tf.square(limit)
        balance = tf.reduce_sum(tf.where(real, tf.where(within, 0.5, -0.5), 0))
        counts = [balance[None], lost[None]]
        if self.monitor is not None:
            counts.append(self.monitor.counts(squared_norms, real, limit))
        return tf.concat(counts, 0)

    def no_tally(self) -> tf.Tensor:
        """The tally of no examples."""
        monitored = 0 if self.monitor is None else self.monitor.SIZE
        return tf.zeros([2 + monitored])

    def noised_mean(
        self,
        sums: dict[int, tf.Tensor | sparse.Touched],
        use: counting.Use,
        tally: tf.Tensor,
        first: bool = True,
        from_first: Callable = tf.identity,
    ) -> dict[int, tf.Tensor | tf.IndexedSlices] | None:
        """Adds noise to the clipped sums, once, and counts the step.

        Args:
            sums: by id of the weight.
            use: what the step costs.
            tally: of all examples.
            first: whether this is the first of several workers, which alone
                draws noise.
            from_first: takes a tensor, and returns that of the first worker.

        Returns:
            Sum and noise over the expected batch size, by id of the weight; of
            tables with `SparseNoise`, for the selected rows. None on other
            workers than the first.
        """
        batch_size = self.denominator()
        step = self.counter.total.read_value()
        sigma, norm = use.sigma, self.clip_norm.at(step)
        tables = {
            key: total
            for key, total in sums.items()
            if isinstance(total, sparse.Touched)
        }
        dense = {key: sums[key] for key in sums if key not in tables}
        batch = [*dense.values(), *(table.sums for table in tables.values())]
        # No update without a count, and no count without a batch.
        with tf.control_dependencies(batch[:1]):
            counted = self.counter.count(use)
        with tf.control_dependencies([counted]):
            self.nonfinite.assign_add(tf.cast(tally[1], tf.int64))
            if self.monitor is not None:
                self.monitor.add(tally[2:])
            if self.clip_norm.adaptive is not None:
                stddev = self.clip_norm.count_stddev(sigma, batch_size)
                balance = tally[0]
                if first:
                    (balance,) = self.noise.add(
                        [balance],
                        stddev,
                        step,
                        first=len(sums),
                        sensitivity=0.5,
                    )
                self.clip_norm.adapt(from_first(balance), batch_size)
                sigma = self.clip_norm.gradient_sigma(sigma, stddev)
            if not first:
                return None
            rows = []
            if tables:
                selection_sigma, sigma = self.sparse.split(sigma)
                rows, totals = sparse.select(
                    self.noise,
                    tables.values(),
                    self.sparse.threshold,
                    selection_sigma * self.sparse.map_norm,
                    step,
                    first=len(sums) + 1,
                )
                batch = [*dense.values(), *totals]
            means = self.noise.add(
                batch,
                sigma * norm,
                step,
                batch_size,
                sensitivity=norm,
                multiplications=batch_size * self._plan.multiplications,
            )
        found = dict(zip([*dense, *tables], means, strict=True))
        for (key, table), chosen in zip(tables.items(), rows, strict=True):
            found[key] = table.slices(chosen, found[key])
        return found

    def denominator(self) -> float:
        """The expected batch size: a public constant, not the realised one."""
        if self.expected_batch_size is None:
            raise ValueError(
                "The gradient is divided by the expected batch size, which "
                "must not depend on the data: pass expected_batch_size= to "
                "the model, give batches of a fixed size (tf.data: "
                ".batch(n, drop_remainder=True)), or let `fit` draw the "
                "batches from arrays."
            )
        return float(self.expected_batch_size)

    def loss_scale(self, model: keras.Model) -> float:
        """What the loss of an example is multiplied by; public, too."""
        return losses.scale_of(model, self.expected_batch_size or 32)

    def limits(
        self, model: keras.Model, batch_size: tf.Tensor | None = None
    ) -> methods.Limits:
        """What a plan depends on beside the kernels."""
        known = None
        if batch_size is not None:
            known = tf.get_static_value(batch_size)
        size = int(known or 32)
        if self.expected_batch_size is not None:
            size = self._part_of_batch(model)
        return methods.Limits(
            batch=min(size, self.physical_batch_size(model) or size),
            budget=self.settings.memory_budget,
            # With a seed, runs are to be the same everywhere.
            measured=self.settings.seed is None,
            jit_compile=bool(model.jit_compile),
            ways=self.settings.ways,
        )

    def physical_batch_size(self, model: keras.Model) -> int | None:
        """How many examples go through the model at a time."""
        size = self.settings.physical_batch_size
        if size == "auto":
            numbers = (0, 0) if self._plan is None else self._plan.numbers
            return physical.auto_size(numbers, self._part_of_batch(model))
        return size

    def _part_of_batch(self, model):
        """How many examples a replica is expected to get."""
        size = int(self.expected_batch_size or 32)
        return -(-size // replicas.count(model))

    def notes(self) -> list[str]:
        """What a statement should say beside the ledger."""
        notes, settings = [], self.settings
        if settings.views > 1:
            notes.append(
                f"Each example went through the model in {settings.views} "
                "random views; it is the mean of their gradients that was "
                "limited, so one example had no more influence than with one."
            )
        if self.clip_norm.adaptive is not None:
            notes.append(
                "The limit on the influence of an example was adapted during "
                "training from a count of examples within it, to which noise "
                "was added; the noise multipliers below are for both together."
            )
        elif self.clip_norm.schedule is not None:
            notes.append(
                "The limit on the influence of an example followed a schedule "
                "fixed beforehand; the noise followed the limit."
            )
        if self.sparse is not None:
            notes.append(
                "In large tables of embeddings, noise and updates went to some "
                "of the rows only. These were selected by how many examples of "
                "a batch hold a row, to which noise was added for every row; "
                "the noise multipliers below are for selection and gradients "
                "together."
            )
        if settings.noise_multiplier is None and self.multiplier.known:
            notes.append(
                "The noise multiplier was chosen before training for a target "
                f"of epsilon = {settings.target_epsilon:g} at "
                f"delta = {settings.delta:g}."
            )
        return notes

    # -- the plan -----------------------------------------------------------

    def prepare(
        self, model: keras.Model, batch: tuple, batch_size: int | None
    ) -> None:
        """Before training: checks the model and fixes what is traced."""
        plan, size = self._plan, self.expected_batch_size
        if self.settings.expected_batch_size is None and batch_size is not None:
            self.expected_batch_size = batch_size
        new_size = self.denominator() != size
        with model.distribute_strategy.scope():
            if self.plan(model, batch) is not plan or new_size:
                model.train_function = None
            _keras.make_state(model, *batch[:2])

    def plan(self, model: keras.Model, batch: tuple[Any, Any, Any]) -> Plan:
        """The plan for the model as it is now; checks it if it is new.

        Args:
            model: the model.
            batch: (x, y, sample_weight), eager or symbolic.
        """
        require_trainable(model)
        signature = self._signature_of(model, batch)
        if self._plan is None or not _fits(signature, self._signature):
            plan = probe(
                model,
                _eager(batch),
                self.registry,
                strict=self.settings.strict,
                views=self.settings.views,
            )
            # Per-layer norms must fit the layers.
            self.clipping.groups([unit.path for unit in plan.units])
            items = [part.item for part in plan.traits if part.item]
            methods.with_ways(items, self.settings.ways)
            # A model that was not built yet has its variables only now.
            self._signature = self._signature_of(model, batch)
            self._plan = plan
        sparse.require_supported(model, self.sparse)
        return self._plan

    @property
    def latest_plan(self) -> Plan | None:
        """The plan of the latest check, if there was one."""
        return self._plan

    def _signature_of(self, model, batch):
        # The library's own losses are right whatever the sample weights are.
        custom = getattr(model, "compute_per_example_loss", None)
        seen = batch[:2] if custom is None else batch
        shapes = [
            None if leaf is None else tuple(leaf.shape)[1:]
            for leaf in keras.tree.flatten(seen)
        ]
        return (
            [id(v) for v in model.trainable_variables],
            # BatchNormalization need not have weights to be frozen.
            [layer.trainable for layer in _keras.layers_of(model)],
            # Held here, so that no other loss gets its id.
            model._compile_loss,
            shapes,
        )


def _joined(own: Ledger, loaded: Ledger, same_run: bool) -> Ledger:
    """The record of a model with steps of its own that loads weights.

    Args:
        own: the model's.
        loaded: of the weights.
        same_run: whether one was saved on the way to the other.
    """
    if same_run and loaded.total_steps >= own.total_steps:
        return loaded
    if same_run:
        return own
    for entry in own.entries:
        loaded = loaded.plus(*entry)
    return loaded


def _fits(signature: Any, checked: Any) -> bool:
    """Whether a model and batch are as they were checked.

    While tracing, sizes may be unknown; those that are known must agree.
    """
    *model, shapes = signature
    *checked_model, checked_shapes = checked
    if model != checked_model or len(shapes) != len(checked_shapes):
        return False
    return all(
        mine == right
        or None not in (mine, right)
        and len(mine) == len(right)
        and all(
            None in pair or pair[0] == pair[1]
            for pair in zip(mine, right, strict=True)
        )
        for mine, right in zip(shapes, checked_shapes, strict=True)
    )


def require_trainable(model: keras.Model) -> None:
    """Refuses what is known to be wrong before anything is run."""
    if not model.compiled:
        raise ValueError("Call `compile` before training the model.")
    custom = getattr(model, "compute_per_example_loss", None)
    if model._compile_loss is None and custom is None:
        raise ValueError(
            "Private training needs a loss: pass `loss=` to `compile`. Losses "
            "made with add_loss alone are not enough."
        )
    replicas.require_supported(model)
    if model.jit_compile and model._privacy.settings.noise == "secure":
        raise ValueError(noise.NOT_BY_XLA)
    optimizer = losses.unscaled_optimizer(model)
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "The optimizer has gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}, which would add noise "
            "at every partial step. Use a larger batch_size instead."
        )
    scaling = keras.optimizers.LossScaleOptimizer
    if type(model.optimizer) is not scaling and isinstance(
        model.optimizer, scaling
    ):
        raise ValueError(
            f"The optimizer {type(model.optimizer).__name__} scales losses in "
            "a way of its own, which may depend on the data. Use "
            "keras.optimizers.LossScaleOptimizer around another optimizer, or "
            "mixed_bfloat16."
        )
    for layer in _keras.layers_of(model):
        if isinstance(layer, (keras.layers.MixUp, keras.layers.CutMix)):
            raise ValueError(
                f"Layer {layer.path!r} ({type(layer).__name__}) mixes "
                "examples: it blends examples with each other. Remove it."
            )
        if getattr(layer, "quantization_mode", None) == "float8":
            raise ValueError(
                f"Layer {layer.path!r} is quantized to float8, whose scales "
                "are raw statistics of the data. Use int8 or int4 with LoRA."
            )
        if getattr(layer, "stateful", False) and isinstance(
            layer, keras.layers.RNN
        ):
            raise ValueError(
                f"Layer {layer.path!r} is stateful: it carries data from one "
                "batch to the next. Use stateful=False."
            )


def _eager(batch):
    """The batch itself, or while tracing a made-up one of the same shapes."""

    def value(leaf):
        if leaf is None or not tf.is_symbolic_tensor(leaf):
            return leaf
        shape = [4] + [8 if n is None else n for n in leaf.shape[1:]]
        with tf.init_scope():
            if leaf.dtype.is_floating:
                return tf.random.stateless_uniform(
                    shape, [1, 2], dtype=leaf.dtype
                )
            ones = tf.random.stateless_uniform(shape, [3, 4]) < 0.5
            return tf.cast(ones, leaf.dtype)

    return keras.tree.map_structure(value, batch)
