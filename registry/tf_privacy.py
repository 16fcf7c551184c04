"""Rules that were written for TensorFlow Privacy's registry."""

import inspect
from collections.abc import Callable

import tensorflow as tf

from keras_fastclip.registry.terms import itself


def from_tf_privacy(function: Callable) -> Callable:
    """Turns a registry function of TensorFlow Privacy into a rule.

    Such a function has the signature

        (layer_instance, input_args, input_kwargs, tape, num_microbatches)
            -> (base_vars, outputs, sqr_norm_fn)

    and works here unchanged: `base_vars` are tensors or variables that it
    watches on the tape, `outputs` is what the layer returns, and `sqr_norm_fn`
    maps the gradient of the summed loss by `base_vars` to the squared norm of
    each example. As every rule it is checked against plain differentiation
    before the first step. Microbatches do not exist here, so
    `num_microbatches` is None.

    Args:
        function: the registry function, with or without its last argument.

    Returns:
        A rule for `keras_fastclip.register`.

    Example:

    ```python
    rule = keras_fastclip.from_tf_privacy(my_layer_computation)
    keras_fastclip.register(MyLayer)(rule)
    ```
    """
    if not callable(function):
        raise ValueError(
            "from_tf_privacy takes a registry function of TensorFlow Privacy; "
            f"received {function!r}."
        )
    names = list(inspect.signature(function).parameters)
    rest = (None,) if len(names) > 4 else ()

    def rule(layer, *args, **kwargs):
        # ζ is the output, so what lies between base_vars and the output is
        # differentiated here.
        with tf.GradientTape(
            persistent=True, watch_accessed_variables=False
        ) as tape:
            base, outputs, squared_norms = function(
                layer, args, kwargs, tape, *rest
            )

        def omega(g):
            return squared_norms(tape.gradient(outputs, base, g))

        return outputs, omega, itself

    return rule
