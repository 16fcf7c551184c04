"""
Title: A private training loop of your own
Description: PoissonDataset and train_on_batch, fully accounted for.
Accelerator: None
"""

"""
## Introduction

`fit` is not the only way. In a loop of your own, draw the batches from a
`PoissonDataset` and hand each to `train_on_batch`: every step is then counted
and accounted for as `fit` would. Batches from anywhere else are counted too,
but nobody knows how they were drawn, so epsilon becomes infinite.
"""

import itertools
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import keras_fastclip

FAST = "--fast" in sys.argv

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
x_train, y_train, x_test, y_test = (
    *(images[:1400], labels[:1400]),
    *(images[1400:], labels[1400:]),
)

"""
## The model

`max_epsilon` makes a budget part of the model. It holds in every kind of loop:
`train_on_batch` raises `BudgetExceededError` before the step that would exceed
it.
"""

DELTA, BATCH = 1e-4, 128
STEPS = len(x_train) // BATCH

model = keras_fastclip.DPSequential(
    [keras.Input((64,)), layers.Dense(64, "tanh"), layers.Dense(10)],
    l2_norm_clip=1.0,
    noise_multiplier=1.5,
    max_epsilon=1.0 if FAST else 4.0,
    delta=DELTA,
)
model.compile(
    optimizer=keras.optimizers.SGD(0.5, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

"""
## The loop

A `PoissonDataset` goes on drawing for ever, so say how many batches make an
epoch. Its function `map` may change every example by itself: here each image
gets a little noise of its own.
"""


def augmented(x, y):
    return x + keras.random.normal(keras.ops.shape(x), stddev=0.05), y


data = keras_fastclip.PoissonDataset(x_train, y_train, batch_size=BATCH)
data = data.map(augmented)

epochs = 0
try:
    while True:
        for batch in itertools.islice(data, STEPS):
            logs = model.train_on_batch(batch, return_dict=True)
        epochs += 1
        model.optimizer.learning_rate *= 0.97
        if epochs % 5 == 0:
            print(f"epoch {epochs}: loss {logs['loss']:.3f}")
except keras_fastclip.BudgetExceededError as spent:
    print(f"Stopped in epoch {epochs + 1}: {spent}")

"""
## What came of it
"""

_, accuracy = model.evaluate(x_test, y_test, verbose=0)
epsilon = model.privacy_spent(DELTA)
print(f"Test accuracy: {accuracy:.1%}")
print(f"Epsilon: {epsilon:.2f} at delta {DELTA:g}")

"""
## Batches from elsewhere

The model trains on them, but it cannot state an epsilon any more. So try this
on a copy.
"""

copy = keras.models.clone_model(model)
copy = keras_fastclip.make_private(
    copy, l2_norm_clip=1.0, noise_multiplier=1.5, expected_batch_size=BATCH
)
copy.compile(optimizer="sgd", loss=model.loss)
copy.train_on_batch(x_train[:BATCH], np.array(y_train[:BATCH]))
unknown = copy.privacy_spent(DELTA)
print(f"Epsilon: {unknown}, because {unknown.reasons[0]}.")
