"""Runs a common workload with TensorFlow Privacy, prints a line of JSON.

Needs tensorflow 2.15 (Keras 2) and tensorflow-privacy 0.9. Modes:

  nondp, nondp-xla            plain Keras train step, without and with XLA
  naive                       DPKerasSGDOptimizer, one microbatch per example
  vectorized                  VectorizedDPKerasSGDOptimizer, likewise
  sparse                      DPSparseKerasSGDOptimizer (sparse Jacobian rows
                              for tables of 10000 rows or more)
  dpmodel, dpmodel-xla        DPModel with no registry (vectorized_map)
  fgc, fgc-xla                DPModel with the default layer registry; an error
                              where DPModel would silently leave the fast path
  fgc-full, fgc-full-xla      the same, with every registry function that the
                              package ships for Keras layers inserted by hand

Example: python run_tf_privacy.py --workload mlp --mode fgc --steps 10
"""

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import time

import limits

THREADS = 2
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

LEARNING_RATE = 0.01
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
SEED = 0

WORKLOAD_NAMES = ("mlp", "cnn", "resnet", "bert", "gpt", "lstm", "rec")
MODES = (
    "nondp",
    "nondp-xla",
    "naive",
    "vectorized",
    "sparse",
    "dpmodel",
    "dpmodel-xla",
    "fgc",
    "fgc-xla",
    "fgc-full",
    "fgc-full-xla",
)


def rss_mb():
    """Peak resident set of this process so far, in MiB (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", required=True, choices=WORKLOAD_NAMES)
    parser.add_argument("--mode", required=True, choices=MODES)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch", type=int, default=None)
    return parser.parse_args()


ARGS = parse_args() if __name__ == "__main__" else None

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_privacy as tfp  # noqa: E402
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry  # noqa: E402
from tensorflow_privacy.privacy.fast_gradient_clipping.registry_functions import (  # noqa: E402, E501
    einsum_dense,
    layer_normalization,
    multi_head_attention,
)
from tensorflow_privacy.privacy.keras_models import dp_keras_model  # noqa: E402
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras_sparse  # noqa: E402

layers = tf.keras.layers


# --------------------------------------------------------------------------
# Losses. Each is a Loss object so that DPModel can rebuild it unreduced.
# --------------------------------------------------------------------------


def sparse_softmax(reduction):
    return tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )


def sigmoid(reduction):
    return tf.keras.losses.BinaryCrossentropy(
        from_logits=True, reduction=reduction
    )


class MeanTokenCrossentropy(tf.keras.losses.Loss):
    """Cross-entropy averaged over the tokens of each example: shape (B,).

    Needed because the fast path refuses an unreduced loss of rank 2, which
    is what the stock loss gives for (B, T) labels.
    """

    def call(self, y_true, y_pred):
        per_token = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=tf.cast(y_true, tf.int32), logits=y_pred
        )
        return tf.reduce_mean(per_token, axis=-1)


def mean_token(reduction):
    return MeanTokenCrossentropy(reduction=reduction)


# --------------------------------------------------------------------------
# Workloads: name -> (inputs, outputs, batch, loss factory, data factory).
# --------------------------------------------------------------------------


def floats(shape):
    return lambda rng, b: rng.standard_normal((b, *shape)).astype("float32")


def ids(length, vocabulary):
    return lambda rng, b: rng.integers(
        0, vocabulary, (b, length), dtype="int32"
    )


def classes(count):
    return lambda rng, b: rng.integers(0, count, (b,), dtype="int32")


def build_mlp():
    inputs = tf.keras.Input((3072,))
    x = inputs
    for _ in range(10):
        x = layers.Dense(1000, activation="relu")(x)
    return (
        inputs,
        layers.Dense(10)(x),
        sparse_softmax,
        floats((3072,)),
        classes(10),
    )


def build_cnn():
    inputs = tf.keras.Input((32, 32, 3))
    x = inputs
    for channels in (32, 64, 128):
        for _ in range(2):
            x = layers.Conv2D(channels, 3, padding="same", activation="tanh")(x)
        x = layers.MaxPooling2D(2)(x)
    x = layers.Flatten()(x)
    x = layers.Dense(128, activation="tanh")(x)
    return (
        inputs,
        layers.Dense(10)(x),
        sparse_softmax,
        floats((32, 32, 3)),
        classes(10),
    )


def build_resnet():
    def conv_norm(x, channels, kernel, stride):
        x = layers.Conv2D(
            channels, kernel, strides=stride, padding="same", use_bias=False
        )(x)
        return layers.GroupNormalization(groups=16)(x)

    def block(x, channels, stride):
        shortcut = x
        y = layers.ReLU()(conv_norm(x, channels, 3, stride))
        y = conv_norm(y, channels, 3, 1)
        if stride != 1 or x.shape[-1] != channels:
            shortcut = conv_norm(x, channels, 1, stride)
        return layers.ReLU()(layers.Add()([y, shortcut]))

    inputs = tf.keras.Input((32, 32, 3))
    x = layers.ReLU()(conv_norm(inputs, 64, 3, 1))
    for stage, channels in enumerate((64, 128, 256, 512)):
        x = block(x, channels, 1 if stage == 0 else 2)
        x = block(x, channels, 1)
    x = layers.GlobalAveragePooling2D()(x)
    return (
        inputs,
        layers.Dense(10)(x),
        sparse_softmax,
        floats((32, 32, 3)),
        classes(10),
    )


def embed_tokens(inputs, vocabulary, length, width):
    """Token plus position embeddings.

    Positions are broadcast to (B, T) first: the embedding registry function
    takes the leading axis of the ids for the batch axis.
    """
    positions = layers.Lambda(
        lambda t: tf.broadcast_to(tf.range(length), tf.shape(t))
    )(inputs)
    tokens = layers.Embedding(vocabulary, width)(inputs)
    return layers.Add()([tokens, layers.Embedding(length, width)(positions)])


def attention(x, causal):
    layer = layers.MultiHeadAttention(num_heads=4, key_dim=64)
    return layer(x, x, use_causal_mask=True) if causal else layer(x, x)


def build_bert():
    inputs = tf.keras.Input((128,), dtype="int32")
    x = layers.LayerNormalization()(embed_tokens(inputs, 30522, 128, 256))
    for _ in range(4):
        x = layers.LayerNormalization()(layers.Add()([x, attention(x, False)]))
        y = layers.Dense(256)(layers.Dense(1024, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling1D()(x)
    return (
        inputs,
        layers.Dense(2)(x),
        sparse_softmax,
        ids(128, 30522),
        classes(2),
    )


def build_gpt():
    inputs = tf.keras.Input((100,), dtype="int32")
    x = embed_tokens(inputs, 10000, 100, 256)
    for _ in range(4):
        y = attention(layers.LayerNormalization()(x), True)
        x = layers.Add()([x, y])
        y = layers.Dense(1024, activation="gelu")(
            layers.LayerNormalization()(x)
        )
        x = layers.Add()([x, layers.Dense(256)(y)])
    x = layers.LayerNormalization()(x)
    logits = layers.Dense(10000, use_bias=False)(x)
    return inputs, logits, mean_token, ids(100, 10000), ids(100, 10000)


def build_lstm():
    inputs = tf.keras.Input((100,), dtype="int32")
    x = layers.LSTM(128)(layers.Embedding(10000, 100)(inputs))
    return (
        inputs,
        layers.Dense(2)(x),
        sparse_softmax,
        ids(100, 10000),
        classes(2),
    )


def build_rec():
    inputs = tf.keras.Input((64,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(100000, 32)(inputs))
    x = layers.Dense(64, activation="relu")(x)

    def labels(rng, b):
        return rng.integers(0, 2, (b, 1)).astype("float32")

    return inputs, layers.Dense(1)(x), sigmoid, ids(64, 100000), labels


BUILDERS = {name: globals()[f"build_{name}"] for name in WORKLOAD_NAMES}
BATCHES = {
    "mlp": 128,
    "cnn": 256,
    "resnet": 32,
    "bert": 32,
    "gpt": 16,
    "lstm": 64,
    "rec": 512,
}


# --------------------------------------------------------------------------
# Modes.
# --------------------------------------------------------------------------


class CannotRun(Exception):
    """The peer has no way to run this workload in this mode."""


def make_registry(full):
    registry = layer_registry.make_default_layer_registry()
    if full:
        registry.insert(
            layers.EinsumDense, einsum_dense.einsum_layer_computation
        )
        registry.insert(
            layers.LayerNormalization,
            layer_normalization.layer_normalization_computation,
        )
        registry.insert(
            layers.MultiHeadAttention,
            multi_head_attention.multi_head_attention_layer_computation,
        )
    return registry


def make_optimizer(mode, batch):
    if mode.startswith(("nondp", "dpmodel", "fgc")):
        return tf.keras.optimizers.SGD(LEARNING_RATE)
    optimizer_class = {
        "naive": tfp.DPKerasSGDOptimizer,
        "vectorized": tfp.VectorizedDPKerasSGDOptimizer,
        "sparse": dp_optimizer_keras_sparse.DPSparseKerasSGDOptimizer,
    }[mode]
    return optimizer_class(
        l2_norm_clip=CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        num_microbatches=batch,
        learning_rate=LEARNING_RATE,
    )


def unregistered_layers(model, registry):
    return sorted(
        {
            type(layer).__name__
            for layer in model.layers
            if layer.trainable_variables and not registry.is_elem(layer)
        }
    )


def make_model(mode, inputs, outputs):
    if not mode.startswith(("dpmodel", "fgc")):
        return tf.keras.Model(inputs, outputs)
    registry = None
    if mode.startswith("fgc"):
        registry = make_registry(full="full" in mode)
    model = dp_keras_model.DPModel(
        l2_norm_clip=CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        use_xla=mode.endswith("-xla"),
        layer_registry=registry,
        inputs=inputs,
        outputs=outputs,
    )
    if registry is not None and not model._enable_fast_peg_computation:
        missing = ", ".join(unregistered_layers(model, registry))
        raise CannotRun(
            "fast gradient clipping not available: DPModel silently falls back"
            f" to vectorized_map; layers without a registry function: {missing}"
        )
    return model


def make_step(mode, model):
    """One training step as a compiled function of (x, y)."""
    if mode == "nondp-xla":
        return tf.function(model.train_step, jit_compile=True)
    # DPModel(use_xla=True) has already wrapped train_step itself.
    return tf.function(model.train_step)


def measure(workload, mode, batch, warmup, steps):
    tf.keras.utils.set_random_seed(SEED)
    inputs, outputs, loss, make_x, make_y = BUILDERS[workload]()
    per_example = mode in ("naive", "vectorized", "sparse")
    reduction = tf.keras.losses.Reduction
    model = make_model(mode, inputs, outputs)
    model.compile(
        optimizer=make_optimizer(mode, batch),
        loss=loss(
            reduction.NONE if per_example else reduction.SUM_OVER_BATCH_SIZE
        ),
    )
    rng = np.random.default_rng(SEED)
    data = (tf.constant(make_x(rng, batch)), tf.constant(make_y(rng, batch)))
    step = make_step(mode, model)

    def run():
        start = time.perf_counter()
        logs = step(data)
        for value in tf.nest.flatten(logs):
            value.numpy()
        return time.perf_counter() - start

    for _ in range(warmup):
        run()
    gc.collect()
    times = [run() for _ in range(steps)]
    for variable in model.trainable_variables:
        if not np.isfinite(variable.numpy()).all():
            raise RuntimeError(f"non-finite values in {variable.name}")
    return model.count_params(), times


def one_line(error):
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, CannotRun):
        text = str(error)
    return text[:300]


def main():
    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    base_rss = rss_mb()
    limits.limit_memory()
    batch = ARGS.batch or BATCHES[ARGS.workload]
    record = {
        "peer": "tensorflow-privacy",
        "version": f"{tfp.__version__} (tensorflow {tf.__version__})",
        "mode": ARGS.mode,
        "workload": ARGS.workload,
        "batch": batch,
    }
    try:
        params, times = measure(
            ARGS.workload, ARGS.mode, batch, ARGS.warmup, ARGS.steps
        )
        record.update(
            params=int(params),
            sec_per_step=round(statistics.median(times), 6),
            sec_min=round(min(times), 6),
            peak_rss_mb=round(rss_mb(), 1),
            base_rss_mb=round(base_rss, 1),
        )
    except Exception as error:  # Any failure is a result here.
        record["error"] = one_line(error)
    sys.stderr.flush()
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
