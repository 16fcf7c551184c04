"""Models with batch normalization train privately after a replacement."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_fastclip
from keras_fastclip import _keras
from keras_fastclip.replacement import replace_batch_normalization
from tests.zoo import labels, random

Batch = layers.BatchNormalization
Group = layers.GroupNormalization
Layer = layers.LayerNormalization
SETTINGS = {"l2_norm_clip": 1.0, "noise_multiplier": 0.0}


def scramble(model, seed=1):
    """Gives a model weights that no initializer would."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        weight.assign(rng.uniform(0.5, 1.5, weight.shape))
    return model


def found(model, *classes):
    """Layers of some classes, wherever they are in a model."""
    classes = classes or (Batch, Group, Layer)
    return [x for x in _keras.layers_of(model) if isinstance(x, classes)]


def functional(inputs, outputs, **kwargs):
    return keras.Model(inputs, outputs(inputs), **kwargs)


def require_equal_otherwise(model, new):
    """All layers but the replaced ones are as they were."""
    assert type(new) is type(model)
    assert new.name == model.name
    assert new.built == model.built
    pairs = zip(_keras.layers_of(model), _keras.layers_of(new), strict=True)
    for old, twin in pairs:
        assert twin is not old
        assert twin.name == old.name
        assert twin.trainable == old.trainable
        if type(twin) is type(old):
            for a, b in zip(old.weights, twin.weights, strict=False):
                if a.shape == b.shape and not found(old):
                    np.testing.assert_array_equal(a, b)
        else:
            assert isinstance(old, Batch)
            assert isinstance(twin, Group | Layer)
            for name in ("gamma", "beta"):
                a, b = getattr(old, name), getattr(twin, name)
                assert (a is None) == (b is None)
                if a is not None:
                    np.testing.assert_array_equal(a, b)


# -- the new layer ----------------------------------------------------------


def convolutional(normalization, last):
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(8, 3, name="conv")(inputs)
    x = normalization(name="first")(x)
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(x))
    x = last(name="second")(layers.Dense(6)(x))
    return keras.Model(inputs, layers.Dense(2)(x), name="mine")


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        ({}, lambda **k: Group(8, **k), Layer),
        ({"groups": 2}, lambda **k: Group(2, **k), lambda **k: Group(2, **k)),
        ({"with_": "layer"}, Layer, Layer),
    ],
    ids=["default", "groups", "layer"],
)
def test_forward_pass_is_that_of_a_model_made_by_hand(arguments, first, last):
    model = scramble(convolutional(Batch, Batch))
    before = [w.numpy() for w in model.weights]
    new = replace_batch_normalization(model, **arguments)
    right = convolutional(first, last)
    right.set_weights(new.get_weights())
    x = random(4, 6, 6, 3)
    np.testing.assert_array_equal(new(x), right(x))
    np.testing.assert_array_equal(new.layers[1].kernel, model.layers[1].kernel)
    require_equal_otherwise(model, new)
    assert found(model, Batch) and not found(new, Batch)
    for old, now in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, now)
    assert (
        new.get_config()
        == keras.Model.from_config(new.get_config()).get_config()
    )


def test_options_of_the_layer_are_carried_over():
    options = {
        "axis": 1,
        "epsilon": 0.25,
        "scale": False,
        "beta_regularizer": keras.regularizers.L2(0.5),
        "beta_constraint": keras.constraints.NonNeg(),
        "dtype": "mixed_bfloat16",
    }
    model = keras.Sequential(
        [keras.Input((6, 5, 5)), Batch(momentum=0.5, **options)]
    )
    x = random(2, 6, 5, 5)
    scramble(model)
    for arguments, right in (
        ({"groups": 3}, Group(3, **options)),
        ({"with_": "layer"}, Layer(**options)),
    ):
        new = replace_batch_normalization(model, **arguments)
        (layer,) = found(new)
        assert layer.gamma is None
        assert layer.beta.shape == (6,)
        assert layer.beta_regularizer.l2 == 0.5
        assert isinstance(layer.beta_constraint, keras.constraints.NonNeg)
        right.build((None, 6, 5, 5))
        right.beta.assign(model.layers[0].beta)
        np.testing.assert_array_equal(new(x), right(x))


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(64, 32), (96, 32), (144, 24), (40, 20), (24, 24), (37, 1), (1, 1)],
)
def test_default_groups_divide_the_channels(channels, groups):
    model = keras.Sequential([keras.Input((4, channels)), Batch()])
    (layer,) = found(replace_batch_normalization(model))
    assert layer.groups == groups


@pytest.mark.parametrize("shape", [(32,), (1, 1, 32)])
def test_a_single_position_is_not_cut_into_groups(shape):
    model = keras.Sequential([keras.Input(shape), Batch(name="bn")])
    (layer,) = found(replace_batch_normalization(model))
    assert type(layer) is Layer
    with pytest.raises(ValueError, match="1, 2, 4, 8, 16[.]"):
        replace_batch_normalization(model, groups=32)
    new = replace_batch_normalization(model, groups=4)
    assert float(np.std(new(random(3, *shape)))) > 0.5


def test_groups_that_do_not_divide_the_channels():
    model = keras.Sequential([keras.Input((5, 12)), Batch(name="bn")])
    with pytest.raises(ValueError, match="bn'.*12 channels.*1, 2, 3, 4, 6, 12"):
        replace_batch_normalization(model, groups=8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"with_": "batch"}, "`with_` must be one of 'group', 'layer'"),
        ({"with_": None}, "with_=None"),
        ({"groups": 0}, "groups=0"),
        ({"groups": 2.0}, "groups=2.0"),
        ({"groups": 2, "with_": "layer"}, "groups=2 and with_='layer'"),
    ],
)
def test_wrong_arguments(arguments, words):
    model = keras.Sequential([keras.Input((4,)), Batch()])
    with pytest.raises(ValueError, match=words):
        replace_batch_normalization(model, **arguments)


def test_only_models_that_are_not_private_yet():
    with pytest.raises(ValueError, match="takes a keras.Model"):
        replace_batch_normalization(Batch())
    inner = [keras.Input((4,)), Batch()]
    private = keras_fastclip.DPSequential(inner, **SETTINGS, name="mine")
    converted = keras.Sequential([keras.Input((4,)), Batch()], name="mine")
    keras_fastclip.make_private(converted, **SETTINGS)
    outer = keras.Sequential([keras.Input((4,)), private])
    for model in (private, converted, outer):
        with pytest.raises(ValueError, match="'mine' is private already"):
            replace_batch_normalization(model)


def test_subclass_with_a_call_of_its_own_is_left_to_the_user():
    class WithActivation(Batch):
        def call(self, inputs, training=None, mask=None):
            return keras.ops.relu(super().call(inputs, training, mask))

    model = keras.Sequential([keras.Input((4,)), WithActivation(name="mine")])
    with pytest.raises(ValueError, match="mine'.*`call` of its own"):
        replace_batch_normalization(model)
    model.layers[0].trainable = False
    assert type(replace_batch_normalization(model).layers[0]) is WithActivation


# -- the copy ---------------------------------------------------------------


class Block(keras.Layer):
    """Makes its sublayers itself and keeps some in containers."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = layers.Dense(units)
        self.norm = Batch()
        self.steps = [layers.Dense(units), Batch(), Batch(trainable=False)]
        self.named = {"norm": Batch(), "more": (layers.ReLU(), Batch())}

    def build(self, shape):
        self.dense.build(shape)
        wide = (*shape[:-1], self.units)
        for layer in _keras.layers_of(self)[2:]:
            layer.build(wide)
        self.scale = self.add_weight(shape=(self.units,))

    def call(self, x, training=None):
        x = self.norm(self.dense(x), training=training)
        for layer in self.steps:
            x = layer(x)
        x = self.named["norm"](x, training=training)
        for layer in self.named["more"]:
            x = layer(x)
        return x * self.scale

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Subclassed(keras.Model):
    def __init__(self, classes=3, **kwargs):
        super().__init__(**kwargs)
        self.block = Block(4)
        self.body = keras.Sequential([layers.Dense(4), Batch()])
        self.head = layers.Dense(classes)

    def call(self, x, training=None):
        x = self.body(self.block(x, training=training), training=training)
        return self.head(x)


def sequential():
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(6), Batch(), layers.Dense(3)]
    )


def built_by_a_call():
    model = keras.Sequential([layers.Dense(6), Batch(), layers.Dense(3)])
    model(random(2, 4))
    return model


def with_block():
    return functional(
        keras.Input((4,)), lambda x: layers.Dense(3)(Block(4)(x) + 1.0)
    )


def subclassed():
    model = Subclassed()
    model(random(2, 4))
    return model


def functional_subclass():
    class Mine(keras.Model):
        pass

    x = keras.Input((4,))
    return Mine(x, layers.Dense(3)(Batch()(x)))


def three_levels():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4), Batch()])
    middle = functional(keras.Input((4,)), lambda x: Batch()(inner(x)) + x)
    return functional(
        keras.Input((4,)), lambda x: layers.Dense(3)(middle(middle(x)))
    )


def several_inputs_and_outputs():
    norm = Batch()
    inputs = {
        "b": keras.Input((4,), name="b"),
        "a": keras.Input((4,), name="a"),
    }
    b, a = (
        norm(layers.Dense(5)(inputs["b"])),
        norm(layers.Dense(5)(inputs["a"])),
    )
    return keras.Model(inputs, {"sum": layers.Add()([a, b]), "both": [a, b]})


def lambda_and_wrapper():
    x = keras.Input((4, 5))
    y = layers.Lambda(lambda t: keras.ops.tanh(t))(x)
    y = layers.TimeDistributed(Batch())(y)
    return keras.Model(x, layers.LSTM(3)(Batch()(y, training=True)))


def masked():
    x = keras.Input((4, 5))
    y = Batch()(layers.Masking()(x))
    return keras.Model(x, layers.LSTM(3)(Batch()(y)))


MODELS = [
    sequential,
    built_by_a_call,
    with_block,
    subclassed,
    functional_subclass,
    three_levels,
    several_inputs_and_outputs,
    lambda_and_wrapper,
    masked,
]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_all_kinds_of_models(build):
    model = scramble(build())
    model.compile("sgd", "mse")
    new = replace_batch_normalization(model)
    require_equal_otherwise(model, new)
    assert not [x for x in found(new, Batch) if x.trainable]
    assert not new.compiled
    if hasattr(model, "input"):
        x = keras.tree.map_structure(
            lambda t: random(4, *t.shape[1:]), model.input
        )
    else:
        x = random(4, 4)
    old, now = model(x), new(x, training=True)
    keras.tree.assert_same_structure(old, now)
    alone = new(keras.tree.map_structure(lambda t: t[:1], x), training=True)
    for together, one in zip(
        keras.tree.flatten(now), keras.tree.flatten(alone), strict=True
    ):
        np.testing.assert_allclose(together[:1], one, rtol=1e-4, atol=1e-4)


def test_frozen_layers_stay_frozen_and_as_they_are():
    base = keras.Sequential([keras.Input((4,)), layers.Dense(4), Batch()])
    model = functional(
        keras.Input((4,)),
        lambda x: layers.Dense(3)(Batch()(Batch(trainable=False)(base(x)))),
    )
    base.trainable = False
    scramble(model)
    new = replace_batch_normalization(model)
    require_equal_otherwise(model, new)
    assert [type(x) for x in found(new)] == [Batch, Batch, Layer]
    old, kept = found(model)[:2], found(new)[:2]
    for a, b in zip(old, kept, strict=True):
        assert not b.trainable
        np.testing.assert_array_equal(a.moving_mean, b.moving_mean)
        np.testing.assert_array_equal(a.moving_variance, b.moving_variance)
    assert len(new.trainable_variables) == len(model.trainable_variables)


def test_a_model_without_batch_normalization_is_copied():
    model = scramble(
        functional(keras.Input((4,)), lambda x: Layer()(layers.Dense(3)(x)))
    )
    new = replace_batch_normalization(model)
    require_equal_otherwise(model, new)
    np.testing.assert_array_equal(model(random(3, 4)), new(random(3, 4)))


def test_shared_layers_stay_shared():
    norm, dense = Batch(name="norm"), layers.Dense(4, name="dense")
    tower = functional(keras.Input((4,)), lambda x: norm(dense(x)))
    other = functional(keras.Input((4,)), lambda x: dense(norm(x)))
    model = functional(
        keras.Input((4,)), lambda x: tower(x) + tower(other(x)) + norm(x)
    )
    scramble(model)
    new = replace_batch_normalization(model)
    require_equal_otherwise(model, new)
    assert len(found(new)) == 1
    assert len(new.weights) == len(model.weights) - 2

    layer = Layer()
    layer.build((None, 4))
    layer.set_weights(norm.get_weights()[:2])

    def tower_by_hand(x):
        return layer(dense(x))

    x = random(3, 4)
    right = tower_by_hand(x) + tower_by_hand(dense(layer(x))) + layer(x)
    np.testing.assert_allclose(new(x), right, rtol=1e-5)


def test_frozen_layers_that_are_shared():
    norm, dense = Batch(trainable=False), layers.Dense(4)
    inner = functional(keras.Input((4,)), lambda x: norm(dense(x)))
    first = functional(keras.Input((4,)), lambda x: inner(x) + dense(x))
    model = functional(keras.Input((4,)), lambda x: first(inner(norm(x))))
    dense.trainable = False
    new = replace_batch_normalization(scramble(model))
    require_equal_otherwise(model, new)
    assert new.trainable and not new.trainable_variables
    np.testing.assert_array_equal(model(random(3, 4)), new(random(3, 4)))


def test_models_that_are_not_built():
    model = keras.Sequential([layers.Conv1D(6, 2), Batch(name="bn")])
    with pytest.raises(ValueError, match="'bn'.*not built.*model.build"):
        replace_batch_normalization(model)
    new = replace_batch_normalization(model, groups=3)
    assert type(new) is keras.Sequential and not new.built
    x = random(3, 5, 4)
    new(x)
    layer = new.layers[1]
    assert layer.name == "bn" and layer.built
    assert len(layer.trainable_variables) == 2
    right = Group(3)
    np.testing.assert_array_equal(new(x), right(new.layers[0](x)))

    model = Subclassed()
    new = replace_batch_normalization(model, with_="layer")
    assert new(x[:, 0]).shape == (3, 3)
    assert len([x for x in found(new, Batch) if x.trainable]) == 0


def test_state_beside_weights_is_copied():
    normalization = layers.Normalization()
    normalization.adapt(random(20, 4) * 3 + 1)
    lookup = layers.StringLookup(output_mode="multi_hot")
    lookup.adapt(np.array(["a", "b", "b"]))
    numbers, words = keras.Input((4,)), keras.Input((2,), dtype="string")
    model = keras.Model(
        [numbers, words],
        layers.Concatenate()([normalization(numbers), lookup(words)]),
    )
    new = replace_batch_normalization(model)
    x = [
        tf.constant(random(2, 4)),
        tf.constant([["a", "b"], ["c", "b"]]),
    ]
    np.testing.assert_array_equal(model(x), new(x))


class NoConfig(keras.Layer):
    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def call(self, x):
        return self.inner(x)


class Growing(keras.Layer):
    """Gets a layer that its config does not tell of."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.extra = None

    def call(self, x):
        return x if self.extra is None else self.extra(x)


def growing():
    layer = Growing(name="culprit")
    layer.extra = Batch()
    return layer


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: NoConfig(Batch(), name="culprit"), "made again"),
        (growing, "does not have the layers"),
    ],
)
def test_layers_that_cannot_be_copied_are_named(layer, words):
    model = functional(keras.Input((4,)), layer())
    with pytest.raises(ValueError, match=f"'culprit'.*{words}.*by hand"):
        replace_batch_normalization(model)


def test_saved_and_loaded(tmp_path):
    model = replace_batch_normalization(scramble(three_levels()))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(model(random(3, 4)), again(random(3, 4)))


# -- private training -------------------------------------------------------


@pytest.mark.filterwarnings("ignore:No rule is registered")
@pytest.mark.parametrize(
    "build", [sequential, with_block, subclassed, three_levels]
)
def test_gradients_after_replacement(float64, build):
    model = replace_batch_normalization(scramble(build()))
    keras_fastclip.make_private(model, **SETTINGS)
    model.compile("sgd", "mse")
    x, y = random(5, 4), random(5, 3, seed=2)
    report = keras_fastclip.check_gradients(model, x, y)
    assert report.relative_error < 1e-9, str(report)


def test_a_task_of_keras_hub_keeps_its_class(float64):
    keras_hub = pytest.importorskip("keras_hub")
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 12],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(16, 16, 3),
    )
    task = keras_hub.models.ResNetImageClassifier(backbone, num_classes=3)
    scramble(task)
    new = replace_batch_normalization(task)
    require_equal_otherwise(task, new)
    assert not found(new, Batch)
    assert type(new.backbone) is type(backbone)
    assert set(found(new.backbone)) == set(found(new))
    assert set(new.backbone.pyramid_outputs) == set(backbone.pyramid_outputs)
    keras_fastclip.make_private(new, **SETTINGS)
    new.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    x, y = random(3, 16, 16, 3), labels(3, high=3)
    report = keras_fastclip.check_gradients(new, x, y)
    assert report.relative_error < 1e-9, str(report)


def application(name, **kwargs):
    build = getattr(keras.applications, name)
    return build(weights=None, input_shape=(32, 32, 3), classes=3, **kwargs)


def conv_next():
    """The first stage; Keras compiles its grouped convolutions every time."""
    model = application("ConvNeXtTiny")
    name = "convnext_tiny_stage_1_block_0_depthwise_conv"
    x = layers.GlobalAveragePooling2D()(model.get_layer(name).input)
    return keras.Model(model.input, layers.Dense(3, "softmax")(x))


APPLICATIONS = {
    "ResNet50": lambda: application("ResNet50"),
    "MobileNetV2": lambda: application("MobileNetV2", alpha=0.35),
    "EfficientNetB0": lambda: application("EfficientNetB0"),
    "ConvNeXtTiny": conv_next,
    "DenseNet121": lambda: application("DenseNet121"),
}


@pytest.mark.filterwarnings("ignore:No rule is registered")
@pytest.mark.parametrize("name", APPLICATIONS)
def test_gradients_of_applications(float64, name):
    model = replace_batch_normalization(APPLICATIONS[name]())
    assert not found(model, Batch)
    keras_fastclip.make_private(model, **SETTINGS)
    model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = random(3, 32, 32, 3), labels(3, high=3)
    report = keras_fastclip.check_gradients(model, x, y)
    assert report.relative_error < 1e-9, str(report)
