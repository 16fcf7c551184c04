"""
Title: Private fine-tuning of GPT-2
Description: Fine-tune a causal language model of KerasHub with make_private.
Accelerator: GPU
"""

"""
## Introduction

Language models repeat what they were trained on, word for word if it was rare
enough. Private fine-tuning bounds what any single text can have left behind.

With a network, this downloads GPT-2 and Shakespeare's lines. Without one, or
with `--fast`, it runs the same code on a tiny GPT-2 of random weights that
reads letters: that shows how it is done, not how well it works.
"""

import os
import string
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_hub
import numpy as np

import keras_fastclip

FAST = "--fast" in sys.argv


def shakespeare_and_gpt2():
    """One example is one speech of a play."""
    path = keras.utils.get_file(
        "shakespeare.txt",
        "https://storage.googleapis.com/download.tensorflow.org/data/"
        "shakespeare.txt",
    )
    with open(path, encoding="utf-8") as file:
        speeches = file.read().split("\n\n")
    task = keras_hub.models.GPT2CausalLM.from_preset("gpt2_base_en")
    task.preprocessor.sequence_length = 48
    # GPT-2 has 124 million weights; its matrices get thin ones beside them.
    task.backbone.enable_lora(rank=4)
    return speeches[:512], task


def made_up_lines_and_tiny_gpt2():
    """Lines of a few words, and a GPT-2 that reads letter by letter."""
    rng = np.random.default_rng(0)
    who = ["the king", "the queen", "a fool", "my lord"]
    does = ["loves", "fears", "seeks", "forgets"]
    what = ["the crown", "the sea", "a ghost", "the night"]
    texts = [
        " ".join(rng.choice(words) for words in (who, does, what))
        for _ in range(256 if FAST else 4000)
    ]
    letters = ["Ġ", "th", *string.ascii_letters, "<|endoftext|>"]
    tokenizer = keras_hub.models.GPT2Tokenizer(
        vocabulary={token: number for number, token in enumerate(letters)},
        merges=["t h"],
    )
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(letters),
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        max_sequence_length=32,
        dropout=0.0,
    )
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(
        tokenizer, sequence_length=32
    )
    return texts, keras_hub.models.GPT2CausalLM(backbone, preprocessor)


try:
    if FAST:
        raise ConnectionError("a fast run downloads nothing")
    texts, task = shakespeare_and_gpt2()
except Exception as error:
    print(f"Made-up lines and random weights ({error}).")
    texts, task = made_up_lines_and_tiny_gpt2()

"""
## Private fine-tuning

One line makes the task private; it keeps its preprocessor, its `fit` on texts
and its `generate`. Its embedding is also its output layer. Both uses count in
the norm of an example's gradient, as they must.

`physical_batch_size` bounds the memory: batches of 64 texts go through the
model 16 at a time, with one noise and one update for all.
"""

DELTA = 1e-4

keras_fastclip.make_private(
    task, l2_norm_clip=1.0, noise_multiplier=0.8, physical_batch_size=16
)
task.compile(
    optimizer=keras.optimizers.Adam(2e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=["accuracy"],
    sampler="greedy",
)
task.fit(
    texts,
    batch_size=64,
    epochs=1 if FAST else 4,
    callbacks=[keras_fastclip.EpsilonTracker(DELTA)],
)

"""
## What came of it
"""

line = task.generate("the king", max_length=24)
epsilon = task.privacy_spent(DELTA)
print(f"Generated: {line!r}")
print(f"Epsilon: {epsilon:.2f} at delta {DELTA:g}")
