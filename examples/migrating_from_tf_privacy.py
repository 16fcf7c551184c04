"""
Title: Migrating from TensorFlow Privacy
Description: The same training before and after, side by side.
Accelerator: None
"""

"""
## Introduction

TensorFlow Privacy 0.9, its newest release, does not run with TensorFlow 2.16
or later. What takes the place of its parts:

- `DPKerasSGDOptimizer(l2_norm_clip, noise_multiplier, num_microbatches)`: any
  optimizer. Clip norm and noise multiplier go to the model.
- `dp_keras_model.DPSequential(clip, noise, layers=...)`:
  `DPSequential(layers, l2_norm_clip=..., noise_multiplier=...)`.
- `num_microbatches`: nothing. Every example is clipped by itself, at about the
  speed of plain training.
- A loss with `reduction=NONE`: any loss of Keras, also by name.
- `compute_dp_sgd_privacy_statement(...)`: `model.privacy_statement(delta)`,
  which goes by the steps that were made.
- `compute_noise(...)`: `calibrate_noise(...)`, or `target_epsilon=`.
- Functions in a `LayerRegistry`: `register(Layer)(from_tf_privacy(function))`.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_fastclip

FAST = "--fast" in sys.argv
EPOCHS = 2 if FAST else 15

images, labels = load_digits(return_X_y=True)
images, labels = (images / 16).astype("float32")[:1792], labels[:1792]

"""
## Before

```python
optimizer = tensorflow_privacy.DPKerasSGDOptimizer(
    l2_norm_clip=1.0,
    noise_multiplier=1.1,
    num_microbatches=256,   # must divide every batch
    learning_rate=0.5,
)
model = tf.keras.Sequential([
    tf.keras.layers.Dense(64, "relu"),
    tf.keras.layers.Dense(10),
])
model.compile(
    optimizer,
    tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.losses.Reduction.NONE
    ),
)
model.fit(images, labels, batch_size=256, epochs=15)
print(tensorflow_privacy.compute_dp_sgd_privacy_statement(
    number_of_examples=1792, batch_size=256, num_epochs=15,
    noise_multiplier=1.1, delta=1e-4,
))
```

## After
"""

model = keras_fastclip.DPSequential(
    [keras.layers.Dense(64, "relu"), keras.layers.Dense(10)],
    l2_norm_clip=1.0,
    noise_multiplier=1.1,
)
model.compile(
    keras.optimizers.SGD(learning_rate=0.5),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(images, labels, batch_size=256, epochs=EPOCHS, verbose=2)
print(model.privacy_statement(delta=1e-4))

"""
## A registry function

Functions written for the registry of TensorFlow Privacy work unchanged. This
one is for a layer that scales its inputs.
"""


class Scale(keras.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.scale


def scale_layer_computation(
    layer_instance, input_args, input_kwargs, tape, num_microbatches=None
):
    (x,) = input_args
    outputs = x * layer_instance.scale
    tape.watch(outputs)

    def sqr_norm_fn(grads):
        return tf.reduce_sum(tf.square(grads * x), axis=-1)

    return outputs, outputs, sqr_norm_fn


keras_fastclip.register(Scale)(
    keras_fastclip.from_tf_privacy(scale_layer_computation)
)
scaled = keras_fastclip.DPSequential(
    [Scale(), keras.layers.Dense(10)],
    l2_norm_clip=1.0,
    noise_multiplier=1.1,
    strict=True,
)
scaled.compile("sgd", model.loss)
report = keras_fastclip.check_gradients(scaled, images[:8], labels[:8])
print(report)

"""
## What will be different

- **Epsilon.** If your batches were shuffled, the epsilon that was printed did
  not hold for them; see `docs/sampling_and_accounting.md`. Here it does hold.
- **Batch sizes** vary around `batch_size`. The sum of the clipped gradients is
  divided by `batch_size` itself, never by the size of the batch at hand.
- **Models** with BatchNormalization are refused, and so is whatever else mixes
  examples. `replace_batch_normalization(model)` helps.
"""

epsilon = model.privacy_spent(delta=1e-4)
