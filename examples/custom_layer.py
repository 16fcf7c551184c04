"""
Title: A rule for a layer of your own
Description: Register a layer that is not linear in its weights.
Accelerator: None
"""

"""
## Introduction

Private training needs the norm of every example's gradient. For the layers of
Keras this library knows closed forms. A layer of yours works as it is: its
gradients are taken one by one, exactly, with a warning that this is slower. A
rule of a few lines makes it fast.

The layer here is the low-rank approximation of Kong and Muñoz Medina (2023).
Its input is a square matrix Uᵢ for each example, its weights are the thin
matrix V, and its output is the number ⟨Uᵢ, VVᵀ⟩/2: how far Uᵢ points in the
direction of the matrix VVᵀ that is being learned. It is quadratic in V.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import keras_fastclip

FAST = "--fast" in sys.argv
SIZE, RANK = 8, 2


class LowRank(keras.Layer):
    """⟨U, VVᵀ⟩/2 for inputs U of shape (batch, n, n)."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank

    def build(self, shape):
        self.v = self.add_weight(shape=(shape[-1], self.rank), name="v")

    def call(self, u):
        return (
            0.5 * keras.ops.einsum("bij,ir,jr->b", u, self.v, self.v)[:, None]
        )


"""
## The rule

A rule is a function of the layer and the arguments of its `call`. It returns
two things:

- ζ, the tensor through which the weights act. Here that is the output.
- Ω, a function from g, the gradient of the loss by ζ, to the squared norm of
  every example's weight gradient.

The gradient of example i by V is gᵢ·(Uᵢ + Uᵢᵀ)V/2, so its squared norm is
gᵢ²/4·‖(Uᵢ + Uᵢᵀ)V‖². The clipped sum follows by itself.
"""


@keras_fastclip.register(LowRank)
def low_rank(layer, u):
    zeta = layer.call(u)

    def omega(g):
        both = tf.matmul(u + tf.linalg.matrix_transpose(u), layer.v)
        return g[:, 0] ** 2 / 4 * tf.reduce_sum(both**2, axis=[1, 2])

    return zeta, omega


"""
## A task

Which of two things does a person find more alike to a third? Answers to such
questions can be explained by a hidden matrix VVᵀ that says which features
count. Each example is a matrix U and a noisy value of ⟨U, VVᵀ⟩/2.
"""

rng = np.random.default_rng(0)
count = 400 if FAST else 20_000
hidden = rng.normal(size=(SIZE, RANK)).astype("float32")
x = rng.normal(size=(count, SIZE, SIZE)).astype("float32")
y = 0.5 * np.einsum("bij,ir,jr->b", x, hidden, hidden)
y += 0.1 * rng.normal(size=count)

model = keras_fastclip.DPSequential(
    [keras.Input((SIZE, SIZE)), LowRank(RANK)],
    l2_norm_clip=5.0,
    noise_multiplier=1.0,
    strict=True,  # Refuses layers without a rule.
)
model.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")

"""
## Is the rule right?

`check_gradients` compares it with a loop over single examples. (A wrong rule
would also be refused by `fit`, before the first step.)
"""

report = keras_fastclip.check_gradients(model, x[:16], y[:16])
print(report)

"""
## Private training
"""

DELTA = 1e-5

model.fit(
    x,
    y,
    batch_size=100 if FAST else 512,
    epochs=2 if FAST else 20,
    callbacks=[keras_fastclip.EpsilonTracker(DELTA)],
)
found = model.layers[-1].v.numpy()
error = np.linalg.norm(found @ found.T - hidden @ hidden.T)
error /= np.linalg.norm(hidden @ hidden.T)
epsilon = model.privacy_spent(DELTA)
print(f"The hidden matrix is found to {error:.0%} of its norm.")
print(f"Epsilon: {epsilon:.2f} at delta {DELTA:g}")
keras_fastclip.clipping_summary(model)
