"""
Title: Two workers on one machine
Description: Private training by several processes, which may be lost.
Accelerator: None
"""

"""
## Introduction

`tf.distribute.MultiWorkerMirroredStrategy` trains one model in several
processes, usually on as many machines. All run the same program, and each finds
in the variable `TF_CONFIG` who the others are and which of them it is itself.
Here both are processes of one machine: without `TF_CONFIG`, this file starts
itself twice and looks after the two.

Private training needs nothing else. All workers are given the same data. They
draw every batch together, by Poisson sampling over all of it, and each takes
its own part of it. The first worker adds noise to the sum over all parts, once,
so epsilon is that of a single device.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import keras_fastclip

FAST = "--fast" in sys.argv
DELTA, BATCH, EPOCHS = 1e-4, 128, 2 if FAST else 20

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
x_train, y_train, x_test, y_test = (
    *(images[:1400], labels[:1400]),
    *(images[1400:], labels[1400:]),
)

"""
## What a worker does

Make the strategy before all else, and the model under its scope. `batch_size`
is that of all workers together. The first worker, and no other, writes files.
`BackupAndRestore` sees to that by itself; its folder must be one that all
workers can read. Before you save the model, ask which worker you are.
"""


def work(folder):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras_fastclip.DPSequential(
            [keras.Input((64,)), layers.Dense(64, "tanh"), layers.Dense(10)],
            l2_norm_clip=1.0,
            noise_multiplier=1.5,
        )
        model.compile(
            optimizer=keras.optimizers.SGD(0.5, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    first = strategy.cluster_resolver.task_id == 0
    model.fit(
        x_train,
        y_train,
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=2 if first else 0,
        callbacks=[
            keras_fastclip.BackupAndRestore(os.path.join(folder, "backup"))
        ],
    )
    if first:
        model.save(os.path.join(folder, "model.keras"))


if "TF_CONFIG" in os.environ:
    work(folder=sys.argv[-1])
    sys.exit()

"""
## What looks after the workers

A worker that loses another one cannot go on: it ends with an error. Whatever
runs your jobs then has to start all workers again. They resume from the latest
backup, which holds the record of the private steps that its weights have seen.
"""


def start_workers(folder, count=2):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for free in sockets:
        free.close()
    started = []
    for index in range(count):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": hosts}, "task": task}
        started.append(
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], folder],
                env={**os.environ, "TF_CONFIG": json.dumps(config)},
            )
        )
    return started


with tempfile.TemporaryDirectory() as folder:
    for _ in range(3):
        codes = [process.wait() for process in start_workers(folder)]
        if not any(codes):
            break
        print(f"A worker was lost (exit codes {codes}); starting all again.")
    model = keras.models.load_model(os.path.join(folder, "model.keras"))

"""
## What came of it

The model that the first worker saved is like that of a single device. Every
step of both workers together is on its record, once.
"""

_, accuracy = model.evaluate(x_test, y_test, verbose=0)
epsilon = model.privacy_spent(DELTA)
print(f"Test accuracy: {accuracy:.1%}")
print(f"Epsilon: {epsilon:.2f} at delta {DELTA:g}")
