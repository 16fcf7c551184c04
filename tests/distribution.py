"""What tests on two devices and on two workers have in common."""

import contextlib
import math

import keras
import numpy as np
from keras import layers

import keras_fastclip
from keras_fastclip import DPSequential

CLIP = 0.5


def data(count, inputs, outputs):
    """Examples, the same in every process."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, inputs)).astype("float32")
    return x, rng.normal(size=(count, outputs)).astype("float32")


def scope(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def dense(
    strategy,
    sizes,
    optimizer=None,
    regularizer=None,
    run_eagerly=False,
    jit_compile=False,
    **settings,
):
    """The same weights every time."""
    settings = {"l2_norm_clip": CLIP, "noise_multiplier": 0.0, **settings}
    inputs, hidden, outputs = sizes
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = DPSequential(
            [
                keras.Input((inputs,)),
                layers.Dense(hidden, "tanh", kernel_regularizer=regularizer),
                layers.Dense(outputs),
            ],
            **settings,
        )
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(1.0),
            "mse",
            metrics=["mae"],
            run_eagerly=run_eagerly,
            jit_compile=jit_compile,
        )
    return model


def entries(model):
    return [
        (entry.mechanism.kind, entry.steps, entry.uses)
        for entry in model._privacy.ledger(model).entries
    ]


def assert_close(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def assert_same_clip_norm(one, other):
    norms = [model._privacy.clip_norm.value for model in (one, other)]
    np.testing.assert_allclose(*norms, rtol=1e-6)


def assert_stops_at_the_last_step(model, x, y, batch_size):
    """Within a budget for four steps more."""
    (before,) = model._privacy.ledger(model).entries
    ledger = model._privacy.ledger(model).plus(before.mechanism, 4)
    epsilon, delta = 1.001 * ledger.epsilon(1e-3, "pld"), 1e-3
    stop = keras_fastclip.PrivacyBudget(epsilon, delta)
    model.fit(x, y, batch_size, epochs=9, verbose=0, callbacks=[stop])
    ledger = model._privacy.ledger(model)
    (entry,) = ledger.entries
    assert entry.steps == model.optimizer.iterations.numpy()
    assert entry.steps == before.steps + 4
    assert ledger.epsilon(delta, "pld") <= epsilon
    assert ledger.plus(entry.mechanism, 1).epsilon(delta, "pld") > epsilon


# -- noise -------------------------------------------------------------------

MULTIPLIER = 3.0


def wide(strategy, **settings):
    """A model whose gradients are zero if the examples are."""
    keras.utils.set_random_seed(1)  # On all workers, too.
    with scope(strategy):
        model = DPSequential(
            [keras.Input((300,)), layers.Dense(400, use_bias=False)],
            l2_norm_clip=CLIP,
            noise_multiplier=MULTIPLIER,
            **settings,
        )
        model.compile(keras.optimizers.SGD(1.0), "mse")
    return model


def noise_of_steps(model, steps):
    """Noise on the sum of each step, as multiples of what it should be."""
    x, y = np.zeros((32, 300), "float32"), np.ones((32, 400), "float32")
    values, before = [], model.get_weights()[0].astype("float64")

    def difference(batch, logs):
        nonlocal before
        after = model.get_weights()[0].astype("float64")
        values.append(8 * (before - after).ravel() / (MULTIPLIER * CLIP))
        before = after

    each = keras.callbacks.LambdaCallback(on_train_batch_end=difference)
    model.fit(
        x, y, batch_size=8, steps_per_epoch=steps, verbose=0, callbacks=[each]
    )
    return values


def assert_standard_normal(values):
    """The mean of n squares is within 6.5 of its deviations, √(2/n).

    Beyond that it is with probability below 10⁻⁹.
    """
    mean_square = np.mean(np.square(values))
    assert abs(mean_square - 1) < 6.5 * math.sqrt(2 / values.size)


def assert_independent(draws):
    """So is a correlation beyond 6.5/√n."""
    for i, one in enumerate(draws):
        for other in draws[:i]:
            correlation = np.corrcoef(one, other)[0, 1]
            assert abs(correlation) < 6.5 / math.sqrt(one.size)


# -- sampling ----------------------------------------------------------------


def assert_poisson(draws):
    """Each of 40 is in each of 400 draws with probability ¼."""
    assert len(draws) == 400
    times = np.zeros(40)
    for rows in draws:
        assert len(set(rows)) == len(rows)
        times[rows] += 1
    assert np.abs(times - 100).max() < 6.5 * math.sqrt(400 * 3 / 16)
    variance = np.var([len(rows) for rows in draws])
    assert abs(variance / 7.5 - 1) < 6.5 * math.sqrt(2 / 400)
