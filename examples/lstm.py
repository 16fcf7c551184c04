"""
Title: A private LSTM
Description: Recurrent layers, padding and masks in private training.
Accelerator: GPU
"""

"""
## Introduction

Recurrent layers train privately as they are: `LSTM`, `GRU`, `SimpleRNN`,
bidirectional or stacked, with masks and dropout. No other layer class is
needed, and no per-example gradients are built inside the loop over the steps.

With a network, this downloads the IMDB reviews. Without one, or with
`--fast`, it makes up sequences in which the order matters.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

import keras_fastclip

FAST = "--fast" in sys.argv
WORDS, LENGTH = 5_000, 40


def imdb():
    """20,000 reviews, as numbers of words."""
    (ids, labels), _ = keras.datasets.imdb.load_data(num_words=WORDS)
    return list(ids[:20_000]), labels[:20_000]


def made_up_sequences():
    """Of words A and B, which comes first? The others say nothing."""
    rng = np.random.default_rng(0)
    count = 500 if FAST else 20_000
    labels = rng.integers(0, 2, count)
    sequences = []
    for label in labels:
        words = rng.integers(3, 20, rng.integers(5, LENGTH))
        first, last = np.sort(rng.choice(len(words), 2, replace=False))
        words[first], words[last] = (1, 2) if label else (2, 1)
        sequences.append(words.tolist())
    return sequences, labels


try:
    if FAST:
        raise ConnectionError("a fast run downloads nothing")
    sequences, labels = imdb()
except Exception as error:
    print(f"Made-up sequences ({error}).")
    sequences, labels = made_up_sequences()

"""
## Padding

Shorter sequences are filled up with zeros to a length that is fixed, not taken
from the data. `mask_zero` makes the LSTM pass over them.
"""

x = keras.utils.pad_sequences(sequences, maxlen=LENGTH)
held_out = len(x) // 5
x_train, y_train = x[held_out:], labels[held_out:]
x_test, y_test = x[:held_out], labels[:held_out]

model = keras_fastclip.DPSequential(
    [
        keras.Input((LENGTH,), dtype="int32"),
        layers.Embedding(WORDS, 16, mask_zero=True),
        layers.LSTM(32),
        layers.Dense(1),
    ],
    l2_norm_clip=1.0,
    noise_multiplier=0.7,
)

"""
## Private training
"""

DELTA = 1e-5

model.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
)
model.fit(
    x_train,
    y_train,
    batch_size=100 if FAST else 512,
    epochs=1 if FAST else 10,
    callbacks=[keras_fastclip.EpsilonTracker(DELTA)],
)

"""
## What came of it
"""

_, accuracy = model.evaluate(x_test, y_test, batch_size=512, verbose=0)
epsilon = model.privacy_spent(DELTA)
print(f"Test accuracy: {accuracy:.1%}")
print(f"Epsilon: {epsilon:.2f} at delta {DELTA:g}")
keras_fastclip.clipping_summary(model)
