"""Turns the metadata of a GGUF file into the configuration that the model would have on Hugging Face."""

from __future__ import annotations

from typing import Any

from pegboard.errors import ModelError
from pegboard_pack_gguf.architectures import Architecture
from pegboard_pack_gguf.header import GGUFHeader
from pegboard_pack_gguf.metadata import Metadata
from pegboard_pack_gguf.rope_scaling import rope_config

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
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.count("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        **rope_config(header, metadata, head_dim),
        **token_ids(header),
    }
    if architecture.model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if architecture.model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
    if architecture.experts:
        config |= _moe_config(metadata, architecture)
    if architecture.norm_offset:
        config |= _gemma_config(metadata, architecture, config)
    elif prefix == "phi3" and metadata.get("attention.sliding_window"):  # 0 means none
        config["sliding_window"] = metadata.count("attention.sliding_window")
    return config


def token_ids(header: GGUFHeader) -> dict[str, int]:
    """Returns bos, eos and pad, if the file names them."""
    metadata = Metadata(header, "tokenizer.ggml")
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: metadata.token_id(key) for name, key in names.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _moe_config(metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    num_experts = metadata.count("expert_count")
    chosen = metadata.count("expert_used_count")
    if architecture.model_type == "mixtral":
        return {"num_local_experts": num_experts, "num_experts_per_tok": chosen}
    config = {
        "num_experts": num_experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": architecture.model_type == "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if architecture.model_type == "qwen2_moe":
        config["shared_expert_intermediate_size"] = metadata.count("expert_shared_feed_forward_length")
    return config


GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}


def _gemma_config(metadata: Metadata, architecture: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of Gemma. It scales queries by head_dim, except the 27B models, which use hidden_size / num_heads.
    Files do not contain this."""
    kind, num_layers = architecture.model_type, config["num_hidden_layers"]
    found: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if kind == "gemma":
        return found
    is_27b = GEMMA_27B_LAYERS[kind] == num_layers
    found["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    found["sliding_window"] = metadata.count("attention.sliding_window")
    if kind == "gemma2":
        found["attn_logit_softcapping"] = metadata.number("attn_logit_softcapping", 50.0)
        found["final_logit_softcapping"] = metadata.number("final_logit_softcapping", 30.0)
        every = 2
    else:
        found["rope_theta"] = metadata.number("rope.freq_base", 1_000_000.0)
        found["rope_local_base_freq"] = 10000.0
        every = 6
    found["layer_types"] = ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(num_layers)]
    return found
