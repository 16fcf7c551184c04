"""
Title: Quick start: a private classifier of handwritten digits
Description: Train a small convolutional network with differential privacy.
Accelerator: None
"""

"""
## Introduction

1,797 images of handwritten digits come with scikit-learn. We keep a fifth of
them for testing and train on the rest, so that nobody can tell from the
trained weights whether any single image was among them.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_fastclip

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
x_train, x_test, y_train, y_test = train_test_split(
    images, labels, test_size=0.2, random_state=0
)

"""
## The model

One class differs from plain Keras, and two numbers: how much a single image
may move the weights (`l2_norm_clip`), and how much noise covers that movement
(`noise_multiplier`).
"""

model = keras_fastclip.DPSequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="tanh"),
        layers.MaxPooling2D(2),
        layers.Conv2D(32, 3, padding="same", activation="tanh"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(10),
    ],
    l2_norm_clip=1.0,
    noise_multiplier=2.0,
)

"""
## Training

`compile` and `fit` are Keras's. The progress bar shows epsilon, the privacy
spent so far.
"""

DELTA = 1e-4

model.compile(
    optimizer=keras.optimizers.SGD(0.5, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(
    x_train,
    y_train,
    batch_size=256,
    epochs=20,
    callbacks=[keras_fastclip.EpsilonTracker(DELTA)],
)

"""
## What came of it
"""

_, accuracy = model.evaluate(x_test, y_test, verbose=0)
path = os.path.abspath("digits.keras")
model.save(path)
print()
print(model.privacy_statement(DELTA))
print(f"Test accuracy: {accuracy:.1%}")
print(f"Epsilon: {model.privacy_spent(DELTA):.2f} at delta {DELTA:g}")
print(f"Saved model: {path}")
