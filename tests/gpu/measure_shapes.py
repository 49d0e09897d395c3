"""The large models that `measure.py` runs with random weights: their configs, what a step of them
reads and computes, and a quantized checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama_8b": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
    },
    "mixtral": {
        **COMMON,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek": {
        **COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "vocab_size": 129280,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 16384,
    },
}
"""Llama-3.1-8B whole. Mixtral-8x7B with 4 of its 32 layers, and DeepSeek-V3 with one of its 3 dense
layers and one of its 58 layers with experts, in bfloat16: so they fit and load fast."""
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_local_experts": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
"""The sizes of all of them when the script itself is tested."""
GROUP = 128
"""Columns of a weight that share a scale."""
INT4_BYTES = 0.5 + 2 / GROUP
"""Bytes per weight in 4 bits, with its part of a scale in bfloat16."""


def shape_of(name: str, tiny: bool) -> dict[str, Any]:
    """Return the config of this name. tiny: with the same layers and experts, but small."""
    config = SHAPES[name]
    if not tiny:
        return config
    small = {key: value for key, value in TINY.items() if key in config}
    if name == "deepseek":
        small["num_key_value_heads"] = small["num_attention_heads"]
    if name == "llama_8b":
        small["hidden_size"] = small["intermediate_size"] = GROUP
        small["head_dim"] = GROUP // small["num_attention_heads"]
    return {**config, **small}


@dataclass(frozen=True, slots=True)
class Work:
    """What a model reads and computes. linear: weights of the linear layers that every token needs.
    expert: weights of one expert. experts: per layer; chosen: of them, by a token; layers: with
    experts. head: weights of the output head. stored: numbers that a token stores in the KV cache.
    pair: multiplications of a pair of a query and a key, in all layers. linear_bytes: per weight of
    a linear layer. All other numbers take 2 bytes."""

    linear: int
    expert: int
    experts: int
    chosen: int
    layers: int
    head: int
    stored: int
    pair: int
    linear_bytes: float = 2.0

    def step_bytes(self, rows: int, context: float) -> float:
        """Return what a decode step reads. context: tokens of each row. Experts are counted as if
        tokens were spread evenly over them."""
        share = 1 - (1 - self.chosen / self.experts) ** rows if self.experts else 0.0
        experts = self.layers * self.expert * self.experts * share
        weights = self.linear * self.linear_bytes + 2 * (experts + self.head)
        return weights + 2 * rows * context * self.stored

    def prompt_operations(self, count: int) -> float:
        """Return what a prompt of `count` tokens computes. Only the last one needs the head."""
        per_token = self.linear + self.layers * self.expert * self.chosen
        return 2 * (count * per_token + self.head) + self.pair * count * (count + 1)


def work_of(config: dict[str, Any], linear_bytes: float = 2.0) -> Work:
    """Count the weights of a config of `SHAPES`."""
    size = config["hidden_size"]
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    experts = config.get("num_local_experts") or config.get("n_routed_experts") or 0
    dense = config.get("first_k_dense_replace", 0) if experts else layers
    if "kv_lora_rank" in config:
        key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        value = config["v_head_dim"]
        rank = config["kv_lora_rank"]
        stored = rank + config["qk_rope_head_dim"]
        attention = config["q_lora_rank"] * (size + heads * key)
        attention += size * stored + size * heads * value
        attention += rank * heads * (config["qk_nope_head_dim"] + value)
    else:
        key = value = config["head_dim"]
        stored = 2 * config["num_key_value_heads"] * key
        attention = size * (2 * heads * key + stored)
    expert = 3 * size * config.get("moe_intermediate_size", config["intermediate_size"])
    linear = layers * attention + dense * 3 * size * config["intermediate_size"]
    linear += (layers - dense) * (experts * size + config.get("n_shared_experts", 0) * expert)
    return Work(
        linear=linear,
        expert=expert,
        experts=experts,
        chosen=config.get("num_experts_per_tok", 0),
        layers=layers - dense,
        head=config["vocab_size"] * size,
        stored=layers * stored,
        pair=layers * heads * (key + value),
        linear_bytes=linear_bytes,
    )


def write_config(config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def quantized(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with 4 bits and groups of 128 columns, as compressed-tensors writes it. The
    output head stays plain."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": {**weights, "group_size": GROUP}}
    stored = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    stored |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {**config, "quantization_config": stored}


def packed_layer(config: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """Return random tensors of one layer of Llama in 4 bits. prefix: "model.layers.0."."""
    size = config["hidden_size"]
    inner = config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    matrices = {
        "self_attn.q_proj": (queries, size),
        "self_attn.k_proj": (keys, size),
        "self_attn.v_proj": (keys, size),
        "self_attn.o_proj": (size, queries),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    tensors = {
        f"{prefix}{norm}.weight": torch.ones(size, dtype=torch.bfloat16)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for name, (rows, columns) in matrices.items():
        codes = torch.randint(-(2**31), 2**31, (rows, columns // 8)).to(torch.int32)
        scales = torch.full((rows, columns // GROUP), 0.02 / 4.6, dtype=torch.bfloat16)
        tensors[f"{prefix}{name}.weight_packed"] = codes
        tensors[f"{prefix}{name}.weight_scale"] = scales
        tensors[f"{prefix}{name}.weight_shape"] = torch.tensor((rows, columns))
    return tensors


def shards(config: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of Llama in 4 bits, a layer at a time. All layers have the same values."""
    size = config["hidden_size"]
    plain = torch.empty(config["vocab_size"], size, dtype=torch.bfloat16)
    plain.view(-1, size * math.gcd(config["vocab_size"], 256)).copy_(
        torch.randn(size * math.gcd(config["vocab_size"], 256)).mul_(0.02)
    )
    norm = torch.ones(size, dtype=torch.bfloat16)
    yield {"model.embed_tokens.weight": plain, "model.norm.weight": norm}
    yield {"lm_head.weight": plain}
    first = packed_layer(config, "")
    for index in range(config["num_hidden_layers"]):
        yield {f"model.layers.{index}.{name}": tensor for name, tensor in first.items()}


def write_quantized(config: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint of Llama in 4 bits with random codes. The load format "dummy" makes plain
    weights only."""
    from safetensors.torch import save_file

    write_config(quantized(config), folder)
    parts = list(shards(config))
    places = {}
    for index, tensors in enumerate(parts):
        file = f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    table = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(table, "utf-8")
