"""The public classes: construction, training, saving, conversion."""

import functools
import gc
import os
import subprocess
import sys
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import DPModel, DPSequential, _keras, make_private
from tests.zoo import cross_entropy, labels, random

SETTINGS = {"l2_norm_clip": 0.5, "noise_multiplier": 1.0}
N = 64


def data():
    return random(N, 5), labels(N)


def functional():
    x = keras.Input((5,))
    y = layers.Dense(3)(layers.Dense(4, activation="relu")(x))
    return DPModel(x, y, name="functional", **SETTINGS)


@keras.saving.register_keras_serializable("tests")
class Subclassed(DPModel):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = layers.Dense(units, activation="relu")
        self.head = layers.Dense(3)

    def call(self, x, training=None):
        return self.head(self.hidden(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("tests")
class FunctionalSubclass(DPModel):
    """A subclass that is made from inputs and outputs."""

    def __init__(self, units, **kwargs):
        x = keras.Input((5,))
        y = layers.Dense(3)(layers.Dense(units, activation="relu")(x))
        super().__init__(x, y, **kwargs)
        self.units = units

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def sequential():
    return DPSequential(
        [layers.Dense(4, activation="relu"), layers.Dense(3)], **SETTINGS
    )


def by_add():
    model = DPSequential(**SETTINGS)
    model.add(keras.Input((5,)))
    model.add(layers.Dense(4, activation="relu"))
    model.add(layers.Dense(3))
    return model


KINDS = {
    "functional": functional,
    "subclassed": lambda: Subclassed(4, **SETTINGS),
    "functional_subclass": lambda: FunctionalSubclass(4, **SETTINGS),
    "sequential": sequential,
    "by_add": by_add,
}


def compiled(model, **kwargs):
    model.compile("sgd", cross_entropy(), metrics=["accuracy"], **kwargs)
    return model


def test_all_kinds_live_in_one_process_in_any_order():
    x, y = data()
    bases = DPModel.__bases__
    for order in (list(KINDS), list(reversed(KINDS))):
        models = [compiled(KINDS[kind]()) for kind in order]
        for model in models:
            model.fit(x, y, batch_size=16, verbose=0)
            assert isinstance(model, keras.Model)
            assert model.privacy_spent(1e-3, "rdp") < np.inf
    assert DPModel.__bases__ == bases
    assert isinstance(functional(), DPModel)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_model_comes_back_private(kind, tmp_path):
    x, y = data()
    model = compiled(KINDS[kind]())
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    again = keras.saving.load_model(path)
    assert type(again) is type(model)
    np.testing.assert_allclose(
        again.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6
    )
    spent = model.privacy_spent(1e-3, "rdp")
    assert again.privacy_spent(1e-3, "rdp") == spent
    again.fit(x, y, batch_size=16, verbose=0)
    assert again.privacy_spent(1e-3, "rdp") > spent


def test_settings_survive_saving(tmp_path):
    x = keras.Input((5,))
    model = DPModel(
        x,
        layers.Dense(3)(x),
        l2_norm_clip=0.5,
        noise_multiplier=1.5,
        method="bk",
        clipping=keras_fastclip.AutomaticClipping(0.5, gamma=0.1),
        expected_batch_size=7,
        strict=True,
    )
    model.save(str(tmp_path / "model.keras"))
    again = keras.saving.load_model(str(tmp_path / "model.keras"))
    settings = again._privacy.settings
    assert settings.clipping.gamma == 0.1
    assert (settings.noise_multiplier, settings.method) == (1.5, "bk")
    assert (settings.expected_batch_size, settings.strict) == (7, True)


def test_eager_graph_and_xla_agree():
    x, y = data()
    results = []
    start = None
    for kwargs in (
        {"run_eagerly": True},
        {"jit_compile": False},
        {"jit_compile": True},
    ):
        model = DPSequential(
            [layers.Dense(4, activation="relu"), layers.Dense(3)],
            l2_norm_clip=0.5,
            noise_multiplier=0.0,
            seed=5,
        )
        compiled(model, **kwargs)
        model.build((None, 5))
        start = start or model.get_weights()
        model.set_weights(start)
        logs = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history
        results.append((model.get_weights(), logs))
    for weights, logs in results[1:]:
        for found, right in zip(weights, results[0][0], strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)
        for key, values in logs.items():
            np.testing.assert_allclose(values, results[0][1][key], rtol=1e-4)


# -- fit ---------------------------------------------------------------------


def two_inputs(names=False):
    a, b = keras.Input((5,), name="a"), keras.Input((5,), name="b")
    y = layers.Dense(3)(layers.Concatenate()([a, b]))
    inputs = {"a": a, "b": b} if names else [a, b]
    return compiled(DPModel(inputs, y, **SETTINGS))


def test_fit_takes_lists_dicts_tensors_and_lists_of_numbers():
    x, y = data()
    two_inputs().fit([x, x], y, verbose=0)
    two_inputs(names=True).fit({"a": x, "b": x}, y, verbose=0)
    compiled(functional()).fit(tf.constant(x), tf.constant(y), verbose=0)
    compiled(functional()).fit(x, y.tolist(), verbose=0)


def test_fit_counts_poisson_steps_and_logs_epsilon(tmp_path):
    x, y = data()
    model = compiled(functional())
    history = model.fit(
        x,
        y,
        batch_size=10,
        epochs=3,
        verbose=0,
        validation_split=0.25,
        callbacks=[keras_fastclip.EpsilonTracker(1e-3)],
    ).history
    (entry,) = model._privacy.ledger(model).entries
    assert entry.mechanism.num_examples == 48
    assert entry.steps == 3 * 5 == int(model.optimizer.iterations.numpy())
    assert history["epsilon"] == sorted(history["epsilon"])
    assert history["epsilon"][-1] == model.privacy_spent(1e-3)
    assert len(history["val_loss"]) == 3


def test_steps_per_execution_are_all_counted():
    x, y = data()
    model = compiled(functional(), steps_per_execution=3)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert model._privacy.ledger(model).total_steps == 16


def test_two_fits_compose():
    x, y = data()
    model = compiled(functional())
    model.fit(x, y, batch_size=8, verbose=0)
    first = model.privacy_spent(1e-3, "rdp")
    model.fit(x, y, batch_size=16, verbose=0)
    assert [e.steps for e in model._privacy.ledger(model).entries] == [8, 4]
    assert model.privacy_spent(1e-3, "rdp") > first
    assert model._privacy.expected_batch_size == 16


def test_batches_not_drawn_here_have_no_finite_epsilon():
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16, True)
    model = compiled(functional())
    model.fit(dataset, num_examples="unknown", verbose=0)
    assert model._privacy.expected_batch_size == 16
    assert model.privacy_spent(1e-3) == np.inf
    assert "not known" in model.privacy_statement(1e-3)

    def batches():
        while True:
            yield x[:8], y[:8]

    model = compiled(
        DPSequential([layers.Dense(3)], **SETTINGS, expected_batch_size=8)
    )
    model.fit(batches(), steps_per_epoch=3, num_examples="unknown", verbose=0)
    assert model.privacy_spent(1e-3) == np.inf


def test_train_on_batch_is_counted():
    x, y = data()
    model = compiled(
        DPSequential([layers.Dense(3)], **SETTINGS, expected_batch_size=8)
    )
    model.fit(x, y, batch_size=8, verbose=0)
    assert model.privacy_spent(1e-3) < np.inf
    model.train_on_batch(x[:8], y[:8])
    assert model._privacy.ledger(model).total_steps == 9
    assert model.privacy_spent(1e-3) == np.inf


def test_train_on_batch_within_fit_is_not_taken_for_a_drawn_batch():
    x, y = data()
    model = compiled(functional())

    class Sneak(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            model.train_on_batch(x[:8], y[:8])

    model.fit(x, y, batch_size=8, verbose=0, callbacks=[Sneak()])
    assert [e.steps for e in model._privacy.ledger(model).entries] == [8, 1]
    assert model.privacy_spent(1e-3) == np.inf


def test_custom_loop_in_a_function_is_counted():
    x, y = data()
    model = compiled(
        DPSequential([layers.Dense(3)], **SETTINGS, expected_batch_size=8)
    )
    step = tf.function(model.train_step)
    for _ in range(3):
        step((tf.constant(x[:8]), tf.constant(y[:8])))
    assert model._privacy.ledger(model).total_steps == 3


def test_interrupted_fit_is_counted():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    x, y = data()
    model = compiled(functional())
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Stop()])
    (entry,) = model._privacy.ledger(model).entries
    assert entry.steps == 3 and model.privacy_spent(1e-3, "rdp") < np.inf


def test_layers_frozen_after_compile_are_frozen():
    x, y = data()
    model = compiled(functional())
    model.fit(x, y, verbose=0)
    model.layers[1].trainable = False
    before = [w.copy() for w in model.layers[1].get_weights()]
    model.fit(x, y, verbose=0)
    for old, new in zip(before, model.layers[1].get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_learns():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 5)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    model = DPSequential(
        [layers.Dense(2)], l2_norm_clip=1.0, noise_multiplier=1.0
    )
    model.compile(
        keras.optimizers.SGD(1.0), cross_entropy(), metrics=["accuracy"]
    )
    model.fit(x, y, batch_size=200, epochs=5, verbose=0)
    assert model.evaluate(x, y, verbose=0)[1] > 0.9
    assert model.privacy_spent(1e-5) < 6


# -- clipping ----------------------------------------------------------------


class Half(keras_fastclip.Clipping):
    """Breaks its promise: half of every gradient, however long."""

    sensitivity = 0.5

    def factors(self, squared_norms):
        return tf.fill(
            tf.shape(squared_norms), tf.cast(0.5, squared_norms.dtype)
        )


@pytest.mark.parametrize(
    "clipping",
    [
        "flat",
        "automatic",
        "global",
        [0.3, 0.4],
        {"first": 0.3, "second": 0.4},
        Half(),
    ],
    ids=["flat", "automatic", "global", "list", "dict", "own"],
)
@pytest.mark.parametrize("method", ["auto", "naive"])
def test_every_clipping_keeps_an_example_within_its_sensitivity(
    clipping, method
):
    inputs = keras.Input((5,))
    outputs = layers.Dense(4, activation="tanh", name="first")(inputs)
    outputs = layers.Dense(3, name="second")(outputs)
    model = compiled(
        DPModel(
            inputs,
            outputs,
            l2_norm_clip=0.5,
            noise_multiplier=0.0,
            clipping=clipping,
            method=method,
        )
    )
    x, y = data()
    x[:8] *= 100
    for i in range(16):
        sums, norms = model.clipped_gradients(x[i : i + 1], y[i : i + 1])
        total = np.sqrt(sum(np.sum(np.square(s)) for s in sums))
        assert total <= 0.5 * (1 + 1e-6)
        norm = np.sqrt(norms[0])
        if clipping == "flat":
            np.testing.assert_allclose(total, min(norm, 0.5), rtol=1e-5)
        if clipping == "automatic":
            expected = 0.5 * norm / (norm + 0.01)
            np.testing.assert_allclose(total, expected, rtol=1e-5)
        if clipping == "global":
            expected = norm if norm <= 0.5 else 0.0
            np.testing.assert_allclose(total, expected, rtol=1e-5)
        if isinstance(clipping, (list, dict)):
            first = np.sqrt(sum(np.sum(np.square(s)) for s in sums[:2]))
            assert first <= 0.3 * (1 + 1e-6)


@pytest.mark.parametrize("clipping", ["flat", "automatic", [0.3, 0.4]], ids=str)
def test_check_gradients_reports_rounding_only(clipping, float64):
    x = keras.Input((5,))
    y = layers.Dropout(0.5)(layers.Dense(4, activation="tanh")(x))
    model = compiled(
        DPModel(
            x,
            layers.Dense(3)(y),
            l2_norm_clip=0.5,
            noise_multiplier=1.0,
            clipping=clipping,
        )
    )
    x, y = data()
    report = keras_fastclip.check_gradients(model, x[:6], y[:6])
    assert report.relative_error < 1e-9
    assert set(report.by_layer) == {u.path for u in model._privacy._plan.units}
    assert "largest relative error" in str(report)


# -- make_private ------------------------------------------------------------


class Plain(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3)

    def call(self, x):
        return self.head(x)


@pytest.mark.parametrize("kind", ["functional", "sequential", "subclassed"])
def test_make_private_keeps_class_and_weights(kind, tmp_path):
    x, y = data()
    inputs = keras.Input((5,))
    model = {
        "functional": lambda: keras.Model(inputs, layers.Dense(3)(inputs)),
        "sequential": lambda: keras.Sequential([layers.Dense(3)]),
        "subclassed": Plain,
    }[kind]()
    model(x)
    cls, weights = type(model), model.get_weights()
    assert make_private(model, **SETTINGS) is model
    assert type(model) is cls
    for found, right in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(found, right)
    compiled(model).fit(
        x,
        y,
        batch_size=16,
        verbose=0,
        callbacks=[keras_fastclip.EpsilonTracker(1e-3)],
    )
    assert 0 < model.privacy_spent(1e-3, "rdp") < np.inf
    if kind != "subclassed":
        model.save(str(tmp_path / "model.keras"))
        assert (
            type(keras.saving.load_model(str(tmp_path / "model.keras"))) is cls
        )


def convolution_twice():
    layer = layers.Conv1D(1, 2, padding="same", name="twice")
    return lambda x: layer(layer(x))


@pytest.mark.parametrize(
    ("middle", "ways"),
    [
        (functools.partial(layers.Dense, 4), None),
        (functools.partial(layers.GroupNormalization, 1), None),
        (functools.partial(layers.LSTM, 4), None),
        (functools.partial(layers.Conv1D, 2, 2), None),
        (convolution_twice, {"twice": "keep:blocks"}),
    ],
)
def test_private_models_are_freed(middle, ways):
    """Weights too, and graphs."""
    inputs = keras.Input((5,))
    y = middle()(layers.Reshape((5, 1))(inputs))
    y = layers.Dense(3)(layers.Flatten()(y))
    model = compiled(DPModel(inputs, y, ways=ways, **SETTINGS))
    x, y = data()
    model.fit(x, y, verbose=0)
    held = model, _keras.raw(model.layers[-1].kernel)
    gone = [weakref.ref(each) for each in held]
    del model, held, inputs
    keras.backend.clear_session()
    gc.collect()
    assert [each() for each in gone] == [None, None]


# -- the package -------------------------------------------------------------


def test_import_is_light():
    code = (
        "import sys, keras, dp_accounting; "  # Keras tries some of them.
        "before = set(sys.modules); import keras_fastclip; "
        "heavy = {'tensorflow_privacy', 'matplotlib', 'keras_hub'}; "
        "found = heavy & (set(sys.modules) - before); "
        "sys.exit(str(found) if found else 0)"
    )
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_all_public_names_exist():
    for name in keras_fastclip.__all__:
        assert getattr(keras_fastclip, name) is not None


# -- what the ledger must not miss -------------------------------------------


def test_optimizer_steps_without_a_record_make_epsilon_infinite():
    x, y = data()
    plain = keras.Sequential([layers.Dense(3)])
    compiled(plain).fit(x, y, verbose=0)
    make_private(plain, **SETTINGS)
    assert plain.privacy_spent(1e-3) == np.inf
    assert "more steps" in plain.privacy_statement(1e-3)
    compiled(plain).fit(x, y, batch_size=16, verbose=0)


def test_restored_training_has_no_smaller_epsilon(tmp_path):
    x, y = data()

    class Crash(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("crash")

    def backup():
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    model = compiled(functional())
    with pytest.raises(RuntimeError):
        model.fit(
            x,
            y,
            batch_size=8,
            epochs=3,
            verbose=0,
            callbacks=[backup(), Crash()],
        )
    spent = model.privacy_spent(1e-3, "rdp")
    again = compiled(functional())
    again.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[backup()])
    assert again.privacy_spent(1e-3, "rdp") > spent


def test_steps_in_callbacks_of_fit_are_not_taken_for_drawn_ones():
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, True)
    model = compiled(functional())

    class Sneak(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            model.train_step((tf.constant(x[:8]), tf.constant(y[:8])))
            keras.Model.fit(model, dataset.take(2), verbose=0)

    model.fit(x, y, batch_size=8, verbose=0, callbacks=[Sneak()])
    steps = [entry.steps for entry in model._privacy.ledger(model).entries]
    assert steps == [8, 3]
    assert model.privacy_spent(1e-3) == np.inf


def test_seeded_noise_is_told():
    model = compiled(DPSequential([layers.Dense(3)], **SETTINGS, seed=1))
    x, y = data()
    model.fit(x, y, verbose=0)
    assert "fixed seed" in model.privacy_statement(1e-3)
    assert "seed" not in model.get_config()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_automatic_clipping_normalizes_short_gradients_too(scale):
    clipping = keras_fastclip.AutomaticClipping(0.5)
    norms = tf.constant([[scale**2]])
    found = clipping.bounded_factors(norms)[0, 0] * scale
    np.testing.assert_allclose(found, 0.5 * scale / (scale + 0.01), rtol=1e-5)


def test_own_clipping_in_several_groups_is_bounded():
    class Greedy(keras_fastclip.Clipping):
        sensitivity = 1.0

        def groups(self, paths):
            return list(range(len(paths)))

        def factors(self, squared_norms):
            return tf.math.rsqrt(squared_norms)

    factors = Greedy().bounded_factors(tf.constant([[4.0], [9.0], [1.0]]))
    after = np.sqrt(np.sum(np.square(factors) * [[4.0], [9.0], [1.0]]))
    assert after <= 1 + 1e-6
