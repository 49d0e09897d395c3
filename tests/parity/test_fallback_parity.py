"""Architectures without their own package, run through transformers' modules on our KV cache and
compared with transformers alone."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.errors import ModelError

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2, capped scores and logits": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    "gemma3, windows": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
        },
    ),
    "phi3, window": ("phi3", {"sliding_window": 13}),
    "phi, partial rotation, head bias": ("phi", {"partial_rotary_factor": 0.5}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "olmo2": ("olmo2", {}),
    "cohere, scaled logits": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {"sliding_window": 9, "num_hidden_layers": 4}),
    "granite, multipliers": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mixtral, experts": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe, experts": (
        "qwen3_moe",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 2,
        },
    ),
    "granitemoe, experts under other names": (
        "granitemoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "phimoe, its own router": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2, latent attention": (
        "deepseek_v2",
        {
            "head_dim": 8,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gpt_oss, sinks and windows": (
        "gpt_oss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "llama4, chunks": (
        "llama4_text",
        {
            "head_dim": 8,
            "attention_chunk_size": 7,
            "num_local_experts": 4,
            "intermediate_size_mlp": 40,
            "no_rope_layers": [1, 1, 0],
            "interleave_moe_layer_step": 2,
        },
    ),
    "granite_swa, sinks": ("granite_swa", {"sliding_window": 9}),
    "granitemoe_swa, sinks": (
        "granitemoe_swa",
        {"sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "flint, sinks": (
        "flint",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "mimo_v2_flash, sinks in some layers": (
        "mimo_v2_flash",
        {
            "head_dim": 12,
            "v_head_dim": 8,
            "sliding_window": 9,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
}

EAGER = {
    "gpt2": "Conv1D.forward computes addmm",
    "opt": "OPTLearnedPositionalEmbedding.forward computes add",
    "mixtral, experts": "MixtralTopKRouter.forward computes linear",
    "qwen3_moe, experts": "Qwen3MoeTopKRouter.forward computes linear",
    "granitemoe, experts under other names": "GraniteMoeTopKRouter.forward computes linear",
    "phimoe, its own router": "PhimoeTopKRouter.forward computes linear",
    "gpt_oss, sinks and windows": "GptOssTopKRouter.forward computes linear",
    "llama4, chunks": "Llama4TextRotaryEmbedding.forward computes float",
    "granitemoe_swa, sinks": "GraniteMoeSWATopKRouter.forward computes linear",
    "flint, sinks": "FlintTopKRouter.forward computes linear",
}
"""Those that the CPU kernels cannot record, and what the log says about them."""
NARROW = ("deepseek_v2, latent attention", "mimo_v2_flash, sinks in some layers")
"""Their values have fewer channels than their keys, which the attention of the CPU kernels
refuses."""
UNKNOWN: dict[str, Any] = {"hf_overrides": {"architectures": ["UnheardOfForCausalLM"]}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(write: Any, check_parity: Any, name: str) -> None:
    model_type, config = ARCHITECTURES[name]
    check_parity(write(model_type, **config), **UNKNOWN)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in (*EAGER, *NARROW)])
def test_recorded(write: Any, check_recorded: Any, name: str) -> None:
    model_type, config = ARCHITECTURES[name]
    check_recorded(write(model_type, **config), **UNKNOWN)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EAGER)
def test_what_is_eager_says_why(
    write: Any, check_parity: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level("INFO", "pegboard")
    model_type, config = ARCHITECTURES[name]
    check_parity(write(model_type, **config), block_size=16, **UNKNOWN)
    assert EAGER[name] in caplog.text


def test_queries_scaled_by_position(write: Any, check_parity: Any) -> None:
    """transformers' Llama 4 counts positions from the start of a step. That is right only where
    nothing is scaled yet."""
    _, config = ARCHITECTURES["llama4, chunks"]
    reference = write("llama4_text", **config, floor_scale=64, attn_temperature_tuning=True)
    with pytest.raises(ModelError, match="set max_model_len below 64"):
        check_parity(reference, **UNKNOWN)
    check_parity(reference, max_model_len=63, **UNKNOWN)


def test_a_known_architecture_under_an_unknown_name(write: Any, check_parity: Any) -> None:
    check_parity(write("llama", attention_bias=True), **UNKNOWN)


def test_text_part_of_a_multimodal_checkpoint(
    write: Any, check_parity: Any, sizes: dict[str, Any]
) -> None:
    text = {**sizes, "head_dim": 8, "sliding_window": 9}
    layers = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision = {**layers, "image_size": 28, "patch_size": 14}
    reference = write(
        "gemma3",
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        **dict.fromkeys(sizes),
    )
    check_parity(reference)
