"""The vision tower of InternVL in GGUF files, which sees tiles of an image. Standard library
only."""

from __future__ import annotations

from pegboard_pack_gguf.mmproj_parts import (
    Parts,
    Projector,
    Shapes,
    Values,
    activation,
    both_endings,
    colors,
    keys,
    square_config,
    token_id,
)

MAX_TILES = 12
"""How many tiles an image is cut into at most, if the file does not say."""


def _shapes(parts: Parts) -> Shapes:
    sizes = parts.sizes
    positions = (sizes.image // sizes.patch) ** 2 + 1
    return {
        "v.class_embd": (1, 1, sizes.width),
        "v.patch_embd.weight": sizes.of_patches,
        "v.position_embd.weight": (1, positions, sizes.width),
    }


def _config(parts: Parts) -> Values:
    metadata = parts.metadata
    vision = square_config(parts)
    scale = metadata.count("projector.scale_factor")
    grid = parts.sizes.image // parts.sizes.patch
    if grid % scale:
        raise metadata.fail(
            "projector.scale_factor", f"is {scale}, expected a divisor of {grid} patches a side"
        )
    for text in ("<img>", "</img>"):
        token_id(parts, text)
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "vision_config": {
            **vision,
            "model_type": "internvl_vision",
            "hidden_act": activation(metadata, "gelu"),
            "norm_type": "layer_norm" if parts.has("v.blk.0.ln1.bias") else "rms_norm",
            "attention_bias": parts.has("v.blk.0.attn_q.bias"),
            "use_qk_norm": parts.has("v.blk.0.attn_q_norm.weight"),
            "use_mean_pooling": True,
            "use_absolute_position_embeddings": True,
        },
        "downsample_ratio": 1 / scale,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "image_token_id": token_id(parts, "<IMG_CONTEXT>"),
    }


def _images(parts: Parts) -> Values:
    metadata = parts.metadata
    size = parts.sizes.image
    least = metadata.count("preproc_min_tiles", 1)
    most = metadata.count("preproc_max_tiles", MAX_TILES)
    if least > most:
        raise metadata.fail(
            "preproc_min_tiles", f"is {least}, expected at most preproc_max_tiles, {most}"
        )
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": size, "width": size},
        "crop_to_patches": True,
        "min_patches": least,
        "max_patches": most,
        **colors(metadata.header),
    }


INTERNVL = Projector(
    layers="vision_tower.encoder.layer",
    layer={
        "ln1": "layernorm_before",
        "ln2": "layernorm_after",
        "ls1.weight": "lambda_1",
        "ls2.weight": "lambda_2",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_q_norm": "attention.q_norm",
        "attn_k_norm": "attention.k_norm",
        "attn_out": "attention.projection_layer",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
    top={
        "v.class_embd": "vision_tower.embeddings.cls_token",
        "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
        **both_endings(
            {
                "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
                "mm.model.mlp.0": "multi_modal_projector.layer_norm",
                "mm.model.mlp.1": "multi_modal_projector.linear_1",
                "mm.model.mlp.3": "multi_modal_projector.linear_2",
            }
        ),
    },
    last="mm.model.mlp.3.weight",
    shapes=_shapes,
    config=_config,
    processor=_images,
    keys=keys("projector.scale_factor", "preproc_min_tiles", "preproc_max_tiles"),
)
