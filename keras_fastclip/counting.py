"""Steps are counted inside the step, so that none goes by uncounted.

What a step costs depends on how its batch was drawn. A batch drawn by Poisson
sampling is one use of the sampler. Where batches come from passes over the
data, an example is used once in each pass, so what counts is how many passes
were begun. Of other batches it is not known.

Formal guarantee: for passes of `pass_size` examples, each of which holds every
example at most once, a single example has entered the noised sums at most as if
by `uses` batches that hold it once: a batch that spans the borders of passes
may hold an example k times, which for Gaussian noise is worth k² of these
uses. Where a pass begins is known, or (`aligned` false) not.
"""

import contextlib
import dataclasses

import numpy as np
import tensorflow as tf

from keras_fastclip import _keras

POISSON, PASSES, UNKNOWN = range(3)

UNLIMITED = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class Use:
    """What a step that is about to be made would cost.

    Attributes:
        poisson: whether the batch was drawn by Poisson sampling.
        kind: scalar, POISSON, PASSES or UNKNOWN.
        slot: scalar, which noise multiplier it has.
        uses: scalar, how often it may use one example more than the steps
            before it.
        rows: scalar, examples in the batch.
        sigma: scalar, the noise multiplier of that slot.
    """

    poisson: bool
    kind: tf.Tensor
    slot: tf.Tensor
    uses: tf.Tensor
    rows: tf.Tensor
    sigma: tf.Tensor | None = None


class Counter:
    """Variables of a model that count its steps.

    Args:
        slots: how many noise multipliers there may be.
    """

    def __init__(self, slots: int):
        def variable(value):
            return _keras.variable(np.asarray(value, np.int64))

        # All steps of the model's life, those before loading included.
        self.total = variable(0)
        self.steps = variable(np.zeros((3, slots)))
        self.uses = variable(np.zeros((3, slots)))
        # Of the passes at hand: their size, zero if it is not known, the
        # examples seen since they began, whether they began with a pass, and
        # the latest slot.
        self.pass_size = variable(0)
        self._position = variable(0)
        self._aligned = variable(1)
        self._latest_slot = variable(-1)
        # A step is made only if the uses stay within this.
        self._allowed = variable(UNLIMITED)

    def cost(self, poisson: bool, rows: tf.Tensor, slot: tf.Tensor) -> Use:
        """What a step on such a batch would cost; counts nothing yet."""
        slot, rows = tf.cast(slot, tf.int64), tf.cast(rows, tf.int64)
        one = tf.ones([], tf.int64)
        if poisson:
            return Use(poisson, POISSON * one, slot, one, rows)
        known = self.pass_size > 0
        kind = tf.where(known, PASSES * one, UNKNOWN * one)
        uses = tf.where(known, self._uses_of_pass(rows, slot), one)
        return Use(poisson, kind, slot, uses, rows)

    def _uses_of_pass(self, rows, slot):
        size, start = tf.maximum(self.pass_size, 1), self._position
        end = start + rows
        # At another noise multiplier the pass counts anew: where in the pass
        # an example comes is not known.
        changed = tf.cast(slot != self._latest_slot, tf.int64)
        begins = tf.cast(start % size == 0, tf.int64)
        times = (end - 1) // size - start // size + 1
        aligned = times - 1 + tf.maximum(begins, changed) + times * (times - 1)

        # The first border may be anywhere: m examples touch so many passes,
        # and at each border a batch may hold an example twice, for two more.
        def passes(m):
            return tf.where(m > 0, (m + size - 2) // size + 1, 0)

        new, times = passes(end) - passes(start), passes(rows)
        anywhere = 3 * new + tf.where(start > 0, changed, -2)
        # Larger batches than the data hold it more often than that.
        anywhere += (times - 1) * (times - 2)
        uses = tf.where(self._aligned > 0, aligned, anywhere)
        return tf.where(rows > 0, uses, tf.zeros_like(uses))

    def count(self, use: Use) -> tf.Tensor:
        """Counts a step; the result is there once it is counted."""
        shape = tf.shape(self.steps)
        place = use.kind * tf.cast(shape[1], tf.int64) + use.slot
        here = tf.one_hot(place, tf.reduce_prod(shape), dtype=tf.int64)
        here = tf.reshape(here, shape)
        self.steps.assign_add(here)
        self.uses.assign_add(here * use.uses)
        if not use.poisson:
            self._position.assign_add(use.rows)
            self._latest_slot.assign(use.slot)
        return self.total.assign_add(1)

    def within(self, use: Use) -> tf.Tensor:
        """Whether a step with this cost is allowed."""
        limited = self._allowed < UNLIMITED
        spent = tf.reduce_sum(self.uses) + use.uses
        # No budget has room for what cannot be accounted for.
        unknown = limited & tf.equal(use.kind, UNKNOWN)
        return (spent <= self._allowed) & ~unknown

    def room(self) -> tf.Tensor:
        """How many further uses are allowed."""
        return self._allowed - tf.reduce_sum(self.uses)

    # -- from outside of the step -------------------------------------------

    def new_pass(self, aligned: bool = True) -> None:
        """The next example may be one that was seen already.

        Args:
            aligned: whether a pass begins with it, or anywhere.
        """
        self._position.assign(0)
        self._aligned.assign(int(aligned))
        self._latest_slot.assign(-1)

    @contextlib.contextmanager
    def other_batches(self):
        """What is counted inside is not of the passes at hand."""
        state = self.pass_size, self._position, self._aligned, self._latest_slot
        before = [int(variable) for variable in state]
        self.pass_size.assign(0)
        self.new_pass()
        try:
            yield
        finally:
            for variable, value in zip(state, before, strict=True):
                variable.assign(value)

    def allow(self, further: int | None) -> None:
        """Allows so many further uses; None for any number."""
        spent = int(tf.reduce_sum(self.uses))
        self._allowed.assign(UNLIMITED if further is None else spent + further)

    @property
    def allowed(self) -> int:
        """How many further uses are allowed."""
        return int(self.room())

    def taken(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and uses so far, each (kinds, slots)."""
        return self.steps.numpy(), self.uses.numpy()
