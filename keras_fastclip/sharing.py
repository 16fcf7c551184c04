"""Which private models trained a weight.

Models may share layers, and each has a ledger of its own steps alone. So every
weight remembers, as long as it lives, which models made steps on it.
"""

import itertools
import weakref
from collections.abc import Iterable

import keras

# A number for each model, which outlives it.
new_owner = itertools.count().__next__

# By id of a weight: the weight, which is not kept alive by it, and the names of
# the models that trained it, by their numbers.
_owners: dict[int, tuple[weakref.ref, dict[int, str]]] = {}


def claim(
    weights: Iterable[keras.Variable], owner: int, name: str | None
) -> None:
    """Enters a model as one that trains these weights."""
    for weight in weights:
        key = id(weight)
        if key not in _owners:
            forget = weakref.ref(weight, lambda _, key=key: _owners.pop(key))
            _owners[key] = forget, {}
        _owners[key][1][owner] = name


def other_owner(weights: Iterable[keras.Variable], owner: int) -> str | None:
    """The name of another model that trained any of these weights."""
    for weight in weights:
        _, names = _owners.get(id(weight), (None, {}))
        for number, name in names.items():
            if number != owner:
                return name
    return None
