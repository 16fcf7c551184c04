"""A model whose weights tell how many steps they have seen."""

import keras
import numpy as np
from keras import layers

import keras_fastclip

X, Y = np.ones((40, 5)), np.ones((40, 3))


def make():
    """Its kernel shrinks by a hundredth in every step, and does no more."""
    model = keras_fastclip.DPSequential(
        [keras.Input((5,)), layers.Dense(3, kernel_initializer="ones")],
        l2_norm_clip=1e-9,  # hence next to no gradient and noise
        noise_multiplier=1.0,
    )
    model.compile(keras.optimizers.SGD(1e-3, weight_decay=10.0), "mse")
    return model


def steps(model):
    """Their number by the weights, and by the record."""
    kernel = model.layers[0].kernel.numpy()
    made = round(np.log(kernel.mean()) / np.log(0.99))
    return made, model._privacy.ledger(model).total_steps
