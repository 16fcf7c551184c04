"""
Title: Private classification of tabular data
Description: A small table, a target epsilon, and what must not be overlooked.
Accelerator: None
"""

"""
## Introduction

569 tumours with 30 measurements each come with scikit-learn. Small tables are
the hard case of private training: with N examples and batches of b, every
example is in a batch with probability b/N, and for small N that is large. So
expect either a large epsilon or a simple model. We take a simple model.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import keras_fastclip

FAST = "--fast" in sys.argv

table, labels = load_breast_cancer(return_X_y=True)

"""
## Scaling without looking

Means and standard deviations of the columns would be computed from the private
data, and nothing would protect them: a `StandardScaler` or an adapted
`Normalization` layer voids the guarantee. Use what is known without the data,
such as the ranges of the instruments. Here we take the largest values that the
published description of the data set prints, for each of ten measurements:
their mean, their standard error and their worst value.
"""

LARGEST = np.array(
    [
        [28.11, 39.28, 188.5, 2501, 0.163, 0.345, 0.427, 0.201, 0.304, 0.097],
        [2.873, 4.885, 21.98, 542.2, 0.031, 0.135, 0.396, 0.053, 0.079, 0.03],
        [36.04, 49.54, 251.2, 4254, 0.223, 1.058, 1.252, 0.291, 0.664, 0.208],
    ]
).reshape(-1)

x_train, x_test, y_train, y_test = train_test_split(
    (table / LARGEST).astype("float32") - 0.4,
    labels,
    test_size=0.2,
    random_state=0,
)

"""
## The model

We name the epsilon instead of the noise. The first `fit` knows how many steps
it will make and calibrates the noise for them; no later step exceeds it.
"""

EPSILON, DELTA = 2.0, 1e-3

model = keras_fastclip.DPSequential(
    [keras.Input((30,)), layers.Dense(1)],
    l2_norm_clip=1.0,
    target_epsilon=EPSILON,
    delta=DELTA,
)
model.compile(
    optimizer=keras.optimizers.SGD(1.0, momentum=0.9),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
)
model.fit(
    x_train,
    y_train,
    batch_size=128,
    epochs=5 if FAST else 30,
    callbacks=[keras_fastclip.EpsilonTracker(DELTA)],
)

"""
## What came of it

The statement says what the numbers cover, and what they do not.
"""

_, accuracy = model.evaluate(x_test, y_test, verbose=0)
epsilon = model.privacy_spent(DELTA)
print(model.privacy_statement(DELTA))
print(f"Test accuracy: {accuracy:.1%}")
print(f"Epsilon: {epsilon:.2f} at delta {DELTA:g}")
