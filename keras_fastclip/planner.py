"""The choices behind `method="auto"`: the least time within a memory budget.

For each kernel there are these ways, with B examples of T positions and a
kernel of d inputs and p outputs:

| way   | norm                 | clipped sum | products              | memory |
|-------|----------------------|-------------|-----------------------|--------|
| ghost | ⟨aaᵀ, ggᵀ⟩           | 𝒜*(c·g)     | 2BT²(d + p) and 2BTdp | 2BT²   |
| build | of aᵀg, then dropped | 𝒜*(c·g)     | 2BTdp twice           | Bdp    |
| keep  | of aᵀg               | c·(aᵀg)     | 2BTdp                 | Bdp    |

The first two also hold g, BTp numbers, from the backward pass until the sum,
where plain training would have let it go; what is kept takes its place. And it
takes the place of the input a: plain training holds that until the backward
pass has come to the layer, and so does keeping; the other two need it for the
sum. So to keep costs no more than what Bdp exceeds the input by. (A BERT-like
model that keeps all its gradients, 400 MB, takes no more memory than one that
keeps none: `python -m benchmarks.compare --workload bert --modes opacus,bk`.)

Each can be taken in several forms, told by a name behind a colon: all examples
at once ("batched", or by the offsets of a convolution), in "blocks" that stay
in caches, or in a "loop" over them, which holds a few at a time. So
"build:loop" needs no more than a few times dp, and where T² numbers of a single
example are too many, "ghost:tiles" takes some rows of the Gram matrices at a
time.

Mixed ghost clipping (Bu et al., 2022) takes the way of least memory. In time,
keeping costs nothing over plain training but for the speed of small products,
which differs between machines by a factor of four. So the ways are timed for
every distinct kernel (`timing.py`) with a hundredth of all products or more, as
that delays the first step, and the planner starts from least memory
and spends what the budget allows where it saves the most time for each byte.
The plan depends on nothing but sizes, seconds and the budget.
"""

import dataclasses
from collections.abc import Callable, Sequence

from keras_fastclip.registry.linear import Kernel
from keras_fastclip.registry.turns import IN_FLIGHT

# Of weights, activations and their gradients, and at least so many bytes.
BUDGET_FRACTION = 0.25
LEAST_BUDGET = 32 * 2**20

# So many limits to what may pass are tried, the largest among them.
_LIMITS = 16

# Of the products of all kernels: with less, one is not worth being timed.
_SHARE = 0.01

# Where a Gram matrix has fewer rows, tiles are not worth a loop.
_LEAST_FOR_TILES = 1024


@dataclasses.dataclass(frozen=True)
class Way:
    """How a kernel is served.

    Attributes:
        norm: "ghost", or "build" gradients.
        form: in which form; None for the usual one.
        keep: whether gradients that were built are kept for the sum.
    """

    norm: str
    form: str | None = None
    keep: bool = False

    @property
    def ghost(self) -> bool:
        return self.norm == "ghost"

    def __str__(self) -> str:
        name = "keep" if self.keep else self.norm
        return name if self.form is None else f"{name}:{self.form}"

    @classmethod
    def parse(cls, text: str) -> "Way":
        """The inverse of `str`."""
        name, _, form = text.partition(":")
        if name == "keep":
            return cls("build", form or None, keep=True)
        return cls(name, form or None)


GHOST_FORMS = ("batched", "loop", "tiles")


@dataclasses.dataclass(frozen=True)
class Item:
    """A kernel to plan for.

    Attributes:
        path: of its layer.
        kernel: its sizes.
        has_ghost: whether there is a ghost norm.
        calls: how often the kernel is used, where its sizes are of one use.
        only: the way that a user chose, if any.
        frees_input: whether plain training lets go of the kernel's input in
            the backward pass; the data themselves are held throughout.
    """

    path: str
    kernel: Kernel
    has_ghost: bool = True
    calls: int = 1
    only: Way | None = None
    frees_input: bool = True

    @property
    def multiplications(self) -> int:
        """In the forward pass of an example."""
        return self.calls * self.kernel.positions * self.kernel.built

    @property
    def prefers_ghost(self) -> bool:
        """The rule of mixed ghost clipping: the way of least memory."""
        return self.has_ghost and self.kernel.gram < self.kernel.built

    def ways(self) -> list[Way]:
        """Those among which `auto` chooses."""
        kernel = self.kernel
        if self.only is not None:
            return [self.only]
        if self.has_ghost and kernel.positions == 1:
            # |a|²·|g|²: no product at all.
            return [Way("ghost", "batched")]
        # The operations of a ghost norm over those of building gradients.
        t, d, p = kernel.positions, kernel.inputs, kernel.outputs
        ratio = t * kernel.ghost_width / (d * p)
        ways = []
        if not self.has_ghost or ratio > 0.1 or kernel.gram > kernel.built:
            ways.append(Way("build", kernel.timed[-1]))
            ways += [Way("build", form, keep=True) for form in kernel.timed]
        if self.has_ghost and (ratio < 1 or kernel.gram < kernel.built):
            ways += [Way("ghost", form) for form in kernel.timed_ghost]
            if kernel.positions > _LEAST_FOR_TILES:
                ways.append(Way("ghost", "tiles"))
        return ways

    def all_ways(self) -> list[Way]:
        """Those that a user may choose; without a form, the usual one."""
        ways = [
            Way("build", form, keep)
            for keep in (True, False)
            for form in (None, *self.kernel.forms)
        ]
        if self.has_ghost:
            ways += [Way("ghost", form) for form in (None, *GHOST_FORMS)]
            if "blocks" in self.kernel.timed_ghost:
                ways.append(Way("ghost", "blocks"))
        return ways


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way for a kernel, with what it costs.

    Attributes:
        way: how the kernel is served.
        kept: bytes from its norm until its sum.
        passing: bytes while its norm is taken.
        seconds: for norm and sum; None if it is not known.
        freed: bytes that go when it is kept, and would stay otherwise.
    """

    way: Way
    kept: int
    passing: int
    seconds: float | None = None
    freed: int = 0

    @property
    def memory(self) -> int:
        return self.kept + self.passing

    @property
    def more(self) -> int:
        """Bytes until its sum, beyond what plain training holds."""
        return max(self.kept - self.freed, 0)


def cost(item: Item, way: Way, batch: int) -> Choice:
    """What a way takes in memory."""
    kernel, number = item.kernel, 4 * item.calls
    at_a_time = batch
    if way.form in ("loop", "tiles"):
        at_a_time = min(batch, IN_FLIGHT)
    elif way.form == "blocks":
        block = kernel.ghost_block if way.ghost else kernel.block
        at_a_time = min(batch, 2 * block)
    held = number * batch * kernel.cotangent
    whole = number * batch * kernel.copies
    if way.ghost:
        grams = kernel.tile if way.form == "tiles" else kernel.gram
        each = grams + kernel.copied_for_ghost(way.form)
        return Choice(way, held, whole + number * at_a_time * each)
    copied = whole + number * at_a_time * kernel.copied(way.form)
    if way.keep:
        kept = number * batch * kernel.built
        freed = number * batch * kernel.input if item.frees_input else 0
        return Choice(way, kept, copied, freed=freed)
    return Choice(way, held, number * at_a_time * kernel.built + copied)


Clock = Callable[[Kernel, Sequence[Way]], Sequence[float]]


def choices(
    item: Item,
    batch: int,
    budget: float,
    clock: Clock,
    loops_pay: bool = True,
) -> list[Choice]:
    """All ways for a kernel that may be part of a plan, with their seconds.

    Where there is but one, no time is taken. Left out is what another way is
    known to beat, in time and in memory.

    Args:
        item: the kernel.
        batch: B.
        budget: bytes.
        clock: seconds for an example, of each of some ways.
        loops_pay: whether a loop over examples may be the fastest form.
    """
    found = [cost(item, way, batch) for way in item.ways()]
    if not loops_pay:
        # What passes does so for all kernels; a little is always there.
        found = [
            choice
            for choice in found
            if not any(_beats(one, choice, budget / 8) for one in found)
        ]
    if len(found) == 1:
        return found
    found = [c for c in found if c.more + c.passing <= budget]
    each = clock(item.kernel, [choice.way for choice in found])
    scale = batch * item.calls
    return [
        dataclasses.replace(choice, seconds=scale * seconds)
        for choice, seconds in zip(found, each, strict=True)
    ]


def _beats(one, other, little):
    """Whether a way takes less time than another, and no more memory.

    Given that loops do not pay, gradients that are kept need not be built
    again, and what is built at once takes less time than in a loop.
    """
    if one.way.norm != other.way.norm or one.way.form in ("loop", "tiles"):
        return False
    if one.more > other.more or one.passing > max(other.passing, little):
        return False
    again = one.way.keep and not other.way.keep
    in_loop = other.way.form in ("loop", "tiles")
    return again or in_loop and one.way.keep == other.way.keep


def plan(
    items: Sequence[Item],
    batch: int,
    budget: float,
    clock: Clock,
    loops_pay: bool = True,
) -> list[Choice]:
    """A choice for each kernel.

    Norms are taken one after the other, so a plan takes what is kept for all
    kernels and the most that passes for one.

    Args:
        items: the kernels.
        batch: B, the expected batch size.
        budget: bytes.
        clock: seconds for an example, of each of some ways.
        loops_pay: as for `choices`.

    Raises:
        ValueError: the budget is too small for any plan.
    """
    smallest = smallest_plan(items, batch)
    if required(smallest) > budget:
        most = max(range(len(items)), key=lambda i: smallest[i].memory)
        raise ValueError(
            f"memory_budget={budget:,.0f} bytes is too small: the least that "
            f"would do is {required(smallest):,} bytes for a batch of {batch} "
            f"examples, most of it for layer {items[most].path!r}."
        )
    clocks = _clocks(items, clock)
    # A loop that does not pay takes less memory; perhaps nothing else fits.
    for pay in (loops_pay, True):
        options = [
            choices(item, batch, budget, clocks[item.kernel], pay)
            for item in items
        ]
        found = _fastest(options, budget, _most_passing(smallest))
        if found is not None:
            return found


def _clocks(items, clock):
    """By kernel: what has a small share in the time of a step is not timed."""
    work = {}
    for item in items:
        before = work.get(item.kernel, 0)
        work[item.kernel] = before + item.multiplications
    least = _SHARE * sum(work.values())
    return {
        kernel: clock if own >= least else reference_clocks
        for kernel, own in work.items()
    }


def _fastest(options, budget, least_passing):
    """The least time within the budget; None if nothing is within it."""
    # What may pass takes from what may be kept, so several limits are tried.
    passing = {choice.passing for found in options for choice in found}
    limits = sorted(passing, reverse=True)[:: -(-len(passing) // _LIMITS) or 1]
    limits.append(least_passing)
    plans = [_plan_within(options, limit, budget - limit) for limit in limits]
    plans = [chosen for chosen in plans if chosen is not None]
    return min(plans, key=_seconds, default=None)


def _plan_within(options, passing, kept):
    """The least time with so much that may pass, and that may be kept."""
    options = [[c for c in found if c.passing <= passing] for found in options]
    if not all(options):
        return None
    chosen = [min(found, key=lambda c: c.more) for found in options]
    kept -= sum(choice.more for choice in chosen)
    if kept < 0:
        return None
    while True:
        best, gain = None, 0.0
        for i, (now, found) in enumerate(zip(chosen, options, strict=True)):
            for way in found:
                if way.seconds is None or way.seconds >= now.seconds:
                    continue
                extra = way.more - now.more
                rate = (now.seconds - way.seconds) / max(extra, 1)
                if extra <= kept and rate > gain:
                    best, gain = (i, way), rate
        if best is None:
            return chosen
        i, way = best
        kept -= way.more - chosen[i].more
        chosen[i] = way


def _seconds(chosen):
    return sum(choice.seconds or 0 for choice in chosen)


def taken(chosen: Sequence[Choice]) -> int:
    """Bytes that a plan takes for norms and sums."""
    return sum(choice.kept for choice in chosen) + _most_passing(chosen)


def required(chosen: Sequence[Choice]) -> int:
    """Bytes of these that are beyond plain training."""
    return sum(choice.more for choice in chosen) + _most_passing(chosen)


def _most_passing(chosen):
    return max((choice.passing for choice in chosen), default=0)


def default_budget(
    items: Sequence[Item], weights: int, activations: int, batch: int
) -> float:
    """What must be, and 25 % of what plain training takes to save time.

    Counted are weights, their gradients, and activations of layers that have
    weights, with their gradients; at least 32 MiB are allowed.

    Args:
        items: the kernels.
        weights: how many are trained.
        activations: numbers that layers with weights return for an example.
        batch: the expected batch size.
    """
    plain = 4 * (2 * weights + 2 * batch * activations)
    least = required(smallest_plan(items, batch))
    return least + max(BUDGET_FRACTION * plain, LEAST_BUDGET)


def smallest_plan(items: Sequence[Item], batch: int) -> list[Choice]:
    """The plan that takes the least memory."""
    options = [
        [cost(item, way, batch) for way in item.ways()] for item in items
    ]
    # With a limit to what passes, each kernel may keep as little as it can.
    limits = {choice.passing for found in options for choice in found}
    plans = [
        [
            min(
                (choice for choice in found if choice.passing <= limit),
                key=lambda choice: (choice.more, choice.passing),
                default=None,
            )
            for found in options
        ]
        for limit in limits
    ]
    plans = [chosen for chosen in plans if None not in chosen]
    return min(plans, key=required, default=[])


# Two cores with AVX2: operations and bytes a second, seconds for an example.
_LARGE, _BATCHED, _LOOP, _STREAM, _TURN = 6e10, 2.5e10, 4.5e10, 1.4e10, 2e-5


def reference_clock(kernel: Kernel, way: Way) -> float:
    """Seconds for an example on a machine as most were when this was written.

    Used where plans must be the same everywhere: the speeds are fixed.
    """
    t, s = kernel.positions, kernel.blocks
    looped = way.form in ("loop", "tiles")
    speed, turn = (_LOOP, _TURN) if looped else (_BATCHED, 0.0)
    once = 2 * t * kernel.built
    if way.ghost:
        grams = 2 * t * t * s * kernel.ghost_width
        return turn + grams / speed + once / _LARGE
    passes = 4 * (2 * kernel.built + kernel.copied(way.form)) / _STREAM
    seconds = turn + once / speed + passes
    return seconds if way.keep else seconds + once / _LARGE


def reference_clocks(kernel: Kernel, ways: Sequence[Way]) -> list[float]:
    """The same of several ways."""
    return [reference_clock(kernel, way) for way in ways]
