"""KerasHub backbones, tiny and with random weights.

`python -m tests.hub_zoo` makes a private classifier of each exported backbone,
compares its clipped gradients with a loop over single examples, runs `fit`, and
prints one line for each and the counts. Names as arguments choose some of them.
"""

import collections
import inspect
import re
import sys
import time
import warnings

import keras
import keras_hub
import numpy as np
from keras_hub import layers, models

import keras_fastclip

EXAMPLES, LENGTH, VOCABULARY, CLASSES = 5, 6, 23, 3

HEADS = dict(
    vocabulary_size=VOCABULARY,
    num_layers=1,
    num_heads=2,
    hidden_dim=8,
    intermediate_dim=16,
)
SHORT = dict(HEADS, max_sequence_length=LENGTH)
GROUPED = dict(
    vocabulary_size=VOCABULARY,
    num_layers=1,
    num_query_heads=4,
    num_key_value_heads=2,
    hidden_dim=8,
    intermediate_dim=12,
)
GEMMA = dict(GROUPED, head_dim=4)
EXPERTS = dict(GROUPED, num_experts=3, top_k=2)
HYBRID = dict(
    num_layers=2,
    layer_types=["linear_attention", "full_attention"],
    head_dim=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    linear_conv_kernel_dim=2,
    partial_rotary_factor=0.5,
)
PATCHES = dict(
    patch_size=8, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16
)
IMAGE = (16, 16, 3)
PAIR = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in dict(
        hidden_dim=8,
        intermediate_dim=16,
        num_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        layer_types=["sliding_attention", "full_attention"],
    ).items()
}


def rng():
    return np.random.default_rng(7)


def inputs_of(backbone, length=LENGTH, **given):
    """Different examples, padded to different lengths.

    Args:
        backbone: its inputs say what to make.
        length: what stands for an axis of any size.
        given: inputs that cannot be any numbers, by name.
    """
    random = rng()

    def make(tensor):
        if tensor.name in given:
            return np.asarray(given[tensor.name])
        shape = [EXAMPLES, *(size or length for size in tensor.shape[1:])]
        if tensor.name.endswith("mask"):
            kept = shape[-1] - np.arange(EXAMPLES) % (shape[-1] // 2 + 1)
            mask = np.arange(shape[-1]) < kept[:, None]
            mask = mask.reshape(EXAMPLES, *[1] * (len(shape) - 2), -1)
            return np.broadcast_to(mask, shape).astype(tensor.dtype)
        if "int" in tensor.dtype:
            high = 2 if tensor.name.startswith("segment") else VOCABULARY
            return random.integers(0, high, shape).astype(tensor.dtype)
        return random.normal(size=shape).astype("float32")

    return keras.tree.map_structure(make, backbone.input)


def simple(name, *, length=LENGTH, **config):
    """A backbone whose inputs can be any numbers."""

    def build():
        backbone = getattr(models, name)(**config)
        return backbone, inputs_of(backbone, length)

    return build


def with_inputs(function):
    def build():
        backbone = function()
        return backbone, inputs_of(backbone)

    return build


def resnet(**config):
    return models.ResNetBackbone(
        **dict(
            dict(
                input_conv_filters=[64],
                input_conv_kernel_sizes=[3],
                stackwise_num_filters=[64, 8],
                stackwise_num_blocks=[1, 1],
                stackwise_num_strides=[1, 2],
                block_type="basic_block",
                image_shape=(32, 32, 3),
            ),
            **config,
        )
    )


def deep_resnet(size):
    return resnet(
        stackwise_num_filters=[64, 4, 4, 4],
        stackwise_num_blocks=[1, 1, 1, 1],
        stackwise_num_strides=[1, 2, 2, 2],
        image_shape=(size, size, 3),
    )


def hgnet(**config):
    return models.HGNetV2Backbone(
        **dict(
            dict(
                depths=[1, 1],
                embedding_size=4,
                hidden_sizes=[8, 8],
                stem_channels=[3, 4, 4],
                hidden_act="relu",
                use_learnable_affine_block=True,
                stackwise_stage_filters=[
                    [4, 4, 8, 1, 1, 3],
                    [8, 4, 8, 1, 1, 3],
                ],
                apply_downsample=[False, True],
                use_lightweight_conv_block=[False, True],
                image_shape=(32, 32, 3),
            ),
            **config,
        )
    )


def mit():
    return models.MiTBackbone(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.1,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        image_shape=(32, 32, 3),
        hidden_dims=[4, 8],
    )


def dino(**config):
    return models.DINOV2Backbone(
        **dict(
            dict(
                PATCHES,
                num_register_tokens=2,
                image_shape=IMAGE,
                position_embedding_shape=(24, 24, 3),
            ),
            **config,
        )
    )


def vit_det(size=16):
    return models.ViTDetBackbone(
        hidden_size=8,
        num_layers=2,
        intermediate_dim=16,
        num_heads=2,
        global_attention_layer_indices=[1],
        image_shape=(size, size, 3),
        patch_size=4,
        num_output_channels=8,
        window_size=2,
    )


def two_towers(name, *, joined, **config):
    """An encoder of images and one of texts.

    Args:
        name: what the names of the classes begin with.
        joined: whether to compare each image with each text of the batch, as
            the backbone does, or to return the embeddings.
        config: arguments of the backbone.
    """

    def build():
        backbone = getattr(models, f"{name}Backbone")(
            getattr(models, f"{name}VisionEncoder")(
                **PATCHES, image_shape=IMAGE
            ),
            getattr(models, f"{name}TextEncoder")(**SHORT, embedding_dim=8),
            **config,
        )
        inputs = inputs_of(backbone)
        if not joined:
            x = backbone.input
            embeddings = [
                backbone.get_vision_embeddings(x["images"]),
                backbone.get_text_embeddings(x["token_ids"]),
            ]
            backbone = keras.Model(x, embeddings)
        return backbone, inputs

    return build


def basnet():
    backbone = models.BASNetBackbone(
        image_encoder=deep_resnet(None),
        num_classes=1,
        image_shape=(32, 32, 3),
        projection_filters=64,
    )
    return backbone, inputs_of(backbone)


def blip2():
    backbone = models.BLIP2Backbone(
        vision_encoder=models.BLIP2VisionEncoder(
            **PATCHES,
            image_size=16,
            use_patch_bias=True,
            use_class_token=True,
            use_mha_bias=True,
            use_mlp_bias=True,
            dropout_rate=0.0,
            layer_norm_epsilon=1e-6,
            initializer_range=0.02,
        ),
        qformer=models.BLIP2QFormer(
            num_query_tokens=2,
            num_layers=1,
            num_heads=2,
            hidden_dim=8,
            intermediate_dim=16,
            vision_dim=8,
            cross_attention_frequency=1,
            dropout=0.1,
            layer_norm_epsilon=1e-6,
        ),
        language_model=models.BLIP2CustomOPT(
            **dict(SHORT, max_sequence_length=12),
            num_query_tokens=2,
            qformer_hidden_dim=8,
            dropout=0.1,
        ),
    )
    return backbone, inputs_of(backbone)


def deeplab():
    backbone = models.DeepLabV3Backbone(
        image_encoder=resnet(),
        spatial_pyramid_pooling_key="P3",
        upsampling_size=2,
        dilation_rates=[2, 3],
        low_level_feature_key="P2",
        projection_filters=4,
        image_shape=(32, 32, 3),
    )
    return backbone, inputs_of(backbone)


def depth_anything():
    backbone = models.DepthAnythingBackbone(
        image_encoder=dino(
            num_layers=4, image_shape=(48, 48, 3), apply_layernorm=True
        ),
        reassemble_factors=[4, 2, 1, 0.5],
        neck_hidden_dims=[4, 4, 4, 4],
        fusion_hidden_dim=4,
        head_hidden_dim=4,
        head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3", "stage4"],
    )
    return backbone, inputs_of(backbone)


def d_fine():
    backbone = models.DFineBackbone(
        backbone=hgnet(out_features=["stage1", "stage2"]),
        decoder_in_channels=[8, 8],
        encoder_hidden_dim=8,
        num_labels=4,
        num_denoising=0,
        learn_initial_query=False,
        num_queries=5,
        anchor_image_size=(32, 32),
        feat_strides=[4, 8],
        num_feature_levels=2,
        hidden_dim=8,
        encoder_in_channels=[8, 8],
        encode_proj_layers=[1],
        num_attention_heads=2,
        encoder_ffn_dim=16,
        num_encoder_layers=1,
        hidden_expansion=0.5,
        depth_multiplier=0.5,
        eval_idx=-1,
        num_decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        decoder_n_points=[2, 2],
        lqe_hidden_dim=8,
        num_lqe_layers=2,
        out_features=["stage1", "stage2"],
        image_shape=(32, 32, 3),
        seed=0,
    )
    return backbone, inputs_of(backbone)


def flux():
    backbone = models.FluxBackbone(
        input_channels=8,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[2, 2, 4],
        theta=10_000,
        use_bias=True,
        guidance_embed=True,
        image_shape=(4, 8),
        text_shape=(4, 8),
        image_ids_shape=(4, 3),
        text_ids_shape=(4, 3),
        y_shape=(8,),
    )
    return backbone, inputs_of(backbone)


def gemma2():
    backbone = models.GemmaBackbone(
        **GEMMA,
        query_head_dim_normalize=False,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        attention_logit_soft_cap=50,
        final_logit_soft_cap=30,
        use_sliding_window_attention=True,
        sliding_window_size=4,
    )
    return backbone, inputs_of(backbone)


def gemma3():
    backbone = models.Gemma3Backbone(
        **GEMMA,
        image_size=16,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        use_sliding_window_attention=True,
        sliding_window_size=4,
    )
    return backbone, inputs_of(backbone)


def places_of_images(length):
    """One image of 9 tokens, at another place in each text."""
    start = np.array([1, 2, 3, 0, 1])[:, None]
    places = np.arange(length)
    mask = (places >= start) & (places < start + 9)
    return dict(
        vision_indices=(start + np.arange(9)).astype("int32"),
        vision_mask=mask.astype("int32"),
    )


def gemma3_with_images():
    # Not 4 tokens for an image: `keras.ops.add` of Keras 3.15 takes a column
    # of n rows for a row if there are n columns, and the check before the
    # first step runs on 2 to 4 examples.
    backbone = models.Gemma3Backbone(
        **GEMMA,
        image_size=24,
        vision_encoder=models.Gemma3VisionEncoder(
            **dict(PATCHES, patch_size=4),
            image_size=24,
            output_dim=8,
            pool_size=2,
        ),
    )
    images = rng().normal(size=(EXAMPLES, 1, 24, 24, 3)).astype("float32")
    return backbone, inputs_of(
        backbone, 14, images=images, **places_of_images(14)
    )


def gemma3n():
    backbone = models.Gemma3nBackbone(
        text_vocab_size=VOCABULARY,
        text_hidden_size=8,
        num_hidden_layers=2,
        pad_token_id=0,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=[16, 16],
        hidden_activation="gelu_approximate",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
        rope_theta=10_000.0,
        max_position_embeddings=16,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=2,
        altup_num_inputs=2,
        laurel_rank=1,
    )
    return backbone, inputs_of(backbone)


def gemma4_config():
    return dict(
        GEMMA,
        image_size=24,
        use_sliding_window_attention=True,
        sliding_window_size=4,
    )


def positions(length):
    return np.tile(np.arange(length, dtype="int32"), (EXAMPLES, 1))


def gemma4():
    backbone = models.Gemma4Backbone(**gemma4_config())
    return backbone, inputs_of(backbone, position_ids=positions(LENGTH))


def gemma4_with_images():
    backbone = models.Gemma4Backbone(
        **gemma4_config(),
        vision_encoder=models.Gemma4VisionEncoder(
            **dict(PATCHES, patch_size=4),
            image_size=24,
            head_dim=4,
            num_key_value_heads=2,
            output_dim=8,
            pool_size=2,
            position_embedding_size=8,
        ),
    )
    rows, columns = np.divmod(np.arange(36), 6)
    grid = np.stack([columns, rows], -1)[None, None].astype("int32")
    return backbone, inputs_of(
        backbone,
        14,
        position_ids=positions(14),
        pixel_values=rng().normal(size=(EXAMPLES, 1, 36, 48)).astype("float32"),
        pixel_position_ids=np.tile(grid, (EXAMPLES, 1, 1, 1)),
        **places_of_images(14),
    )


def gemma4_with_experts():
    backbone = models.Gemma4Backbone(
        **gemma4_config(),
        enable_moe_block=True,
        num_experts=3,
        expert_intermediate_dim=8,
        num_experts_per_token=2,
    )
    return backbone, inputs_of(backbone, position_ids=positions(LENGTH))


def mobilenet_v5():
    def each(first, second):
        return [[first], [second, second]]

    backbone = models.MobileNetV5Backbone(
        stackwise_block_types=[["er"], ["uir", "mqa"]],
        stackwise_num_blocks=[1, 2],
        stackwise_num_filters=[[8], [8, 8]],
        stackwise_strides=[[2], [2, 1]],
        stackwise_act_layers=each("relu", "relu"),
        stackwise_exp_ratios=each(2.0, 2.0),
        stackwise_se_ratios=each(0.0, 0.0),
        stackwise_dw_kernel_sizes=[[0], [3, 3]],
        stackwise_dw_start_kernel_sizes=each(0, 0),
        stackwise_dw_end_kernel_sizes=each(0, 0),
        stackwise_exp_kernel_sizes=each(3, 0),
        stackwise_pw_kernel_sizes=each(1, 0),
        stackwise_num_heads=[[0], [0, 2]],
        stackwise_key_dims=[[0], [0, 4]],
        stackwise_value_dims=[[0], [0, 4]],
        stackwise_kv_strides=[[0], [0, 1]],
        stackwise_use_cpe=[[False], [False, False]],
        use_msfa=False,
        stem_size=8,
        layer_scale_init_value=0.5,
        image_shape=IMAGE,
    )
    return backbone, inputs_of(backbone)


def moonshine():
    backbone = models.MoonshineBackbone(
        vocabulary_size=VOCABULARY,
        filter_dim=8,
        encoder_num_layers=1,
        decoder_num_layers=1,
        hidden_dim=8,
        intermediate_dim=16,
        encoder_num_heads=2,
        decoder_num_heads=2,
    )
    random = rng()
    kept = np.array([3000, 2600, 2200, 1800, 3000])[:, None]
    tokens = random.integers(0, VOCABULARY, (EXAMPLES, LENGTH))
    return backbone, inputs_of(
        backbone,
        encoder_input_values=random.normal(size=(EXAMPLES, 3000, 1)),
        encoder_padding_mask=np.arange(3000) < kept,
        decoder_token_ids=tokens.astype("int32"),
    )


def parseq():
    backbone = models.PARSeqBackbone(
        image_encoder=models.ViTBackbone(
            image_shape=IMAGE,
            patch_size=8,
            num_layers=1,
            num_heads=2,
            hidden_dim=8,
            mlp_dim=16,
            use_class_token=False,
        ),
        vocabulary_size=VOCABULARY,
        max_label_length=LENGTH,
        decoder_hidden_dim=8,
        num_decoder_layers=1,
        num_decoder_heads=2,
        decoder_mlp_dim=16,
    )
    return backbone, inputs_of(backbone)


def retinanet():
    backbone = models.RetinaNetBackbone(
        image_encoder=deep_resnet(32),
        min_level=3,
        max_level=6,
        use_p5=False,
        image_shape=(32, 32, 3),
    )
    return backbone, inputs_of(backbone)


def sam():
    backbone = models.SAMBackbone(
        image_encoder=vit_det(),
        prompt_encoder=layers.SAMPromptEncoder(
            hidden_size=8,
            image_embedding_size=(4, 4),
            input_image_size=(16, 16),
            mask_in_channels=4,
        ),
        mask_decoder=layers.SAMMaskDecoder(
            num_layers=1,
            hidden_size=8,
            intermediate_dim=8,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=2,
            iou_head_depth=2,
            iou_head_hidden_dim=4,
        ),
    )
    random = rng()
    return backbone, inputs_of(
        backbone,
        points=random.uniform(0, 16, (EXAMPLES, 2, 2)).astype("float32"),
        labels=np.array([[0, 1], [1, 1], [1, 0], [0, 0], [1, 1]], "float32"),
        boxes=random.uniform(0, 16, (EXAMPLES, 1, 2, 2)).astype("float32"),
        masks=random.normal(size=(EXAMPLES, 1, 16, 16, 1)).astype("float32"),
    )


def sam3():
    blocks = dict(num_layers=1, hidden_dim=8, intermediate_dim=16, num_heads=2)
    shape = (32, 32, 3)
    backbone = models.SAM3PromptableConceptBackbone(
        vision_encoder=layers.SAM3VisionEncoder(
            **blocks,
            image_shape=shape,
            patch_size=8,
            fpn_hidden_dim=8,
            fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
            pretrain_image_shape=IMAGE,
            window_size=2,
            global_attn_indexes=[0],
        ),
        text_encoder=layers.SAM3TextEncoder(
            **blocks,
            vocabulary_size=VOCABULARY,
            embedding_dim=8,
        ),
        geometry_encoder=layers.SAM3GeometryEncoder(**blocks, roi_size=3),
        detr_encoder=layers.SAM3DetrEncoder(**blocks),
        detr_decoder=layers.SAM3DetrDecoder(
            **blocks, image_shape=shape, patch_size=8, num_queries=4
        ),
        mask_decoder=layers.SAM3MaskDecoder(
            num_upsampling_stages=3, hidden_dim=8, num_heads=2
        ),
    )
    boxes = rng().uniform(0.2, 0.8, (EXAMPLES, 1, 5)).astype("float32")
    return backbone, inputs_of(
        backbone,
        32,
        boxes=boxes,
        box_labels=np.array([[0], [1], [1], [0], [1]], "int32"),
    )


def segformer():
    backbone = models.SegFormerBackbone(
        image_encoder=mit(), projection_filters=4
    )
    return backbone, inputs_of(backbone)


def stable_diffusion_3():
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    def clip(width, name):
        return models.CLIPTextEncoder(
            **dict(SHORT, hidden_dim=width, num_layers=2),
            embedding_dim=width,
            intermediate_output_index=-2,
            name=name,
        )

    backbone = models.StableDiffusion3Backbone(
        mmdit_patch_size=2,
        mmdit_hidden_dim=8,
        mmdit_num_layers=2,
        mmdit_num_heads=2,
        mmdit_position_size=8,
        mmdit_qk_norm="rms_norm",
        mmdit_dual_attention_indices=[0],
        vae=VAEBackbone(
            [32, 32, 32, 32],
            [1, 1, 1, 1],
            [32, 32, 32, 32],
            [1, 1, 1, 1],
            sampler_method="mode",
            name="vae",
        ),
        clip_l=clip(8, "clip_l"),
        clip_g=clip(16, "clip_g"),
        image_shape=(32, 32, 3),
    )
    return backbone, inputs_of(
        backbone, num_steps=np.array([20, 25, 30, 35, 40], "int32")
    )


ZOO = {
    "AlbertBackbone": simple("AlbertBackbone", **SHORT, embedding_dim=4),
    "BASNetBackbone": basnet,
    "BLIP2Backbone": blip2,
    "BartBackbone": simple("BartBackbone", **SHORT),
    "BertBackbone": simple("BertBackbone", **SHORT),
    "BloomBackbone": simple("BloomBackbone", **HEADS),
    "CLIPBackbone": two_towers("CLIP", joined=True, projection_dim=4),
    "CLIPBackbone (embeddings)": two_towers(
        "CLIP", joined=False, projection_dim=4
    ),
    "CSPNetBackbone": simple(
        "CSPNetBackbone",
        stem_filters=4,
        stem_kernel_size=3,
        stem_strides=1,
        stackwise_depth=[1, 2],
        stackwise_strides=2,
        stackwise_num_filters=[4, 8],
        block_type="dark_block",
        stage_type="csp",
        bottle_ratio=(0.5, 1.0),
        block_ratio=(1.0, 0.5),
        expand_ratio=(2.0, 1.0),
        stem_padding="same",
        down_growth=True,
        image_shape=IMAGE,
    ),
    "DFineBackbone": d_fine,
    "DINOV2Backbone": with_inputs(dino),
    "DINOV3Backbone": simple("DINOV3Backbone", **PATCHES, image_shape=IMAGE),
    "DebertaV3Backbone": simple("DebertaV3Backbone", **SHORT, bucket_size=4),
    "DeepLabV3Backbone": deeplab,
    "DeiTBackbone": simple("DeiTBackbone", **PATCHES, image_shape=IMAGE),
    "DenseNetBackbone": simple(
        "DenseNetBackbone",
        stackwise_num_repeats=[1, 2],
        growth_rate=2,
        image_shape=(32, 32, 3),
    ),
    "DepthAnythingBackbone": depth_anything,
    "DistilBertBackbone": simple("DistilBertBackbone", **SHORT),
    "ESM2Backbone": simple("ESM2Backbone", **SHORT),
    "EdRecBackbone": simple(
        "EdRecBackbone",
        vocab_size=VOCABULARY,
        num_layers_enc=1,
        num_layers_dec=1,
        hidden_dim=8,
        intermediate_dim=16,
        num_heads=2,
    ),
    "EfficientNetBackbone": simple(
        "EfficientNetBackbone",
        stackwise_width_coefficients=[1.0] * 3,
        stackwise_depth_coefficients=[1.0] * 3,
        stackwise_kernel_sizes=[3] * 3,
        stackwise_num_repeats=[1] * 3,
        stackwise_input_filters=[8] * 3,
        stackwise_output_filters=[8] * 3,
        stackwise_expansion_ratios=[1, 2, 2],
        stackwise_squeeze_and_excite_ratios=[0.25, 0.0, 0.25],
        stackwise_strides=[1, 2, 2],
        stackwise_block_types=["v1", "fused", "unfused"],
        stackwise_force_input_filters=[0] * 3,
        stackwise_nores_option=[False] * 3,
        input_shape=IMAGE,
    ),
    "ElectraBackbone": simple(
        "ElectraBackbone",
        vocab_size=VOCABULARY,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        embedding_dim=4,
        intermediate_dim=16,
        max_sequence_length=LENGTH,
    ),
    "FNetBackbone": simple(
        "FNetBackbone",
        vocabulary_size=VOCABULARY,
        num_layers=1,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=LENGTH,
    ),
    "FalconBackbone": simple(
        "FalconBackbone",
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_attention_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
    ),
    "FluxBackbone": flux,
    "GPT2Backbone": simple("GPT2Backbone", **SHORT),
    "GPTNeoXBackbone": simple(
        "GPTNeoXBackbone", **SHORT, rotary_percentage=0.5
    ),
    "GemmaBackbone": simple("GemmaBackbone", **GEMMA),
    "GemmaBackbone (Gemma 2)": gemma2,
    "Gemma3Backbone": gemma3,
    "Gemma3Backbone (with images)": gemma3_with_images,
    "Gemma3nBackbone": gemma3n,
    "Gemma4Backbone": gemma4,
    "Gemma4Backbone (with experts)": gemma4_with_experts,
    "Gemma4Backbone (with images)": gemma4_with_images,
    "GptOssBackbone": simple("GptOssBackbone", **EXPERTS, head_dim=4),
    "HGNetV2Backbone": with_inputs(hgnet),
    "Llama3Backbone": simple("Llama3Backbone", **GROUPED),
    "LlamaBackbone": simple("LlamaBackbone", **GROUPED),
    "MetaCLIP2Backbone": two_towers("MetaCLIP2", joined=True, projection_dim=4),
    "MetaCLIP2Backbone (embeddings)": two_towers(
        "MetaCLIP2", joined=False, projection_dim=4
    ),
    "MiTBackbone": with_inputs(mit),
    "MistralBackbone": simple("MistralBackbone", **GROUPED, sliding_window=4),
    "MixtralBackbone": simple("MixtralBackbone", **EXPERTS, sliding_window=4),
    "MobileNetBackbone": simple(
        "MobileNetBackbone",
        stackwise_expansion=[[8], [8, 16]],
        stackwise_num_blocks=[1, 2],
        stackwise_num_filters=[[8], [8, 8]],
        stackwise_kernel_size=[[3], [3, 3]],
        stackwise_num_strides=[[2], [1, 1]],
        stackwise_se_ratio=[[None], [0.5, 0.5]],
        stackwise_activation=[["relu"], ["hard_swish", "hard_swish"]],
        stackwise_padding=[[1], [1, 1]],
        output_num_filters=8,
        depthwise_filters=8,
        depthwise_stride=1,
        depthwise_residual=False,
        last_layer_filter=8,
        squeeze_and_excite=0.5,
        input_num_filters=8,
        image_shape=IMAGE,
    ),
    "MobileNetV5Backbone": mobilenet_v5,
    "MoonshineBackbone": moonshine,
    "OPTBackbone": simple("OPTBackbone", **SHORT),
    "PARSeqBackbone": parseq,
    "PaliGemmaBackbone": simple(
        "PaliGemmaBackbone",
        **GEMMA,
        image_size=16,
        vit_patch_size=8,
        vit_num_heads=2,
        vit_hidden_dim=8,
        vit_num_layers=1,
        vit_intermediate_dim=16,
    ),
    "Phi3Backbone": simple("Phi3Backbone", **GROUPED),
    "Qwen2Backbone": simple("Qwen2Backbone", **GROUPED),
    "Qwen3Backbone": simple("Qwen3Backbone", **GEMMA),
    "Qwen3MoeBackbone": simple(
        "Qwen3MoeBackbone", **EXPERTS, head_dim=4, moe_intermediate_dim=8
    ),
    "Qwen3_5Backbone": simple("Qwen3_5Backbone", **dict(GROUPED, **HYBRID)),
    "Qwen3_5MoeBackbone": simple(
        "Qwen3_5MoeBackbone",
        **{
            key: value
            for key, value in dict(EXPERTS, **HYBRID).items()
            if key != "intermediate_dim"
        },
        moe_intermediate_dim=8,
        shared_expert_intermediate_size=8,
    ),
    "QwenMoeBackbone": simple(
        "QwenMoeBackbone",
        **EXPERTS,
        moe_intermediate_dim=8,
        shared_expert_intermediate_dim=8,
    ),
    "RWKV7Backbone": simple(
        "RWKV7Backbone",
        length=16,
        hidden_size=8,
        head_size=4,
        num_layers=2,
        vocabulary_size=VOCABULARY,
        intermediate_dim=16,
        gate_lora=4,
        mv_lora=4,
        aaa_lora=4,
        decay_lora=4,
    ),
    "ResNetBackbone": with_inputs(resnet),
    "RetinaNetBackbone": retinanet,
    "RobertaBackbone": simple("RobertaBackbone", **SHORT),
    "RoformerV2Backbone": simple("RoformerV2Backbone", **HEADS, head_size=4),
    "SAM3PromptableConceptBackbone": sam3,
    "SAMBackbone": sam,
    "SegFormerBackbone": segformer,
    "SigLIPBackbone": two_towers("SigLIP", joined=True),
    "SigLIPBackbone (embeddings)": two_towers("SigLIP", joined=False),
    "SmolLM3Backbone": simple(
        "SmolLM3Backbone",
        vocabulary_size=VOCABULARY,
        hidden_dim=8,
        intermediate_dim=16,
        num_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=False,
        attention_dropout=0.0,
        rope_layer_enabled_list=[True],
        layer_types=["attention"],
        mlp_bias=False,
        layer_norm_epsilon=1e-5,
        max_position_embeddings=16,
        rope_theta=10_000.0,
        partial_rotary_factor=1.0,
    ),
    "StableDiffusion3Backbone": stable_diffusion_3,
    "SwinTransformerBackbone": simple(
        "SwinTransformerBackbone",
        image_shape=IMAGE,
        embed_dim=8,
        depths=(2,),
        num_heads=(2,),
        window_size=2,
        drop_path=0.0,
    ),
    "T5Backbone": simple("T5Backbone", **HEADS, dropout=0.0),
    "T5Gemma2Backbone": simple(
        "T5Gemma2Backbone",
        vocabulary_size=VOCABULARY,
        **PAIR,
        sliding_window=4,
        cross_attention_hidden_size=8,
    ),
    "T5GemmaBackbone": simple(
        "T5GemmaBackbone",
        vocabulary_size=VOCABULARY,
        **PAIR,
        sliding_window=4,
        cross_attention_hidden_size=8,
    ),
    "VGGBackbone": simple(
        "VGGBackbone",
        stackwise_num_repeats=[1, 2],
        stackwise_num_filters=[4, 8],
        image_shape=IMAGE,
    ),
    "ViTBackbone": simple(
        "ViTBackbone",
        image_shape=IMAGE,
        patch_size=8,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
    ),
    "ViTDetBackbone": with_inputs(vit_det),
    "VideoPrismBackbone": simple(
        "VideoPrismBackbone",
        num_frames=2,
        patch_size=8,
        hidden_dim=8,
        intermediate_dim=16,
        num_heads=2,
        num_spatial_layers=1,
        num_temporal_layers=1,
        num_auxiliary_layers=1,
        vocabulary_size=VOCABULARY,
        num_text_layers=1,
        image_shape=IMAGE,
    ),
    "WhisperBackbone": simple(
        "WhisperBackbone",
        **HEADS,
        num_mels=4,
        max_encoder_sequence_length=LENGTH,
        max_decoder_sequence_length=LENGTH,
    ),
    "XLMRobertaBackbone": simple("XLMRobertaBackbone", **SHORT),
    "XLNetBackbone": simple("XLNetBackbone", **HEADS),
    "XceptionBackbone": simple(
        "XceptionBackbone",
        stackwise_conv_filters=[[4, 4], [8, 8]],
        stackwise_pooling=[True, False],
        image_shape=(32, 32, 3),
    ),
}


def exported():
    """The backbones of KerasHub: each class once, without the base classes."""
    found = {}
    for name in dir(models):
        cls = getattr(models, name)
        if name.endswith("Backbone") and inspect.isclass(cls):
            found.setdefault(cls, name)
    found.pop(models.Backbone)
    found.pop(models.FeaturePyramidBackbone)
    return sorted(found.values())


def with_config(name, **changes):
    """A backbone of the zoo with other values in its configuration."""

    def build():
        backbone, inputs = ZOO[name]()
        config = {**backbone.get_config(), **changes}
        return type(backbone).from_config(config), inputs

    return build


# Routers add a loss of all tokens of the batch. Private models have it off.
for _name, _coefficient in (
    ("MixtralBackbone", "router_aux_loss_coef"),
    ("Qwen3MoeBackbone", "router_aux_loss_coefficient"),
    ("Qwen3_5MoeBackbone", "router_aux_loss_coefficient"),
    ("QwenMoeBackbone", "router_aux_loss_coefficient"),
):
    ZOO[f"{_name} (no added loss)"] = with_config(_name, **{_coefficient: 0})


def perturb(model):
    """Moves all weights: ones and zeros would hide mistakes."""
    random = rng()
    for weight in model.trainable_variables:
        noise = 0.1 * random.normal(size=weight.shape)
        weight.assign(weight + noise.astype(weight.dtype))


def has_batch_normalization(model):
    return any(
        isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        for layer in model._flatten_layers()
    )


def classifier(backbone):
    """A private model that classifies by the outputs of a backbone."""
    if has_batch_normalization(backbone):
        backbone = keras_fastclip.replace_batch_normalization(backbone)
    logits = 0.0
    for output in keras.tree.flatten(backbone.output):
        if output.shape[0] is not None or "float" not in output.dtype:
            continue  # the same for all examples, or a mask
        if output.shape[-1] is None:
            output = output[..., None]
        middle = tuple(range(1, len(output.shape) - 1))
        pooled = keras.ops.mean(output, middle) if middle else output
        logits += keras.layers.Dense(CLASSES)(pooled)
    model = keras_fastclip.DPModel(
        backbone.input, logits, l2_norm_clip=1.0, noise_multiplier=1.0
    )
    perturb(model)
    model.compile(
        keras.optimizers.SGD(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


LABELS = np.arange(EXAMPLES) % CLASSES


def gradient_report(name, dtype="float32"):
    """The private model of a backbone, and its gradients against the loop's.

    Returns:
        The model, its inputs, and the report of `check_gradients`.
    """
    before = keras.config.dtype_policy(), keras.config.floatx()
    try:
        keras.config.set_dtype_policy(dtype)
        keras.config.set_floatx(dtype)
        keras.utils.set_random_seed(1)
        backbone, x = ZOO[name]()
        model = classifier(backbone)
        return model, x, keras_fastclip.check_gradients(model, x, LABELS)
    finally:
        keras.config.set_dtype_policy(before[0])
        keras.config.set_floatx(before[1])


def is_right(name):
    """Whether the gradients are those of the loop.

    Where rounding of float32 shows (a weight before a normalization, whose
    gradient is next to nothing), float64 tells it from a mistake. Some models
    compute parts in float32 even then.
    """
    _, _, report = gradient_report(name)
    if report.relative_error < 1e-5:
        return True
    _, _, report = gradient_report(name, "float64")
    return report.relative_error < 1e-6


def verdict(name):
    """One line on a backbone: right, wrong, refused or not runnable."""
    try:
        backbone, x = ZOO[name]()
        backbone(x, training=True)
    except Exception as error:
        return f"not runnable: {_first_sentence(error)}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if not is_right(name):
                return "WRONG"
            model = classifier(ZOO[name]()[0])
            model.fit(x, LABELS, batch_size=EXAMPLES, verbose=0)
        except ValueError as error:
            return f"refused: {_first_sentence(error)}"
        except Exception as error:
            return f"CRASHED: {type(error).__name__}: {_first_sentence(error)}"
    fallbacks = {
        layer
        for warning in caught
        for layer in re.findall(
            r"\((\w+), [\d,]+ weights", str(warning.message)
        )
    }
    without = ", ".join(sorted(fallbacks))
    return f"right (no rule for {without})" if without else "right"


def _first_sentence(error):
    return re.split(r"(?<=[.:]) ", " ".join(str(error).split()))[0][:300]


def main(names):
    forms = collections.defaultdict(dict)
    for name in names or ZOO:
        start = time.time()
        line = verdict(name)
        backbone, _, form = name.partition(" ")
        forms[backbone][form] = re.split("[ :]", line)[0]
        print(f"{name}: {line} [{time.time() - start:.0f} s]", flush=True)
        keras.utils.clear_session()
    plain = [b for b, words in forms.items() if words.get("") == "right"]
    others = {
        b: " ".join(form for form, word in words.items() if word == "right")
        for b, words in forms.items()
        if b not in plain and "right" in words.values()
    }
    rest = collections.Counter(
        words[""]
        for b, words in forms.items()
        if b not in plain and b not in others
    )
    print(f"\n{len(forms)} backbones of KerasHub {keras_hub.__version__}:")
    print(f"{len(plain)} train exactly as they are")
    listed = ", ".join(f"{b} {form}" for b, form in others.items())
    print(f"{len(others)} train exactly in another form: {listed}")
    for word, count in rest.items():
        print(f"{count} {word}")


if __name__ == "__main__":
    main(sys.argv[1:])
