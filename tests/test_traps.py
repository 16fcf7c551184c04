"""Refuse or be right: models and data that private training gets wrong easily.

One class a row. A model is *right* if its norms and clipped sums are those of
the loop over single examples and an update from one example is no longer than
the clip norm. A model is *refused* before anything changes, with the name of
the culprit and a remedy; the test then follows the remedy and finds the model
right.
"""

import types
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_fastclip
from keras_fastclip.sampling import PoissonBatch
from tests.zoo import (
    ClassToken,
    GatedAttention,
    Positions,
    Quadratic,
    Windows,
    labels,
    random,
)

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:No rule is registered"),
]

ROWS = 3
CLIP = 0.3
SETTINGS = {
    "l2_norm_clip": CLIP,
    "noise_multiplier": 0.0,
    "expected_batch_size": 1,
}


# -- models and data ---------------------------------------------------------


def compiled(model, loss="mse", optimizer=None, **kwargs):
    """A step of this optimizer takes the gradient itself off the weights."""
    model.compile(optimizer or keras.optimizers.SGD(1.0), loss, **kwargs)
    return model


def private(outputs, shape=(4,), dtype=None, loss="mse", **settings):
    """A compiled model from a function of its input."""
    x = keras.Input(shape, dtype=dtype)
    return compiled(
        keras_fastclip.DPModel(x, outputs(x), **{**SETTINGS, **settings}), loss
    )


def stack(*chain, shape=(4,), dtype=None, **kwargs):
    """A model of layers one after the other, with a head."""

    def outputs(x):
        for layer in chain:
            x = layer(x)
        if len(x.shape) > 2:
            x = layers.Flatten()(x)
        return layers.Dense(2, name="head")(x)

    return private(outputs, shape, dtype, **kwargs)


def around(layer, **kwargs):
    """A model with a layer between two others."""
    first = layers.Dense(4, activation="tanh", name="first")
    return stack(first, layer, **kwargs)


class Subclassed(keras_fastclip.DPModel):
    """A model with layers of its own; `call` is the row's business."""

    def __init__(self, **settings):
        super().__init__(**{**SETTINGS, **settings})
        self.first = layers.Dense(4, use_bias=False, name="first")
        self.second = layers.Dense(2, name="second")


def data(model, rows=ROWS):
    """Inputs and targets that fit the model, with gradients to be clipped."""

    def inputs(tensor):
        if tensor.dtype.startswith("int"):
            return labels(rows, *tensor.shape[1:], high=5)
        return random(rows, *tensor.shape[1:])

    def targets(tensor):
        return 30 * random(rows, *tensor.shape[1:], seed=2)

    x = keras.tree.map_structure(inputs, model.input)
    return x, keras.tree.map_structure(targets, model.output)


def as_tensors(batch):
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.constant(leaf), batch
    )


def one_example(batch, index=0):
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else leaf[index : index + 1], batch
    )


def in_float32():
    """From here to the end of the test."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def norm(tensors):
    squares = [np.sum(np.square(np.array(t, "float64"))) for t in tensors]
    return np.sqrt(np.sum(squares))


# -- the two assertions ------------------------------------------------------


def update(model, x, y, sample_weight=None):
    """What a step takes off the weights; they are put back after it."""
    before = model.get_weights()
    start = [v.numpy() for v in model.trainable_variables]
    model.train_step(as_tensors((x, y, sample_weight)))
    end = [v.numpy() for v in model.trainable_variables]
    model.set_weights(before)
    return [np.array(s - e) for s, e in zip(start, end, strict=True)]


def update_norm(model, x, y, sample_weight=None):
    """How far one example moves the weights."""
    batch = one_example((x, y, sample_weight))
    return norm(update(model, *batch))


def right(model, x=None, y=None, sample_weight=None, tolerance=1e-9):
    """Norms and sums are the loop's, and one example moves weights by C."""
    if x is None:
        x, y = data(model)
    report = keras_fastclip.check_gradients(model, x, y, sample_weight)
    assert report.relative_error < tolerance, str(report)
    # These gradients are long, so that clipping brings them to C exactly.
    found = update_norm(model, x, y, sample_weight)
    np.testing.assert_allclose(found, CLIP, rtol=max(1e-6, tolerance))


def refuses(model, *words, x=None, y=None, sample_weight=None, rows=ROWS):
    """An error that names culprit and remedy, before anything changes."""
    if x is None:
        x, y = data(model, rows)
    model(x)  # builds it
    before = model.get_weights()
    with pytest.raises((ValueError, RuntimeError)) as error:
        model.fit(x, y, 2, sample_weight=sample_weight, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(model._privacy.steps) == 0
    assert not isinstance(error.value, tf.errors.OpError)
    for word in words:
        assert word in str(error.value)


# -- the table ---------------------------------------------------------------


class FromTensorFlow(layers.Layer):
    """Draws from the global stream of TensorFlow."""

    def call(self, x, training=None):
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype)


class FromNumPy(layers.Layer):
    """Draws what cannot be drawn again."""

    def call(self, x):
        return x * np.random.default_rng().uniform(1, 2)


class FromKeras(layers.Layer):
    """The same, from a stream that Keras knows."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(0)

    def call(self, x):
        return x * keras.random.uniform((), 1, 2, x.dtype, self.seeds)


class TestRandomness:
    """Dropout, noise layers, random augmentation, any other randomness."""

    VECTORS = {
        "dropout": lambda: layers.Dropout(0.5),
        "dropout_for_all": lambda: layers.Dropout(0.5, noise_shape=(1, 4)),
        "gaussian_noise": lambda: layers.GaussianNoise(1.0),
        "from_tensorflow": FromTensorFlow,
        "from_keras": FromKeras,
    }
    SEQUENCES = {
        "attention": lambda: (
            lambda x: layers.MultiHeadAttention(1, 2, dropout=0.5)(x, x)
        ),
        "recurrent": lambda: layers.SimpleRNN(2, dropout=0.5),
    }
    IMAGES = {
        "flip": lambda: layers.RandomFlip(),
        "rotation": lambda: layers.RandomRotation(0.5),
    }

    def require_bound(self, model):
        """In training: norm and sum come from one forward pass."""
        x, y = data(model)
        for _ in range(2):
            sums, squared = model.clipped_gradients(x[:1], y[:1])
            assert squared[0] > CLIP**2
            np.testing.assert_allclose(norm(sums), CLIP, rtol=1e-6)
            found = update_norm(model, x, y)
            np.testing.assert_allclose(found, CLIP, rtol=1e-6)

    @pytest.mark.parametrize("name", VECTORS)
    def test_between_layers(self, name):
        self.require_bound(around(self.VECTORS[name]()))

    @pytest.mark.parametrize("name", SEQUENCES)
    def test_in_sequences(self, name):
        self.require_bound(around(self.SEQUENCES[name](), shape=(3, 4)))

    @pytest.mark.parametrize("name", IMAGES)
    def test_in_images(self, name):
        in_float32()  # Some take no other.
        image = self.IMAGES[name]()
        self.require_bound(stack(image, layers.Conv2D(2, 2), shape=(4, 4, 3)))

    def test_that_cannot_be_repeated_is_refused(self):
        refuses(around(FromNumPy(name="numpy")), "keras.random", "'numpy'")
        self.require_bound(around(FromKeras()))


def lengths():
    """Sequences of 1, 3 and 5 numbers, padded with zeros."""
    x = labels(ROWS, 5, high=4) + 1
    for i in range(ROWS):
        x[i, 1 + 2 * i :] = 0
    return x


class TestMasks:
    """Masks: mask_zero, Masking, attention masks, ignore_class."""

    def embedded(self, *chain, **kwargs):
        table = layers.Embedding(5, 4, mask_zero=True)
        return stack(table, *chain, shape=(5,), dtype="int32", **kwargs)

    def tokens(self, loss="mse", **kwargs):
        """A loss for each token."""

        def outputs(x):
            y = layers.Embedding(5, 4, **kwargs)(x)
            return layers.Dense(3)(y)

        return private(outputs, (5,), "int32", loss)

    def test_mask_zero(self):
        model = self.embedded(layers.GlobalAveragePooling1D())
        right(model, lengths(), data(model)[1])

    def test_mask_zero_in_the_loss(self):
        model = self.tokens(mask_zero=True)
        right(model, lengths(), data(model)[1])

    def test_masking(self):
        model = stack(
            layers.Masking(),
            layers.Dense(4, activation="tanh"),
            layers.GlobalAveragePooling1D(),
            shape=(5, 3),
        )
        x, y = data(model)
        right(model, x * (lengths() > 0)[..., None], y)

    def test_mask_that_attention_finds(self):
        model = self.embedded(GatedAttention(), layers.Dense(2))
        right(model, lengths(), data(model)[1])

    def test_attention_mask_as_argument(self):
        x, mask = keras.Input((3, 4)), keras.Input((3, 3), dtype="bool")
        y = layers.MultiHeadAttention(1, 2)(x, x, attention_mask=mask)
        outputs = layers.Dense(2)(layers.Flatten()(y))
        model = compiled(keras_fastclip.DPModel([x, mask], outputs, **SETTINGS))
        allowed = random(ROWS, 3, 3) > 0
        inputs = [random(ROWS, 3, 4), allowed | np.eye(3, dtype=bool)]
        right(model, inputs, 10 * random(ROWS, 2, seed=2))

    def test_ignore_class(self):
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=1
        )
        model = self.tokens(loss)
        model.set_weights([10 * w for w in model.get_weights()])
        right(model, lengths(), labels(ROWS, 5))

    def test_lengths_of_other_examples_do_not_matter(self):
        model = self.tokens(mask_zero=True)
        x, y = lengths(), data(model)[1]
        others = np.concatenate([x[:1], x[:0:-1]])
        assert not np.array_equal(x == 0, others == 0)
        _, norms = model.clipped_gradients(x, y)
        _, beside_others = model.clipped_gradients(others, y)
        np.testing.assert_allclose(norms[0], beside_others[0], rtol=1e-12)


class TestCalledSeveralTimes:
    """One layer called k times in a forward pass."""

    def test_dense(self):
        shared = layers.Dense(4, activation="tanh")
        right(stack(shared, shared, shared, shape=(3, 4)))

    def test_convolution(self):
        shared = layers.Conv1D(2, 2, padding="same", activation="tanh")
        right(stack(shared, shared, shape=(4, 2)))

    def test_embedding_of_two_inputs(self):
        table, x = layers.Embedding(5, 3), keras.Input((2, 3), dtype="int32")
        y = table(x[:, 0]) * table(x[:, 1])
        outputs = layers.Dense(2)(layers.Flatten()(y))
        right(compiled(keras_fastclip.DPModel(x, outputs, **SETTINGS)))

    def test_normalization(self):
        shared = layers.LayerNormalization()
        right(stack(shared, layers.Dense(4, activation="tanh"), shared))

    def test_recurrent_layer(self):
        shared = layers.SimpleRNN(2, return_sequences=True)
        right(stack(shared, shared, shape=(3, 2)))


class TestTiedEmbedding:
    """Embedding tied to the output projection."""

    @pytest.mark.parametrize("mask_zero", [False, True])
    def test_reversible_embedding(self, mask_zero):
        table = layers.ReversibleEmbedding(5, 3, mask_zero=mask_zero)

        def outputs(x):
            y = layers.Dense(3, activation="tanh")(table(x))
            return table(y, reverse=True)

        right(private(outputs, (4,), "int32"))


class KernelOutside(Subclassed):
    """Reads the kernel of a layer that it does not call."""

    def call(self, x):
        return self.second(ops.tanh(x) @ self.first.kernel)


class KernelInside(Subclassed):
    """The remedy: calls the layer."""

    def call(self, x):
        return self.second(self.first(ops.tanh(x)))


class KernelTwice(Subclassed):
    """Calls the layer and reads its kernel as well."""

    def call(self, x):
        return self.second(ops.tanh(self.first(x)) @ self.first.kernel)


class CalledTwice(Subclassed):
    """The remedy: calls the layer again."""

    def call(self, x):
        return self.second(self.first(ops.tanh(self.first(x))))


class TiedByHand(Subclassed):
    """Projects to the output with the table of the embedding."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.table = layers.Embedding(5, 4, name="table")

    def call(self, x):
        y = self.first(self.table(x))
        return y @ ops.transpose(self.table.embeddings)


class OwnWeight(Subclassed):
    """A weight of the model itself."""

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 4))
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        return self.second(self.scale * self.first(x))


class Traced(layers.Layer):
    """Reads its weight in a function that was traced before."""

    def build(self, shape):
        self.w = self.add_weight(shape=(4, 4), initializer="normal", name="w")
        self.function = tf.function(lambda x: x @ self.w)
        self.function(tf.zeros([2, 4], "float64"))

    def call(self, x):
        return self.function(x)


class NotTraced(Traced):
    """The remedy: reads it in its call."""

    def call(self, x):
        return x @ self.w


class TestReadOutside:
    """A variable read outside the call of the layer that owns it."""

    BATCH = staticmethod(
        lambda: (random(ROWS, 4), 10 * random(ROWS, 2, seed=2))
    )

    @pytest.mark.parametrize(
        "wrong, remedy",
        [(KernelOutside, KernelInside), (KernelTwice, CalledTwice)],
    )
    def test_kernel(self, wrong, remedy):
        x, y = self.BATCH()
        words = "first/kernel", "outside the call", "call the layer", "freeze"
        model = compiled(wrong())
        model.first.build((None, 4))
        refuses(model, *words, x=x, y=y)
        right(compiled(remedy()), x, y)
        model.first.trainable = False
        right(compiled(model), x, y)

    def test_table_of_an_embedding(self):
        x, y = labels(ROWS, 3, high=5), random(ROWS, 3, 5, seed=2)
        words = "table/embeddings", "call the layer", "freeze"
        model = compiled(TiedByHand())
        refuses(model, *words, x=x, y=y)
        model.table.trainable = False
        right(compiled(model), x, 1000 * y)

    def test_weight_in_a_compiled_function(self):
        words = "traced/w", "compiled function", "inside its own layer"
        layer = Traced(name="traced")
        model = around(layer)
        refuses(model, *words, "freeze")
        right(around(NotTraced()))
        layer.trainable = False
        right(compiled(model))

    def test_weight_in_a_rematerialized_layer(self):
        with keras.RematScope(mode="full"):
            layer = layers.Dense(4, name="remat")
        model = around(layer)
        refuses(model, "remat/kernel", "rematerialized", "freeze")
        right(around(layers.Dense(4)))
        layer.trainable = False
        right(compiled(model))

    def test_kernel_of_a_wrapped_layer(self):
        """Spectral normalization reads and writes the kernel of its layer."""
        inner = layers.Dense(4)
        wrapper = layers.SpectralNormalization(inner, name="spectral")
        model = around(wrapper)
        refuses(model, "'spectral'", "freeze")
        wrapper.trainable = False
        right(compiled(model))

    def test_weight_of_the_model_itself(self):
        right(compiled(OwnWeight()), *self.BATCH())


class InInference(layers.Layer):
    """Calls BatchNormalization in inference mode."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, x):
        return self.norm(x, training=False)


class TestBatchNormalization:
    """BatchNormalization in training, with and without scale and offset."""

    def model(self, affine):
        return keras.Sequential(
            [
                keras.Input((3, 4)),
                layers.Dense(4, activation="tanh"),
                layers.BatchNormalization(
                    scale=affine, center=affine, name="bn"
                ),
                layers.Dense(2),
            ]
        )

    @pytest.mark.parametrize("affine", [True, False])
    def test_refused(self, affine):
        model = self.model(affine)
        x, y = random(ROWS, 3, 4), 30 * random(ROWS, 3, 2, seed=2)
        replaced = keras_fastclip.replace_batch_normalization(model)
        keras_fastclip.make_private(replaced, **SETTINGS)
        right(compiled(replaced), x, y)
        keras_fastclip.make_private(model, **SETTINGS)
        words = "bn' (Batch", "replace_batch_normalization(model)", "trainable"
        refuses(compiled(model), *words, x=x, y=y)
        model.get_layer("bn").trainable = False
        right(model, x, y)

    def test_inference_mode(self):
        right(around(InInference()))


def contrastive(y_true, y_pred):
    """Every other example is a counterexample."""
    similarity = ops.matmul(y_pred, ops.transpose(y_pred))
    return keras.losses.sparse_categorical_crossentropy(
        ops.arange(ops.shape(y_pred)[0]), similarity, from_logits=True
    )


def against_fixed(y_true, y_pred):
    """The remedy: counterexamples that are not in the batch."""
    similarity = ops.matmul(y_pred, 9 * np.eye(2, 3))
    return keras.losses.sparse_categorical_crossentropy(
        ops.cast(y_true[:, 0] > 0, "int32"), similarity, from_logits=True
    )


class TestMixing:
    """Any op that mixes examples: means over the batch, MixUp, contrast."""

    @pytest.mark.parametrize(
        "mix",
        [
            lambda x: x - ops.mean(x, axis=0),
            lambda x: ops.sort(x, axis=0),
        ],
        ids=["mean", "sort"],
    )
    def test_over_the_batch(self, mix):
        words = "'mix'", "mixes examples", "from its own data alone"
        refuses(around(layers.Lambda(mix, name="mix")), *words)

    @pytest.mark.parametrize(
        "own",
        [
            lambda x: x - ops.mean(x, axis=-1, keepdims=True),
            lambda x: ops.sort(x, axis=-1),
        ],
        ids=["mean", "sort"],
    )
    def test_within_an_example(self, own):
        right(around(layers.Lambda(own)))

    @pytest.mark.parametrize("kind", [layers.MixUp, layers.CutMix])
    def test_blended_images(self, kind):
        def model(blend):
            x = {
                "images": keras.Input((4, 4, 3), name="images"),
                "labels": keras.Input((2,), name="labels"),
            }
            images = blend(x)["images"]
            y = layers.Dense(2)(layers.Flatten()(images))
            return compiled(keras_fastclip.DPModel(x, y, **SETTINGS))

        refuses(
            model(kind(name="blend")), "'blend'", "mixes examples", "Remove"
        )
        right(model(lambda x: x))

    def test_contrastive_loss(self):
        words = "loss", "mixes examples", "from its own data alone"
        refuses(around(layers.Identity(), loss=contrastive), *words)
        right(around(layers.Identity(), loss=against_fixed))


class TestShapesOfLosses:
    """A loss of shape (B, 1), (B,), (B, T), (B, H, W) for the examples."""

    @pytest.mark.parametrize(
        "loss",
        [
            lambda y, p: ops.mean((y - p) ** 2, axis=(1, 2, 3))[:, None],
            lambda y, p: ops.mean((y - p) ** 2, axis=(1, 2, 3)),
            lambda y, p: ops.mean((y - p) ** 2, axis=(2, 3)),
            lambda y, p: ops.mean((y - p) ** 2, axis=3),
        ],
        ids=["B1", "B", "BT", "BHW"],
    )
    def test_shape(self, loss):
        model = private(layers.Conv2D(2, 2), (4, 3, 2), loss=loss)
        right(model)
        right(model, *data(model), np.arange(1.0, 1 + ROWS))

    def test_column_of_predictions(self):
        model = private(layers.Dense(1), loss="binary_crossentropy")
        model.set_weights([10 * w for w in model.get_weights()])
        x = 5 * random(ROWS, 4)
        compiled(model, keras.losses.BinaryCrossentropy(from_logits=True))
        # The first prediction is wrong, so that its gradient is long.
        y = labels(ROWS, 1, high=2)
        y[0] = model(x).numpy()[0] < 0
        right(model, x, y)


class TestKindsOfLosses:
    """String, function, list, dict and nested losses; weights of all kinds."""

    STRUCTURES = {
        "list": lambda a, b: [a, b],
        "dict": lambda a, b: {"a": a, "b": b},
        "nested": lambda a, b: {"u": {"a": a}, "v": {"b": b}},
        "nested_list": lambda a, b: {"u": {"a": a}, "v": [b]},
    }

    def two(self, structure):
        def outputs(x):
            y = layers.Dense(4, activation="tanh")(x)
            a, b = layers.Dense(2, name="a")(y), layers.Dense(3, name="b")(y)
            return structure(a, b)

        return private(outputs)

    @pytest.mark.parametrize(
        "loss",
        [
            "mse",
            keras.losses.mean_squared_error,
            keras.losses.Huber(100.0),
            lambda y, p: ops.square(y - p),
        ],
        ids=["string", "function", "object", "own"],
    )
    def test_one(self, loss):
        right(private(layers.Dense(3), loss=loss))

    @pytest.mark.parametrize("name", STRUCTURES)
    def test_several(self, name):
        structure = self.STRUCTURES[name]
        loss = structure("mse", keras.losses.mean_squared_error)
        right(compiled(self.two(structure), loss))

    def test_loss_weights(self):
        model = self.two(self.STRUCTURES["dict"])
        loss, weights = {"a": "mse", "b": "mae"}, {"a": 0.5, "b": 2.0}
        right(compiled(model, loss, loss_weights=weights))

    def test_sample_weights(self):
        model = private(layers.Dense(3), (3, 4))
        for shape in [(ROWS,), (ROWS, 1), (ROWS, 3)]:
            right(model, *data(model), np.exp(random(*shape)))

    def test_class_weights(self):
        """In a batch that holds every example once."""
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = private(layers.Dense(3), loss=loss, expected_batch_size=ROWS)
        x, y = random(ROWS, 4), labels(ROWS)
        weight_of = {0: 0.2, 1: 1.0, 2: 3.0}
        weights = np.array([weight_of[label] for label in y])
        expected, _ = model.clipped_gradients(x, y, weights)
        before = model.get_weights()
        compiled(model, loss, run_eagerly=True)
        model.fit(x, y, ROWS, class_weight=weight_of, verbose=0)
        for b, a, e in zip(before, model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(b - a, e / ROWS, atol=1e-12)


def one_number(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


class OneNumber(keras.Loss):
    def call(self, y_true, y_pred):
        return one_number(y_true, y_pred)


class OwnReduction(keras.losses.MeanSquaredError):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return one_number(y_true, y_pred)


class ByExample(keras.Loss):
    """The remedy."""

    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred), axis=-1)


class TestLossOfTheBatch:
    """A loss function that returns a scalar for the batch."""

    WORDS = "shape ()", "first axis is the batch", "without a mean"

    @pytest.mark.parametrize(
        "loss, words",
        [
            (lambda: one_number, ("one_number", *WORDS)),
            (lambda: OneNumber(name="own"), ("'own'", *WORDS)),
            (
                lambda: OwnReduction(name="own"),
                ("'own'", "overrides `__call__`", "Override `call`"),
            ),
        ],
        ids=["function", "class", "reduction"],
    )
    def test_refused(self, loss, words):
        model = private(layers.Dense(2), loss=loss())
        refuses(model, *words)
        right(compiled(model, ByExample()))


class Rows(Subclassed):
    """Subclassed, with a model inside."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.inner = keras.Sequential([layers.Dense(4, activation="tanh")])

    def call(self, x):
        return self.second(self.inner(self.first(x)))


class TestKindsOfModels:
    """Nested, subclassed, Sequential by add, Sequential without an Input.

    Right and fast: strict=True refuses what has no rule.
    """

    SETTINGS = {**SETTINGS, "strict": True}

    def batch(self):
        return random(ROWS, 4), 10 * random(ROWS, 2, seed=2)

    def test_nested(self):
        x = keras.Input((4,))
        inner = keras.Model(x, layers.Dense(4, activation="tanh")(x))
        right(around(keras.Sequential([inner, layers.Dense(3)]), strict=True))

    def test_subclassed(self):
        right(compiled(Rows(strict=True)), *self.batch())

    def test_sequential_by_add(self):
        model = keras_fastclip.DPSequential(**self.SETTINGS)
        model.add(keras.Input((4,)))
        model.add(layers.Dense(3, activation="tanh"))
        model.add(layers.Dense(2))
        right(compiled(model), *self.batch())

    def test_sequential_without_input(self):
        model = keras_fastclip.DPSequential(
            [layers.Dense(3, activation="tanh"), layers.Dense(2)],
            **self.SETTINGS,
        )
        right(compiled(model), *self.batch())

    def test_made_private(self):
        model = keras.Sequential([layers.Dense(3), layers.Dense(2)])
        keras_fastclip.make_private(model, **self.SETTINGS)
        right(compiled(model), *self.batch())


class BiasTable(layers.Layer):
    """Attention with a table of biases, shared by all examples."""

    def __init__(self):
        super().__init__()
        self.query, self.key = layers.Dense(2), layers.Dense(2)

    def build(self, shape):
        length = shape[1]
        self.table = self.add_weight(
            shape=(2 * length - 1,), initializer="normal"
        )
        self.query.build(shape)
        self.key.build(shape)

    def call(self, x):
        steps = np.arange(x.shape[1])
        places = steps[:, None] - steps + len(steps) - 1
        scores = self.query(x) @ ops.transpose(self.key(x), (0, 2, 1))
        biases = ops.take(self.table, places, axis=0)
        return ops.softmax(scores + biases) @ x


class TestOwnWeightsAndSublayers:
    """A layer with own weights and sublayers: class tokens, bias tables."""

    @pytest.mark.parametrize("layer", [ClassToken, BiasTable])
    def test_layer(self, layer):
        right(stack(layer(), layers.Dense(2), shape=(3, 4)))


class Experts(layers.Layer):
    """Folds a copy of each example for every expert into the batch axis."""

    def __init__(self):
        super().__init__()
        self.shared = layers.Dense(4, activation="tanh")

    def build(self, shape):
        self.shared.build(shape)
        self.gates = self.add_weight(shape=(3, 4), initializer="normal")

    def call(self, x):
        gated = x[:, None] * self.gates
        y = self.shared(ops.reshape(gated, (-1, 4)))
        return ops.reshape(y, (-1, 3, 4))


class TestOtherBatchAxes:
    """No batch axis (positions); windows, frames, experts folded into it."""

    @pytest.mark.parametrize("stacked", [True, False])
    def test_positions(self, stacked):
        positions = Positions(3, 4, stacked)
        right(stack(layers.Dense(4), positions, shape=(3, 4)))

    @pytest.mark.parametrize("example_major", [True, False])
    def test_windows(self, example_major):
        right(stack(Windows(example_major), shape=(6, 3)))

    def test_frames(self):
        frames = layers.TimeDistributed(layers.Conv1D(2, 2))
        right(stack(frames, shape=(2, 3, 2)))

    def test_experts(self):
        right(stack(Experts()))


class AnotherOrder(keras_fastclip.DPModel):
    """Its layers are made from last to first."""

    def __init__(self):
        super().__init__(**SETTINGS)
        self.last = layers.Dense(2)
        self.middle = layers.Dense(3, activation="tanh")
        self.first = layers.Dense(4, activation="tanh")

    def call(self, x):
        return self.last(self.middle(self.first(x)))


class TestOrderOfLayers:
    """Layers created in another order than called."""

    def test_subclassed(self):
        x, y = random(ROWS, 4), 10 * random(ROWS, 2, seed=2)
        right(compiled(AnotherOrder()), x, y)


class TestConvolutions:
    """Grouped, dilated, strided, causal, depthwise, separable, transposed."""

    SEQUENCES = {
        "dilated": lambda: layers.Conv1D(3, 2, dilation_rate=2),
        "causal": lambda: layers.Conv1D(3, 2, padding="causal"),
        "depthwise": lambda: layers.DepthwiseConv1D(2, depth_multiplier=2),
    }
    IMAGES = {
        "grouped": lambda: layers.Conv2D(4, 2, groups=2),
        "strided": lambda: layers.Conv2D(3, 2, strides=2, padding="same"),
        "depthwise": lambda: layers.DepthwiseConv2D(2, depth_multiplier=2),
        "separable": lambda: layers.SeparableConv2D(3, 2),
        "transposed": lambda: layers.Conv2DTranspose(3, 2, strides=2),
    }

    @pytest.mark.parametrize("name", SEQUENCES)
    def test_of_sequences(self, name):
        right(stack(self.SEQUENCES[name](), shape=(5, 4)))

    @pytest.mark.parametrize("name", IMAGES)
    def test_of_images(self, name):
        right(stack(self.IMAGES[name](), shape=(4, 5, 2)))

    def test_of_volumes(self):
        right(stack(layers.Conv3DTranspose(2, 2), shape=(3, 2, 2, 2)))


class TestDenseOfHighRank:
    """Dense on 4-D and 5-D inputs."""

    @pytest.mark.parametrize("shape", [(2, 3, 4), (2, 1, 3, 4)], ids=str)
    def test_shape(self, shape):
        right(around(layers.Dense(2), shape=shape))


class TestCustomLayer:
    """Custom layer with raw weights and no rule: named once, or refused."""

    def test_is_right_and_reported_once_with_its_memory(self):
        model = around(Quadratic(name="quadratic"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            right(model)
            right(model)
        (message,) = (
            str(w.message) for w in caught if "No rule" in str(w.message)
        )
        assert "quadratic (Quadratic, 36 weights" in message
        assert "MiB for each example" in message

    def test_strict_refuses_it(self):
        words = "quadratic", "strict=True", "keras_fastclip.register"
        model = around(Quadratic(name="quadratic"), strict=True)
        refuses(model, *words, "strict=False")
        right(around(Quadratic(), strict=False))
        registry = keras_fastclip.LayerRegistry(
            keras_fastclip.default_registry()
        )

        @keras_fastclip.register(Quadratic, registry)
        def rule(layer, x):
            zeta = layer.call(x)

            def omega(g):
                by_w = 2 * (x @ layer.w) * g
                inputs = tf.reduce_sum(tf.square(x), -1)
                outputs = tf.reduce_sum(tf.square(by_w), -1)
                squares = tf.reduce_sum(tf.square(g), -1)
                return inputs * (outputs + squares) + squares

            return zeta, omega

        right(around(Quadratic(), strict=True, registry=registry))


class TestRecurrent:
    """LSTM, GRU, SimpleRNN, Bidirectional, sequences, masks, stacks, state."""

    LAYERS = {
        "lstm": lambda **kwargs: layers.LSTM(2, **kwargs),
        "gru": lambda **kwargs: layers.GRU(2, **kwargs),
        "simple": lambda **kwargs: layers.SimpleRNN(2, **kwargs),
        "bidirectional": lambda **kwargs: layers.Bidirectional(
            layers.SimpleRNN(2, **kwargs)
        ),
    }

    @pytest.mark.parametrize("name", ["lstm", "gru"])
    def test_last_output(self, name):
        right(stack(self.LAYERS[name](), shape=(3, 2)))

    @pytest.mark.parametrize("name", LAYERS)
    def test_sequences_with_masks(self, name):
        table = layers.Embedding(5, 2, mask_zero=True)
        layer = self.LAYERS[name](return_sequences=True)
        model = stack(table, layer, shape=(3,), dtype="int32")
        right(model, lengths()[:, :3], data(model)[1])

    def test_stacked(self):
        first = layers.LSTM(2, return_sequences=True)
        right(stack(first, layers.GRU(2), shape=(3, 2)))

    def test_options(self):
        layer = layers.GRU(2, reset_after=False, go_backwards=True)
        right(stack(layer, shape=(3, 2)))

    @pytest.mark.parametrize("name", LAYERS)
    def test_stateful(self, name):
        def model(**kwargs):
            x = keras.Input((3, 2), batch_size=4)
            y = self.LAYERS[name](name="recurrent", **kwargs)(x)
            return compiled(keras_fastclip.DPModel(x, y, **SETTINGS))

        words = "recurrent", "stateful=False"
        refuses(model(stateful=True), *words, rows=4)
        if name == "simple":
            right(model(stateful=False))


class TestFrozen:
    """Frozen layers, frozen kernel with trained bias, LoRA."""

    def test_layer(self):
        right(around(layers.Dense(3, trainable=False)))

    def test_kernel(self):
        layer = layers.Dense(3)
        layer.build((None, 4))
        layer.kernel.trainable = False
        right(around(layer))

    @pytest.mark.parametrize(
        "layer, shape, dtype",
        [
            (lambda: layers.Dense(3), (4,), None),
            (lambda: layers.Conv1D(3, 2), (3, 4), None),
            (lambda: layers.Embedding(5, 4), (3,), "int32"),
        ],
        ids=["dense", "convolution", "embedding"],
    )
    def test_lora(self, layer, shape, dtype):
        layer = layer()
        model = stack(layer, shape=shape, dtype=dtype)
        layer.enable_lora(2)
        # The second factor starts at zero, where the first has no gradient.
        for v in layer.trainable_variables:
            v.assign(random(*v.shape))
        # Keras holds LoRA weights in float32 always.
        right(compiled(model), tolerance=1e-6)


class TestQuantized:
    """Quantized layers: int8 and int4 with LoRA; float8."""

    def model(self, mode, layer, shape=(4,), dtype=None):
        """Quantized after another layer, or before if it takes integers."""
        make = around if dtype is None else stack
        model = make(layer, shape=shape, dtype=dtype)
        layer.quantize(mode)
        return model

    LAYERS = {
        "dense": (lambda: layers.Dense(4), (4,), None),
        "embedding": (lambda: layers.Embedding(5, 4), (3,), "int32"),
    }

    @pytest.mark.parametrize(
        "mode, name",
        [
            ("int8", "embedding"),
            ("int4", "dense"),
        ],
    )
    def test_integers_with_lora(self, mode, name):
        layer, shape, dtype = self.LAYERS[name]
        layer = layer()
        model = self.model(mode, layer, shape, dtype)
        layer.enable_lora(2)
        # As above: all of them different from zero.
        for v in layer.trainable_variables:
            if v.trainable:
                v.assign(random(*v.shape))
        right(compiled(model), tolerance=1e-6)

    def test_float8(self):
        layer = layers.Dense(4, name="eight")
        refuses(self.model("float8", layer), "'eight'", "float8", "int8")
        self.test_integers_with_lora("int8", "dense")


class AddLoss(layers.Layer):
    def __init__(self, loss, **kwargs):
        super().__init__(**kwargs)
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


class TestAddedLosses:
    """activity_regularizer, scalar add_loss; add_loss by example."""

    def by_example(self):
        own = AddLoss(lambda x: 5 * ops.sum(x**2, axis=-1))
        model = around(own)
        right(model)
        x, y = data(model)
        _, norms = model.clipped_gradients(x, y)
        own.loss = lambda x: 0 * x[:, 0]
        _, without = model.clipped_gradients(x, y)
        assert np.all(np.abs(norms - without) > 1e-3)

    def test_one_number(self):
        words = "'own'", "add_loss", "one value for each example", "(batch,)"
        for layer in (
            layers.Dense(4, activity_regularizer="l2", name="own"),
            layers.ActivityRegularization(l2=0.1, name="own"),
            AddLoss(ops.mean, name="own"),
        ):
            refuses(around(layer), *words)
        self.by_example()

    def test_regularizer_of_a_recurrent_layer(self):
        def model(**kwargs):
            layer = layers.GRU(2, name="own", **kwargs)
            return stack(layer, shape=(3, 2))

        refuses(model(activity_regularizer="l2"), "'own'", "Remove")
        right(model())


class TestPenaltiesOfWeights:
    """Weight regularizers, constraints, weight decay: after the noise."""

    def moved(self, model):
        """The update beyond the clipped gradient, which is the penalty's."""
        x, y = data(model)
        report = keras_fastclip.check_gradients(model, x, y)
        assert report.relative_error < 1e-9
        sums, _ = model.clipped_gradients(x[:1], y[:1])
        found = update(model, x[:1], y[:1])
        return [f - s for f, s in zip(found, sums, strict=True)]

    def test_regularizer(self):
        l2 = keras.regularizers.L2(0.25)
        model = private(layers.Dense(2, kernel_regularizer=l2))
        kernel, bias = model.get_weights()
        by_kernel, by_bias = self.moved(model)
        np.testing.assert_allclose(by_kernel, 2 * 0.25 * kernel, rtol=1e-9)
        np.testing.assert_allclose(by_bias, 0 * bias, atol=1e-15)

    def test_weight_decay(self):
        model = private(layers.Dense(2))
        compiled(model, optimizer=keras.optimizers.SGD(1.0, weight_decay=0.25))
        kernel, _ = model.get_weights()
        by_kernel, _ = self.moved(model)
        np.testing.assert_allclose(by_kernel, 0.25 * kernel, rtol=1e-9)

    def test_constraint(self):
        model = private(layers.Dense(2, kernel_constraint="non_neg"))
        right(private(layers.Dense(2)))
        kernel, _ = model.get_weights()
        sums, _ = model.clipped_gradients(*data(model))
        found, _ = update(model, *data(model))
        expected = np.maximum(kernel - sums[0], 0)
        np.testing.assert_allclose(kernel - found, expected, atol=1e-12)


class TestNotFinite:
    """One example with NaN or inf contributes zero, and is counted."""

    @pytest.mark.parametrize(
        "bad, in_target", [(np.inf, False), (np.nan, True)]
    )
    def test_example(self, bad, in_target):
        model = around(layers.Dense(3, activation="relu"))
        x, y = data(model)
        without, _ = model.clipped_gradients(x[1:], y[1:])
        (y if in_target else x)[0, 0] = bad
        sums, _ = model.clipped_gradients(x, y)
        for found, expected in zip(sums, without, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-12)
        assert model.nonfinite_examples() == 0
        assert np.isfinite(norm(update(model, x, y)))
        assert model.nonfinite_examples() == 1
        assert update_norm(model, x, y) == 0


class TestNothing:
    """An exact zero gradient; all-zero batch; empty batch: noise alone."""

    def model(self, **settings):
        head = layers.Dense(30, kernel_initializer="zeros")
        return private(
            lambda x: head(layers.Dense(40, use_bias=False)(x)), **settings
        )

    BATCHES = {
        "zero_gradients": lambda: (random(ROWS, 4), np.zeros((ROWS, 30))),
        "zero_batch": lambda: (np.zeros((ROWS, 4)), np.zeros((ROWS, 30))),
    }

    @pytest.mark.parametrize("name", BATCHES)
    def test_batch(self, name):
        assert norm(update(self.model(), *self.BATCHES[name]())) == 0
        self.require_noise(update, *self.BATCHES[name]())

    def test_empty_batch(self):
        def step(model, x, y):
            """As `fit` makes it when no example was drawn."""
            before = model.get_weights()
            rows = tf.zeros([len(x)], tf.bool)
            model.train_step(PoissonBatch((*as_tensors((x, y)), None), rows))
            return [
                b - a for b, a in zip(before, model.get_weights(), strict=True)
            ]

        x, y = data(self.model())
        assert norm(step(self.model(), x, y)) == 0
        self.require_noise(step, x, y)

    def test_batch_without_rows(self):
        model = self.model()
        x, y = data(model)
        model.clipped_gradients(x, y)  # checks the model
        sums, norms = model.clipped_gradients(x[:0], y[:0])
        assert norm(sums) == 0 and norms.shape == (0,)
        self.require_noise(lambda m, x, y: update(m, x[:0], y[:0]), x, y)

    def require_noise(self, step, x, y):
        model = self.model(noise_multiplier=2.0)
        model.clipped_gradients(*data(model))
        values = np.concatenate([d.ravel() for d in step(model, x, y)])
        assert len(np.unique(values)) == len(values) == 1390
        # Off by more than a fifth once in 10^20 runs.
        np.testing.assert_allclose(np.std(values), 2.0 * CLIP, rtol=0.2)


class TestCancelling:
    """Gram norm cancels (true 7e-5, float32 gives -0.3): the bound holds."""

    LONG = 64

    @pytest.mark.parametrize("method", ["auto", "bk"])
    @pytest.mark.parametrize("size", [1.0, 1000.0])
    def test_sequence_whose_terms_cancel(self, method, size):
        in_float32()
        model = private(
            layers.Dense(16, use_bias=False),
            (self.LONG, 16),
            loss=lambda y, p: ops.sum(y * p, axis=(1, 2)),
            method=method,
        )
        # Rows that are nearly alike meet cotangents that add up to nearly 0.
        x = size * (1 + 1e-4 * random(ROWS, self.LONG, 16))
        y = np.repeat(random(ROWS, self.LONG // 2, 16, seed=2), 2, axis=1)
        y[:, ::2] *= -1
        # The first is exact in float32, so its norm is the one in float64.
        exact = np.einsum(
            "btd,bte->bde", x.astype("float64"), y.astype("float64")
        )
        norms = np.sqrt(np.sum(np.square(exact), (1, 2)))
        terms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
        assert np.all(norms < 1e-3 * np.sum(terms, axis=1))
        for i in range(ROWS):
            x1, y1 = one_example((x, y), i)
            sums, _ = model.clipped_gradients(x1, y1)
            assert norm(sums) <= CLIP * (1 + 1e-3)


class TestPrecision:
    """float16 with loss scaling, bfloat16, float64."""

    def under(self, policy, **settings):
        in_float32()
        keras.config.set_dtype_policy(policy)
        return around(layers.Dense(4), **settings)

    def test_loss_scaling_of_another_kind(self):
        """It might depend on the data. Keras's own: in test_precision.py."""

        class Own(keras.optimizers.LossScaleOptimizer):
            pass

        model = self.under("mixed_float16")
        compiled(model, optimizer=Own(keras.optimizers.SGD(1.0)))
        refuses(model, "Own", "LossScaleOptimizer", "mixed_bfloat16")

    @pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
    def test_half_precision(self, policy):
        model = self.under(policy)
        x, y = data(model)
        report = keras_fastclip.check_gradients(model, x, y)
        assert report.relative_error < 0.1
        _, norms = model.clipped_gradients(x, y)
        assert norms.dtype == tf.float32
        if policy.startswith("mixed"):  # Otherwise weights are rounded.
            assert update_norm(model, x, y) <= CLIP * (1 + 1e-2)

    def test_half_precision_in_one_layer(self):
        """Keras scales no loss for it."""
        model = around(layers.Dense(4, dtype="mixed_float16"))
        x, y = data(model)
        report = keras_fastclip.check_gradients(model, x, y)
        assert report.relative_error < 0.1
        _, norms = model.clipped_gradients(x, y)
        assert norms.dtype == tf.float64
        assert update_norm(model, x, y) <= CLIP * (1 + 1e-2)

    def test_single_precision(self):
        right(self.under("float32"), tolerance=1e-5)

    def test_double_precision(self):
        model = around(layers.Dense(4))
        right(model)
        assert model.clipped_gradients(*data(model))[1].dtype == tf.float64


class TestReplicas:
    """2 and more replicas, workers: right under a MirroredStrategy.

    Those are in test_distribution.py; other strategies are refused.
    """

    def test_two(self):
        model = around(layers.Dense(3))
        model._distribute_strategy = types.SimpleNamespace(
            num_replicas_in_sync=2
        )
        refuses(model, "several replicas", "MirroredStrategy")
        model._distribute_strategy = None
        right(model)


class TestLogicalBatch:
    """A logical batch larger than the physical one.

    There is no such option yet; what it will rely on holds: the clipped sum
    of a batch is the sum over its parts.
    """

    def test_sum_over_parts(self):
        model = around(layers.Dense(3))
        right(model)
        x, y = data(model)
        whole, _ = model.clipped_gradients(x, y)
        first, _ = model.clipped_gradients(x[:2], y[:2])
        second, _ = model.clipped_gradients(x[2:], y[2:])
        for total, a, b in zip(whole, first, second, strict=True):
            np.testing.assert_allclose(total, a + b, atol=1e-12)


class TestAccumulation:
    """The optimizer's own gradient_accumulation_steps."""

    def test_refused(self):
        model = around(layers.Dense(3), expected_batch_size=None)
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        compiled(model, optimizer=optimizer)
        words = "gradient_accumulation_steps=2", "batch_size"
        refuses(model, *words)
        compiled(model, run_eagerly=True)
        x, y = data(model)
        sums, _ = model.clipped_gradients(x, y)
        before = model.get_weights()
        model.fit(x, y, batch_size=ROWS, verbose=0)
        for b, a, s in zip(before, model.get_weights(), sums, strict=True):
            np.testing.assert_allclose(b - a, s / ROWS, atol=1e-12)


DELTA = 1e-3


def counted(**kwargs):
    """A model with noise, for what is counted; steps run eagerly."""
    model = private(
        layers.Dense(2), expected_batch_size=4, noise_multiplier=1.0
    )
    return compiled(model, **{"run_eagerly": True, **kwargs})


def many():
    return random(16, 4), random(16, 2, seed=2)


def steps(model):
    return [entry.steps for entry in model._privacy.ledger(model).entries]


class TestSaving:
    """Saving and loading .keras: comes back private, with what is spent."""

    def test_round_trip(self, tmp_path):
        model = counted()
        model.fit(*many(), 4, verbose=0)
        model.save(tmp_path / "model.keras")
        again = keras.saving.load_model(tmp_path / "model.keras")
        spent = model.privacy_spent(DELTA, "rdp")
        assert 0 < spent < np.inf
        assert again.privacy_spent(DELTA, "rdp") == spent
        again.fit(*many(), 4, verbose=0)
        assert again.privacy_spent(DELTA, "rdp") > spent
        settings = {**again.get_config(), "noise_multiplier": 0.0}
        quiet = type(again).from_config({**settings, "expected_batch_size": 1})
        right(compiled(quiet))


class TestEveryWayToTrain:
    """train_on_batch, custom loops, fit twice, changed noise: all counted."""

    def test_fit_twice(self):
        model = counted()
        model.fit(*many(), 4, verbose=0)
        spent = model.privacy_spent(DELTA, "rdp")
        model.fit(*many(), 4, verbose=0)
        assert sum(steps(model)) == 8
        assert model.privacy_spent(DELTA, "rdp") > spent

    @pytest.mark.parametrize("way", ["train_on_batch", "train_step"])
    def test_own_loop(self, way):
        model = counted()
        model.fit(*many(), 4, verbose=0)
        for _ in range(3):
            if way == "train_on_batch":
                model.train_on_batch(*many())
            else:
                model.train_step(as_tensors(many()))
        assert steps(model) == [4, 3]
        assert model.privacy_spent(DELTA) == np.inf
        assert "not known" in model.privacy_statement(DELTA)

    @pytest.mark.parametrize("way", ["in place", "by a new model"])
    def test_other_noise_between_fits(self, way):
        model = counted()
        model.fit(*many(), 4, verbose=0)
        spent = model.privacy_spent(DELTA, "rdp")
        again = model
        if way == "in place":
            model.set_privacy(noise_multiplier=5.0)
        else:
            config = {**model.get_config(), "noise_multiplier": 5.0}
            again = compiled(type(model).from_config(config), run_eagerly=True)
            again.set_weights(model.get_weights())
        assert again.privacy_spent(DELTA, "rdp") == spent
        again.fit(*many(), 4, verbose=0)
        noises = [
            entry.mechanism.noise_multiplier
            for entry in again._privacy.ledger(again).entries
        ]
        assert noises == [1.0, 5.0] and steps(again) == [4, 4]
        assert again.privacy_spent(DELTA, "rdp") > spent

    def test_noise_cannot_be_changed_behind_the_record(self):
        with pytest.raises(AttributeError):
            counted()._privacy.settings.noise_multiplier = 5.0
        with pytest.raises(ValueError, match="private already"):
            keras_fastclip.make_private(counted(), **SETTINGS)


class TestTrainableChanged:
    """`trainable` changed after compile: checked and built anew."""

    def test_frozen(self):
        layer = layers.Dense(3)
        model = around(layer)
        x, y = data(model)
        model.train_on_batch(x, y)  # traces the step
        layer.trainable = False
        before = model.get_weights()
        model.train_on_batch(x, y)
        pairs = zip(before, model.get_weights(), strict=True)
        moved = [not np.array_equal(b, a) for b, a in pairs]
        assert moved == [True, True, False, False, True, True]
        right(model)

    def test_thawed(self):
        """The optimizer has no room for more weights: compile anew."""
        layer = layers.Dense(3, trainable=False, name="layer")
        model = around(layer)
        x, y = data(model)
        model.train_on_batch(x, y)
        layer.trainable = True
        before = model.get_weights()
        with pytest.raises(ValueError, match="layer/kernel.*new optimizer"):
            model.train_on_batch(x, y)
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)
        right(compiled(model))


class TestSampler:
    """Shuffled batches are not accounted as Poisson: the sampler decides."""

    def test_arrays_are_sampled(self):
        model = counted()
        model.fit(*many(), 4, shuffle=True, verbose=0)
        (entry,) = model._privacy.ledger(model).entries
        assert (entry.steps, entry.mechanism.num_examples) == (4, 16)
        assert model.privacy_spent(DELTA, "rdp") < np.inf

    def test_shuffled_batches_are_not(self):
        dataset = tf.data.Dataset.from_tensor_slices(many())
        model = counted()
        batches = dataset.shuffle(16).batch(4, True)
        model.fit(batches, num_examples=16, verbose=0)
        spent = model.privacy_spent(DELTA)
        assert spent == dp_accounting.get_epsilon_gaussian(1.0, DELTA)
        model.fit(batches, num_examples="unknown", verbose=0)
        assert model.privacy_spent(DELTA) == np.inf
        assert "not known" in model.privacy_statement(DELTA)


class TestStepsPerExecution:
    """steps_per_execution > 1: counted by optimizer.iterations."""

    def test_all_are_counted(self):
        model = counted(run_eagerly=False, steps_per_execution=3)
        tracker = keras_fastclip.EpsilonTracker(DELTA)
        logs = model.fit(
            *many(), 4, epochs=2, verbose=0, callbacks=[tracker]
        ).history
        assert steps(model) == [8]
        assert int(model.optimizer.iterations) == 8
        assert logs["epsilon"][-1] == model.privacy_spent(DELTA)
