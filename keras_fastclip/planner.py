"""The choices behind `method="auto"`: the least time within a memory budget.

For each kernel there are three ways, with B examples of T positions and a
kernel of d inputs and p outputs:

| way     | norm             | clipped sum | products                | memory |
|---------|------------------|-------------|-------------------------|--------|
| ghost   | ⟨aaᵀ, ggᵀ⟩       | 𝒜*(c·g)     | 2BT²(d + p) and 2BTdp   | 2BT²   |
| build   | of aᵀg, then     | 𝒜*(c·g)     | 2BTdp twice             | Bdp    |
|         | dropped          |             |                         |        |
| keep    | of aᵀg           | c·(aᵀg)     | 2BTdp                   | Bdp    |

Mixed ghost clipping (Bu et al., 2022) takes the way of least memory. In time,
keeping costs nothing over plain training but for the speed of small products:
on two cores without AVX-512, TensorFlow's products of one matrix for each
example run at half the speed of one large product (64 examples, T = 100,
d = 228, p = 512: 1.5 GFLOP in 22 ms against 10 ms). So the planner starts from
least memory and spends what the budget allows where it saves the most time for
each byte. Both speeds are measured once, in a quarter of a second; with them
given, the plan depends on nothing but sizes.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence

import tensorflow as tf

# Of what plain training takes, and at least so many bytes.
BUDGET_FRACTION = 0.1
LEAST_BUDGET = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class Machine:
    """Speeds in products and in bytes a second.

    Attributes:
        large: floating-point operations in one large matrix product.
        batched: in products of one small matrix for each example.
        stream: bytes read and written in order.
    """

    large: float
    batched: float
    stream: float


# Two cores with AVX2.
REFERENCE = Machine(large=6e10, batched=3e10, stream=1.4e10)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the choice for one kernel depends on.

    Attributes:
        positions: T, over all uses of the kernel.
        inputs: d.
        outputs: p.
        blocks: independent blocks of the kernel.
    """

    positions: int
    inputs: int
    outputs: int
    blocks: int = 1


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a kernel is served.

    Attributes:
        ghost: by its ghost norm, or else by building gradients.
        keep: whether gradients that were built are kept for the sum.
        memory: bytes.
        seconds: expected time for norm and sum.
    """

    ghost: bool
    keep: bool
    memory: float
    seconds: float


def choices(sizes: Sizes, batch: int, machine: Machine) -> list[Choice]:
    """All ways to serve a kernel, the one of least memory first."""
    t, d, p, s = dataclasses.astuple(sizes)
    total = 4 * batch * s * d * p
    once = 2 * batch * t * s * d * p
    grams = 2 * batch * t * t * s * (d + p)
    if t == 1:
        # |a|²·|g|²: no product at all.
        norm, gram_memory = 4 * batch * (d + p) * s / machine.stream, 0
    else:
        norm, gram_memory = grams / machine.batched, 8 * batch * s * t * t
    ghost = Choice(True, False, gram_memory, norm + once / machine.large)
    built = once / machine.batched + total / machine.stream
    build = Choice(False, False, total, built + once / machine.large)
    keep = Choice(False, True, total, built + total / machine.stream)
    return sorted([ghost, build, keep], key=lambda c: (c.memory, c.seconds))


def plan(
    kernels: Sequence[Sizes], batch: int, budget: float, machine: Machine
) -> list[Choice]:
    """A choice for each kernel.

    Args:
        kernels: their sizes.
        batch: B, the expected batch size.
        budget: bytes that the chosen ways may take together, beyond what the
            way of least memory takes.
        machine: speeds.
    """
    options = [choices(sizes, batch, machine) for sizes in kernels]
    chosen = [ways[0] for ways in options]
    # Each way out of the cheapest: what it saves and what it takes.
    upgrades = [
        (chosen[i].seconds - way.seconds, way.memory - chosen[i].memory, i, way)
        for i, ways in enumerate(options)
        for way in ways[1:]
        if way.seconds < chosen[i].seconds
    ]
    upgrades.sort(key=lambda u: (-u[0] / max(u[1], 1), u[2]))
    left, done = budget, set()
    for _, extra, index, way in upgrades:
        if index not in done and extra <= left:
            chosen[index] = way
            left -= extra
            done.add(index)
    return chosen


def plan_here(
    kernels: Sequence[Sizes],
    weights: int,
    activations: int,
    batch: int,
    budget: int | None,
    measured: bool = True,
) -> list[Choice]:
    """A choice for each kernel, on this machine.

    Args:
        kernels: their sizes.
        weights, activations: as for `default_budget`.
        batch: the expected batch size.
        budget: bytes, or None for the default.
        measured: take the speeds of this machine, or else `REFERENCE`, with
            which the plan is the same in every process.
    """
    if not kernels:
        return []
    if budget is None:
        budget = default_budget(weights, activations, batch)
    machine = this_machine() if measured else REFERENCE
    return plan(kernels, batch, budget, machine)


def default_budget(weights: int, activations: int, batch: int) -> float:
    """A tenth of what plain training takes, and at least 32 MiB.

    Args:
        weights: how many are trained.
        activations: numbers that layers with weights return for an example.
        batch: the expected batch size.
    """
    # Weights and gradients; activations and their cotangents.
    plain = 4 * (2 * weights + 2 * batch * activations)
    return max(BUDGET_FRACTION * plain, LEAST_BUDGET)


@functools.cache
def this_machine() -> Machine:
    """Speeds as they are measured here, once in a process."""
    with tf.init_scope():
        a = tf.random.stateless_normal([6400, 128], [1, 2])
        g = tf.random.stateless_normal([6400, 256], [3, 4])
        many = tf.reshape(a, [64, 100, 128]), tf.reshape(g, [64, 100, 256])
        operations = 2 * 6400 * 128 * 256
        large = _seconds(lambda: tf.matmul(a, g, transpose_a=True))
        batched = _seconds(lambda: tf.matmul(*many, transpose_a=True))
        stream = _seconds(lambda: g * 2.0)
    return Machine(
        operations / large, operations / batched, 2 * 4 * 6400 * 256 / stream
    )


def _seconds(function):
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        # Devices run ahead of Python until a value is asked for.
        float(tf.reduce_sum(function()))
        best = min(best, time.perf_counter() - start)
    return best
