"""Vision towers of SigLIP and CLIP in GGUF files, whose images all have one size: LLaVA 1.5,
SmolVLM and Gemma 3. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from pegboard_pack_gguf.mmproj_parts import (
    Parts,
    Projector,
    Shapes,
    Values,
    activation,
    both_endings,
    check_grid,
    check_language,
    colors,
    keys,
    row_token,
    square_config,
    token_id,
)

SOFT_NORM = "multi_modal_projector.mm_soft_emb_norm.weight"
"""The converter added 1 to it."""
GEMMA_SCALE = 4
"""The patches of a line that are averaged, if the file does not say."""
IDEFICS_TILES = 4
"""How many tiles of the tower's size a side of an image may have, if the file does not say."""
RESERVED = "<|reserved_special_token_"
UNKNOWN = "<unk>"
UNUSED = "<unused"
"""Beginnings of tokens that no text has: those of Llama 3, of Llama 2 and of Gemma 3."""

_LAYER = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_EMBEDDINGS = {
    "v.patch_embd.weight": "embeddings.patch_embedding.weight",
    "v.position_embd.weight": "embeddings.position_embedding.weight",
}
_SIGLIP = {
    **_EMBEDDINGS,
    "v.patch_embd.bias": "embeddings.patch_embedding.bias",
    **both_endings({"v.post_ln": "post_layernorm"}),
}
_CLIP = {
    **_EMBEDDINGS,
    "v.class_embd": "embeddings.class_embedding",
    **both_endings({"v.pre_ln": "pre_layrnorm"}),
}
_TOWER = "vision_tower.vision_model"


def _below(tower: str, names: Mapping[str, str]) -> dict[str, str]:
    return {name: f"{tower}.{path}" for name, path in names.items()}


def _siglip_shapes(parts: Parts) -> Shapes:
    sizes = parts.sizes
    positions = (sizes.image // sizes.patch) ** 2
    return {
        "v.patch_embd.weight": sizes.of_patches,
        "v.position_embd.weight": (positions, sizes.width),
    }


def _clip_shapes(parts: Parts) -> Shapes:
    sizes = parts.sizes
    positions = (sizes.image // sizes.patch) ** 2 + 1
    return {**_siglip_shapes(parts), "v.position_embd.weight": (positions, sizes.width)}


def _llava(parts: Parts) -> Values:
    """LLaVA 1.5. Its converter leaves out the layers of the tower after the last one that counts.
    Without a list of layers, this is the last one of the file."""
    metadata = parts.metadata
    count = parts.sizes.depth
    layers = metadata.get("feature_layer")
    chosen = [count] if layers is None else layers
    if (
        not isinstance(chosen, list)
        or not chosen
        or not all(type(layer) is int and 0 <= layer <= count for layer in chosen)
    ):
        raise metadata.fail("feature_layer", f"is {layers!r}, expected numbers from 0 to {count}")
    unused = RESERVED if any(text.startswith(RESERVED) for text in parts.tokens) else UNKNOWN
    token, named = row_token(parts, "<image>", unused)
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": {
            **square_config(parts),
            "model_type": "clip_vision_model",
            "hidden_act": activation(metadata, "gelu"),
        },
        "vision_feature_layer": chosen[0] if len(chosen) == 1 else chosen,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "image_token_id": token,
        **named,
    }


def _idefics3(parts: Parts) -> Values:
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "vision_config": {
            **square_config(parts),
            "model_type": "idefics3_vision",
            "hidden_act": activation(parts.metadata, "gelu_pytorch_tanh"),
        },
        "scale_factor": parts.metadata.count("projector.scale_factor"),
        "image_token_id": token_id(parts, "<image>"),
    }


def _gemma3(parts: Parts) -> Values:
    metadata = parts.metadata
    check_language(parts, "Gemma 3", ("gemma3_text",))
    check_grid(parts)
    scale = metadata.count("projector.scale_factor", GEMMA_SCALE)
    grid = parts.sizes.image // parts.sizes.patch
    if grid % scale:
        raise metadata.fail(
            "projector.scale_factor", f"is {scale}, expected a divisor of {grid} patches a side"
        )
    token, named = row_token(parts, "<image_soft_token>", UNUSED)
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vision_config": {
            **square_config(parts),
            "model_type": "siglip_vision_model",
            "hidden_act": activation(metadata, "gelu_pytorch_tanh"),
        },
        "mm_tokens_per_image": (grid // scale) ** 2,
        "boi_token_index": token_id(parts, "<start_of_image>"),
        "eoi_token_index": token_id(parts, "<end_of_image>"),
        "image_token_index": token,
        **named,
    }


def _clip_images(parts: Parts) -> Values:
    size = parts.sizes.image
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": size},
        "crop_size": {"height": size, "width": size},
        **colors(parts.metadata.header),
    }


def _idefics3_images(parts: Parts) -> Values:
    size = parts.sizes.image
    longest = parts.metadata.count("preproc_image_size", IDEFICS_TILES * size)
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": size},
        **colors(parts.metadata.header),
    }


def _gemma3_images(parts: Parts) -> Values:
    size = parts.sizes.image
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": size, "width": size},
        **colors(parts.metadata.header),
    }


LLAVA = Projector(
    layers=f"{_TOWER}.encoder.layers",
    layer=_LAYER,
    top={
        **_below(_TOWER, _CLIP),
        **both_endings(
            {"mm.0": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2"}
        ),
    },
    last="mm.2.weight",
    shapes=_clip_shapes,
    config=_llava,
    processor=_clip_images,
    keys=keys("feature_layer"),
)
IDEFICS3 = Projector(
    layers="vision_model.encoder.layers",
    layer=_LAYER,
    top={
        **_below("vision_model", _SIGLIP),
        "mm.model.fc.weight": "connector.modality_projection.proj.weight",
    },
    last="mm.model.fc.weight",
    shapes=_siglip_shapes,
    config=_idefics3,
    processor=_idefics3_images,
    keys=keys("projector.scale_factor", "preproc_image_size"),
)
GEMMA3 = Projector(
    layers=f"{_TOWER}.encoder.layers",
    layer=_LAYER,
    top={
        **_below(_TOWER, _SIGLIP),
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm.weight": SOFT_NORM,
    },
    last="mm.input_projection.weight",
    side=1,
    shapes=_siglip_shapes,
    config=_gemma3,
    processor=_gemma3_images,
    keys=keys("projector.scale_factor"),
)
