"""The methods of the papers, as a choice of how norms and sums are taken.

| method        | norm                     | clipped sum                      |
|---------------|--------------------------|----------------------------------|
| `bk`          | ghost wherever it exists | 𝒜*(c·g) from the kept cotangents |
| `bk_mixghost` | ghost where 2T² < pd     | 𝒜*(c·g) from the kept cotangents |
| `bk_mixopt`   | ghost where 2T² < pd     | from instantiated gradients where |
|               |                          | there are any, else as above      |
| `auto`        | what takes the least time within a memory budget, by kernel; |
|               | see `planner.py`                                             |
| `naive`       | a loop over the examples | the sum of the loop's gradients  |

All give the same clipped sum, to rounding. `bk` is book-keeping (Bu et al.,
2023): one backward pass to the ζ's, whose cotangents serve both the norms and
the sum.
"""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from keras_fastclip import planner
from keras_fastclip.capture import Plan, Use
from keras_fastclip.clipping import Clipping
from keras_fastclip.registry import shared
from keras_fastclip.registry.terms import (
    at_least_float32,
    select_rows,
    squared_norm,
)


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the grid.

    Attributes:
        ghost_everywhere: take the ghost norm even where building the
            gradients would take less memory.
        keep: reuse gradients that were built for their norms.
        planned: leave both to the planner, for kernels that are matrices.
    """

    ghost_everywhere: bool = False
    keep: bool = True
    planned: bool = False


METHODS: dict[str, Method | None] = {
    "auto": Method(planned=True),
    "bk": Method(ghost_everywhere=True, keep=False),
    "bk_mixghost": Method(keep=False),
    "bk_mixopt": Method(),
    "naive": None,
}


class Part:
    """Weights whose gradients must be put together before their norm.

    Usually the weights of one term of one call. A weight that is used several
    times (a layer called twice, an embedding tied to the output projection)
    joins all its terms in one part, since the gradient of an example is the
    sum over the uses, and the norm of a sum is not the sum of the norms.
    """

    def __init__(self, uses: list[Use], method: Method):
        self.uses = uses
        self.variables = list(
            {id(v): v for use in uses for v in use.term.variables}.values()
        )
        self._ghost = _takes_ghost(uses, method)
        self._has_adjoint = all(use.term.has_adjoint_for(use.g) for use in uses)
        self._keep = method.keep or not self._has_adjoint
        self._built: list[tf.Tensor] | None = None

    @property
    def path(self) -> str:
        """Of the layer whose share of the clip norm counts."""
        return self.uses[0].unit.path

    def sizes(self) -> planner.Sizes | None:
        """What the planner needs to know; None where there is no choice."""
        found = [use.term.plan_sizes(use.rows) for use in self.uses]
        joined = len(self.uses) == 1 or shared.can_join(self.uses)
        if None in found or not joined or not self._has_adjoint:
            return None
        positions = sum(sizes.positions for sizes in found)
        return dataclasses.replace(found[0], positions=positions)

    def follow(self, choice: planner.Choice) -> None:
        self._ghost, self._keep = choice.ghost, choice.keep

    def squared_norms(self) -> tf.Tensor:
        """Ω, shape (batch,)."""
        if self._ghost:
            norms = _ghost_norms(self.uses)
            if norms is not None:
                return norms
        built = self._build()
        if self._keep:
            self._built = built
        return tf.add_n(widest([squared_norm(b) for b in built]))

    def _build(self):
        """The gradient of every example for each of the variables."""
        total = {id(v): 0.0 for v in self.variables}
        for use in self.uses:
            built = use.term.per_example(use.g, use.rows)
            for variable, gradient in zip(
                use.term.variables, built, strict=True
            ):
                gradient = at_least_float32(gradient)
                total[id(variable)] += tf.reshape(
                    gradient, [-1, *variable.shape]
                )
        return list(total.values())

    def weighted_sum(self, factors: tf.Tensor) -> list[tf.Tensor]:
        """𝒜*(c·g) for each of the variables, with c of shape (batch,)."""
        keep = factors != 0
        if self._built is None and not self._has_adjoint:
            self._built = self._build()
        if self._built is not None:
            return [
                tf.tensordot(tf.cast(factors, b.dtype), select_rows(keep, b), 1)
                for b in self._built
            ]
        total = {id(v): 0.0 for v in self.variables}
        for use in self.uses:
            g = _scaled(use.g, use.rows.spread(factors))
            sums = use.term.adjoint(g, use.rows.spread(keep))
            for variable, part in zip(use.term.variables, sums, strict=True):
                part = at_least_float32(part)
                total[id(variable)] += tf.reshape(part, variable.shape)
        return list(total.values())


def _takes_ghost(uses, method):
    if not all(use.term.has_omega for use in uses):
        return False
    if len(uses) > 1:
        return method.ghost_everywhere or shared.prefers_omega(uses)
    (use,) = uses
    return method.ghost_everywhere or use.term.prefers_omega(use.rows)


def _ghost_norms(uses):
    if len(uses) > 1:
        return shared.omega(uses)
    (use,) = uses
    return use.term.omega(use.g, use.rows)


def _scaled(g, factors):
    """c·g, and zero where c is zero, whatever g holds there."""
    g = at_least_float32(g)
    shape = [-1] + [1] * (g.shape.rank - 1)
    factors = tf.reshape(tf.cast(factors, g.dtype), shape)
    return tf.math.multiply_no_nan(g, factors)


def widest(norms: list[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors in the widest of their types."""
    wide = any(norm.dtype == tf.float64 for norm in norms)
    return [tf.cast(n, tf.float64 if wide else tf.float32) for n in norms]


def make_parts(uses: Sequence[Use], method: Method) -> list[Part]:
    """Joins uses that share a weight."""
    clusters: list[list[Use]] = []
    for use in uses:
        mine = {id(v) for v in use.term.variables}
        joined, others = [], []
        for cluster in clusters:
            held = {id(v) for other in cluster for v in other.term.variables}
            (joined if held & mine else others).append(cluster)
        merged = [other for cluster in joined for other in cluster] + [use]
        clusters = [*others, merged]
    return [Part(cluster, method) for cluster in clusters]


def plan_parts(
    parts: Sequence[Part], batch: int, budget: int | None, measured: bool
) -> None:
    """Has parts follow what the planner chooses for them.

    Args:
        parts: what `make_parts` returned.
        batch, budget, measured: as for `planner.plan_here`.
    """
    pairs = [(part, part.sizes()) for part in parts]
    pairs = [(part, sizes) for part, sizes in pairs if sizes is not None]
    chosen = planner.plan_here(
        [sizes for _, sizes in pairs],
        *numbers(parts),
        batch,
        budget,
        measured,
    )
    for (part, _), choice in zip(pairs, chosen, strict=True):
        part.follow(choice)


def numbers(parts: Sequence[Part]) -> tuple[int, int]:
    """How many weights there are, and activations of an example."""
    weights = {id(v): math.prod(v.shape) for p in parts for v in p.variables}
    activations = {}
    for part in parts:
        for use in part.uses:
            for g in use.g if isinstance(use.g, list) else [use.g]:
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


def clipped_sums(
    parts: Sequence[Part],
    clipping: Clipping,
    paths: Sequence[str],
    batch_size: tf.Tensor,
    real: tf.Tensor | None = None,
) -> tuple[dict[int, tf.Tensor], tf.Tensor, tf.Tensor]:
    """Norms, factors and the clipped sum.

    Args:
        parts: what `make_parts` returned.
        clipping: norms to factors.
        paths: of all weight-owning layers of the model.
        batch_size: the number of rows of the batch.
        real: (batch,), false for rows that only fill up the batch.

    Returns:
        The sums by id of the variable, the squared norms (groups, batch), and
        the factors (groups, batch), which are zero for rows left out.
    """
    groups = dict(zip(paths, clipping.groups(paths), strict=True))
    count = max(groups.values()) + 1
    # A call whose rows are not those of the batch must not pass unnoticed.
    norms = [tf.reshape(part.squared_norms(), [batch_size]) for part in parts]
    norms = widest(norms)
    squared = [tf.zeros_like(norms[0])] * count
    for part, norm in zip(parts, norms, strict=True):
        squared[groups[part.path]] += norm
    squared = tf.stack(squared)
    factors = clipping.bounded_factors(squared)
    if real is not None:
        factors = tf.where(real, factors, tf.zeros_like(factors))
    sums = {}
    for part in parts:
        weighted = part.weighted_sum(factors[groups[part.path]])
        for variable, total in zip(part.variables, weighted, strict=True):
            sums[id(variable)] = total
    return sums, squared, factors
