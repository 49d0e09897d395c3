"""Turns the metadata of a GGUF file into the configuration that the model would have on Hugging
Face."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard_pack_gguf.header import GGUFHeader
from pegboard_pack_gguf.metadata import Metadata
from pegboard_pack_gguf.rope_scaling import rope_config
from pegboard_pack_gguf.state_models import state_config, state_heads
from pegboard_pack_gguf.table_parts import REQUIRED, Architecture, Has, Key
from pegboard_pack_gguf.tables import COPIES

MAX_LAYERS = 10_000


def hf_config(header: GGUFHeader, prefix: str, architecture: Architecture) -> dict[str, Any]:
    """Returns the configuration. Raises ModelError when a required key is missing or has an
    impossible value."""
    metadata = Metadata(header, prefix)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    hidden_size = metadata.count("embedding_length")
    num_blocks = metadata.count("block_count")
    num_drafting = metadata.optional_count("nextn_predict_layers")
    if not num_drafting < num_blocks <= MAX_LAYERS:
        least = num_drafting + 1
        raise metadata.fail(
            "block_count", f"is {num_blocks}, expected at least {least} and at most {MAX_LAYERS}"
        )
    num_layers = num_blocks - num_drafting
    heads: dict[str, int]
    if architecture.keeps_states:
        heads = state_heads(metadata, hidden_size, num_layers)
    else:
        heads = _latent_heads(metadata) if architecture.is_latent else _heads(metadata, hidden_size)
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2 or embedding[1] != hidden_size:
        raise ModelError(
            f"{header.path}: token_embd.weight is {embedding}, expected (vocabulary, {hidden_size})"
        )
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        **(
            {}
            if architecture.keeps_states
            else {"intermediate_size": metadata.count("feed_forward_length")}
        ),
        "num_hidden_layers": num_layers,
        **heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.count("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "pad_token_id": None,
        **(
            rope_config(header, metadata, heads["head_dim"], architecture.is_partly_rotary)
            if heads
            else {}
        ),
        **token_ids(header),
    }
    if num_drafting:
        config["num_nextn_predict_layers"] = num_drafting
    config |= {name: _value(metadata, value, shapes) for name, value in architecture.config.items()}
    config |= {
        name: config[known] for name, known in COPIES.get(architecture.model_type, {}).items()
    }
    if config.get("sliding_window") and architecture.full_every:
        config["layer_types"] = _layer_types(metadata, architecture.full_every, num_layers)
    return config | _computed(architecture, config, metadata, shapes)


def config_of_language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config that describes the language model."""
    part: Mapping[str, Any] = config.get("text_config", config)
    return part


def _heads(metadata: Metadata, hidden_size: int) -> dict[str, int]:
    """Returns the sizes of attention."""
    num_heads = metadata.count("attention.head_count")
    num_kv_heads = metadata.count("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise metadata.fail(
            "attention.head_count_kv", f"is {num_kv_heads}, which does not divide {num_heads} heads"
        )
    head_dim = metadata.count("attention.key_length", max(hidden_size // num_heads, 1))
    if metadata.count("attention.value_length", head_dim) != head_dim:
        raise metadata.fail(
            "attention.value_length",
            f"differs from the key length {head_dim}, which is not supported",
        )
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def _latent_heads(metadata: Metadata) -> dict[str, int]:
    """Returns the sizes of latent attention. Newer files have those of the cache as key and value
    length, and those of the heads under keys that end in "_mla"."""
    num_heads = metadata.count("attention.head_count")
    rope_dim = metadata.count("rope.dimension_count")
    ending = "_mla" if metadata.has("attention.key_length_mla") else ""
    key_length, value_length = (
        metadata.count(f"attention.{part}_length{ending}") for part in ("key", "value")
    )
    if key_length <= rope_dim:
        raise metadata.fail(
            f"attention.key_length{ending}",
            f"is {key_length}, of which {rope_dim} channels are rotated",
        )
    heads = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": rope_dim,
    }
    return heads | {
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_length - rope_dim,
        "v_head_dim": value_length,
    }


def _value(metadata: Metadata, value: Any, shapes: Mapping[str, Any]) -> Any:
    """Returns a value of the configuration. value: as in `Architecture.config`."""
    if isinstance(value, Has) and value.in_any_layer:
        return any(name.endswith(f".{tensor}") for tensor in value.tensors for name in shapes)
    if isinstance(value, Has):
        return any(tensor in shapes for tensor in value.tensors)
    if not isinstance(value, Key):
        return value
    stored = metadata.get(value.name)
    if isinstance(stored, bool):
        return stored
    if value.default is not REQUIRED and stored in (None, 0):  # 0 means none
        return value.default
    return metadata.count(value.name) if value.kind == "count" else metadata.number(value.name)


def _layer_types(metadata: Metadata, full_every: int, num_layers: int) -> list[str]:
    """Returns "sliding_attention" or "full_attention" for each layer. The file may have a flag for
    each layer, or a number that replaces `full_every`."""
    pattern = metadata.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise metadata.fail(
                "attention.sliding_window_pattern",
                f"has {len(pattern)} values for {num_layers} layers",
            )
        slides = [bool(flag) for flag in pattern]
    else:
        every = (
            full_every if pattern is None else metadata.count("attention.sliding_window_pattern")
        )
        slides = [(index + 1) % every != 0 for index in range(num_layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in slides]


GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}


SCORES = {None: None, 0: None, 1: "softmax", 2: "sigmoid"}
"""How experts are scored, by `expert_gating_func`. None = the file does not say it."""


def _computed(
    architecture: Architecture,
    config: Mapping[str, Any],
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Returns what follows from other values. Gemma scales queries by head_dim, except the 27B
    models, which use hidden_size / num_heads; files do not contain this."""
    kind = architecture.model_type
    if architecture.keeps_states:
        return state_config(kind, config, metadata, shapes)
    if kind in GEMMA_27B_LAYERS:
        is_27b = GEMMA_27B_LAYERS[kind] == config["num_hidden_layers"]
        return {
            "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
            if is_27b
            else config["head_dim"]
        }
    if kind.startswith("granite") and config["attention_multiplier"] is None:
        return {"attention_multiplier": config["head_dim"] ** -0.5}
    if kind == "gpt_bigcode":
        return {"multi_query": config["num_key_value_heads"] == 1}
    if kind == "falcon":  # models with several heads of keys order their rows by these
        has_groups = config["num_ln_in_parallel_attn"] == 2 or config["num_key_value_heads"] != 1
        return {"new_decoder_architecture": has_groups, "multi_query": not has_groups}
    if kind == "afmoe":
        return {"score_func": _score(metadata, "sigmoid", "sigmoid")}
    if kind == "apertus":  # without the divisors of its frequencies, they are not scaled
        return {
            "xielu": _xielu(metadata, config["num_hidden_layers"]),
            "rope_scaling": config.get("rope_scaling"),
        }
    if kind == "stablelm":
        return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes}
    if kind == "mpt":
        return _mpt(metadata, config, shapes)
    if kind == "llama4_text":  # Maverick, with 128 experts, has no norms of queries and keys
        return {"use_qk_norm": config["num_local_experts"] != 128}
    if kind == "gpt_oss" and "rope_scaling" in config:
        return {"rope_scaling": {**config["rope_scaling"], "truncate": False}}
    if kind.startswith("bailing_moe"):
        return _bailing(metadata, config, shapes)
    if "n_routed_experts" in config or kind == "minimax_m2":
        return _routing(metadata, config, "sigmoid" if architecture.whole else "softmax")
    return {}


def _xielu(metadata: Metadata, num_layers: int) -> list[list[float]]:
    """Returns alpha_p, alpha_n and beta of the activation of each layer. One number is that of all
    layers."""
    rows = []
    for name in ("alpha_p", "alpha_n", "beta"):
        stored = metadata.header.metadata.get(f"xielu.{name}")
        values = stored if isinstance(stored, list) else [stored] * num_layers
        if len(values) != num_layers or any(
            type(value) is not float or not math.isfinite(value) for value in values
        ):
            message = (
                f"metadata xielu.{name} is {stored!r}, expected a finite number for each of "
                f"{num_layers} layers"
            )
            raise ModelError(f"{metadata.header.path}: {message}")
        rows.append(values)
    return [list(row) for row in zip(*rows, strict=True)]


def _mpt(
    metadata: Metadata, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Returns what MPT says of attention, and the width of its blocks as a multiple of the
    model's."""
    width = config["intermediate_size"]
    hidden_size = config["hidden_size"]
    if width % hidden_size:
        raise metadata.fail(
            "feed_forward_length",
            f"is {width}, expected a multiple of embedding_length, {hidden_size}",
        )
    largest = config["alibi_bias_max"]
    attention = {
        "alibi": largest > 0,
        "alibi_bias_max": int(largest) if largest == int(largest) else largest,
        "kv_n_heads": config["num_key_value_heads"],
        "clip_qkv": config["clip_qkv"],
        "qk_ln": "blk.0.attn_q_norm.weight" in shapes,
    }
    has_bias = any(name.endswith(".bias") for name in shapes)
    return {
        "attn_config": attention,
        "expansion_ratio": width // hidden_size,
        "no_bias": not has_bias,
    }


def _bailing(
    metadata: Metadata, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Returns how Ling's experts are chosen, and how wide one of its shared experts is. Files do
    not agree on whether the stored width is that of one or of all, so it is read from the
    tensors."""
    corrects = any(name.endswith(".exp_probs_b.bias") for name in shapes)
    score = _score(metadata, "sigmoid" if corrects else "softmax", None)
    router = {"score_function": score, "moe_router_enable_expert_bias": corrects}
    rows = next(
        (shape[0] for name, shape in shapes.items() if name.endswith(".ffn_up_shexp.weight")), 0
    )
    if rows and (not config["num_shared_experts"] or rows % config["num_shared_experts"]):
        message = (
            f"is {config['num_shared_experts']}, which does not divide the {rows} rows of the "
            "shared experts"
        )
        raise metadata.fail("expert_shared_count", message)
    return router | (
        {"moe_shared_expert_intermediate_size": rows // config["num_shared_experts"]}
        if rows
        else {}
    )


def _score(metadata: Metadata, usual: str, only: str | None) -> str:
    """Returns how experts are scored. usual: if the file does not say it. only: what the model
    supports, None = both."""
    stored = metadata.get("expert_gating_func")
    score = (
        (SCORES[stored] or usual) if isinstance(stored, int | None) and stored in SCORES else None
    )
    if score is None or (only is not None and score != only):
        raise metadata.fail(
            "expert_gating_func",
            f"is {stored!r}, expected {'2' if only == 'sigmoid' else '1 or 2'}",
        )
    return score


def _routing(metadata: Metadata, config: Mapping[str, Any], usual: str) -> dict[str, Any]:
    """Returns how experts are chosen. usual: how they are scored if the file does not say it. Only
    models that score by softmax choose without a correction."""
    score = _score(metadata, usual, "sigmoid" if usual == "sigmoid" else None)
    if usual == "sigmoid":
        return {"scoring_func": score}
    return {
        "scoring_func": score,
        "topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy",
    }


def token_ids(header: GGUFHeader) -> dict[str, int]:
    """Returns bos, eos and pad, if the file names them."""
    metadata = Metadata(header, "tokenizer.ggml")
    names = {
        "bos_token_id": "bos_token_id",
        "eos_token_id": "eos_token_id",
        "pad_token_id": "padding_token_id",
    }
    ids = {name: metadata.token_id(key) for name, key in names.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}
