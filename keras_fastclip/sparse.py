"""Noise for large tables of embeddings, on the rows that a batch selects.

Plain private training puts noise on every row of a table, whichever rows the
batch holds, and so costs the table at every step. Here rows are selected first,
privately, and the others are left as they are (DP-AdaFEST: Ghazi et al., 2023,
"Sparsity-Preserving Differentially Private Training of Large Embedding
Models"). A step then costs what the batch touches.

Selection draws noise for every row, also for those that the batch does not
hold, or the rows that change would tell what it holds. Rows without a
contribution are all alike: each is selected with the probability that noise
alone exceeds the threshold, by itself. So which of them are selected is drawn
directly, at the cost of those that are, and with the very same distribution as
if noise had been drawn for each.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, _validate, losses, replicas
from keras_fastclip.clipping import matching
from keras_fastclip.noise import GaussianNoise


@keras.saving.register_keras_serializable("keras_fastclip")
class SparseNoise:
    """Noise on selected rows of embedding tables only (DP-AdaFEST).

    In every step, each example marks the rows of the tables in which its
    gradient is not zero: k rows, each with min(1, M/√k), which is a vector of
    norm at most M. The sum over the batch gets Gaussian noise in every row.
    Rows in which it is above a threshold are selected. Their clipped sums get
    noise, as all other weights do; the other rows get neither gradient nor
    noise and are not touched by the optimizer (Ghazi et al., 2023).

    Formal guarantee: the sum of marks has sensitivity M and noise of standard
    deviation σ₁M, the clipped sum of gradients has sensitivity C and noise of
    standard deviation σ₂C, and σ₁⁻² + σ₂⁻² = σ⁻². Both together are one
    Gaussian mechanism of noise multiplier σ, which is what is accounted for;
    which rows are selected, and the noised sums of these rows, follow from its
    result. So the guarantee is the one of plain private training with the same
    σ. The price is a little more noise, and the gradient of rows that too few
    examples of a batch hold, which is lost.

    Only `keras.optimizers.SGD` without momentum makes steps whose cost does
    not depend on the size of the table. Others are right, too, but go over the
    whole table for their averages, as they do in plain training.

    Args:
        layers: names or paths of `keras.layers.Embedding` layers; by default
            all that are trained.
        threshold: in standard deviations of the noise on the marks, σ₁M. A row
            that nobody holds is selected with the probability that a normal
            value exceeds it: at 4, 32 of a million.
        noise_ratio: σ₁/σ₂. Above 1, most of the guarantee is spent on the
            gradients.
        map_norm: M. Examples with more than M² rows mark each with less than
            one.

    Example:

    ```python
    model = keras_fastclip.DPSequential(
        [
            keras.layers.Embedding(1_000_000, 32),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2),
        ],
        l2_norm_clip=1.0,
        noise_multiplier=1.1,
        sparse_noise=keras_fastclip.SparseNoise(),
    )
    ```
    """

    def __init__(
        self,
        layers: Sequence[str] | None = None,
        *,
        threshold: float = 4.0,
        noise_ratio: float = 5.0,
        map_norm: float = 1.0,
    ):
        _validate.positive(
            threshold=threshold, noise_ratio=noise_ratio, map_norm=map_norm
        )
        if isinstance(layers, str):
            raise ValueError(
                "`layers` must be a list of names of layers; received "
                f"{layers=!r}."
            )
        self.layers = None if layers is None else list(layers)
        self.threshold = float(threshold)
        self.noise_ratio = float(noise_ratio)
        self.map_norm = float(map_norm)

    def split(self, sigma: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """σ₁ and σ₂, with σ₁⁻² + σ₂⁻² = σ⁻²."""
        ratio = self.noise_ratio
        return sigma * math.hypot(1, ratio), sigma * math.hypot(1, 1 / ratio)

    def get_config(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "threshold": self.threshold,
            "noise_ratio": self.noise_ratio,
            "map_norm": self.map_norm,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SparseNoise":
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class Touched:
    """What a batch adds to a table, before noise.

    Attributes:
        rows: (n,), int64, distinct; those that the batch holds, and perhaps
            some that it does not.
        sums: (n, width), the clipped sum in these rows.
        marks: (n,), float64, the sum of the examples' marks in these rows.
        size: how many rows the table has.
    """

    rows: tf.Tensor
    sums: tf.Tensor
    marks: tf.Tensor
    size: int

    def dense(self) -> tf.Tensor:
        """The clipped sum of the whole table."""
        shape = [self.size, self.sums.shape[1]]
        return tf.scatter_nd(self.rows[:, None], self.sums, shape)

    def slices(self, rows: tf.Tensor, values: tf.Tensor) -> tf.IndexedSlices:
        """Values for some rows of the table, as optimizers take them."""
        shape = tf.constant([self.size, values.shape[1]], tf.int64)
        return tf.IndexedSlices(values, rows, shape)


def tables(model: keras.Model, given: SparseNoise | None) -> dict[int, Any]:
    """The tables that get noise on selected rows, by id.

    Raises:
        ValueError: if the option does not fit the model.
    """
    if given is None:
        return {}
    found, used = {}, set()
    for layer in _keras.layers_of(model):
        if not isinstance(layer, keras.layers.Embedding):
            continue
        path = layer.path or layer.name
        name = None if given.layers is None else matching(given.layers, path)
        if given.layers is not None and name is None:
            continue
        used.add(name)
        trained = layer.trainable_variables
        if given.layers is None and not trained:
            continue
        _require_plain(layer, path)
        found[id(layer.embeddings)] = layer.embeddings
    unused = set(given.layers or ()) - used
    if unused or not found:
        raise ValueError(
            "`sparse_noise` is for keras.layers.Embedding layers; not found: "
            f"{sorted(unused) or 'any that is trained'}."
        )
    return found


def _require_plain(layer, path):
    """A table that is trained, and by the gradients of its rows alone."""
    table = layer.embeddings
    obstacle = None
    if getattr(layer, "lora_enabled", False):
        obstacle = "has LoRA enabled, which trains no rows of its table"
    elif not isinstance(table, keras.Variable) or not table.trainable:
        obstacle = "has no table that is trained"
    elif table.regularizer is not None:
        obstacle = "has a regularizer, which moves all rows at every step"
    elif table.constraint is not None:
        obstacle = "has a constraint, which looks at all rows at every step"
    if obstacle is not None:
        raise ValueError(
            f"Layer {path!r} {obstacle}: `sparse_noise` is not for it. Name "
            "other layers with SparseNoise(layers=[...])."
        )


def require_supported(model: keras.Model, given: SparseNoise | None) -> None:
    """Refuses what would not leave the other rows as they are."""
    if given is None:
        return
    tables(model, given)
    optimizer = losses.unscaled_optimizer(model)
    for name in ("weight_decay", "use_ema", "loss_scale_factor"):
        value = getattr(optimizer, name, None)
        if value:
            raise ValueError(
                f"The optimizer has {name}={value!r}, which is not supported "
                "with `sparse_noise`. Leave it out."
            )
    if model.jit_compile:
        raise ValueError(
            "jit_compile=True is not supported with `sparse_noise`, since the "
            "number of selected rows varies. Compile with jit_compile=False."
        )
    if replicas.strategy_of(model) is not None:
        raise ValueError("`sparse_noise` is not supported on several replicas.")


def touched(
    positions: Mapping[int, tuple[tf.Tensor, tf.Tensor, int]], norm: float
) -> dict[int, Touched]:
    """Clipped sums and marks, by id of the table.

    Args:
        positions: by id of the table, the rows that the examples look up,
            (batch, q), the clipped cotangents there, (batch, q, width), and
            how many rows the table has. Cotangents are zero for examples that
            are left out.
        norm: M, of the marks of an example in all tables.
    """
    sums, pairs, counts = {}, {}, []
    for key, (ids, g, _) in positions.items():
        shape = tf.shape(ids, tf.int64)
        flat = tf.reshape(g, [-1, g.shape[-1]])
        rows, place = tf.unique(
            tf.reshape(tf.cast(ids, tf.int64), [-1]), tf.int64
        )
        number = tf.size(rows, tf.int64)
        sums[key] = rows, tf.math.unsorted_segment_sum(flat, place, number)
        # An example marks a row once, however often it holds it.
        example = tf.repeat(tf.range(shape[0]), shape[1])
        held = tf.reduce_any(flat != 0, -1)
        pair, _ = tf.unique(tf.boolean_mask(example * number + place, held))
        number = tf.maximum(number, 1)
        pairs[key] = pair // number, pair % number
        counts.append(
            tf.math.unsorted_segment_sum(
                tf.ones_like(pair, tf.float64), pairs[key][0], shape[0]
            )
        )
    # Of all tables together, so that they share one norm.
    marked = tf.maximum(tf.add_n(counts), 1)
    mark = tf.minimum(tf.ones([], tf.float64), norm / tf.sqrt(marked))
    found = {}
    for key, (example, place) in pairs.items():
        rows, total = sums[key]
        marks = tf.math.unsorted_segment_sum(
            tf.gather(mark, example), place, tf.size(rows, tf.int64)
        )
        found[key] = Touched(rows, total, marks, positions[key][2])
    return found


def select(
    noise: GaussianNoise,
    found: Iterable[Touched],
    threshold: float,
    stddev: tf.Tensor,
    step: tf.Tensor,
    first: int,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Selects rows, privately, of each of the tables.

    Args:
        noise: where noise comes from.
        found: what the batch adds to each of the tables.
        threshold: in standard deviations.
        stddev: of the noise on the marks, σ₁M.
        step: number of the step.
        first: number of the first of these tables among all tensors of the
            step that get noise.

    Returns:
        For each of the tables the rows that were selected, and for each their
        sums.
    """
    found = list(found)
    marks = [each.marks for each in found]
    marks = noise.add(marks, stddev, step, first=first)
    # That noise alone exceeds the threshold.
    chance = math.erfc(threshold / math.sqrt(2)) / 2
    chance = tf.where(stddev > 0, tf.constant(chance, tf.float64), 0)
    selected, sums = [], []
    for i, (each, mark) in enumerate(zip(found, marks, strict=True)):
        above = mark > threshold * tf.cast(stddev, mark.dtype)
        others = noise.scattered(each.size, chance, step, first + i)
        others = _without(others, each.rows)
        zeros = tf.zeros([tf.size(others), each.sums.shape[1]], each.sums.dtype)
        kept = tf.boolean_mask(each.rows, above)
        selected.append(tf.concat([kept, others], 0))
        kept = tf.boolean_mask(each.sums, above)
        sums.append(tf.concat([kept, zeros], 0))
    return selected, sums


def _without(places, rows):
    """The places that are not among the rows, which have noise of their own."""

    def without(places, rows):
        return places[~np.isin(places, rows)]

    left = tf.numpy_function(without, [places, rows], tf.int64)
    left.set_shape([None])
    return left
