"""
Title: Private text classification with BERT and LoRA
Description: Fine-tune small low-rank matrices of a BERT classifier privately.
Accelerator: GPU
"""

"""
## Introduction

A pretrained language model was trained on public text; what is private are
the few thousand texts that it is fine-tuned on. With LoRA, only small
matrices beside the frozen kernels are trained. That suits private training:
noise is added to every trained weight, so fewer of them drown in less of it.

With a network, this downloads a small pretrained BERT and the IMDB reviews.
Without one, or with `--fast`, it runs the same code on a tiny BERT of random
weights and made-up reviews: that shows how it is done, not how well it works.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_hub
import numpy as np

import keras_fastclip

FAST = "--fast" in sys.argv


def imdb_and_pretrained_bert():
    """4,000 reviews as texts, and a BERT of 4 million weights."""
    (ids, labels), _ = keras.datasets.imdb.load_data()
    words = keras.datasets.imdb.get_word_index()
    # Keras counts three special tokens before the first word.
    word_of = {number + 3: word for word, number in words.items()}
    texts = [
        " ".join(word_of.get(number, "") for number in review[1:120])
        for review in ids[:5000]
    ]
    task = keras_hub.models.BertTextClassifier.from_preset(
        "bert_tiny_en_uncased", num_classes=2
    )
    task.preprocessor.sequence_length = 128
    return np.array(texts), labels[:5000], task


def made_up_reviews_and_random_bert():
    """Reviews that are good or bad by some of their words."""
    rng = np.random.default_rng(0)
    good, bad = ["great", "lovely", "moving"], ["dull", "poor", "awful"]
    other = ["the", "film", "plot", "was", "actor", "scene", "and", "it"]
    count = 320 if FAST else 2500
    labels = rng.integers(0, 2, count)
    texts = [
        " ".join(rng.choice(other + 4 * (good if label else bad), 20))
        for label in labels
    ]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + good + bad + other
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(words),
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=32,
    )
    # Keras begins with tiny kernels; frozen, they would let nothing through.
    for variable in backbone.weights:
        if variable.name == "kernel":
            variable.assign(10 * variable)
    task = keras_hub.models.BertTextClassifier(
        backbone=backbone,
        num_classes=2,
        preprocessor=keras_hub.models.BertTextClassifierPreprocessor(
            keras_hub.models.BertTokenizer(vocabulary=words, lowercase=True),
            sequence_length=24,
        ),
    )
    return np.array(texts), labels, task


try:
    if FAST:
        raise ConnectionError("a fast run downloads nothing")
    texts, labels, task = imdb_and_pretrained_bert()
except Exception as error:
    print(f"Made-up data and random weights ({error}).")
    texts, labels, task = made_up_reviews_and_random_bert()

held_out = len(texts) // 5
x_train, y_train = texts[held_out:], labels[held_out:]
x_test, y_test = texts[:held_out], labels[:held_out]

"""
## LoRA

`enable_lora` freezes the backbone and puts two thin matrices beside the
kernels of its attention layers. The classifier's own head stays trained.
"""

task.backbone.enable_lora(rank=4)
trained = sum(int(np.prod(v.shape)) for v in task.trainable_variables)
print(f"{trained:,} of {task.count_params():,} weights are trained.")

"""
## Private training

`make_private` converts the task in place; it still takes raw texts. Instead of
the noise we name the ε that we want, and `fit` finds the noise for it.
"""

DELTA = 1e-4

keras_fastclip.make_private(
    task, l2_norm_clip=1.0, target_epsilon=4.0, delta=DELTA
)
task.compile(
    optimizer=keras.optimizers.Adam(5e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
task.fit(
    x_train,
    y_train,
    batch_size=128,
    epochs=2 if FAST else 10,
    callbacks=[keras_fastclip.EpsilonTracker(DELTA)],
)

"""
## What came of it
"""

_, accuracy = task.evaluate(x_test, y_test, verbose=0)
epsilon = task.privacy_spent(DELTA)
print(f"Test accuracy: {accuracy:.1%}")
print(f"Epsilon: {epsilon:.2f} at delta {DELTA:g}")
keras_fastclip.clipping_summary(task)
