"""Writes the towers of Pixtral, InternVL and Qwen-VL as llama.cpp's converters do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
from gguf_layouts import in_pairs
from mmproj_files import Metadata, tower_metadata
from torch import Tensor

Arrays = dict[str, np.ndarray]


def of_towers(model: Any) -> dict[str, Tensor]:
    """Return the tensors that are not the language model's, without "model." before their names."""
    named = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    return {
        name: tensor
        for name, tensor in named.items()
        if not name.startswith(("language_model.", "lm_head."))
    }


def in_file(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return the tensors by the names that the package gguf has for them."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 20)
    arrays = {}
    for name, tensor in tensors.items():
        stored = table.get_name(name, (".weight", ".bias"))
        assert stored is not None, f"the package has no name for {name}"
        arrays[stored] = tensor.float().numpy()
    return arrays


def pixtral(model: Any) -> tuple[Metadata, Arrays]:
    """The rows of Q and K are in pairs, and the vector of a token of the language model is part of
    the tower."""
    vision = model.config.vision_config
    vision.num_key_value_heads = vision.num_attention_heads
    tensors = in_pairs(of_towers(model), vision)
    embedding = model.state_dict()["model.language_model.embed_tokens.weight"]
    arrays = in_file(tensors) | {"v.token_embd.img_break": embedding[101].float().numpy()}
    metadata = tower_metadata(model, "pixtral", 1e-5)
    metadata["clip.use_gelu"] = vision.hidden_act == "gelu"
    metadata["clip.use_silu"] = vision.hidden_act == "silu"
    if model.config.model_type == "mistral3":
        metadata["clip.vision.spatial_merge_size"] = model.config.spatial_merge_size
    return metadata, arrays


def internvl(model: Any, *, is_dropped: bool = False) -> tuple[Metadata, Arrays]:
    """is_dropped: without dimensions of one."""
    parts = {"layer_norm": 0, "linear_1": 1, "linear_2": 3}
    tensors = {}
    for name, tensor in of_towers(model).items():
        place, _, rest = name.removeprefix("multi_modal_projector.").partition(".")
        known = f"mlp1.{parts[place]}.{rest}" if place in parts else f"model.{name}"
        if ".lambda_" in known or known.endswith("position_embeddings"):
            known += ".weight"
        tensors[known] = tensor.squeeze() if is_dropped else tensor
    metadata = tower_metadata(model, "internvl", model.config.vision_config.layer_norm_eps)
    vision = model.config.vision_config
    sides = {"image_size": vision.image_size[0], "patch_size": vision.patch_size[0]}
    metadata |= {f"clip.vision.{name}": side for name, side in sides.items()}
    metadata["clip.vision.projector.scale_factor"] = round(1 / model.config.downsample_ratio)
    return metadata, in_file(tensors)


def qwen_vl(model: Any) -> tuple[Metadata, Arrays]:
    tensors = {}
    for name, tensor in of_towers(model).items():
        if ".qkv." in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                tensors[name.replace(".qkv.", f".{part}.")] = rows
        else:
            tensors[name] = tensor
    patches = tensors.pop("visual.patch_embed.proj.weight").float().numpy()
    arrays = in_file(tensors)
    arrays |= {"v.patch_embd.weight": patches[:, :, 0], "v.patch_embd.weight.1": patches[:, :, 1]}
    vision = model.config.vision_config
    is_later = model.config.model_type == "qwen2_5_vl"
    sizes = SimpleNamespace(
        image_size=560,
        patch_size=vision.patch_size,
        hidden_size=vision.hidden_size if is_later else vision.embed_dim,
        intermediate_size=vision.intermediate_size if is_later else vision.hidden_size,
        num_hidden_layers=vision.depth,
        num_attention_heads=vision.num_heads,
    )
    kind = "qwen2.5vl_merger" if is_later else "qwen2vl_merger"
    metadata = tower_metadata(model, kind, 1e-6, sizes) | {"clip.use_gelu": False}
    if is_later:
        every = vision.fullatt_block_indexes[0] + 1
        metadata |= {"clip.use_silu": True, "clip.vision.n_wa_pattern": every}
    return metadata, arrays


def whisper(tensors: Mapping[str, Tensor], kind: str, sizes: Mapping[str, int]) -> Any:
    """Return the metadata and the tensors of an encoder of Whisper. tensors: of it and of the
    projector. kind: of the projector. sizes: by the names of the metadata."""
    named = {}
    for name, tensor in tensors.items():
        known = f"audio.{name}" if name.startswith("multi_modal_projector") else name
        is_bias = name.endswith(("conv1.bias", "conv2.bias"))
        named[known] = tensor[:, None] if is_bias else tensor
    metadata: Metadata = {
        "clip.has_audio_encoder": True,
        "clip.projector_type": kind,
        "clip.audio.attention.layer_norm_epsilon": 1e-5,
        **{f"clip.audio.{name}": size for name, size in sizes.items()},
    }
    return metadata, in_file(named)


WRITERS: dict[str, Callable[[Any], tuple[Metadata, Arrays]]] = {
    "pixtral": pixtral,
    "internvl": internvl,
    "qwen2vl_merger": qwen_vl,
    "qwen2.5vl_merger": qwen_vl,
}
"""By the kind of the projector."""
