"""Batches drawn here, as `tf.data` pipelines: by Poisson sampling or by passes.

Amplification by sampling is a statement about one sampler: every example is
in the batch with probability q, independently of all others. `PoissonDataset`
draws exactly that. Batch sizes therefore vary and may be zero; rows added to
make a shape constant are marked in a mask that travels beside the batch, and
a draw is never cut to fit. `PoissonDataset.passes` is what Keras does: passes
over the data in random order, for which there is no amplification.
"""

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_fastclip import _keras, _validate

# A Binomial(N, b/N) count exceeds b + 8 sqrt(b) less than once in 1e10 draws
# from b = 10 on (1e6 at b = 1), so static shapes have one shape in practice.
_CAPACITY_DEVIATIONS = 8.0

# Tags of draws: below this number.
TAGS = 1 << 62
NO_TAG = np.int64(-1)

# Indices, which of them were drawn, and the tag.
Draw = tuple[np.ndarray, np.ndarray, np.int64]
_DRAW_SPEC = (
    tf.TensorSpec((None,), tf.int64),
    tf.TensorSpec((None,), tf.bool),
    tf.TensorSpec((), tf.int64),
)


class PoissonBatch(NamedTuple):
    """A batch, and which of its rows were drawn; others fill it up.

    A type of its own, so that a train step cannot take it for (x, y).
    """

    batch: Any
    real: tf.Tensor


class PassBatch(NamedTuple):
    """A batch of a pass over the data; rows that are not real fill it up."""

    batch: Any
    real: tf.Tensor


class Part(NamedTuple):
    """What one of several replicas gets of a batch.

    Attributes:
        data: a `PoissonBatch`, a `PassBatch`, or what a user gave.
        tag: random, and the same for all parts of a batch.
    """

    data: Any
    tag: tf.Tensor


class Parts(NamedTuple):
    """Into how many parts a draw is divided, and which of them are wanted.

    Attributes:
        count: of all parts, one for each replica.
        wanted: those of the replicas of this process.
    """

    count: int
    wanted: slice = slice(None)


class Unpacked(NamedTuple):
    """What a train step was given.

    Attributes:
        batch: (x, y, sample_weight).
        real: (batch,), which rows are real; None if all are.
        poisson: whether the batch was drawn by Poisson sampling.
    """

    batch: tuple[Any, Any, Any]
    real: tf.Tensor | None
    poisson: bool


def unpack(data: Any) -> Unpacked:
    """Looks into what `fit` or a user hands to the train step."""
    real, poisson = None, isinstance(data, PoissonBatch)
    if isinstance(data, (PoissonBatch, PassBatch)):
        data, real = data
    batch = keras.utils.unpack_x_y_sample_weight(data)
    if real is None:
        batch, real = never_empty(batch)
    return Unpacked(batch, real, poisson)


def never_empty(batch: Any) -> tuple[Any, tf.Tensor | None]:
    """Puts a row of zeros into a batch of none, and tells which are real.

    TensorFlow's convolutions by oneDNN take no empty batch: the cotangents of
    their inputs come out in another shape.
    """
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    if not (_keras.on_cpu() and _keras.uses_onednn()):
        return batch, None
    if leaves[0].shape[0] or not all(map(_can_be_padded, leaves)):
        return batch, None
    count = tf.shape(leaves[0])[0]
    added = tf.maximum(1 - count, 0)

    def pad(leaf):
        if leaf is None:
            return None
        behind = [[0, added]] + [[0, 0]] * (leaf.shape.rank - 1)
        return tf.pad(leaf, behind)

    return keras.tree.map_structure(pad, batch), tf.range(count + added) < count


def _can_be_padded(leaf):
    return isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string


def num_examples_of(structure: Any) -> int:
    """Returns the common leading size of all arrays in a structure.

    Args:
        structure: Nested tuples, lists and dicts of arrays or tensors. `None`
            leaves are skipped.

    Returns:
        The number of examples.

    Raises:
        ValueError: If there is no array, an array has no leading axis, or the
            leading sizes differ.
    """
    sizes = [
        _leading_size(leaf)
        for leaf in tf.nest.flatten(structure)
        if leaf is not None
    ]
    if not sizes:
        raise ValueError("The data has no arrays: nothing to sample from.")
    if len(set(sizes)) > 1:
        raise ValueError(
            "All arrays must have the same number of examples (leading "
            f"size). Received sizes: {sizes}."
        )
    return sizes[0]


def capacity(expected_batch_size: float, num_examples: int) -> int:
    """Returns the number of rows that practically every Poisson draw fits.

    Args:
        expected_batch_size: The mean batch size b.
        num_examples: The number of examples N.

    Returns:
        `ceil(b + 8 sqrt(b))`, at most N.
    """
    b = expected_batch_size
    rows = math.ceil(b + _CAPACITY_DEVIATIONS * math.sqrt(b))
    return max(1, min(rows, num_examples))


def padded_size(count: int, capacity: int) -> int:
    """Returns the smallest positive multiple of `capacity` that holds a draw.

    A draw beyond the capacity gets the next multiple and is never truncated:
    truncation is another sampler with another privacy cost. Under XLA the
    rare other shape costs one more compilation.

    Args:
        count: The number of examples drawn, possibly zero.
        capacity: The usual number of rows.

    Returns:
        The number of rows after padding, at least `capacity`.
    """
    return -(-max(count, 1) // capacity) * capacity


def poisson_indices(
    num_examples: int, expected_batch_size: float, rng: np.random.Generator
) -> np.ndarray:
    """Draws one Poisson sample of `range(num_examples)`.

    Every index is included independently with probability q = b / N. Given
    its size, such a sample is uniform among the subsets of that size, so the
    size is drawn first and then the subset. That costs O(b) and not O(N)
    while b is a small part of N.

    Args:
        num_examples: The number of examples N.
        expected_batch_size: The mean batch size b, in (0, N].
        rng: Source of randomness.

    Returns:
        Distinct indices, int64, in no meaningful order; possibly empty.

    Example:

    >>> rng = np.random.default_rng()
    >>> batch = x[poisson_indices(len(x), 256, rng)]
    """
    _check_batch_size(expected_batch_size, num_examples)
    count = rng.binomial(num_examples, expected_batch_size / num_examples)
    # The order of rows in a batch is irrelevant; shuffling would only cost.
    indices = rng.choice(num_examples, count, replace=False, shuffle=False)
    return indices.astype(np.int64, copy=False)


class DrawnBatch:
    """One batch of a `PoissonDataset`, for `model.train_on_batch(batch)`.

    It may be trained on once: what is accounted for is a new draw in every
    step.
    """

    def __init__(self, data: PoissonBatch, num_examples: int, batch_size: int):
        self.num_examples, self.batch_size = num_examples, batch_size
        self._data: PoissonBatch | None = data

    def take(self) -> PoissonBatch:
        """The batch, the first time."""
        data, self._data = self._data, None
        if data is None:
            raise ValueError(
                "A batch of a PoissonDataset can be trained on once only: "
                "every step needs a draw of its own."
            )
        return data


class PoissonDataset:
    """Batches drawn by Poisson sampling, as the accountant assumes.

    `fit` on arrays makes one by itself. Make your own to map the batches (to
    decode or augment them), to load examples from elsewhere, or for a loop
    with `train_on_batch`. A model that is fitted on it accounts for its steps
    with amplification by sampling.

    An empty draw is a valid step (noise alone), so it is delivered too, as
    padding only. Every iterator makes new draws.

    Args:
        x: Arrays or tensors, possibly nested, with equal leading size N; or a
            function that takes a NumPy array of indices and returns the batch
            of these examples as arrays: x, (x, y) or (x, y, sample_weight).
        y: Targets, if `x` is not a function.
        sample_weight: Weights of the examples, likewise.
        batch_size: The mean batch size b; each example is in a batch with
            probability b / N, independently of all others.
        num_examples: N, if `x` is a function.

    Example:

    ```python
    data = keras_fastclip.PoissonDataset(x, y, batch_size=256)
    data = data.map(lambda x, y: (tf.reverse(x, [1]), y))
    model.fit(data, epochs=10)
    ```
    """

    def __init__(
        self, x, y=None, sample_weight=None, *, batch_size, num_examples=None
    ):
        self._load = x if callable(x) else None
        if self._load is None:
            arrays = as_arrays((x, y, sample_weight))
            self._arrays = without_lists(arrays)
            counted = num_examples_of(self._arrays)
            if num_examples not in (None, counted):
                raise ValueError(
                    f"The data has {counted} examples; received "
                    f"{num_examples=}."
                )
            num_examples = counted
        elif num_examples is None:
            raise ValueError(
                "With a function that loads examples, pass num_examples=, "
                "their number."
            )
        _validate.positive_integer(
            num_examples=num_examples, batch_size=batch_size
        )
        if batch_size > num_examples:
            raise ValueError(
                f"batch_size={batch_size} is larger than the data, which has "
                f"{num_examples} examples. Use a smaller batch_size."
            )
        self.num_examples = int(num_examples)
        self.batch_size = int(batch_size)
        self._transforms: tuple[Callable, ...] = ()

    def map(self, function: Callable) -> "PoissonDataset":
        """A data set whose batches went through a function.

        Args:
            function: takes the batch's x, or x and y, or x, y and
                sample_weight, and returns as many. It runs as a graph of
                TensorFlow, and must keep the number and order of the rows and
                treat each by itself: one that mixes rows voids the guarantee.
        """

        def transform(batch):
            present = [part for part in batch if part is not None]
            return keras.utils.unpack_x_y_sample_weight(function(*present))

        return self.transformed(transform)

    def transformed(self, transform: Callable) -> "PoissonDataset":
        """As `map`, for a function of (x, y, sample_weight)."""
        result = copy.copy(self)
        result._transforms = (*self._transforms, transform)
        return result

    def some(self) -> tuple[Any, Any, Any]:
        """Some examples, for the check before training."""
        if self._load is None:
            batch = some(self._arrays)
        else:
            rows = min(64, self.num_examples)
            chosen = np.linspace(0, self.num_examples - 1, rows)
            batch = self._loaded(chosen.astype(np.int64))
            batch = tf.nest.map_structure(_tensor_or_none, batch)
        for transform in self._transforms:
            batch = transform(batch)
        return batch

    def digest(self) -> int:
        """A number that is the same for the same arrays; 0 for a function.

        By rows from all over them. What a function loads may be random.
        """
        return 0 if self._load is not None else digest(some(self._arrays))

    def batches(
        self,
        rng: np.random.Generator,
        static_shapes: bool = False,
        parts: Parts | None = None,
    ) -> tf.data.Dataset:
        """An endless data set of `PoissonBatch`, or of `Part`s of them.

        Args:
            rng: Source of randomness. Each new iterator continues its stream,
                so no draw is repeated; draws that were prefetched and never
                used are dropped, which is harmless since draws are
                independent of each other.
            static_shapes: If true, pad every batch to `capacity(b, N)` rows,
                so that XLA compiles once. If false, pad only an empty batch,
                to one row. Padding rows are copies of the first example.
            parts: For replicas, each of which gets a part of the draw. The
                parts of a draw follow one another, none has a row of another
                one, and all of them together are the draw.
        """
        if self._load is None:
            return poisson_dataset(
                self._arrays,
                self.batch_size,
                rng,
                static_shapes=static_shapes,
                transforms=self._transforms,
                parts=parts,
            )
        draws = functools.partial(
            _poisson_draws,
            self.num_examples,
            self.batch_size,
            rng,
            static_shapes,
            parts,
        )
        data = self._loading(draws)
        return _finish(data, self._transforms, PoissonBatch, parts)

    def passes(
        self,
        rng: np.random.Generator,
        static_shapes: bool = False,
        parts: Parts | None = None,
    ) -> tf.data.Dataset:
        """An endless data set of `PassBatch`: shuffled passes over arrays.

        What Keras does by itself, and not Poisson sampling. The last batch of
        a pass may be smaller; with static shapes it is padded. Arguments as
        for `batches`.
        """
        size, batch_size = self.num_examples, self.batch_size
        multiple = batch_size if static_shapes else 1

        def draws() -> Iterator[Draw]:
            while True:
                order = rng.permutation(size).astype(np.int64)
                for start in range(0, size, batch_size):
                    rows = order[start : start + batch_size]
                    yield from _padded(rows, multiple, rng, parts)

        data = _gathered(draws, self._arrays)
        return _finish(data, self._transforms, PassBatch, parts)

    def __iter__(self) -> Iterator[DrawnBatch]:
        for data in self.batches(np.random.default_rng()):
            yield DrawnBatch(data, self.num_examples, self.batch_size)

    def _loaded(self, indices):
        batch = keras.utils.unpack_x_y_sample_weight(self._load(indices))
        batch = without_lists(as_arrays(batch))
        if num_examples_of(batch) != len(indices):
            raise ValueError(
                f"The function that loads examples was given {len(indices)} "
                f"indices and returned {num_examples_of(batch)} examples."
            )
        return batch

    def _loading(self, draws):
        present, leaves = _flattened(self._loaded(np.zeros(1, np.int64)))

        def batches():
            for indices, *rest in draws():
                yield *_flattened(self._loaded(indices))[1], *rest

        specs = [
            tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype)
            for leaf in leaves
        ]
        data = tf.data.Dataset.from_generator(
            batches,
            output_signature=(*specs, *_DRAW_SPEC[1:]),
        )
        return data.map(
            lambda *leaves: (_unflatten(present, leaves[:-2]), *leaves[-2:])
        )


def poisson_dataset(
    arrays: Any,
    expected_batch_size: float,
    rng: np.random.Generator,
    *,
    static_shapes: bool,
    transforms: Sequence[Callable[[Any], Any]] = (),
    parts: Parts | None = None,
) -> tf.data.Dataset:
    """As `PoissonDataset.batches`, for arrays of any structure.

    Lists come back as tuples (`tf.data` would stack lists).
    """
    arrays = keras.tree.lists_to_tuples(arrays)
    size = num_examples_of(arrays)
    _check_batch_size(expected_batch_size, size)
    draws = functools.partial(
        _poisson_draws, size, expected_batch_size, rng, static_shapes, parts
    )
    data = _gathered(draws, arrays)
    return _finish(data, transforms, PoissonBatch, parts)


def _poisson_draws(size, batch_size, rng, static_shapes, parts):
    """Indices, masks and tags of one draw after the other."""
    multiple = capacity(batch_size, size) if static_shapes else 1
    while True:
        indices = poisson_indices(size, batch_size, rng)
        yield from _padded(indices, multiple, rng, parts)


def _padded(indices, multiple, rng, parts) -> Iterator[Draw]:
    """A draw, or the parts of it, each with the same random tag."""
    if parts is None:
        yield *pad(indices, padded_size(len(indices), multiple)), NO_TAG
        return
    tag, multiple = rng.integers(TAGS), -(-multiple // parts.count)
    for part in np.array_split(indices, parts.count)[parts.wanted]:
        yield *pad(part, padded_size(len(part), multiple)), tag


def _gathered(draws, arrays):
    """The rows of the arrays that were drawn, and the mask."""
    present, leaves = _flattened(arrays)
    # The data set may not fit an accelerator; only batches should go there.
    with tf.device("CPU:0"):
        tensors = tuple(
            leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)
            for leaf in leaves
        )

    def gather(draw, tensors):
        indices, mask, tag = draw
        rows = [tf.gather(tensor, indices) for tensor in tensors]
        return _unflatten(present, rows), mask, tag

    data = tf.data.Dataset.from_generator(draws, output_signature=_DRAW_SPEC)
    # Zipping hands the tensors over by reference; captured by the mapped
    # function they would become part of its graph.
    data = tf.data.Dataset.zip(
        data, tf.data.Dataset.from_tensors(tensors).repeat()
    )
    return data.map(gather, num_parallel_calls=tf.data.AUTOTUNE)


def _finish(data, transforms, kind, parts):
    for transform in transforms:
        data = data.map(
            lambda batch, *rest, transform=transform: (
                keras.tree.lists_to_tuples(transform(batch)),
                *rest,
            ),
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    def finished(batch, mask, tag):
        batch = kind(batch, mask)
        return batch if parts is None else Part(batch, tag)

    data = data.map(finished)
    data = data.apply(
        tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    )
    return data.prefetch(tf.data.AUTOTUNE)


def _flattened(structure):
    """Which leaves are present, and these."""
    present = tf.nest.map_structure(lambda leaf: leaf is not None, structure)
    leaves = tf.nest.flatten(structure)
    return present, [leaf for leaf in leaves if leaf is not None]


def _tensor_or_none(leaf):
    return None if leaf is None else tf.convert_to_tensor(leaf)


def is_arrays(x: Any) -> bool:
    """Whether data is held in memory, so that it can be sampled here."""
    streams = (tf.data.Dataset, keras.utils.PyDataset, PoissonDataset)
    return not isinstance(x, streams) and not hasattr(x, "__next__")


def as_arrays(structure: Any) -> Any:
    """Turns what Keras accepts as data into arrays.

    Tensors stay; frames and series of pandas, lists of numbers and of strings
    become NumPy arrays, floating-point ones in Keras's default type.
    """
    if isinstance(structure, (list, tuple)) and (
        not structure
        or isinstance(structure[0], (str, bytes, int, float, np.generic))
    ):
        return as_arrays(np.array(structure))
    if isinstance(structure, (list, tuple)):
        parts = [as_arrays(part) for part in structure]
        return parts if isinstance(structure, list) else tuple(parts)
    if isinstance(structure, dict):
        return {key: as_arrays(part) for key, part in structure.items()}
    if structure is None or isinstance(structure, tf.Tensor):
        return structure
    array = np.asarray(structure)
    if np.issubdtype(array.dtype, np.floating):
        array = array.astype(keras.config.floatx(), copy=False)
    return array


def without_lists(structure: Any) -> Any:
    """The structure with tuples for lists, which tf.data would stack."""
    if isinstance(structure, (list, tuple)):
        return tuple(without_lists(part) for part in structure)
    if isinstance(structure, dict):
        return {key: without_lists(part) for key, part in structure.items()}
    return structure


def split(arrays: Any, fraction: float) -> tuple[Any, Any]:
    """The data without its last part, and that part, for validation."""
    count = num_examples_of(arrays)
    kept = math.floor(count * (1 - fraction))
    if not 0 < kept < count:
        raise ValueError(
            f"validation_split={fraction!r} of {count} examples leaves no "
            "example for training or none for validation."
        )

    def part(rows):
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else leaf[rows], arrays
        )

    return part(slice(None, kept)), part(slice(kept, None))


def some(arrays: Any, rows: int = 64) -> Any:
    """Some rows of every array, from all over it: data may be sorted."""
    count = num_examples_of(arrays)
    chosen = np.linspace(0, count - 1, min(rows, count)).astype(np.int64)
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else _rows(leaf, chosen), arrays
    )


def digest(*structures: Any) -> int:
    """A number that is the same for the same arrays, numbers and texts."""
    found = hashlib.sha256()
    for leaf in tf.nest.flatten(structures):
        value = np.asarray("" if leaf is None else leaf)
        found.update(f"{value.dtype}{value.shape}".encode())
        is_object = value.dtype == object
        found.update(
            repr(value.tolist()).encode() if is_object else value.tobytes()
        )
    return int.from_bytes(found.digest()[:8], "big", signed=True)


def _rows(leaf, chosen):
    if isinstance(leaf, tf.Tensor):
        return tf.gather(leaf, chosen)
    return tf.convert_to_tensor(leaf[chosen])


def peek(stream: Any) -> tuple[tuple[Any, Any, Any], Any]:
    """The first batch of a stream, and the stream as it was before."""
    if isinstance(stream, tf.data.Dataset):
        first = next(iter(stream.take(1)), None)
    elif isinstance(stream, keras.utils.PyDataset):
        first = stream[0]
    else:
        first = next(stream, None)
        stream = _put_back(first, stream)
    if first is None:
        raise ValueError("The data set is empty.")
    return some(as_arrays(unpack(first).batch)), stream


def _put_back(first, stream):
    yield first
    yield from stream


def static_batch_size(stream: Any) -> int | None:
    """The size of a data set's batches, if it is fixed."""
    if not isinstance(stream, tf.data.Dataset):
        return None
    return tf.nest.flatten(stream.element_spec)[0].shape[0]


def _leading_size(leaf: Any) -> int:
    shape = getattr(leaf, "shape", None)
    if shape is None or len(shape) == 0 or shape[0] is None:
        raise ValueError(
            "Every leaf of the data must be an array or tensor with a known "
            f"leading size. Received: {leaf!r:.80}"
        )
    return int(shape[0])


def _check_batch_size(expected_batch_size: float, num_examples: int) -> None:
    if not 0 < expected_batch_size <= num_examples:
        raise ValueError(
            "expected_batch_size must be positive and at most the number of "
            f"examples. Received: {expected_batch_size=}, {num_examples=}."
        )


def pad(indices: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Appends index 0 up to `rows`; returns the indices and the mask."""
    padded = np.zeros(rows, np.int64)
    padded[: len(indices)] = indices
    return padded, np.arange(rows) < len(indices)


@tf.autograph.experimental.do_not_convert
def _unflatten(present: Any, leaves: list[Any]) -> Any:
    """Packs leaves into a structure of booleans, with `None` where false."""
    remaining = iter(leaves)
    flat = [
        next(remaining) if is_present else None
        for is_present in tf.nest.flatten(present)
    ]
    return tf.nest.pack_sequence_as(present, flat)
