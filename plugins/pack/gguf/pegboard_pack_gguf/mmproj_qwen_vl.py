"""The vision towers of Qwen2-VL and Qwen2.5-VL in GGUF files. Standard library only.

Converters take queries, keys and values apart, and the matrix of patches of two frames.
"""

from __future__ import annotations

import math
from typing import Any

from pegboard_pack_gguf.mmproj_parts import (
    Parts,
    Projector,
    Shapes,
    Values,
    activation,
    both_endings,
    colors,
    flag,
    keys,
    token_id,
)

FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The matrices of patches of the first and of the second frame."""
JOINED = {"attn.qkv": ("attn.q", "attn.k", "attn.v")}
"""Modules of a layer that are joined of others, below each other."""
EPS = 1e-6
"""Of all norms of the tower."""
PIXELS = (56 * 56, 3584 * 3584)
"""The fewest and the most pixels of an image in the repositories of all these models."""
WINDOW = 112
"""Pixels of a window's side, if the file does not say."""
RATE = 2
"""Positions of a second of video in the repositories of Qwen2.5-VL. Files do not say it."""


def _shapes(parts: Parts) -> Shapes:
    return dict.fromkeys(FRAMES, parts.sizes.of_patches)


def _config(parts: Parts, name: str, vision: Values) -> Values:
    """Return what both models have. name: of the architecture. vision: of the vision_config."""
    sizes = parts.sizes
    metadata = parts.metadata
    if sizes.eps != EPS:
        raise metadata.fail("attention.layer_norm_epsilon", f"is {sizes.eps}, expected {EPS}")
    for text in ("<|vision_start|>", "<|vision_end|>"):
        token_id(parts, text)
    scaling = parts.text.get("rope_scaling") or {"rope_type": "default"}
    return {
        "architectures": [name],
        "text_config": {
            **parts.text,
            "rope_scaling": {**scaling, "mrope_section": _sections(parts)},
        },
        "vision_config": {
            "depth": sizes.depth,
            "num_heads": sizes.heads,
            "patch_size": sizes.patch,
            "temporal_patch_size": len(FRAMES),
            "spatial_merge_size": metadata.count("spatial_merge_size", 2),
            "hidden_act": activation(metadata, "gelu"),
            **vision,
        },
        "image_token_id": token_id(parts, "<|image_pad|>"),
        "video_token_id": token_id(parts, "<|video_pad|>"),
    }


def _sections(parts: Parts) -> list[int]:
    """Return how many pairs of channels of the language model have the position in time, in height
    and in width. Files have a fourth number, 0."""
    given = parts.language.get("rope.dimension_sections")
    is_valid = (
        isinstance(given, list)
        and len(given) in (3, 4)
        and all(type(count) is int and count >= 0 for count in given)
        and not any(given[3:])
    )
    if not is_valid:
        raise parts.language.fail(
            "rope.dimension_sections",
            f"is {given!r}, expected the numbers of pairs of channels of three axes",
        )
    return [*given[:3]]


def _qwen2(parts: Parts) -> Values:
    """Qwen2-VL. Converters write other numbers than the width of the feed-forward blocks as
    feed_forward_length, so it is read from a tensor."""
    width = parts.sizes.width
    name = "v.blk.0.ffn_up.weight"
    size = math.prod(parts.shapes.get(name, ()))
    if size == 1 or size % width**2:
        raise parts.fail(
            f"{name} has shape {parts.shapes.get(name)}; expected a multiple of {width} rows of "
            f"{width} numbers"
        )
    if not flag(parts.metadata, "has_qwen2vl_merger", default=True):
        raise parts.fail("metadata clip.has_qwen2vl_merger is False; expected True")
    vision: Values = {
        "model_type": "qwen2_vl_vision",
        "embed_dim": width,
        "mlp_ratio": size // width**2,
        "hidden_size": parts.sizes.text,
    }
    config = _config(parts, "Qwen2VLForConditionalGeneration", vision)
    return {"model_type": "qwen2_vl", **config}


def _qwen2_5(parts: Parts) -> Values:
    metadata = parts.metadata
    for name in ("use_glu_mlp", "use_rms_norm"):
        if not flag(metadata, name, default=True):
            raise parts.fail(f"metadata clip.{name} is False; expected True")
    vision: Values = {
        "model_type": "qwen2_5_vl_vision",
        "hidden_size": parts.sizes.width,
        "intermediate_size": metadata.count("feed_forward_length"),
        "out_hidden_size": parts.sizes.text,
        "window_size": metadata.count("window_size", WINDOW),
        "fullatt_block_indexes": _whole_layers(parts),
        "tokens_per_second": RATE,
    }
    config = _config(parts, "Qwen2_5_VLForConditionalGeneration", vision)
    return {"model_type": "qwen2_5_vl", **config}


def _whole_layers(parts: Parts) -> list[int]:
    """Return the layers that attend to all of an image instead of a window: those of a list, or
    every n-th one."""
    metadata = parts.metadata
    depth = parts.sizes.depth
    layers: Any = metadata.get("fullatt_block_indexes")
    if layers is None:
        every = 1 if metadata.get("n_wa_pattern") == 0 else metadata.count("n_wa_pattern")
        return [*range(every - 1, depth, every)]
    if not isinstance(layers, list) or not all(
        type(layer) is int and 0 <= layer < depth for layer in layers
    ):
        raise metadata.fail(
            "fullatt_block_indexes", f"is {layers!r}, expected numbers from 0 to {depth - 1}"
        )
    return layers


def _images(parts: Parts) -> Values:
    metadata = parts.metadata
    least = metadata.count("image_min_pixels", PIXELS[0])
    most = metadata.count("image_max_pixels", PIXELS[1])
    if least > most:
        raise metadata.fail(
            "image_min_pixels", f"is {least}, expected at most image_max_pixels, {most}"
        )
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": least, "longest_edge": most},
        **colors(metadata.header),
    }


_LAYER = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
}
_TOP = {
    FRAMES[0]: "visual.patch_embed.proj.weight.0",
    FRAMES[1]: "visual.patch_embed.proj.weight.1",
    **both_endings(
        {
            "v.post_ln": "visual.merger.ln_q",
            "mm.0": "visual.merger.mlp.0",
            "mm.2": "visual.merger.mlp.2",
        }
    ),
}
_KEYS = keys("spatial_merge_size", "image_min_pixels", "image_max_pixels") | {
    "clip.has_qwen2vl_merger"
}
_UNUSED = frozenset({"v.position_embd.weight"})
"""The oldest files have an empty tensor of this name."""
QWEN2_VL = Projector(
    layers="visual.blocks",
    layer={**_LAYER, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    top=_TOP,
    ignored=_UNUSED,
    joined=JOINED,
    frames=FRAMES,
    last="mm.2.weight",
    shapes=_shapes,
    config=_qwen2,
    processor=_images,
    keys=_KEYS,
    has_axes=True,
)
QWEN2_5_VL = Projector(
    layers="visual.blocks",
    layer={
        **_LAYER,
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    top=_TOP,
    ignored=_UNUSED,
    joined=JOINED,
    frames=FRAMES,
    last="mm.2.weight",
    shapes=_shapes,
    config=_qwen2_5,
    processor=_images,
    keys=_KEYS
    | keys("n_wa_pattern", "window_size", "fullatt_block_indexes")
    | {"clip.use_glu_mlp", "clip.use_rms_norm"},
    has_axes=True,
)
