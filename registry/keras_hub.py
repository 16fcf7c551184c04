"""Rules for layers of KerasHub, by name: KerasHub need not be installed.

Most of its models bring a root-mean-square normalization of their own. All
multiply a vector by something that does not depend on it, as do their layer
scales: y = x̂·w or y = x̂·(1 + w). The layer itself computes x̂, with one or zero
in place of w.

Class tokens, query tokens and position tables are added to some positions of
the output, or stand there alone: their gradient is g at these positions.
"""

import keras
import tensorflow as tf

from keras_fastclip.registry.embedding import Lookup
from keras_fastclip.registry.lookup import default_registry
from keras_fastclip.registry.terms import Small, at_least_float32, sum_to_shape

# By module and class the weight; those below add one to it.
_SCALES = {
    "layers.modeling.rms_normalization.RMSNormalization": "scale",
    "models.dinov2.dinov2_layers.DINOV2LayerScale": "lambda1",
    "models.dinov3.dinov3_layers.DINOV3LayerScale": "lambda1",
    "models.gemma3n.rms_normalization.Gemma3nRMSNorm": "scale",
    "models.gemma4.gemma4_layers.RMSNormalization": "scale",
    "models.gpt_oss.gpt_oss_layer_norm.GptOssLayerNormalization": "scale",
    "models.llama.llama_layernorm.LlamaLayerNorm": "scale",
    "models.mistral.mistral_layer_norm.MistralLayerNormalization": "scale",
    "models.mixtral.mixtral_layer_norm.MixtralLayerNormalization": "scale",
    "models.phi3.phi3_layernorm.Phi3LayerNorm": "scale",
    "models.qwen.qwen_layernorm.QwenLayerNorm": "scale",
    "models.qwen3.qwen3_layernorm.Qwen3LayerNorm": "scale",
    "models.qwen3_5.qwen3_5_layers.Qwen3_5RMSNormGated": "scale",
    "models.qwen3_moe.qwen3_moe_layernorm.Qwen3MoeLayerNorm": "scale",
    "models.qwen_moe.qwen_moe_layernorm.QwenMoeLayerNorm": "scale",
    "models.roformer_v2.roformer_v2_attention.RoformerNorm": "scale",
    "models.t5.t5_layer_norm.T5LayerNorm": "weight",
}
_SCALES_PLUS_ONE = {
    "models.edrec.edrec_layers.EdRecRMSNormalization": "scale",
    "models.gemma.rms_normalization.RMSNormalization": "scale",
    "models.gemma3.gemma3_layers.RMSNormalization": "scale",
    "models.qwen3_5.qwen3_5_layers.Qwen3_5LayerNorm": "scale",
}

# By module and class the weight, and how many positions of the output, from
# the first one on, it is added to; None for all.
_ADDED = {
    "models.blip2.blip2_qformer.BLIP2QueryTokens": ("query_tokens", None),
    "models.clip.clip_layers.CLIPVisionEmbedding": ("class_embedding", 1),
    "models.metaclip_2.metaclip_2_layers.MetaCLIP2VisionEmbedding": (
        "class_embedding",
        1,
    ),
    "models.vit.vit_layers.ViTPatchingAndEmbedding": ("class_token", 1),
    "models.vit_det.vit_layers.AddPositionalEmbedding": ("pos_embed", None),
}


def scale_rule(name: str, *, plus_one: bool = False):
    """The rule for y = x̂·w, or x̂·(1 + w), with w a vector of the last axis.

    Args:
        name: the attribute that holds w.
        plus_one: whether the layer adds one to w.
    """

    def rule(layer, inputs, *args, **kwargs):
        weight = getattr(layer, name)
        neutral = tf.zeros if plus_one else tf.ones
        value = neutral(weight.shape, weight.dtype)
        with keras.StatelessScope([(weight, value)]):
            unscaled = type(layer).call(layer, inputs, *args, **kwargs)
        factor = keras.ops.cast(weight, unscaled.dtype)
        zeta = unscaled * (factor + 1 if plus_one else factor)
        wide, shape = at_least_float32(unscaled), tuple(weight.shape)
        return zeta, [Small(weight, lambda g: sum_to_shape(g * wide, shape))]

    return rule


def added_rule(name: str, count: int | None):
    """The rule for a weight that is added to positions of the output.

    Sublayers run through their own rules.

    Args:
        name: the attribute that holds the weight.
        count: how many positions there are, from the first one; None for all.
    """

    def rule(layer, *args, **kwargs):
        weight = getattr(layer, name)
        shape = tuple(weight.shape)
        term = Small(weight, lambda g: tf.reshape(g[:, :count], [-1, *shape]))
        return type(layer).call(layer, *args, **kwargs), [term]

    return rule


def position_embedding(layer, inputs, start_index=0, positions=None):
    """A table of which the first rows, or rows by number, are returned."""
    zeta = type(layer).call(layer, inputs, start_index, positions)
    if positions is None:
        length = tf.shape(zeta)[-2]
        positions = start_index + tf.range(length)
    shape = tf.shape(zeta)[:-1]
    ids = tf.broadcast_to(tf.cast(positions, tf.int32), shape)
    return zeta, [Lookup(layer.position_embeddings, ids)]


def _register():
    registry, root = default_registry(), "keras_hub.src."
    for name, weight in _SCALES.items():
        registry.register_name(root + name, scale_rule(weight))
    for name, weight in _SCALES_PLUS_ONE.items():
        registry.register_name(root + name, scale_rule(weight, plus_one=True))
    for name, (weight, count) in _ADDED.items():
        registry.register_name(root + name, added_rule(weight, count))
    registry.register_name(
        f"{root}layers.modeling.position_embedding.PositionEmbedding",
        position_embedding,
    )


_register()
