"""
Title: A private recommender with large embedding tables
Description: Two embedding tables, hundreds of thousands of rows, private fit.
Accelerator: None
"""

"""
## Introduction

Recommenders keep a row of weights for every user and every item. An example,
one rating, touches two of all those rows, so per-example gradients are almost
empty, and building them would take memory of batch times table. Here their
norms come from the touched rows alone; the tables are never copied for single
examples.

With a network, this downloads the 100,000 ratings of MovieLens. Without one,
or with `--fast`, it makes up ratings.

What is protected is one *rating*. A user with 50 ratings is protected much
less. To protect users, make an example of all the ratings of one user.
"""

import os
import sys
import zipfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

import keras_fastclip

FAST = "--fast" in sys.argv


def movielens():
    """User, item and rating from 1 to 5, in random order."""
    path = keras.utils.get_file(
        "ml-100k.zip",
        "https://files.grouplens.org/datasets/movielens/ml-100k.zip",
        extract=False,
    )
    with zipfile.ZipFile(path) as archive, archive.open("ml-100k/u.data") as f:
        table = np.loadtxt(f, dtype="int64")
    np.random.default_rng(0).shuffle(table)
    return table[:, 0], table[:, 1], table[:, 2].astype("float32")


def made_up_ratings():
    """Ratings by how well hidden tastes of users and items agree."""
    rng = np.random.default_rng(0)
    count = 2_000 if FAST else 100_000
    users = rng.integers(0, 1_000, count)
    items = rng.integers(0, 2_000, count)
    taste, kind = rng.normal(size=(1_000, 2)), rng.normal(size=(2_000, 2))
    match = np.sum(taste[users] * kind[items], 1) + kind[items, 0]
    return users, items, np.clip(3 + match, 1, 5).astype("float32")


try:
    if FAST:
        raise ConnectionError("a fast run downloads nothing")
    users, items, ratings = movielens()
except Exception as error:
    print(f"Made-up ratings ({error}).")
    users, items, ratings = made_up_ratings()

held_out = len(ratings) // 10
x = {"user": users, "item": items}
x_train = {name: ids[held_out:] for name, ids in x.items()}
x_test = {name: ids[:held_out] for name, ids in x.items()}
y_train, y_test = ratings[held_out:], ratings[:held_out]

"""
## The model

Which ids occur is private, so the size of a table must not come from the data:
take one that surely is enough.
"""

ROWS = 10_000 if FAST else 100_000

inputs = {
    name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")
}
vectors = {
    name: layers.Embedding(ROWS, 8, name=f"{name}_table")(ids)
    for name, ids in inputs.items()
}
biases = {
    name: layers.Embedding(ROWS, 1, name=f"{name}_bias")(ids)
    for name, ids in inputs.items()
}
match = layers.Dot(axes=-1)([vectors["user"], vectors["item"]])
# The middle of the scale is public, so the model need not learn it.
outputs = layers.Rescaling(1.0, offset=3.0)(
    layers.Add()([match, biases["user"], biases["item"]])
)
model = keras_fastclip.DPModel(
    inputs, outputs, l2_norm_clip=1.0, noise_multiplier=1.0
)

"""
## Private training

Large batches pay: the noise is the same for a batch of any size. The optimizer
is plain SGD. Adam and its kin would blow up the noise of the many rows that a
batch does not touch.
"""

DELTA = 1e-6

model.compile(
    optimizer=keras.optimizers.SGD(20.0),
    loss="mse",
    metrics=[keras.metrics.RootMeanSquaredError(name="rmse")],
)
model.fit(
    x_train,
    y_train,
    batch_size=500 if FAST else 4096,
    epochs=1 if FAST else 10,
    callbacks=[keras_fastclip.EpsilonTracker(DELTA)],
)

"""
## What came of it
"""

_, rmse = model.evaluate(x_test, y_test, batch_size=4096, verbose=0)
constant = np.sqrt(np.mean((y_test - 3) ** 2))
epsilon = model.privacy_spent(DELTA)
print(f"Error: {rmse:.3f} (always answering 3: {constant:.3f})")
print(f"Epsilon: {epsilon:.2f} at delta {DELTA:g}, for one rating")
keras_fastclip.clipping_summary(model)
