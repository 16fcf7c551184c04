"""Peak memory of a big model: GPT-2 small, private and plain.

    python -m benchmarks.big [batch sizes]

124 million weights of KerasHub's GPT-2, at random, on sequences of 128 tokens,
with Adam. Two steps, each case in a process of its own; what the libraries
take, before there is a model, is not counted.
"""

import sys

import keras
import numpy as np

import keras_fastclip
from benchmarks import machine
from benchmarks.processes import measured

LENGTH = 128


SMALL = dict(
    vocabulary_size=50257,
    num_layers=12,
    num_heads=12,
    hidden_dim=768,
    intermediate_dim=3072,
    max_sequence_length=1024,
)


def gpt2(**sizes):
    """GPT-2 small or of other sizes; its head is its table of tokens."""
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(**(SMALL | sizes))
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def train(batch_size, private, sizes=SMALL, steps=2):
    """Makes some steps; returns how many weights there are."""
    model = gpt2(**sizes)
    if private:
        keras_fastclip.make_private(
            model,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            expected_batch_size=batch_size,
        )
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    vocabulary = model.backbone.vocabulary_size
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, (batch_size, LENGTH + 1))
    x = {
        "token_ids": tokens[:, :-1].astype("int32"),
        "padding_mask": np.ones((batch_size, LENGTH), "int32"),
    }
    for _ in range(steps):
        model.train_on_batch(x, tokens[:, 1:])
    return model.count_params()


def main():
    sizes = [int(argument) for argument in sys.argv[1:]] or [4, 8]
    print(
        f"Peak memory of GPT-2 small, T = {LENGTH}, on {machine.description()}"
    )
    for size in sizes:
        weights, plain = measured(train, size, False)
        _, private = measured(train, size, True)
        print(
            f"batch {size}: {weights:,} weights, plain {plain:,.0f} MB, "
            f"private {private:,.0f} MB, {private / plain:.2f} of plain",
            flush=True,
        )


if __name__ == "__main__":
    main()
