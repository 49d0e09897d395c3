"""Turns the metadata of a GGUF file into the configuration that the model would have on Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard_pack_gguf.header import GGUFHeader
from pegboard_pack_gguf.metadata import Metadata
from pegboard_pack_gguf.rope_scaling import rope_config
from pegboard_pack_gguf.tables import COPIES, REQUIRED, Architecture, Has, Key

MAX_LAYERS = 10_000


def hf_config(header: GGUFHeader, prefix: str, architecture: Architecture) -> dict[str, Any]:
    """Returns the configuration. Raises ModelError when a required key is missing or has an impossible value."""
    metadata = Metadata(header, prefix)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    hidden_size = metadata.count("embedding_length")
    num_heads = metadata.count("attention.head_count")
    num_kv_heads = metadata.count("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise metadata.fail("attention.head_count_kv", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    head_dim = metadata.count("attention.key_length", max(hidden_size // num_heads, 1))
    if metadata.count("attention.value_length", head_dim) != head_dim:
        raise metadata.fail("attention.value_length", f"differs from the key length {head_dim}, which is not supported")
    num_layers = metadata.count("block_count")
    if num_layers > MAX_LAYERS:
        raise metadata.fail("block_count", f"is {num_layers}, expected at most {MAX_LAYERS}")
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2 or embedding[1] != hidden_size:
        raise ModelError(f"{header.path}: token_embd.weight is {embedding}, expected (vocabulary, {hidden_size})")
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.count("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "pad_token_id": None,
        **rope_config(header, metadata, head_dim, architecture.is_partly_rotary),
        **token_ids(header),
    }
    config |= {name: _value(metadata, value, shapes) for name, value in architecture.config.items()}
    config |= {name: config[known] for name, known in COPIES.get(architecture.model_type, {}).items()}
    if config.get("sliding_window") and architecture.full_every:
        config["layer_types"] = _layer_types(metadata, architecture.full_every, num_layers)
    return config | _computed(architecture, config)


def _value(metadata: Metadata, value: Any, shapes: Mapping[str, Any]) -> Any:
    """Returns a value of the configuration. value: as in `Architecture.config`."""
    if isinstance(value, Has):
        return any(tensor in shapes for tensor in value.tensors)
    if not isinstance(value, Key):
        return value
    found = metadata.get(value.name)
    if isinstance(found, bool):
        return found
    if value.default is not REQUIRED and found in (None, 0):  # 0 means none
        return value.default
    return metadata.count(value.name) if value.kind == "count" else metadata.number(value.name)


def _layer_types(metadata: Metadata, full_every: int, num_layers: int) -> list[str]:
    """Returns "sliding_attention" or "full_attention" for each layer. The file may have a flag for each layer, or a number that
    replaces `full_every`."""
    found = metadata.get("attention.sliding_window_pattern")
    if isinstance(found, list):
        if len(found) != num_layers:
            raise metadata.fail("attention.sliding_window_pattern", f"has {len(found)} values for {num_layers} layers")
        slides = [bool(flag) for flag in found]
    else:
        every = full_every if found is None else metadata.count("attention.sliding_window_pattern")
        slides = [(index + 1) % every != 0 for index in range(num_layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in slides]


GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}


def _computed(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what follows from other values. Gemma scales queries by head_dim, except the 27B models, which use hidden_size /
    num_heads; files do not contain this."""
    kind = architecture.model_type
    if kind in GEMMA_27B_LAYERS:
        is_27b = GEMMA_27B_LAYERS[kind] == config["num_hidden_layers"]
        return {"query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]}
    if kind == "granite" and config["attention_multiplier"] is None:
        return {"attention_multiplier": config["head_dim"] ** -0.5}
    if kind == "gpt_bigcode":
        return {"multi_query": config["num_key_value_heads"] == 1}
    return {}


def token_ids(header: GGUFHeader) -> dict[str, int]:
    """Returns bos, eos and pad, if the file names them."""
    metadata = Metadata(header, "tokenizer.ggml")
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: metadata.token_id(key) for name, key in names.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}
