"""Writes a transformers model of images as llama.cpp's converters do: the language model with its
vocabulary in one GGUF file, and the vision tower with its projector in another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_layouts import ATTENTION, TOP, in_file, in_pairs
from tiny_models import VOCAB_SIZE

Metadata = dict[str, Any]

GATED = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen2_vl_text": "qwen2vl",
}
"""The architecture of a file, by the model type of a language model, if it has another name."""
LINEAR = {"mm.1.": "mm.0."}
"""What the converter of LLaVA calls the first layer of its projector."""
TEMPLATE = "{% for message in messages %}w1 {{ message['content'] }} {% endfor %}w3"
CONTROL = 3
USER_DEFINED = 4


def write_file(
    path: Path,
    arch: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    stored: str = "F32",
) -> None:
    """Write a GGUF file. stored: the type of matrices whose columns fill its blocks."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        kind = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        kind[type(value)](key, value)
    for name, values in tensors.items():
        number = gguf.GGMLQuantizationType[type_of(name, values.shape, stored)]
        data = np.ascontiguousarray(values, np.float32)
        packed = data if number.name == "F32" else gguf.quants.quantize(data, number)
        writer.add_tensor(name, packed, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def type_of(name: str, shape: Sequence[int], stored: str) -> str:
    """Return the type of a tensor. Converters keep vectors and embeddings of towers in F32, and
    the projection of Gemma 3 in F16."""
    if len(shape) < 2 or name.endswith(".bias") or "embd" in name or stored == "F32":
        return "F32"
    if "input_projection" in name or shape[-1] % 32:
        return "F16"
    return stored


def round_values(model: Any, stored: str) -> None:
    """Give the matrices of a model the values that its files have."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            short = name.replace("embeddings", "embd").replace("embed_tokens", "embd")
            short = short.replace("mm_input_projection", "input_projection")
            number = gguf.GGMLQuantizationType[type_of(short, parameter.shape, stored)]
            values = parameter.numpy()
            if number.name != "F32":
                packed = gguf.quants.quantize(values, number)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, number)))


def vocabulary(special: Sequence[str]) -> Metadata:
    """Return the metadata of a tokenizer of words w0 … w99, and special tokens from 100 on. It has
    no space, so it drops spaces."""
    words = [f"w{number}" for number in range(100)]
    rest = [f"unused{number}" for number in range(VOCAB_SIZE - len(words) - len(special) - 3)]
    tokens = [*words, *special, *rest, "x", "y", "xy"]
    kinds = [USER_DEFINED] * len(words) + [CONTROL] * (len(special) + len(rest)) + [1] * 3
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["x y"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def text_parts(model: Any, special: Sequence[str]) -> tuple[str, Metadata, dict[str, np.ndarray]]:
    """Return the architecture, the metadata and the tensors of the language model."""
    config = model.config.text_config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    is_gemma = arch == "gemma3"
    tensors = {}
    for name, tensor in model.state_dict().items():
        for part in ("model.language_model.", "model.text_model."):
            if name.startswith(part):
                tensors["model." + name.removeprefix(part)] = tensor
    if not is_gemma:
        tensors |= {"lm_head.weight": model.lm_head.weight.detach()}
    ordered = in_pairs(tensors, config) if arch == "llama" else tensors
    named = in_file(ordered, {**TOP, **ATTENTION, **GATED, **(GEMMA if is_gemma else {})})
    values = {name: tensor.float().numpy() for name, tensor in named.items()}
    if is_gemma:
        values = {name: each + (1.0 if "norm" in name else 0.0) for name, each in values.items()}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if is_gemma:
        sizes["attention.sliding_window"] = config.sliding_window
    if sections := rope.get("mrope_section"):
        sizes["rope.dimension_sections"] = [*sections, 0]
    return (
        arch,
        {f"{arch}.{key}": value for key, value in sizes.items()} | vocabulary(special),
        values,
    )


def tower_parts(model: Any, kind: str) -> tuple[Metadata, dict[str, np.ndarray]]:
    """Return the metadata and the tensors of the tower and the projector. kind: of the
    projector. The package gguf knows the names."""
    vision = model.config.vision_config
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        known = name.removeprefix("model.")
        if known.startswith(("language_model", "text_model", "lm_head")) or ".head." in known:
            continue
        if known.startswith("vision_tower.") and "vision_model" not in known:
            known = known.replace("vision_tower.", "vision_tower.vision_model.")
        if kind == "idefics3":
            known = f"model.{known}"
        stored = table.get_name(known.replace("_weight", ".weight"), (".weight", ".bias"))
        assert stored is not None, f"the package has no name for {known}"
        if kind == "mlp":
            for package, converter in LINEAR.items():
                stored = stored.replace(package, converter)
        is_offset = "soft_emb_norm" in stored
        tensors[stored] = tensor.float().numpy() + (1.0 if is_offset else 0.0)
    return tower_metadata(model, kind, vision.layer_norm_eps), tensors


def tower_metadata(model: Any, kind: str, eps: float, given: Any = None) -> Metadata:
    """Return the metadata that all towers have. kind: of the projector. eps: of norms. given: the
    sizes, if not by the usual names in the config."""
    vision = given or model.config.vision_config
    return {
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.use_gelu": kind != "mlp",
        "clip.vision.image_size": vision.image_size,
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": vision.hidden_size,
        "clip.vision.feed_forward_length": vision.intermediate_size,
        "clip.vision.block_count": vision.num_hidden_layers,
        "clip.vision.attention.head_count": vision.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": eps,
        "clip.vision.projection_dim": model.config.text_config.hidden_size,
        "clip.vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
        "clip.vision.image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def without_last_layers(
    metadata: Metadata, tensors: dict[str, np.ndarray], count: int
) -> tuple[Metadata, dict[str, np.ndarray]]:
    """Return what the converter of LLaVA keeps: the first layers, without the norm after them.
    count: of the layers that are kept."""
    last = metadata["clip.vision.block_count"]
    dropped = ("v.post_ln.", *(f"v.blk.{layer}." for layer in range(count, last)))
    kept = {name: value for name, value in tensors.items() if not name.startswith(dropped)}
    return {**metadata, "clip.vision.block_count": count}, kept


def with_old_names(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors as older converters call them: the layers of blocks in the wrong order."""
    swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    return {
        ".".join(swap.get(part, part) for part in name.split(".")): value
        for name, value in tensors.items()
    }
