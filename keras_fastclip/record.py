"""The record of a model's steps travels with its weights.

Keras saves every saveable object among the attributes of a model under its
name, in `.keras` and weights files alike, and a plain model that loads such a
file passes over it. So weights and record are one file and never disagree.
The key of the noise is not among what is saved.
"""

import json
import os
import weakref
from typing import Any

import keras
import numpy as np

from keras_fastclip import _keras

# The attribute of a private model that holds the record.
ATTRIBUTE = "privacy_record"


class Record(_keras.KerasSaveable):
    """Writes and reads what `Privacy.record` returns.

    Args:
        model: a private model.
    """

    def __init__(self, model: keras.Model):
        # Keras follows references, and would follow this one for ever.
        self._model = weakref.ref(model)

    def _obj_type(self):
        return "Layer"

    def save_own_variables(self, store) -> None:
        model = self._model()
        text = json.dumps(model._privacy.record(model))
        store["record"] = np.frombuffer(text.encode(), np.uint8)

    def load_own_variables(self, store) -> None:
        # Weights without a record are not of a private model.
        if "record" in store.keys():
            self._model()._privacy.continue_from(_decoded(store["record"]))


def read(path: str | os.PathLike) -> dict[str, Any]:
    """The record in a `.keras` or weights file."""
    with _keras.weights_store(path) as store:
        entry = store.get(ATTRIBUTE)
        if "record" in entry.keys():
            return _decoded(entry["record"])
    raise ValueError(
        f"The file {os.fspath(path)!r} has no privacy record: it was not "
        "saved by a private model."
    )


def _decoded(array) -> dict[str, Any]:
    return json.loads(np.asarray(array, np.uint8).tobytes().decode())
