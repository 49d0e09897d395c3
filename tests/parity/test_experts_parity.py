"""Models with experts, compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_layouts import store_experts_in_mxfp4

QWEN = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
}
LLAMA4 = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": 10,
    "no_rope_layer_interval": 3,
    "floor_scale": 7,
    "attn_scale": 0.3,
    "rms_norm_eps": 1e-3,
}
GRANITE = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "rms_norm_eps": 0.01,
}
GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "intermediate_size": 64}),
    "mixtral, window": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9},
    ),
    "qwen2_moe": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 32}),
    "qwen2_moe, some layers": (
        "qwen2_moe",
        {
            **QWEN,
            "shared_expert_intermediate_size": 48,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**QWEN, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe, some layers": ("qwen3_moe", {**QWEN, "head_dim": 8, "mlp_only_layers": [1]}),
    "olmoe": (
        "olmoe",
        {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": None},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1500.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama4": ("llama4_text", LLAMA4),
    "llama4, some layers, no norms": (
        "llama4_text",
        {**LLAMA4, "use_qk_norm": False, "interleave_moe_layer_step": 2},
    ),
    "granitemoe": ("granitemoe", {**GRANITE, "tie_word_embeddings": True}),
    "granitemoeshared": ("granitemoeshared", {**GRANITE, "shared_intermediate_size": 48}),
    "glm4_moe": ("glm4_moe", {**GROUPS, "use_qk_norm": True, "head_dim": 16}),
    "glm4_moe, biases": (
        "glm4_moe",
        {**GROUPS, "n_group": 1, "topk_group": 1, "attention_bias": True, "norm_topk_prob": False},
    ),
    "dots1": ("dots1", {**GROUPS, "sliding_window": 9, "max_window_layers": 2}),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "afmoe": (
        "afmoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 2,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 9,
            "global_attn_every_n_layers": 3,
            "route_scale": 2.5,
            "mup_enabled": True,
        },
    ),
    "phimoe, biases": (
        "phimoe",
        {
            "num_local_experts": 5,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 13,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_theta": 500.0,
                "rope_type": "longrope",
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [9.0] * 4,
                "short_mscale": 1.3,
                "long_mscale": 1.7,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "flex_olmo": (
        "flex_olmo",
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "dbrx, limited queries": (
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 500.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 5, "moe_top_k": 2},
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
            "d_model": 32,
            **dict.fromkeys(("hidden_size", "num_key_value_heads", "intermediate_size")),
        },
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": 2, "head_dim": 16}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(write: Any, check_parity: Any, name: str) -> None:
    model_type, config = ARCHITECTURES[name]
    check_parity(write(model_type, **config))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [("mixtral", 19), ("qwen2_moe", 19), ("gpt_oss", 32), ("llama4", 60), ("afmoe", 60)],
)
def test_preemption_and_many_tokens(
    write: Any, check_parity: Any, name: str, num_blocks: int
) -> None:
    model_type, config = ARCHITECTURES[name]
    reference = write(model_type, **config)
    check_parity(
        reference, lengths=(3, 20, 40, 33), num_gpu_blocks_override=num_blocks, max_model_len=56
    )
    check_parity(
        reference,
        lengths=(50, 50, 50),
        block_size=16,
        max_num_batched_tokens=160,
        enable_chunked_prefill=False,
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4", "afmoe"])
def test_cached_prefixes_and_two_answers(write: Any, check_cached: Any, name: str) -> None:
    model_type, config = ARCHITECTURES[name]
    reference = write(model_type, **config)
    check_cached(reference, (37, 30, 13))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded(write: Any, check_recorded: Any, name: str) -> None:
    model_type, config = ARCHITECTURES[name]
    check_recorded(write(model_type, **config))


def test_llama4_is_recorded_if_no_query_is_late(write: Any, check_recorded: Any) -> None:
    check_recorded(write("llama4_text", **{**LLAMA4, "floor_scale": 65}))


def test_gpt_oss_with_experts_in_mxfp4(write: Any, check_parity: Any, check_recorded: Any) -> None:
    """The layout of the published checkpoints: codes and powers of two, [experts, rows, blocks of
    32 columns, 16 bytes]."""
    reference = write("gpt_oss", **{**ARCHITECTURES["gpt_oss"][1], "intermediate_size": 64})
    store_experts_in_mxfp4(reference)
    check_parity(reference)
    check_recorded(reference)


def test_stacked_tensors_are_the_same_model(write: Any, check_parity: Any) -> None:
    """transformers writes a module per expert. Its own layout in memory, one tensor for all
    experts, is read too."""
    model_type, config = ARCHITECTURES["qwen3_moe"]
    reference = write(model_type, **config)
    path = reference.directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if ".experts." not in name}
    held = reference.model.state_dict()
    tensors |= {
        name: tensor.contiguous().clone() for name, tensor in held.items() if ".experts." in name
    }
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    save_file(tensors, path, {"format": "pt"})
    check_parity(reference)


def test_wrong_shapes_are_named(write: Any, open_llm: Any) -> None:
    from pegboard.errors import ModelError

    reference = write("mixtral", num_local_experts=4)
    path = reference.directory / "model.safetensors"
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    save_file({**load_file(path), name: torch.zeros(7, 32)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=name):
        open_llm(reference.directory)
