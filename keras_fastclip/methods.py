"""The methods of the papers: how norms and clipped sums are taken.

| method         | norm                 | clipped sum                          |
|----------------|----------------------|--------------------------------------|
| `naive`        | of a loop's gradients | the loop's gradients, summed        |
| `opacus`       | of built gradients   | of the built gradients, kept         |
| `fastgradclip` | of built gradients   | a second backward pass               |
| `ghost`        | ghost                | a second backward pass               |
| `mixed_ghost`  | ghost where 2T² < pd | a second backward pass               |
| `bk`           | ghost                | 𝒜*(c·g) from the kept cotangents     |
| `bk_mixghost`  | ghost where 2T² < pd | 𝒜*(c·g) from the kept cotangents     |
| `bk_mixopt`    | ghost where 2T² < pd | of built gradients, where there are  |
|                |                      | any, else 𝒜*(c·g)                    |
| `auto`         | what takes the least time within a memory budget, by kernel |
|                | and by machine; see `planner.py`                            |

All give the same clipped sum, to rounding. `opacus` is what Opacus does,
`fastgradclip` is Lee & Kifer (2021), `ghost` Li et al. (2022), `mixed_ghost`
Bu, Mao & Xu (2022). Book-keeping, `bk`, is Bu et al. (2023): one backward pass
to the ζ's, whose cotangents serve both the norms and the sum.

The second backward pass is that of Σᵢ cᵢ·lossᵢ by the weights, on the record
of the same forward pass, so with the same random numbers. It is left out, and
𝒜*(c·g) taken, for batches with an example whose gradient is not finite, which
would spoil the sum even with a factor of zero, and in models that compute in
half precision. It rounds anew what the first pass has rounded, so where a
backward pass cancels, the bound on an example's influence holds to rounding of
what cancels; the other methods round the same numbers, or add a margin.

Where a part of the weights has no ghost norm (the fallback for layers without
a rule), its gradients are built; and the gradient of an embedding is the rows
that an example touches, never a table for each example.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_fastclip import planner, sparse, timing
from keras_fastclip.capture import Plan
from keras_fastclip.clipping import Clipping, matching
from keras_fastclip.parts import Part, Traits, together, widest
from keras_fastclip.planner import Choice, Item, Way
from keras_fastclip.registry.linear import Kernel
from keras_fastclip.sparse import Touched


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the grid.

    Attributes:
        norm: "ghost", "build", "mixed" for ghost where that takes less memory,
            or "loop" over the examples.
        gradient: "adjoint", "keep" for gradients that were built for their
            norms, or "second" for a second backward pass.
        planned: both are left to the planner, where there is a choice.
    """

    norm: str
    gradient: str
    planned: bool = False

    @property
    def twice(self) -> bool:
        """Whether there is a second backward pass."""
        return self.gradient == "second"

    def way(self, traits: Traits) -> Way:
        """How a part is served, but for what is planned."""
        ghost = self.norm == "ghost" or traits.is_table
        if self.norm == "mixed" and traits.prefers_ghost:
            ghost = True
        if ghost and traits.has_ghost:
            return Way("ghost")
        # Biases and the like are few, and layers without a rule have no
        # other way.
        return Way("build", keep=self.gradient == "keep" or not traits.item)


METHODS = {
    "auto": Method("mixed", "keep", planned=True),
    "naive": Method("loop", "keep"),
    "opacus": Method("build", "keep"),
    "fastgradclip": Method("build", "second"),
    "ghost": Method("ghost", "second"),
    "mixed_ghost": Method("mixed", "second"),
    "bk": Method("ghost", "adjoint"),
    "bk_mixghost": Method("mixed", "adjoint"),
    "bk_mixopt": Method("mixed", "keep"),
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a plan depends on beside the kernels.

    Attributes:
        batch: the expected batch size.
        budget: bytes, or None for the default.
        measured: take the speeds of this machine, or else fixed ones, with
            which the plan is the same in every process.
        jit_compile: whether the step is compiled by XLA.
        ways: by name or path of a layer, the way that a user chose.
    """

    batch: int
    budget: int | None = None
    measured: bool = True
    jit_compile: bool = False
    ways: Mapping[str, str] | None = None

    @property
    def loops_pay(self) -> bool:
        """Whether a loop over examples may be the fastest form."""
        return not self.measured or timing.loops_pay(self.jit_compile)

    def clock(self, kernel: Kernel, ways: Sequence[Way]) -> list[float]:
        """Seconds for an example, of each way."""
        if not self.measured:
            return planner.reference_clocks(kernel, ways)
        return timing.clock(kernel, ways, self.jit_compile)


def choose(
    traits: Sequence[Traits],
    numbers: tuple[int, int],
    method: Method,
    limits: Limits,
) -> list[Choice]:
    """How each part is served, and what that costs.

    Args:
        traits: of the parts.
        numbers: as for `planner.default_budget`.
        method: the row of the grid.
        limits: for the planner.
    """
    chosen = [_unplanned(part, method.way(part), limits) for part in traits]
    if not method.planned:
        return chosen
    places = [i for i, part in enumerate(traits) if part.item is not None]
    items = with_ways([traits[i].item for i in places], limits.ways)
    if items:  # What comes first has the data for its input.
        items[0] = dataclasses.replace(items[0], frees_input=False)
    budget = limits.budget
    if budget is None:
        budget = planner.default_budget(items, *numbers, limits.batch)
    planned = planner.plan(
        items, limits.batch, budget, limits.clock, limits.loops_pay
    )
    for i, choice in zip(places, planned, strict=True):
        chosen[i] = choice
    return chosen


def _unplanned(part, way, limits):
    if part.item is not None:
        return planner.cost(part.item, way, limits.batch)
    built = 0 if way.ghost else 4 * limits.batch * part.weights
    return Choice(way, built, 0) if way.keep else Choice(way, 0, built)


def with_ways(
    items: Sequence[Item], ways: Mapping[str, str] | None
) -> list[Item]:
    """The items, with the ways that a user chose for some of the layers."""
    found, used = [], set()
    for item in items:
        name = matching(ways or (), item.path)
        if name is None:
            found.append(item)
            continue
        used.add(name)
        way = Way.parse(ways[name])
        if way not in item.all_ways():
            known = ", ".join(map(str, item.all_ways()))
            raise ValueError(
                f"ways[{name!r}] is {ways[name]!r}; the layer {item.path!r} "
                f"can be served by {known}."
            )
        found.append(dataclasses.replace(item, only=way))
    unused = set(ways or ()) - used
    if unused:
        raise ValueError(
            f"`ways` names {sorted(unused)}, but the layers that leave a "
            f"choice are {sorted({item.path for item in items})}."
        )
    return found


def set_ways(parts: Sequence[Part], method: Method, limits: Limits) -> None:
    """Has the parts follow what is chosen for them."""
    traits = [part.traits for part in parts]
    chosen = choose(traits, numbers(parts), method, limits)
    for part, choice in zip(parts, chosen, strict=True):
        part.way = choice.way


def numbers(parts: Sequence[Part]) -> tuple[int, int]:
    """How many weights there are, and activations of an example."""
    weights = {id(v): math.prod(v.shape) for p in parts for v in p.variables}
    activations = {}
    for part in parts:
        for use in part.uses:
            for g in tf.nest.flatten(use.g):
                sizes = [n or 1 for n in g.shape[1:]]
                each = math.prod(sizes) * use.rows.per_example
                activations[id(g)] = each
    return sum(weights.values()), sum(activations.values())


def groups_of_weights(plan: Plan, clipping: Clipping) -> dict[int, int]:
    """By id of each weight that the losses depend on, its group."""
    groups = clipping.groups([unit.path for unit in plan.units])
    reached = {path for path, _ in plan.reached}
    found = {}
    for unit, group in zip(plan.units, groups, strict=True):
        for variable in unit.variables if unit.path in reached else ():
            found.setdefault(id(variable), group)
    return found


Backward = Callable[[tf.Tensor, list], list[tf.Tensor]]


def clipped_sums(
    parts: Sequence[Part],
    clipping: Clipping,
    paths: Sequence[str],
    batch_size: tf.Tensor,
    real: tf.Tensor | None = None,
    backward: Backward | None = None,
    scale: float = 1.0,
    tables: Mapping[int, Any] = types.MappingProxyType({}),
    map_norm: float = 1.0,
) -> tuple[dict[int, tf.Tensor | Touched], tf.Tensor, tf.Tensor]:
    """Norms, factors and the clipped sum.

    Args:
        parts: what `make_parts` returned.
        clipping: norms to factors.
        paths: of all weight-owning layers of the model.
        batch_size: the number of rows of the batch.
        real: (batch,), false for rows that only fill up the batch.
        backward: the second backward pass, for methods that have one: maps
            factors (batch,) and weights to the gradients of Σᵢ cᵢ·lossᵢ.
        scale: what the losses were multiplied by, a power of two; norms and
            sums are those of the losses themselves.
        tables: by id, those of which only selected rows get noise.
        map_norm: for these; see `SparseNoise`.

    Returns:
        The sums by id of the variable, the squared norms (groups, batch), and
        the factors (groups, batch), which are zero for rows left out.
    """
    groups = dict(zip(paths, clipping.groups(paths), strict=True))
    count = max(groups.values()) + 1
    parts = together(parts, groups)
    # A call whose rows are not those of the batch must not pass unnoticed.
    shape = tf.reshape(batch_size, [1])
    norms = []
    # One after the other: two at a time would hold twice what passes. And from
    # the first layer on: its inputs and cotangents are often the largest, and
    # go, where the gradients that the last ones keep are, and stay.
    for part in parts:
        with tf.control_dependencies(norms[-1:]):
            norms.append(tf.reshape(part.squared_norms(), shape))
    norms = widest(norms)
    squared = [tf.zeros_like(norms[0])] * count
    for part, norm in zip(parts, norms, strict=True):
        squared[groups[part.path]] += norm
    squared = tf.stack(squared)
    if scale != 1:
        squared /= scale**2
    factors = clipping.bounded_factors(squared)
    if real is not None:
        factors = tf.where(real, factors, tf.zeros_like(factors))
    sums, positions = {}, {}
    # Neither 0·inf nor, on some devices, a sum over nothing is zero.
    usual = tf.reduce_all(tf.math.is_finite(squared)) & (batch_size > 0)
    for group in range(count):
        own = [part for part in parts if groups[part.path] == group]
        dense = [part for part in own if id(part.variables[0]) not in tables]
        sums |= _weighted_sums(dense, factors[group], usual, backward)
        for part in own:
            key = id(part.variables[0])
            if key in tables:
                rows, g = part.positions(factors[group])
                positions[key] = rows, g / scale, tables[key].shape[0]
    if scale != 1:
        sums = {key: total / scale for key, total in sums.items()}
    if positions:
        sums |= sparse.touched(positions, map_norm)
    return sums, squared, factors


def _weighted_sums(parts, factors, usual, backward):
    """By id of the variable, for parts that share their factors."""

    def by_parts():
        sums = {}
        # Gradients of all examples take the most memory: they go first.
        for kept in True, False:
            with tf.control_dependencies(list(sums.values())):
                for part in parts:
                    if part.kept == kept:
                        sums |= part.weighted_sum(factors, usual)
        return sums

    if backward is None or not parts:
        return by_parts()
    variables = [variable for part in parts for variable in part.variables]
    second = backward(factors, variables)

    def otherwise():
        sums, pairs = by_parts(), zip(variables, second, strict=True)
        return [tf.cast(sums[id(v)], total.dtype) for v, total in pairs]

    chosen = tf.cond(usual, lambda: second, otherwise)
    return dict(zip(map(id, variables), chosen, strict=True))
