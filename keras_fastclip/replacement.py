"""Models with batch normalization, made fit for private training.

`replace_batch_normalization` copies a model and turns every BatchNormalization
of the copy that is being trained into a layer that looks at one example only.
A layer is turned into another one where it stands, so whatever refers to it
(graphs, attributes, lists, other models) refers to the new one.
"""

import tempfile
from typing import Any

import keras

from keras_fastclip import _keras, _validate
from keras_fastclip._keras import described

# What the layers mean by the same names.
SHARED_CONFIG = (
    "name",
    "trainable",
    "dtype",
    "axis",
    "epsilon",
    "center",
    "scale",
    "beta_initializer",
    "gamma_initializer",
    "beta_regularizer",
    "gamma_regularizer",
    "beta_constraint",
    "gamma_constraint",
)


def replace_batch_normalization(
    model: keras.Model, with_: str = "group", groups: int | None = None
) -> keras.Model:
    """A copy of a model that trains without batch normalization.

    `BatchNormalization` computes with statistics of the batch, so it mixes
    examples and cannot be trained privately. In the copy, each such layer is a
    `GroupNormalization` or a `LayerNormalization` of the same name, with the
    same gamma, beta, axis, epsilon, regularizers and constraints. Everything
    else is as in the model: classes, names, weights, which layers are frozen,
    and which are shared. The model itself is not changed.

    A frozen `BatchNormalization` (`layer.trainable = False`) is left as it is,
    with its moving statistics: it computes each example on its own.

    The copy does not give the model's outputs, and a pretrained model has to be
    trained further: to normalize by other statistics is another function.

    Replace first, compile and make private then: the copy is not compiled, and
    private models are not accepted.

    Args:
        model: a built functional, Sequential or subclassed model, whose layers
            and models of your own can be made again from their `get_config`,
            and pass no `mask` to the layers to be replaced. A model that is
            not built yet is accepted if no number of groups has to be found.
        with_: "group" for `GroupNormalization`, or "layer" for
            `LayerNormalization` over the channels, at each position.
        groups: for "group", the number of groups in every layer. By default,
            in each layer the largest number up to 32 that divides its channels,
            so 32 where 32 divides them. Where an example has a single position,
            as after `Dense` or global pooling, a small group would lose what
            its few values say; there the default is a single group, that is
            `LayerNormalization`.

    Returns:
        The new model. If a layer or model of your own (or of KerasHub) makes
        its sublayers itself, its config knows nothing of the replacement: save
        the weights of such a model, and load them into one that was made and
        replaced in the same way.

    Example:

    ```python
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(10),
        ]
    )
    model = keras_fastclip.replace_batch_normalization(model)
    keras_fastclip.make_private(model, l2_norm_clip=1.0, noise_multiplier=1.1)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    model.fit(x, y, batch_size=256)
    ```
    """
    _check_arguments(model, with_, groups)
    replaced = _copy(model)
    for layer in _keras.layers_of(replaced):
        is_normalization = isinstance(layer, keras.layers.BatchNormalization)
        if is_normalization and layer.trainable:
            _keras.turn_into(layer, _replacement(layer, with_, groups))
    return replaced


def _check_arguments(model, with_, groups):
    _validate.one_of(("group", "layer"), with_=with_)
    if groups is not None:
        _validate.positive_integer(groups=groups)
        if with_ == "layer":
            raise ValueError(
                "`groups` is for with_='group'; LayerNormalization has none. "
                f"Received groups={groups} and with_='layer'."
            )
    if not isinstance(model, keras.Model):
        raise ValueError(
            "replace_batch_normalization takes a keras.Model; received "
            f"{type(model).__name__}."
        )
    for layer in _keras.layers_of(model):
        if getattr(layer, "_privacy", None) is not None:
            raise ValueError(
                f"The model {layer.name!r} is private already, and a copy "
                "would lose the record of its steps. Replace batch "
                "normalization in the plain model, then make it private."
            )


# -- the new layer ----------------------------------------------------------


def _replacement(layer, with_, groups):
    """The layer to take the place of a BatchNormalization."""
    if type(layer).call is not keras.layers.BatchNormalization.call:
        raise ValueError(
            f"{described(layer)} derives from BatchNormalization and has a "
            "`call` of its own, which a replacement would lose. Replace it by "
            "hand, or freeze it: layer.trainable = False."
        )
    config = {k: v for k, v in layer.get_config().items() if k in SHARED_CONFIG}
    if with_ == "group":
        groups = _groups(layer, groups)
    if with_ == "layer" or groups is None:
        new = keras.layers.LayerNormalization.from_config(config)
    else:
        config["groups"] = groups
        new = keras.layers.GroupNormalization.from_config(config)
    if layer.built:
        new.build(layer.get_build_config()["input_shape"])
        for name in ("gamma", "beta"):
            weight = getattr(layer, name)
            if weight is not None:
                getattr(new, name).assign(weight)
                getattr(new, name).trainable = weight.trainable
    return new


def _groups(layer, groups):
    """The number of groups, or None for a LayerNormalization."""
    if not layer.built:
        if groups is None:
            raise ValueError(
                f"{described(layer)} is not built, so the number of its "
                "channels is not known, and no number of groups can be chosen. "
                "Build the model first (model.build(input_shape), or a "
                "keras.Input as its first layer), or pass `groups`."
            )
        return groups
    shape = list(layer.get_build_config()["input_shape"])
    channels = shape.pop(layer.axis)
    single_position = all(size == 1 for size in shape[1:])
    divisors = [d for d in range(1, channels + 1) if channels % d == 0]
    if groups is None:
        if single_position:
            return None
        return max(d for d in divisors if d <= 32)
    if single_position and channels > 1:
        # A group of one value is always normalized to zero.
        divisors.remove(channels)
    if groups not in divisors:
        known = ", ".join(map(str, divisors))
        raise ValueError(
            f"{described(layer)} has {channels} channels, which cannot be "
            f"normalized in groups={groups}. Possible here: {known}."
        )
    return groups


# -- the copy ---------------------------------------------------------------


def _copy(model):
    """A model of the same layers, weights, names and trainable flags."""
    copies = {}
    classes = {type(x).__name__: type(x) for x in _keras.layers_of(model)}
    # Layers within layers are made by Keras, which looks classes up by name.
    with keras.saving.custom_object_scope(classes):
        copy = _copy_operation(model, copies)
        if model.built and not copy.built:
            copy.build_from_config(model.get_build_config())
    originals, twins = _keras.layers_of(model), _keras.layers_of(copy)
    if [type(x) for x in originals] != [type(x) for x in twins]:
        raise ValueError(_unlike_message(model, originals, twins))
    pairs = list(zip(originals, twins, strict=True))
    # A layer hands its flag down, so it comes before all those below it.
    pairs.sort(key=lambda pair: len(_keras.layers_of(pair[0])), reverse=True)
    for original, twin in pairs:
        twin.trainable = original.trainable
        twin.name = original.name
        _copy_state(original, twin)
    if len(model.weights) != len(copy.weights):
        raise ValueError(
            f"{described(model)} has layers that share weights in a way that "
            "a copy made from its config does not. Replace BatchNormalization "
            "in its code by hand."
        )
    for original, twin in zip(model.weights, copy.weights, strict=True):
        twin.trainable = original.trainable
    copy.built = model.built
    return copy


def _copy_operation(operation: Any, copies: dict[int, Any]) -> Any:
    """A copy of a layer, a model or an operation; the same one every time."""
    if id(operation) in copies:
        return copies[id(operation)]

    def copy_below(below):
        return _copy_operation(below, copies)

    # Keras's own models are copied layer by layer, which keeps layers shared
    # that occur in several of them. All else knows how to make itself.
    if type(operation) is _keras.Functional:
        inputs, outputs = _keras.copy_graph(operation, copy_below)
        copy = keras.Model(inputs, outputs, name=operation.name)
    elif type(operation) is keras.Sequential:
        below = _keras.layers_with_input(operation)
        copy = keras.Sequential(
            [copy_below(layer) for layer in below], name=operation.name
        )
    elif type(operation) is keras.layers.Lambda:
        copy = _keras.copy_lambda(operation)
    else:
        try:
            copy = type(operation).from_config(operation.get_config())
        except Exception as error:
            raise ValueError(
                f"{described(operation)} cannot be made again from its "
                "config. Define `get_config` (and `from_config`, if it holds "
                "more than the arguments of `__init__`), and decorate classes "
                "and functions of your own with "
                "keras.saving.register_keras_serializable; or replace "
                f"BatchNormalization in its code by hand. The error: {error}"
            ) from error
    copies[id(operation)] = copy
    return copy


def _copy_state(original, twin):
    """Copies the weights of a layer itself, and what else it learned."""
    weights = {}
    original.save_own_variables(weights)
    try:
        twin.load_own_variables(weights)
    except Exception as error:
        raise ValueError(
            f"{described(original)}, made again from its config, does not "
            "take the weights of the original. Let `__init__` and `build` "
            "make all of its weights, or replace BatchNormalization in its "
            f"code by hand. The error: {error}"
        ) from error
    if hasattr(original, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            original.save_assets(folder)
            twin.load_assets(folder)


def _unlike_message(model, originals, twins):
    """Names the innermost layer whose copy has other layers below it."""
    culprit = model
    for original, twin in zip(originals, twins, strict=False):
        if type(original) is not type(twin):
            break
        below = [type(x) for x in _keras.layers_of(original)]
        if below != [type(x) for x in _keras.layers_of(twin)]:
            culprit = original
    return (
        f"{described(culprit)}, made again from its config, does not have "
        "the layers of the original. Let `__init__` and `build` make all of "
        "its layers from what `get_config` returns, or replace "
        "BatchNormalization in its code by hand."
    )
