"""
Title: Fashion-MNIST at epsilon 2.7
Description: Three private models of 60,000 images, and what makes them good.
Accelerator: None
"""

"""
## Introduction

Papernot et al. ("Tempered sigmoid activations for deep learning with
differential privacy", 2021) trained a small convolutional network on
Fashion-MNIST with (epsilon, delta) = (2.7, 1e-5), and found 86.1 % test
accuracy. This example trains three models within the same budget:

- `scattering`: one dense layer on wavelet features that are fixed beforehand
  (Tramer & Boneh, "Differentially private learning needs better features (or
  much more data)", 2021);
- `cnn`: a convolutional network of about their size, end to end, with large
  batches, group normalization and averaged weights;
- `views`: the same with four augmented views of each image (De et al.,
  "Unlocking high-accuracy differentially private image classification through
  scale", 2022), which takes four times as long.

```
python examples/fashion_mnist.py                      # scattering, one seed
python examples/fashion_mnist.py --models scattering cnn --seeds 0 1 2
```
"""

import argparse
import gzip
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers
from kymatio import Scattering2D

import keras_fastclip

parser = argparse.ArgumentParser()
parser.add_argument("--models", nargs="+", default=["scattering"])
parser.add_argument("--seeds", nargs="+", type=int, default=[0])
parser.add_argument("--fast", action="store_true")
arguments = parser.parse_args()
FAST = arguments.fast

EPSILON, DELTA = 2.7, 1e-5

"""
## The images

Debian has them in the package dataset-fashion-mnist; elsewhere Keras downloads
them.
"""

FOLDER = pathlib.Path("/usr/share/datasets/fashion-mnist")


def read(name, header):
    with gzip.open(FOLDER / f"{name}-ubyte.gz") as file:
        return np.frombuffer(file.read(), "uint8", offset=header)


def load():
    if not FOLDER.exists():
        return keras.datasets.fashion_mnist.load_data()
    return [
        (
            read(f"{part}-images-idx3", 16).reshape(-1, 28, 28),
            read(f"{part}-labels-idx1", 8).astype("int32"),
        )
        for part in ("train", "t10k")
    ]


(x_train, y_train), (x_test, y_test) = load()
if FAST:
    x_train, y_train = x_train[:2000], y_train[:2000]
    x_test, y_test = x_test[:500], y_test[:500]

"""
## Features that need no data

A scattering transform convolves an image with wavelets, takes absolute values,
and averages. Nothing in it is trained, so it costs no privacy: an image becomes
81 channels of 7 x 7. Normalization must not cost any either. Means and
deviations of the data set would; those of each image by itself do not.

On features as good as these, one dense layer is enough.
"""


def scattering_features(images):
    transform = Scattering2D(J=2, L=8, shape=(28, 28))
    normalize = layers.GroupNormalization(
        27, center=False, scale=False, epsilon=1e-8
    )
    parts = []
    for start in range(0, len(images), 1000):
        part = transform(images[start : start + 1000].astype("float32") / 255)
        parts.append(normalize(np.moveaxis(part, 1, -1)))
    return np.concatenate(parts)


def scattering(**settings):
    model = keras_fastclip.DPSequential(
        [
            keras.Input((7, 7, 81)),
            layers.Flatten(),
            layers.Dense(10, kernel_initializer="zeros"),
        ],
        l2_norm_clip=0.1,
        **settings,
    )
    return model, keras.optimizers.SGD(16.0, momentum=0.9)


"""
## End to end

Bounded activations keep gradients from growing, so that clipping costs less;
group normalization, which is of each image by itself, helps as it does without
privacy. One dense layer on top, which starts from zero, learns faster than two:
noise is added in every step, so what counts is to need few of them. Averaging
the weights over steps takes out some of the noise and costs no privacy; Keras
does it with `use_ema`.

Nor do `views` cost any. Every image is flipped and shifted at random, several
times in each step; the gradient of an image is the mean over its views, and it
is the mean that is clipped. So an image still moves the sum of gradients by no
more than the clip norm.
"""


def pixels(images):
    images = images[..., None].astype("float32")
    mean = images.mean((1, 2), keepdims=True)
    deviation = images.std((1, 2), keepdims=True)
    return (images - mean) / (deviation + 1)


def cnn(*augmentation, **settings):
    model = keras_fastclip.DPSequential(
        [
            keras.Input((28, 28, 1)),
            *augmentation,
            layers.Conv2D(32, 5, strides=2, padding="same"),
            layers.GroupNormalization(8),
            layers.Activation("tanh"),
            layers.Conv2D(64, 3, strides=2, padding="same"),
            layers.GroupNormalization(8),
            layers.Activation("tanh"),
            layers.Flatten(),
            layers.Dense(10, kernel_initializer="zeros"),
        ],
        l2_norm_clip=1.0,
        **settings,
    )
    # 20 epochs of 30 steps: long steps first, then ones with little noise.
    rate = keras.optimizers.schedules.CosineDecay(1.0, 20 * 30)
    return model, keras.optimizers.SGD(
        rate, momentum=0.9, use_ema=True, ema_momentum=0.98
    )


def cnn_with_views(**settings):
    shift = layers.RandomTranslation(0.08, 0.08, fill_mode="nearest")
    flip = layers.RandomFlip("horizontal")
    return cnn(flip, shift, views=4, **settings)


"""
## Training

Large batches: the noise in the mean gradient falls faster with their size than
the accountant's charge rises. The noise is calibrated for the epsilon that we
name. A seed makes noise and sampling repeatable, which is for public data such
as these only: noise that others can repeat protects nothing.
"""


def train(build, data, batch_size, epochs, seed):
    keras.utils.set_random_seed(seed)
    model, optimizer = build(target_epsilon=EPSILON, delta=DELTA, seed=seed)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        data[0],
        y_train,
        batch_size=min(batch_size, len(y_train) // 4),
        epochs=1 if FAST else epochs,
        verbose=2,
    )
    _, accuracy = model.evaluate(data[1], y_test, verbose=0)
    return model, accuracy


PLANS = {
    "scattering": (scattering_features, scattering, 8192, 40),
    "cnn": (pixels, cnn, 2048, 20),
    "views": (pixels, cnn_with_views, 2048, 20),
}

rows = []
for name in PLANS if FAST else arguments.models:
    features, build, batch_size, epochs = PLANS[name]
    data = features(x_train), features(x_test)
    for seed in arguments.seeds:
        started, used = time.perf_counter(), time.process_time()
        model, accuracy = train(build, data, batch_size, epochs, seed)
        epsilon = model.privacy_spent(DELTA)
        minutes = (time.perf_counter() - started) / 60
        processor = (time.process_time() - used) / 60
        rows.append((name, seed, accuracy, epsilon, minutes, processor))
        print(f"{name}, seed {seed}: {accuracy:.2%}", flush=True)

"""
## What came of it
"""

print(model.privacy_statement(DELTA))
print("\nmodel       seed  accuracy  epsilon  minutes  of processor time")
for name, seed, accuracy, epsilon, *times in rows:
    print(
        f"{name:<10}  {seed:4d}  {accuracy:8.2%}  {epsilon:7.3f}"
        f"  {times[0]:7.1f}  {times[1]:.1f}"
    )
for name in PLANS:
    found = [row[2] for row in rows if row[0] == name]
    if found:
        print(f"{name}: mean {np.mean(found):.2%} over {len(found)} seeds")
