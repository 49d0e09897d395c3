"""The vision tower of Pixtral in GGUF files: LLaVA with it, and Mistral 3, which merges patches.
Standard library only.

Converters put the rows of queries and keys of a head in pairs, as those of Llama.
"""

from __future__ import annotations

from pegboard_pack_gguf.metadata import Metadata
from pegboard_pack_gguf.mmproj_parts import (
    Parts,
    Projector,
    Shapes,
    Values,
    activation,
    any_config,
    both_endings,
    check_language,
    colors,
    keys,
    token_id,
)

BREAK = "v.token_embd.img_break"
"""The vector of the token that ends a line. The language model has it, too."""
MERGER = "mm.patch_merger.weight"
NORM = "mm.input_norm.weight"


def _shapes(parts: Parts) -> Shapes:
    sizes = parts.sizes
    return {"v.patch_embd.weight": sizes.of_patches, BREAK: (sizes.text,)}


def _config(parts: Parts) -> Values:
    metadata = parts.metadata
    check_language(parts, "Pixtral", ("llama", "mistral"))
    for text in ("[IMG_BREAK]", "[IMG_END]"):
        token_id(parts, text)
    vision = {
        **any_config(parts),
        "model_type": "pixtral",
        "hidden_act": activation(metadata, "gelu"),
    }
    base = Metadata(metadata.header, "clip")
    if base.has("rope.freq_base"):
        theta = base.number("rope.freq_base")
        vision["rope_parameters"] = {"rope_theta": theta, "rope_type": "axial"}
    has_bias = parts.has("mm.1.bias")
    shared = {
        "vision_config": vision,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": has_bias,
        "image_token_id": token_id(parts, "[IMG]"),
    }
    merged = metadata.count("spatial_merge_size", 1)
    if parts.has(MERGER) != parts.has(NORM):
        there, missing = (MERGER, NORM) if parts.has(MERGER) else (NORM, MERGER)
        raise parts.fail(f"there is a tensor {there}, but no {missing}; Mistral 3 has both")
    if not parts.has(MERGER):
        if merged != 1:
            raise metadata.fail(
                "spatial_merge_size", f"is {merged}, but there is no tensor {MERGER}"
            )
        return {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "vision_feature_select_strategy": "full",
            **shared,
        }
    columns = parts.sizes.width * merged**2
    if parts.shapes[MERGER] != (parts.sizes.width, columns):
        raise metadata.fail(
            "spatial_merge_size",
            f"is {merged}, and {MERGER} has shape {parts.shapes[MERGER]}; expected "
            f"{(parts.sizes.width, columns)}",
        )
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "spatial_merge_size": merged,
        **shared,
    }


def _images(parts: Parts) -> Values:
    return {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": parts.sizes.image},
        **colors(parts.metadata.header),
    }


PIXTRAL = Projector(
    layers="vision_tower.transformer.layers",
    layer={
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    top={
        "v.patch_embd.weight": "vision_tower.patch_conv.weight",
        "v.pre_ln.weight": "vision_tower.ln_pre.weight",
        NORM: "multi_modal_projector.norm.weight",
        MERGER: "multi_modal_projector.patch_merger.merging_layer.weight",
        **both_endings(
            {"mm.1": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2"}
        ),
    },
    ignored=frozenset({BREAK}),
    last="mm.2.weight",
    shapes=_shapes,
    config=_config,
    processor=_images,
    keys=keys("spatial_merge_size") | {"clip.rope.freq_base"},
)
