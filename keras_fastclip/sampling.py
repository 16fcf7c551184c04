"""Poisson sampling of in-memory data as a `tf.data` pipeline.

Amplification by sampling is a statement about one sampler: every example is
in the batch with probability q, independently of all others. This module
draws exactly that. Batch sizes therefore vary and may be zero; rows added to
make a shape constant are marked in a mask that travels beside the batch, and
a draw is never cut to fit.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

# A Binomial(N, b/N) count exceeds b + 8 sqrt(b) less than once in 1e10 draws
# from b = 10 on (1e6 at b = 1), so static shapes have one shape in practice.
_CAPACITY_DEVIATIONS = 8.0


class PoissonBatch(NamedTuple):
    """A batch, and which of its rows were drawn; others fill it up.

    A type of its own, so that a train step cannot take it for (x, y).
    """

    batch: Any
    real: tf.Tensor


def unpack(data: Any) -> tuple[tuple[Any, Any, Any], tf.Tensor | None]:
    """(x, y, sample_weight), and which rows are real; None if all are."""
    real = None
    if isinstance(data, PoissonBatch):
        data, real = data
    return keras.utils.unpack_x_y_sample_weight(data), real


def num_examples(structure: Any) -> int:
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


def poisson_dataset(
    arrays: Any,
    expected_batch_size: float,
    rng: np.random.Generator,
    *,
    static_shapes: bool,
    transform: Callable[[Any], Any] | None = None,
) -> tf.data.Dataset:
    """Makes an endless dataset of Poisson-sampled batches.

    Each element is a `PoissonBatch(batch, real)`. `batch` has the structure
    of `arrays`, with `None` leaves kept and lists turned into tuples
    (`tf.data` would stack lists). `real` is a boolean vector that is true for
    the rows that were drawn. The other rows are padding: copies of the first
    example, valid as input and to be ignored.

    An empty draw is a valid step (noise alone), so it is delivered too, as
    padding only. Each new iterator continues the random stream, so no draw is
    repeated; draws that were prefetched and never used are dropped, which is
    harmless since draws are independent of each other.

    Args:
        arrays: Nested tuples, lists and dicts of arrays or tensors with equal
            leading size N, strings included; leaves may be `None`. Usually
            `(x, y, sample_weight)`.
        expected_batch_size: The mean batch size b, in (0, N].
        rng: Source of randomness.
        static_shapes: If true, pad every batch to `capacity(b, N)` rows, so
            that XLA compiles once. If false, pad only an empty batch, to one
            row.
        transform: Optional function of the gathered batch, such as a
            preprocessor. It must return the same number of rows in the same
            order, and treat each row by itself: a transform that mixes rows
            voids the privacy guarantee.

    Returns:
        An infinite `tf.data.Dataset` of `PoissonBatch`.

    Example:

    >>> rng = np.random.default_rng()
    >>> data = poisson_dataset((x, y), 256, rng, static_shapes=False)
    >>> (x_batch, y_batch), mask = next(iter(data))
    """
    arrays = keras.tree.lists_to_tuples(arrays)
    size = num_examples(arrays)
    _check_batch_size(expected_batch_size, size)
    multiple = capacity(expected_batch_size, size) if static_shapes else 1
    present = tf.nest.map_structure(lambda leaf: leaf is not None, arrays)
    # The data set may not fit an accelerator; only batches should go there.
    with tf.device("CPU:0"):
        tensors = tuple(
            leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)
            for leaf in tf.nest.flatten(arrays)
            if leaf is not None
        )

    def draws() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            indices = poisson_indices(size, expected_batch_size, rng)
            yield _pad(indices, padded_size(len(indices), multiple))

    def gather(draw, tensors):
        indices, mask = draw
        rows = [tf.gather(tensor, indices) for tensor in tensors]
        return _unflatten(present, rows), mask

    data = tf.data.Dataset.from_generator(
        draws,
        output_signature=(
            tf.TensorSpec((None,), tf.int64),
            tf.TensorSpec((None,), tf.bool),
        ),
    )
    # Zipping hands the tensors over by reference; captured by the mapped
    # function they would become part of its graph.
    data = tf.data.Dataset.zip(
        data, tf.data.Dataset.from_tensors(tensors).repeat()
    )
    data = data.map(gather, num_parallel_calls=tf.data.AUTOTUNE)
    if transform is not None:
        data = data.map(
            lambda batch, mask: (
                keras.tree.lists_to_tuples(transform(batch)),
                mask,
            ),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    data = data.map(PoissonBatch)
    data = data.apply(
        tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    )
    return data.prefetch(tf.data.AUTOTUNE)


def is_arrays(x: Any) -> bool:
    """Whether data is held in memory, so that it can be sampled here."""
    streams = (tf.data.Dataset, keras.utils.PyDataset)
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
    count = num_examples(arrays)
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
    count = num_examples(arrays)
    chosen = np.linspace(0, count - 1, min(rows, count)).astype(np.int64)
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else _rows(leaf, chosen), arrays
    )


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
    batch, _ = unpack(first)
    return some(as_arrays(batch)), stream


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


def _pad(indices: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
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
