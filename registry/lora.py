"""LoRA and quantized layers: two small kernels beside a frozen one.

LoRA adds s·A·B to a frozen kernel, so a layer computes x·K + s·(x·A)·B. With
g the cotangent of the result, A is a kernel with input x and cotangent
s·g·Bᵀ, and B one with input s·x·A and cotangent g: two `Linear` terms, and the
gradient of the full kernel is never formed.

The frozen kernel may be quantized (QLoRA). In either case the layer itself
computes ζ, without its activation: nothing of the frozen part is needed here.
"""

from collections.abc import Callable

import tensorflow as tf

from keras_fastclip.registry.linear import Linear, times_transposed


def factors(
    layer, dtype, weight: str = "kernel"
) -> tuple[tf.Tensor, tf.Tensor, float]:
    """A, B and s."""
    a = tf.convert_to_tensor(getattr(layer, f"lora_{weight}_a"))
    b = tf.convert_to_tensor(getattr(layer, f"lora_{weight}_b"))
    scale = layer.lora_alpha / layer.lora_rank
    return tf.cast(a, dtype), tf.cast(b, dtype), scale


def terms(
    layer, a: tf.Tensor, canonical: Callable[[tf.Tensor], tf.Tensor]
) -> list[Linear]:
    """The terms of LoRA on a kernel that is a matrix.

    Args:
        layer: the layer.
        a: its inputs, (rows, T, d).
        canonical: maps the cotangent of ζ to (rows, T, p).
    """
    first, second, scale = factors(layer, a.dtype)
    return [
        Linear(
            layer.lora_kernel_a,
            a,
            lambda g: scale * times_transposed(canonical(g), second),
        ),
        Linear(layer.lora_kernel_b, scale * tf.matmul(a, first), canonical),
    ]
