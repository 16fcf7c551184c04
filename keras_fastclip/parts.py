"""Norms and sums of the weights that belong together, in a chosen way."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from keras_fastclip.capture import Use
from keras_fastclip.planner import Item, Way
from keras_fastclip.registry import linear, shared
from keras_fastclip.registry.embedding import Lookup
from keras_fastclip.registry.terms import (
    Factors,
    Small,
    at_least_float32,
    itself,
    squared_norm,
)
from keras_fastclip.registry.turns import (
    Blockwise,
    KeptInBlocks,
    KeptInTurns,
    norm_of_one,
    norms_in_turns,
)

# Weights that share an array with others; more are not copied there.
_FEW = 2**12


@dataclasses.dataclass(frozen=True)
class Traits:
    """What the way to serve a part depends on.

    Attributes:
        path: of the layer whose share of the clip norm counts.
        weights: how many there are.
        has_ghost: whether there is a ghost norm.
        prefers_ghost: whether it takes less memory than gradients.
        is_table: whether the weights are a table that is looked up. The rows
            that an example touches are its gradient; the table is never built
            for each example.
        item: for the planner; None where there is no choice.
    """

    path: str
    weights: int
    has_ghost: bool
    prefers_ghost: bool
    is_table: bool
    item: Item | None


class Part:
    """Weights whose gradients must be put together before their norm.

    Usually the weights of one term of one call. A weight that is used several
    times (a layer called twice, an embedding tied to the output projection)
    joins all its terms in one part, since the gradient of an example is the
    sum over the uses, and the norm of a sum is not the sum of the norms.

    Attributes:
        uses: the terms, with their cotangents.
        variables: the weights.
        has_adjoint: whether there is a closed form of the weighted sum.
        traits: what `way` depends on.
        way: how norms and sums are taken.
    """

    def __init__(self, uses: list[Use]):
        self.uses = uses
        self.variables = _variables_of(uses)
        self.has_adjoint = all(use.term.has_adjoint_for(use.g) for use in uses)
        self.traits = self._find_traits()
        self.way = Way("build", keep=True)
        if self.traits.prefers_ghost:
            self.way = Way("ghost")
        self._built: _Built | KeptInBlocks | KeptInTurns | None = None

    @property
    def path(self) -> str:
        return self.traits.path

    @property
    def ghost_form(self) -> tuple | None:
        """All that ghost norms of the library's own depend on but numbers.

        None for others: what a term of another class does, sizes do not tell.
        """
        item, (use, *others) = self.traits.item, self.uses
        if others or item is None or not self.way.ghost:
            return None
        if type(use.term) is not linear.Linear:
            return None
        return item.kernel, use.rows, use.g.dtype

    def _find_traits(self):
        uses = self.uses
        # Without an adjoint the sum is of gradients that were built, and
        # another norm than theirs need not bound it: a rule of a user may
        # take its own in half precision.
        has_ghost = self.has_adjoint and all(u.term.has_omega for u in uses)
        has_ghost &= len(uses) == 1 or shared.can_join(uses)
        tables = [isinstance(use.term, Lookup) for use in uses]
        is_table = has_ghost and any(tables)
        if len(uses) > 1:
            prefers = has_ghost and shared.prefers_omega(uses)
        else:
            prefers = has_ghost and uses[0].term.prefers_omega(uses[0].rows)
        path = uses[0].unit.path if uses[0].unit else ""
        item = None if is_table else self._find_item(path, has_ghost)
        return Traits(
            path=path,
            weights=sum(math.prod(v.shape) for v in self.variables),
            has_ghost=has_ghost,
            prefers_ghost=prefers,
            is_table=is_table,
            item=item,
        )

    def _find_item(self, path, has_ghost):
        kernels = [use.term.kernel(use.rows) for use in self.uses]
        if None in kernels or not self.has_adjoint:
            return None
        if not has_ghost:
            return Item(path, kernels[0], False, len(kernels))
        positions = sum(kernel.positions for kernel in kernels)
        return Item(path, dataclasses.replace(kernels[0], positions=positions))

    def squared_norms(self) -> tf.Tensor:
        """Ω, shape (batch,)."""
        # What depends on the forward pass alone (Gram matrices of inputs,
        # patches) would else be computed early, and held for all layers.
        with tf.control_dependencies(tf.nest.flatten(self.uses[-1].g)):
            if self.way.ghost:
                return self._ghost_norms()
            if self.way.form == "loop" and not self.way.keep:
                return norms_in_turns(self._norm_of_one, self._operands())
            built = self._build()
            if self.way.keep or self.traits.item is None:
                self._built = built
                return built.squared_norms
            return self._rounded_up(built.squared_norms, self._operands())

    def built_norms(self) -> tf.Tensor:
        """Squared norms of gradients that are built for them and dropped."""
        return self._build().squared_norms

    def _norm_of_one(self, *operands):
        return self._rounded_up(norm_of_one(self._of_one(*operands)), operands)

    def _rounded_up(self, squared_norms, operands):
        """Norms of gradients that will not be those in the sum.

        The sum takes the same products anew and rounds them otherwise. Where
        they cancel, that may be far more than the gradient.
        """
        pairs = zip(self.uses, self._by_use(operands), strict=True)
        lengths = [use.term.lengths(*own) for use, own in pairs]
        # Of the one sum and of the other.
        drift = 2 * linear.drift_of_sum(tf.concat(lengths, 1))
        return tf.square(tf.sqrt(squared_norms) + drift)

    def _ghost_norms(self):
        if len(self.uses) > 1:
            return shared.omega(self.uses, self.way.form)
        (use,) = self.uses
        return use.term.omega(use.g, use.rows, self.way.form)

    def _build(self):
        """The gradients of all examples."""
        shapes = [variable.shape for variable in self.variables]
        if self.way.form == "loop":
            return KeptInTurns(self._of_one, self._operands(), shapes)
        if self.way.form == "blocks":
            most = self.traits.item.kernel.block
            if len(self.uses) == 1:
                build = self.uses[0].term.blockwise()
                return KeptInBlocks(build, self._operands(), most)
            build = Blockwise(self._of_some, tuple(map(tuple, shapes)))
            alone = functools.partial
            return KeptInBlocks(build, self._operands(), most, alone)
        if len(self.uses) == 1:
            (use,) = self.uses
            pieces = use.term.pieces(use.g, use.rows, self.way.form)
            # Of the use alone: a cycle would hold what is kept for longer.
            return _Built(
                [at_least_float32(piece) for piece in pieces],
                lambda sums: _added([use], [use.term.assembled(sums)], []),
            )
        found = [
            use.term.per_example(use.g, use.rows, self.way.form)
            for use in self.uses
        ]
        return _Built(_added(self.uses, found, [-1]))

    def _operands(self):
        found = [use.term.operands(use.g, use.rows) for use in self.uses]
        return [tensor for operands in found for tensor in operands]

    def _of_one(self, *operands):
        """The gradients of one example, (1, ...), from all uses."""
        pairs = zip(self.uses, self._by_use(operands), strict=True)
        found = [use.term.of_one(*own) for use, own in pairs]
        return _added(self.uses, found, [1])

    def _of_some(self, *operands):
        """The gradients of some examples, (n, ...), from all uses."""
        pairs = zip(self.uses, self._by_use(operands), strict=True)
        found = [use.term.of_some(*own) for use, own in pairs]
        return _added(self.uses, found, [-1])

    def _by_use(self, operands):
        each = len(operands) // len(self.uses)
        return [operands[i : i + each] for i in range(0, len(operands), each)]

    @property
    def few(self) -> tf.DType | None:
        """The type of few gradients, None if `rows_of_few` cannot be had."""
        term, g = self.uses[0].term, self.uses[0].g
        if len(self.uses) > 1 or not isinstance(term, Small):
            return None
        if self.traits.weights > _FEW:
            return None
        return tf.float64 if g.dtype == tf.float64 else tf.float32

    def rows_of_few(self) -> tf.Tensor:
        """The gradients of all examples, (B, n)."""
        (use,) = self.uses
        with tf.control_dependencies([use.g]):
            (rows,) = use.term.per_example(use.g, use.rows)
            if rows.shape[1:] == [self.traits.weights]:
                return rows
            return tf.reshape(rows, [-1, self.traits.weights])

    def positions(self, factors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """c·g of a table, position by position, with c of shape (batch,).

        Returns:
            The rows that are looked up, (batch, q), and the weighted
            cotangents there, (batch, q, width).
        """
        if not all(isinstance(use.term, Lookup) for use in self.uses):
            raise ValueError(
                f"The table of layer {self.path!r} is not only looked up: "
                "`sparse_noise` is not for it. Name other layers with "
                "SparseNoise(layers=[...])."
            )
        factors = Factors(factors)
        found = [
            use.term.pair(factors.spread(use.rows).scaled(use.g), use.rows)
            for use in self.uses
        ]
        return tuple(tf.concat(each, 1) for each in zip(*found, strict=True))

    @property
    def kept(self) -> bool:
        """Whether the gradients of all examples are there, since the norms."""
        return self._built is not None

    def weighted_sum(
        self, factors: tf.Tensor, finite: tf.Tensor | None = None
    ) -> dict[int, tf.Tensor]:
        """𝒜*(c·g) by id of the variable, with c of shape (batch,).

        Args:
            factors: c.
            finite: whether all norms are, if that is known.
        """
        sums = self._weighted_sum(Factors(factors, finite))
        return dict(zip(map(id, self.variables), sums, strict=True))

    def _weighted_sum(self, factors):
        if self._built is not None:
            return self._built.weighted_sum(factors)
        if not self.has_adjoint:
            return self._build().weighted_sum(factors)
        found = [
            use.term.weighted_sum(use.g, factors.spread(use.rows))
            for use in self.uses
        ]
        return _added(self.uses, found, [])


def _variables_of(uses):
    """Each once."""
    return list({id(v): v for u in uses for v in u.term.variables}.values())


def _added(uses, found, leading):
    """Adds up what the uses have found, in the shapes of the weights."""
    total = {id(v): [] for v in _variables_of(uses)}
    for use, tensors in zip(uses, found, strict=True):
        for variable, tensor in zip(use.term.variables, tensors, strict=True):
            tensor = at_least_float32(tensor)
            if tuple(tensor.shape) != (*leading, *variable.shape):
                tensor = tf.reshape(tensor, [*leading, *variable.shape])
            total[id(variable)].append(tensor)
    return [sum(each[1:], each[0]) for each in total.values()]


class FewWeights:
    """Parts of so few weights that one array holds their gradients.

    A model has many biases and scales, and the operations for one of them take
    longer to start than to run.

    Args:
        parts: those for which `few` is true, of one group of weights.
    """

    kept = True

    def __init__(self, parts: Sequence[Part]):
        self._parts = parts
        self.path = parts[0].path
        self.variables = [v for part in parts for v in part.variables]

    def squared_norms(self) -> tf.Tensor:
        """As `Part.squared_norms`, of all together."""
        rows = [part.rows_of_few() for part in self._parts]
        self._built = _Built([tf.concat(rows, 1)])
        return self._built.squared_norms

    def weighted_sum(
        self, factors: tf.Tensor, finite: tf.Tensor | None = None
    ) -> dict[int, tf.Tensor]:
        """As `Part.weighted_sum`."""
        (total,) = self._built.weighted_sum(Factors(factors, finite))
        sizes = [math.prod(v.shape) for v in self.variables]
        sums = tf.split(total, sizes)
        return {
            id(v): own if len(v.shape) == 1 else tf.reshape(own, v.shape)
            for v, own in zip(self.variables, sums, strict=True)
        }


def together(parts: Sequence[Part], groups: Mapping[str, int]) -> list:
    """The same, but with few weights of a group in one part.

    Args:
        parts: what `make_parts` returned.
        groups: by path.
    """
    others, few = [], {}
    for part in parts:
        if part.few is None:
            others.append(part)
        else:
            key = groups[part.path], part.few
            few.setdefault(key, []).append(part)
    return [FewWeights(found) for found in few.values()] + others


class _Built:
    """The gradients of all examples, in arrays (B, ...).

    Args:
        gradients: the arrays.
        assembled: maps sums of them to those of the weights.
    """

    def __init__(self, gradients, assembled=itself):
        self._gradients, self._assembled = gradients, assembled
        norms = [squared_norm(gradient) for gradient in gradients]
        self.squared_norms = tf.add_n(widest(norms))

    def weighted_sum(self, factors):
        kept = factors.without_others(*self._gradients)
        return self._assembled([factors.total(g) for g in kept])


def widest(norms: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors in the widest of their types."""
    wide = any(norm.dtype == tf.float64 for norm in norms)
    return [tf.cast(n, tf.float64 if wide else tf.float32) for n in norms]


def make_parts(uses: Sequence[Use]) -> list[Part]:
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
    return [Part(cluster) for cluster in clusters]
