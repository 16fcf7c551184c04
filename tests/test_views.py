"""The gradient of an example is the mean over its views, and then clipped."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_fastclip
from keras_fastclip.checking import _plain_gradient
from keras_fastclip.methods import METHODS
from tests.test_methods import by_method
from tests.test_zoo import CLIP, relative_error
from tests.zoo import BATCH, ZOO, cross_entropy, labels, random

pytestmark = pytest.mark.filterwarnings("ignore:No rule is registered")

VIEWS = 3


def view(x, number):
    """What the `number`-th view of some examples is; 0 for themselves."""
    if x.dtype.is_floating:
        return x * (1 + 0.4 * number)
    return tf.roll(x, number, axis=1)


class Numbered(layers.Layer):
    """Makes views that are known beforehand, but passes as random."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(0)

    def call(self, x, training=False):
        if not training:
            return x
        self.generator.next()
        rows = tf.range(tf.shape(x)[0])
        result = x
        for number in range(1, VIEWS):
            chosen = tf.equal(rows % VIEWS, number)
            chosen = tf.reshape(chosen, [-1] + [1] * (x.shape.rank - 1))
            result = tf.where(chosen, view(x, number), result)
        return result


def with_views(name, **settings):
    """A model of the zoo that sees three views of each example.

    Returns:
        The private model, the model of the zoo inside it, and its data.
    """
    build, x, y, loss = ZOO[name]()
    inner = build(functools.partial(keras.Model))
    inner.compile(loss=loss)
    inner(x)
    inputs = keras.Input(x.shape[1:], dtype=x.dtype)
    settings = {
        "l2_norm_clip": CLIP,
        "noise_multiplier": 0.0,
        "expected_batch_size": 1,
        "views": VIEWS,
        **settings,
    }
    model = keras_fastclip.DPModel(
        inputs, inner(Numbered()(inputs)), **settings
    )
    model.compile(keras.optimizers.SGD(1.0), loss)
    return model, inner, tf.constant(x), tf.constant(y)


def loop_over_views(inner, x, y, clip=CLIP):
    """Clipped sums and squared norms, by one plain gradient a view."""
    sums, squared_norms = 0, []
    for i in range(len(x)):
        gradients = [
            _plain_gradient(
                inner, (view(x[i : i + 1], k), y[i : i + 1], None), True
            )
            for k in range(VIEWS)
        ]
        means = [sum(each) / VIEWS for each in zip(*gradients, strict=True)]
        squared = sum(np.sum(np.square(mean)) for mean in means)
        factor = min(1.0, clip / np.sqrt(squared))
        sums = sums + np.array([factor * mean for mean in means], object)
        squared_norms.append(squared)
    return list(sums), np.array(squared_norms)


@pytest.mark.parametrize("name", ZOO)
def test_equals_loop_over_views(name, float64):
    model, inner, x, y = with_views(name)
    sums, squared_norms = tf.function(model.clipped_gradients)(x, y)
    right = loop_over_views(inner, x, y)
    tolerance = 1e-6 if name == "lora" else 1e-9
    assert relative_error(sums, right[0]) < tolerance
    np.testing.assert_allclose(squared_norms, right[1], rtol=tolerance)
    assert np.min(right[1]) > 0


@pytest.mark.parametrize("name", ["cnn", "tied_embedding"])
def test_methods_agree(name, float64):
    model, inner, x, y = with_views(name)
    right = loop_over_views(inner, x, y)
    for method in METHODS:
        sums, squared_norms = by_method(model, method)(x, y)
        assert relative_error(sums, right[0]) < 1e-9, method
        np.testing.assert_allclose(
            squared_norms, right[1], rtol=1e-9, err_msg=method
        )


@pytest.mark.parametrize("name", ["cnn", "encoder"])
def test_compiles(name, float64):
    model, inner, x, y = with_views(name)
    run = tf.function(model.clipped_gradients, jit_compile=True)
    assert relative_error(run(x, y)[0], loop_over_views(inner, x, y)[0]) < 1e-9


@pytest.mark.parametrize("size", [None, 2, 4])
def test_physical_batches_count_examples(size, float64):
    model, inner, x, y = with_views("cnn", physical_batch_size=size)
    before = [v.numpy() for v in inner.trainable_variables]
    right, _ = loop_over_views(inner, x, y)
    model.train_on_batch(x, y)
    steps = [
        old - new.numpy()
        for old, new in zip(before, inner.trainable_variables, strict=True)
    ]
    assert relative_error(steps, right) < 1e-9


def test_an_example_moves_weights_by_the_clip_norm_at_most(float64):
    model, inner, x, y = with_views("cnn")
    before = [v.numpy() for v in inner.trainable_variables]
    model.train_on_batch(1000 * x[:1], y[:1])
    moved = sum(
        np.sum(np.square(old - new.numpy()))
        for old, new in zip(before, inner.trainable_variables, strict=True)
    )
    assert 0.99 * CLIP < np.sqrt(moved) <= CLIP * (1 + 1e-9)


def test_examples_do_not_mix(float64):
    model, _, x, y = with_views("resnet")
    sums = [model.clipped_gradients(x[i : i + 1], y[i : i + 1]) for i in (1, 4)]
    both, norms = model.clipped_gradients(tf.gather(x, [1, 4]), y[1:5:3])
    added = [a + b for a, b in zip(sums[0][0], sums[1][0], strict=True)]
    assert relative_error(both, added) < 1e-9
    np.testing.assert_allclose(norms, np.concatenate([s[1] for s in sums]))


def small(*first, **settings):
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **settings}
    model = keras_fastclip.DPSequential(
        [keras.Input((4, 4, 1)), *first, layers.Flatten(), layers.Dense(3)],
        **settings,
    )
    model.compile("sgd", cross_entropy(), metrics=["accuracy"])
    return model


def images(count=BATCH):
    return random(count, 4, 4, 1), labels(count)


class Neighbour(layers.Layer):
    """Adds to each row what is in the row before it."""

    def call(self, x):
        return x + ops.roll(x, 1, axis=0)


def test_mixing_is_found_among_views():
    model = small(layers.Dropout(0.5), Neighbour(name="neighbour"), views=3)
    with pytest.raises(keras_fastclip.NotPrivateError, match="neighbour"):
        model.fit(*images(), batch_size=2, verbose=0)


def test_views_without_random_numbers_are_refused():
    with pytest.raises(ValueError, match="views=2 would be 2 times the same"):
        small(views=2).fit(*images(), batch_size=2, verbose=0)


@pytest.mark.parametrize("views", [0, 1.5, "all"])
def test_views_are_counted(views):
    with pytest.raises(ValueError, match="views"):
        small(layers.Dropout(0.5), views=views)


class Seen(layers.Layer):
    """Notes what comes to it in training."""

    rows = None

    def call(self, x, training=False):
        if training and tf.executing_eagerly():
            Seen.rows = np.array(x)
        return x


def test_each_view_of_each_example_has_its_own_random_numbers():
    model = small(layers.RandomTranslation(0.5, 0.5), Seen(), views=5)
    x, y = images(2)
    x = np.repeat(x[:1], 2, axis=0)
    model.clipped_gradients(x, y)
    assert len(np.unique(Seen.rows, axis=0)) == 10


def test_epsilon_is_that_of_one_view():
    spent = []
    for views in (1, 3):
        model = small(layers.Dropout(0.5), views=views, physical_batch_size=4)
        history = model.fit(*images(64), batch_size=16, verbose=0)
        spent.append(model.privacy_spent(1e-3))
        assert 0 <= history.history["accuracy"][0] <= 1
        assert np.isfinite(history.history["loss"][0])
    assert spent[0] == spent[1]


def test_logged_loss_is_the_mean_over_views(float64):
    model, inner, x, y = with_views("mlp")
    right = np.mean([inner.evaluate(view(x, k), y) for k in range(VIEWS)])
    logs = model.train_on_batch(x, y, return_dict=True)
    np.testing.assert_allclose(logs["loss"], right)


def test_views_are_saved(tmp_path):
    model = small(layers.RandomFlip(), views=3)
    model.fit(*images(), batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_config()["views"] == 3
    loaded.fit(*images(), batch_size=2, verbose=0)


def test_views_are_told():
    model = small(layers.RandomFlip(), views=3)
    model.fit(*images(), batch_size=2, verbose=0)
    assert "3 random views" in model.privacy_statement(1e-3)
    printed = []
    keras_fastclip.clipping_summary(model, print_fn=printed.append)
    assert "3 views of each example" in printed[0]


def test_gradients_can_be_checked():
    model = small(layers.RandomFlip(), views=3)
    report = keras_fastclip.check_gradients(model, *images())
    assert report.relative_error < 1e-5
