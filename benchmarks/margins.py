"""How much of the signal it costs that norms are rounded up.

    python -m benchmarks.margins

For each workload, by how much the norm of an example's gradient exceeds the
true one, which is what clipped gradients are shorter by. The true norm is that
of plain differentiation of one example, its squares added in float64.
"""

import warnings

import keras
import numpy as np
import tensorflow as tf

from benchmarks import machine, run
from benchmarks.workloads import WORKLOADS
from keras_fastclip import sampling
from keras_fastclip.model import clip

EXAMPLES = 4


def margins(name: str, method: str) -> np.ndarray:
    """Norm over true norm, less one, of some examples."""
    workload = WORKLOADS[name]
    x, y = workload.data(np.random.default_rng(0), EXAMPLES)
    keras.utils.set_random_seed(0)
    model = run.build(workload, method)
    some = sampling.some((x, y, None))
    model._privacy.prepare(model, some, workload.batch)
    batch = tf.constant(x), tf.constant(y), None
    step = tf.function(lambda: clip(model, batch).squared_norms)
    squares = np.sum(step().numpy().astype("float64"), 0)
    return np.sqrt(squares) / _true_norms(model, *batch[:2]) - 1


def _true_norms(model, x, y):
    weights = [v.value for v in model.trainable_variables]

    @tf.function
    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)]

    found = [gradients(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    return [
        np.sqrt(sum(np.sum(g.numpy().astype("float64") ** 2) for g in each))
        for each in found
    ]


def main():
    warnings.simplefilter("ignore")
    print(machine.description())
    for name in WORKLOADS:
        found = {m: max(margins(name, m)) for m in ("auto", "bk")}
        shown = ", ".join(f"{m} {value:.1e}" for m, value in found.items())
        print(f"{name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
