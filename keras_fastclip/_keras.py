"""Every private Keras name that is used, in one place.

Each function here has a test in tests/test_keras_internals.py that fails when
Keras changes what it relies on.
"""

import contextlib
import errno
import functools
import io
import math
import os
import pathlib
import shutil
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.variables import AutocastScope
from keras.src.backend.tensorflow import nn as backend_nn
from keras.src.backend.tensorflow import numpy as backend_numpy
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer
from keras.src.models.functional import Functional
from keras.src.random.seed_generator import global_seed_generator
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES
from keras.src.saving.saving_lib import (
    H5IOStore,
    ShardedH5IOStore,
    _save_state,
    save_weights_only,
)
from keras.src.trainers.data_adapters.data_adapter_utils import (
    class_weight_to_sample_weights,
)
from keras.src.utils.file_utils import is_remote_path
from keras.src.utils.io_utils import ask_to_proceed_with_overwrite
from keras.src.utils.python_utils import pythonify_logs
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager import record as tf_record
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.parallel_for import pfor
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.util import _pywrap_util_port, tf_stack

__all__ = [
    "Functional",
    "KerasSaveable",
    "class_weight_to_sample_weights",
]


def layers_of(model: keras.Layer) -> list[keras.Layer]:
    """The model and all layers below it, each once, outermost first."""
    unique = {id(layer): layer for layer in model._flatten_layers()}
    return list(unique.values())


def holders_of(model: keras.Model, layer: keras.Layer) -> list[keras.Layer]:
    """The layers of a model that hold a layer directly."""
    return [
        holder
        for holder in layers_of(model)
        if any(
            child is layer
            for child in holder._flatten_layers(False, recursive=False)
        )
    ]


def described(layer: Any) -> str:
    """A layer or operation, for messages."""
    path = getattr(layer, "path", None) or layer.name
    return f"Layer {path!r} ({type(layer).__name__})"


def own_trainable_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Weights that the layer itself holds and that are being trained.

    LoRA leaves a frozen kernel among a layer's trainable variables, hence the
    look at each variable's own flag.
    """
    if not layer.trainable:
        return []
    return [v for v in layer._trainable_variables if v.trainable]


def raw(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable behind a Keras variable.

    Of one with a copy for each replica, the copy that is read here.
    """
    if isinstance(variable, keras.Variable):
        variable = variable._value
    if isinstance(variable, tf.distribute.DistributedValues):
        variable = variable._get_on_device_or_primary()
    return variable


def rows_of(table: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Rows of a table by their ids, without a look at the others.

    Keras reads the whole table first. Where rows of it are updated by
    themselves, TensorFlow makes a copy of the table for every such read.
    """
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(table)
    return tf.gather(raw(table) if value is None else value, ids)


def variable(value: np.ndarray) -> tf.Variable:
    """A variable of this process, also under `strategy.scope()`.

    There `tf.Variable` would make one for each replica.
    """
    with tf.init_scope():
        return ResourceVariable(value, trainable=False)


def custom_gradient(
    function: Callable, plain: Callable | None = None
) -> Callable:
    """As `tf.custom_gradient`, for functions of tensors, within a tape.

    That one puts closures of a graph into a registry of the process, which
    holds the graph, and with it the model, for good. Here the tape alone has
    them. Without a tape, as within a loop that is differentiated as a whole,
    TensorFlow differentiates what the function does. So it does for second
    derivatives: where a backward pass is itself recorded by a tape, what the
    forward pass has held would pass for constants. There are no derivatives in
    forward mode.

    Args:
        function: maps tensors to tensors, one or several, and to a function
            from their cotangents to those of the arguments.
        plain: what is differentiated for second derivatives, if it is not what
            the function does.
    """
    plain = plain or (lambda *inputs: function(*inputs)[0])

    @functools.wraps(function)
    def run(*inputs):
        with tf_record.stop_recording():
            outputs, backward = function(*inputs)
            # Tensors of their own, should one of them be an input.
            outputs = tf.nest.map_structure(tf.identity, outputs)

        def flat_backward(*cotangents):
            if tf_record.could_possibly_record():
                return plainly(*cotangents)
            return tf.nest.flatten(backward(*cotangents))

        def plainly(*cotangents):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                again = tf.nest.flatten(plain(*inputs))
            return tape.gradient(again, inputs, list(cotangents))

        tf_record.record_operation(
            function.__name__, tf.nest.flatten(outputs), inputs, flat_backward
        )
        return outputs

    return run


def normalizes_as_keras(layer: keras.layers.GroupNormalization) -> bool:
    """Whether no subclass does so in another way."""
    return all(
        getattr(type(layer), name)
        is getattr(keras.layers.GroupNormalization, name)
        for name in ("_apply_normalization", "_reshape_into_groups")
    )


class Exchange:
    """A function of Keras that, within `on`, another one stands in for.

    In the thread that is within, and in no other.

    Args:
        module: where Keras looks the function up.
        name: of the function.
    """

    def __init__(self, module: types.ModuleType, name: str):
        self.original, self._other = getattr(module, name), None
        self._thread = threading.local()

        @functools.wraps(self.original)
        def run(*args, **kwargs):
            on = getattr(self._thread, "on", False)
            return (self._other if on else self.original)(*args, **kwargs)

        self._place = module, name, run

    def by(self, other: Callable) -> Callable:
        """A decorator of what stands in."""
        self._other = other
        return other

    @contextlib.contextmanager
    def on(self):
        before = getattr(self._thread, "on", False)
        setattr(*self._place)
        self._thread.on = True
        try:
            yield
        finally:
            self._thread.on = before


# (query, key, value, bias, mask, is_causal, scale)
attention = Exchange(backend_nn, "_dot_product_attention_xla")
# (target, output, from_logits=False, axis=-1)
cross_entropy = Exchange(backend_nn, "sparse_categorical_crossentropy")


@contextlib.contextmanager
def own_operations():
    """Within, in this thread, some operations of Keras run faster."""
    with attention.on(), cross_entropy.on():
        yield


def masked_scores(
    scores: tf.Tensor, mask: tf.Tensor | None, is_causal: bool
) -> tf.Tensor:
    """Scores of attention, very low where a position is not to be seen."""
    return backend_nn._apply_masks(scores, mask, is_causal)


def logits_of(output: tf.Tensor, from_logits: bool) -> tf.Tensor | None:
    """What a softmax was applied to, or is to be; None if that is not known."""
    output, from_logits = backend_nn._get_logits(
        output, from_logits, "Softmax", "sparse_categorical_crossentropy"
    )
    return tf.convert_to_tensor(output) if from_logits else None


_addition = Exchange(backend_numpy, "add")


@_addition.by
def _add(x1, x2):
    if not _taken_for_a_bias(x1, x2):
        return _addition.original(x1, x2)
    dtype = keras.backend.result_type(x1.dtype, x2.dtype)
    x1, x2 = (keras.ops.convert_to_tensor(x, dtype) for x in (x1, x2))
    return tf.add(x1, x2)


def _taken_for_a_bias(x1, x2):
    """Whether Keras may add a tensor along another axis than it should."""
    if not (tf.is_tensor(x1) and tf.is_tensor(x2)):
        return False
    if None in (x1.shape.rank, x2.shape.rank) or x2.shape.rank < 2:
        return False
    return x2.shape[-1] == 1 or x2.shape[-1] != x1.shape[-1]


def plain_addition():
    """Within, in this thread, `keras.ops.add` broadcasts like all others.

    Keras takes its second argument for a bias if but one of its axes is longer
    than 1 and as long as the channels of the first. To (n, n) it so adds
    (n, 1) by columns: in a batch of n examples, what is of one goes to all
    others. It does where the number of examples is known when a function is
    traced, and without a function.
    """
    return _addition.on()


def untracked_variables(layer: keras.Layer) -> list[tf.Variable]:
    """TensorFlow variables among a layer's attributes; Keras ignores them."""
    return [v for v in vars(layer).values() if isinstance(v, tf.Variable)]


def values(variables: list[keras.Variable]) -> list[np.ndarray]:
    """The present values of variables."""
    return [raw(variable).numpy() for variable in variables]


def with_values(arguments: Any) -> Any:
    """Arguments of a call with tensors in place of variables."""
    return keras.tree.map_structure(
        lambda leaf: (
            tf.convert_to_tensor(leaf)
            if isinstance(leaf, keras.Variable)
            else leaf
        ),
        arguments,
    )


def assign(variables: list[keras.Variable], values: list[np.ndarray]) -> None:
    """Gives variables the values that `values` found."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def seed_states(layer: keras.Layer) -> list[keras.Variable]:
    """States of the random generators of a layer and of all below it."""
    states = [global_seed_generator().state]
    for sublayer in layers_of(layer):
        for generator in sublayer._seed_generators:
            states.append(generator.state)
    return list({id(s): s for s in states}.values())


def training_phase(layer: keras.Layer) -> Any:
    """The value of `training` that holds inside the current call."""
    return layer._get_call_context().get_value("training")


def is_functional_call(args: tuple, kwargs: dict) -> bool:
    """Whether a model is being made from inputs and outputs."""
    return (
        len(args) == 2
        or (len(args) == 1 and "outputs" in kwargs)
        or ("inputs" in kwargs and "outputs" in kwargs)
    )


def own_losses(layer: keras.Layer) -> list[tf.Tensor]:
    """What the layer gave to `add_loss` in its latest call."""
    return list(layer._losses)


def call_model(model: keras.Model, x: Any, training: bool = True) -> Any:
    """The forward pass as Keras runs it in a step."""
    if model._call_has_training_arg:
        return model(x, training=training)
    return model(x)


def compiled_loss(model: keras.Model, y, y_pred, sample_weight) -> tf.Tensor:
    """The compiled loss of a batch, as Keras reduces it."""
    return model._compile_loss(y, y_pred, sample_weight)


def draws_random_numbers(model: keras.Model, x: Any) -> bool:
    """Whether a forward pass in training moves a random generator."""
    states = seed_states(model)
    before = values(states)
    call_model(model, x)
    return not np.array_equal(before, values(states))


@contextlib.contextmanager
def compiled_losses_replaced(model: keras.Model, wrap, metric_wrap):
    """Runs the compiled loss with each of its loss objects wrapped.

    Keras matches outputs, targets, weights and losses by path when it calls
    the compiled loss, so exchanging the loss objects underneath gets all of
    that for free.
    """
    compiled = model._compile_loss
    losses, metrics = compiled._flat_losses, compiled._metrics
    compiled._flat_losses = [
        entry._replace(loss=wrap(entry.loss)) for entry in losses
    ]
    compiled._metrics = [metric_wrap(metric) for metric in metrics]
    try:
        yield compiled
    finally:
        compiled._flat_losses, compiled._metrics = losses, metrics


def compiled_metrics(model: keras.Model, y, y_pred, sample_weight):
    """[(metric, y, y_pred, sample_weight)] of the compiled metrics.

    As in Keras, only metrics that are to be weighted get the weights. Building
    the metrics makes their variables.
    """
    compiled = model._compile_metrics
    if compiled is None:
        return []
    if not compiled.built:
        compiled.build(y, y_pred)
    flat_y, flat_pred = compiled._flatten_y(y), compiled._flatten_y(y_pred)
    none = [None] * len(flat_y)
    given = none
    if sample_weight is not None:
        given = compiled._flatten_y(sample_weight)
    if len(given) < len(flat_y):
        given = given[:1] * len(flat_y)
    return [
        (metric, target, prediction, weight)
        for lists, weights in (
            (compiled._flat_metrics, none),
            (compiled._flat_weighted_metrics, given),
        )
        for metrics, target, prediction, weight in zip(
            lists, flat_y, flat_pred, weights, strict=False
        )
        for metric in (metrics.metrics if metrics else [])
    ]


def make_state(model: keras.Model, x: Any, y: Any) -> None:
    """Makes the variables of optimizer and metrics.

    Made while a step is traced, they would have TensorFlow trace it again.
    """
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    compiled = model._compile_metrics
    if compiled is not None and not compiled.built:
        options = {"training": False} if has_training_argument(model) else {}
        try:
            y_pred = model.compute_output_spec(x, **options)
        except (
            # Reshape asks tensors for what only symbolic ones have.
            AttributeError,
            TypeError,
            ValueError,
            NotImplementedError,
        ):
            return  # Then they are made while the step is traced.
        compiled.build(y, y_pred)


@contextlib.contextmanager
def autocast(layer: keras.Layer):
    """The scope in which a layer of mixed precision reads its weights."""
    if layer.compute_dtype == layer.variable_dtype:
        yield
        return
    with AutocastScope(layer.compute_dtype):
        yield


def computes_in_half(model: keras.Model) -> bool:
    """Whether some layer computes in half precision."""
    half = ("float16", "bfloat16")
    return any(layer.compute_dtype in half for layer in layers_of(model))


def is_quantized(layer: keras.Layer) -> bool:
    """Whether Keras runs the layer through `quantized_call`, not `call`."""
    return getattr(layer, "quantization_mode", None) is not None


def up_to_activation(layer: keras.Layer, *args, **kwargs) -> Any:
    """What the layer computes before it applies its activation."""
    run = type(layer).call
    if is_quantized(layer):
        run = type(layer).quantized_call
    held = vars(layer)
    activation = held.get("activation")
    if activation is None:
        return run(layer, *args, **kwargs)
    held["activation"] = None
    try:
        return run(layer, *args, **kwargs)
    finally:
        held["activation"] = activation


def attention_scores(layer: keras.Layer, query, key) -> tf.Tensor:
    """Scores of Attention and AdditiveAttention, before mask and softmax."""
    return layer._calculate_scores(query=query, key=key)


def attention_from_scores(layer: keras.Layer, scores, *args, **kwargs) -> Any:
    """What such a layer computes from given scores."""
    held = vars(layer)
    held["_calculate_scores"] = lambda query, key: scores
    try:
        return type(layer).call(layer, *args, **kwargs)
    finally:
        del held["_calculate_scores"]


@contextlib.contextmanager
def fused_directions_off(layer: keras.layers.Bidirectional):
    """Has a Bidirectional layer call the two layers that it holds."""
    held = vars(layer)
    names = ("_can_attempt_fused_lstm", "_can_attempt_fused_gru")
    for name in names:
        held[name] = lambda *args, **kwargs: False
    try:
        yield
    finally:
        for name in names:
            del held[name]


def has_mask_argument(layer: keras.Layer) -> bool:
    """Whether the layer's `call` takes a mask."""
    return layer._call_has_mask_arg


def has_training_argument(layer: keras.Layer) -> bool:
    """Whether the layer's `call` takes the phase."""
    return layer._call_has_training_arg


def identity(tensor: tf.Tensor) -> tf.Tensor:
    """A new tensor with the value, and the mask, of another."""
    return with_mask(tf.identity(tensor), mask_of(tensor))


def with_mask(tensor: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Hangs a mask on a tensor."""
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def mask_of(tensor: Any) -> tf.Tensor | None:
    """The mask that Keras hung on a tensor."""
    return getattr(tensor, "_keras_mask", None)


@contextlib.contextmanager
def weights_as_constants(variables):
    """Inside, the weights read as constants that no tape follows."""
    outer = get_stateless_scope()
    scope = keras.StatelessScope(
        [(v, tf.stop_gradient(raw(v))) for v in variables]
    )
    if outer is not None:
        scope.state_mapping = {**outer.state_mapping, **scope.state_mapping}
    with scope:
        yield


@contextlib.contextmanager
def tensorflow_seed_kept():
    """Gives TensorFlow its global seed and stream of seeds back."""
    context = tf_context.context()
    seed, generator = context._seed, getattr(context, "_rng", None)
    state = None if generator is None else generator.getstate()
    try:
        yield
    finally:
        context._seed, context._rng = seed, generator
        if generator is not None:
            generator.setstate(state)


def preprocessing_of(model: keras.Model):
    """A function from raw to model inputs for a KerasHub task, or None.

    Such a task preprocesses inside its own `fit`, one batch at a time.
    """
    if not hasattr(model, "preprocess_samples"):
        return None

    def transform(batch):
        x, y, sample_weight = batch
        result = model.preprocess_samples(x, y, sample_weight)
        return keras.utils.unpack_x_y_sample_weight(result)

    return transform


def preprocessed(model: keras.Model, data: Any, batch_size: int) -> Any:
    """Validation data as a data set of batches of model inputs."""
    if data is None or not hasattr(model, "preprocess_samples"):
        return data
    if not isinstance(data, tf.data.Dataset):
        present = tuple(part for part in data if part is not None)
        data = tf.data.Dataset.from_tensor_slices(present).batch(batch_size)
    return data.map(model.preprocess_samples)


def layers_with_input(model: keras.Sequential) -> list[keras.Layer]:
    """The layers of a Sequential model, its input layer included."""
    return list(model._layers)


def init_functional(model: keras.Model, *args, **kwargs) -> None:
    """Initializes a model from inputs and outputs.

    As `keras.Model.__init__` does, but without changing the bases of classes.
    """
    Trainer.__init__(model)
    Functional.__init__(model, *args, **kwargs)


def functional_config(model: keras.Model) -> dict[str, Any]:
    """The config of a functional model, as if it were a plain one."""
    plain = Functional(
        model._inputs_struct, model._outputs_struct, name=model.name
    )
    return plain.get_config()


def functional_from_config(config, custom_objects) -> tuple[Any, Any, str]:
    """Inputs, outputs and name of a functional model."""
    plain = Functional.from_config(config, custom_objects)
    return plain._inputs_struct, plain._outputs_struct, plain.name


def independent(tensor: tf.Tensor) -> tf.Tensor:
    """Lets an operation run beside others that have a state, too.

    TensorFlow runs such operations of a graph, calls of Python among them, one
    after the other.
    """
    if not tf.executing_eagerly():
        manager = getattr(tensor.graph, "experimental_acd_manager", None)
        if manager is not None:
            manager.run_independently(tensor.op)
    return tensor


def on_cpu() -> bool:
    """Whether what is traced now runs by TensorFlow's own CPU kernels.

    Not if there is a GPU, nor if XLA compiles it.
    """
    if tf.config.list_logical_devices("GPU"):
        return False
    return not in_xla()


def in_xla() -> bool:
    """Whether XLA compiles what is traced now."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def added_in_place(
    tensor: tf.Tensor, indices: tf.Tensor, updates: tf.Tensor
) -> tf.Tensor:
    """`tf.tensor_scatter_nd_add`, in place where no one else needs the tensor.

    TensorFlow's own always makes a copy. Not for XLA, which lacks it.
    """
    return tf.raw_ops.ScatterNdNonAliasingAdd(
        input=tensor, indices=indices, updates=updates
    )


def uses_onednn() -> bool:
    """Whether TensorFlow's CPU kernels are those of oneDNN."""
    return _pywrap_util_port.IsMklEnabled()


def vectorized_map(function, examples):
    """`tf.vectorized_map` without a product that destroys memory.

    TensorFlow 2.21 with oneDNN writes out of bounds where (n, 1, m, k) is
    multiplied by one matrix for all: what becomes of x·W for a batch of one
    example. Taken as one large product it is right, and faster.
    """
    name = "BatchMatMulV2"
    usual = pfor._pfor_converter_registry[name]

    def convert(pfor_input, *rest):
        x, matrix = pfor_input.input(0), pfor_input.input(1)
        batch_axes = matrix.t.shape[:-2]
        adjoint = pfor_input.get_attr("adj_x")
        if matrix.is_stacked or batch_axes.num_elements() != 1 or adjoint:
            return usual(pfor_input, *rest)
        shape = tf.shape(x.t)
        product = tf.matmul(
            tf.reshape(x.t, [-1, shape[-1]]),
            tf.reshape(matrix.t, tf.shape(matrix.t)[-2:]),
            adjoint_b=pfor_input.get_attr("adj_y"),
        )
        shape = tf.concat([shape[:-1], tf.shape(product)[-1:]], 0)
        return pfor.wrap(tf.reshape(product, shape), True)

    pfor._pfor_converter_registry[name] = convert
    try:
        return tf.vectorized_map(function, examples)
    finally:
        pfor._pfor_converter_registry[name] = usual


@contextlib.contextmanager
def eager_scope():
    """Eager execution, also while a function is being traced.

    `tf.init_scope` does that but stops all gradient tapes; here they run.
    """
    if tf.executing_eagerly():
        yield
        return
    with tf.init_scope():
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        try:
            yield
        finally:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


class _NoModules(tf_stack.StackTraceFilter):
    """Leaves the frames of all modules out of tracebacks of operations."""

    def __init__(self):
        super().__init__()
        modules = [
            module
            for module in list(sys.modules.values())
            if isinstance(module, types.ModuleType)
        ]
        # Some make what is asked of them on demand; not what is not there.
        files = {vars(module).get("__file__") for module in modules}
        self._files = {file for file in files if isinstance(file, str)}
        self.internal_set.update_to(self._files)

    def update(self):
        """Nothing to do: which files these are does not change."""

    def get_filtered_filenames(self):
        return self._files


_of_thread = threading.local()


@contextlib.contextmanager
def short_tracebacks():
    """Operations made here hardly tell where they were made.

    When a function that is not inlined is first run, TensorFlow writes out the
    tracebacks of all its operations, for good: some 10 kB for each, most of
    them frames of Keras and of its own.
    """
    if not hasattr(_of_thread, "filter"):
        _of_thread.filter = _NoModules()
    with _of_thread.filter:
        yield


@contextlib.contextmanager
def as_written():
    """Functions that are called here run as they are written.

    Otherwise TensorFlow optimizes the graph of a function when it is first
    run, for some ten milliseconds or more, which one that runs a few times only
    does not make up for.
    """
    context = tf_context.context()
    before = context.function_call_options
    config = tf.compat.v1.ConfigProto()
    config.MergeFromString(before.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    context.function_call_options = tf_context.FunctionCallOptions(
        before.executor_type, config
    )
    try:
        yield
    finally:
        context.function_call_options = before


@contextlib.contextmanager
def weights_store(path: str | os.PathLike):
    """The store of weights in a `.keras` or weights file, to read from."""
    path = os.fspath(path)
    with contextlib.ExitStack() as stack:
        if path.endswith(".keras"):
            archive = stack.enter_context(zipfile.ZipFile(path))
            store = H5IOStore("model.weights.h5", archive, mode="r")
        elif path.endswith(".json"):
            store = ShardedH5IOStore(path, mode="r")
        else:
            store = H5IOStore(path, mode="r")
        stack.callback(store.close)
        yield store


def save_weights(
    model: keras.Model,
    path: str | os.PathLike,
    overwrite: bool = True,
    max_shard_size: float | None = None,
) -> None:
    """`keras.Model.save_weights` that ends in an error when the disk is full.

    There HDF5 crashes the process. So it writes to memory, as it does for
    `.keras` files, and Python writes to the disk: the new file is whole, or the
    old one is left. Shards, which are for weights that memory has no room for
    twice, are written where there is room for them.
    """
    if is_remote_path(path):  # Keras writes it here first, then there.
        save_weights_only(model, path, max_shard_size)
        return
    path = pathlib.Path(path)
    if not overwrite and path.exists():
        if not ask_to_proceed_with_overwrite(str(path)):
            return
    if max_shard_size is not None:
        _require_room(path.parent, model)
        save_weights_only(model, path, max_shard_size)
        return
    if not (model.built and path.name.endswith(".weights.h5")):
        save_weights_only(model, path)  # It says what is wrong.
    buffer = io.BytesIO()
    store = H5IOStore(buffer, mode="w")
    _save_state(model, store, None, "", set())
    store.close()
    new = path.with_name(f"new-{path.name}")
    try:
        new.write_bytes(buffer.getbuffer())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _require_room(folder, model):
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer else [])]
    size = sum(
        math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        for variable in variables
    )
    free = shutil.disk_usage(folder).free
    if free < 1.1 * size + 2**20:
        reason = f"{os.strerror(errno.ENOSPC)}: {free:,} bytes for weights of"
        raise OSError(errno.ENOSPC, f"{reason} {size:,}", str(folder))


def train_on(model: keras.Model, data: Any, return_dict: bool) -> Any:
    """One step on what a train step takes, as `train_on_batch` makes it."""
    model.make_train_function()
    model.reset_metrics()
    logs = pythonify_logs(model.train_function(iter([data])))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """The strategy under which the model was made."""
    return model._distribute_strategy


def is_mirrored(variable: keras.Variable, strategy: Any) -> bool:
    """Whether each replica of a strategy has a copy of the variable."""
    owner = getattr(variable._value, "_distribute_strategy", None)
    return owner is not None and owner.extended is strategy.extended


def cross_replica_function(model: keras.Model, step):
    """A train or test function whose step takes batches of all replicas.

    Keras's own averages the logs of workers over an axis that scalars do not
    have, and so fails. Here the step returns what is to be logged.
    """
    options = {"reduce_retracing": True, "autograph": False}
    if not model.run_eagerly:
        step = tf.function(step, **options)
    step = model._autoconvert_optionals(step)

    # In a graph, batches of all sizes have one shape: one trace for all.
    def next_step(iterator):
        return step(iterator.get_next())

    if not model.run_eagerly:
        next_step = tf.function(next_step, **options)

    def function(iterator):
        if isinstance(iterator, tf.distribute.DistributedIterator):
            return next_step(iterator)
        return step(next(iterator))

    return function


@contextlib.contextmanager
def built_already(model: keras.Model):
    """Has Keras build nothing when it trains a model under a strategy.

    To that end it would take a batch out of the data, which then is not the
    beginning of a pass, and average the batches of the replicas, which need
    not be of one size.
    """
    held = vars(model)
    if model._distribute_strategy is None or "_maybe_symbolic_build" in held:
        yield
        return
    held["_maybe_symbolic_build"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del held["_maybe_symbolic_build"]


def save_as(cls: type, original: type) -> None:
    """Lets instances of a class be saved under the name of another."""
    name = GLOBAL_CUSTOM_NAMES.get(original)
    if name is not None:
        GLOBAL_CUSTOM_NAMES[cls] = name


def copy_graph(model: keras.Model, copy_operation) -> tuple[Any, Any]:
    """Inputs and outputs of a functional model, its operations copied."""
    inputs = keras.tree.map_structure(
        lambda tensor: copy_operation(tensor._keras_history.operation).output,
        model._inputs_struct,
    )
    return inputs, model._run_through_graph(inputs, operation_fn=copy_operation)


def copy_lambda(layer: keras.layers.Lambda) -> keras.layers.Lambda:
    """A Lambda layer of the same function, which no config can hold."""
    return keras.layers.Lambda(
        layer.function,
        output_shape=layer._output_shape,
        mask=layer.mask,
        arguments=layer.arguments,
        **keras.Layer.get_config(layer),
    )


def turn_into(layer: keras.Layer, new: keras.Layer) -> None:
    """Makes a layer what another one is, for all that refer to it.

    The layer keeps its places in the graphs of models. What Keras adds to an
    instance when it is made belongs to the new layer; if that is not built
    yet, it is built when the layer is.
    """
    places = {
        name: vars(layer)[name]
        for name in ("_inbound_nodes", "_outbound_nodes")
    }
    if not new._call_has_mask_arg:
        # Keras notes the mask, also None, among the arguments of a call.
        for node in layer._inbound_nodes:
            arguments = node.arguments
            kwargs = {k: v for k, v in arguments.kwargs.items() if k != "mask"}
            node.arguments = type(arguments)(*arguments.args, **kwargs)

    def adopt():
        vars(layer).clear()
        vars(layer).update({**vars(new), **places})

    def build(*args, **kwargs):
        new.build(*args, **kwargs)
        adopt()

    layer.__class__ = type(new)
    adopt()
    if not new.built:
        vars(layer)["build"] = functools.wraps(new.build)(build)
