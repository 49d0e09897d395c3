"""Decoders described by data that transformers has, too: compared with it."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers.models.falcon import modeling_falcon

TYPES = ["sliding_attention", "full_attention"] * 2
FOUR = {"num_hidden_layers": 4, "sliding_window": 9}
NO_SIZES = dict.fromkeys(
    (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
)
NO_SIZES["max_position_embeddings"] = None
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, **NO_SIZES}
FALCON = {"intermediate_size": None, "num_key_value_heads": None}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2, capped scores and logits": (
        "gemma2",
        {
            "head_dim": 8,
            **FOUR,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3, windows": (
        "gemma3_text",
        {"head_dim": 8, **FOUR, "layer_types": TYPES, "query_pre_attn_scalar": 20},
    ),
    "phi3, window": ("phi3", {"sliding_window": 13, "rms_norm_eps": None}),
    "phi3, partial rotation": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": None}),
    "granite, multipliers": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "rms_norm_eps": 0.01,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3, scaled rotation of full attention": (
        "olmo3",
        {
            **FOUR,
            "rope_parameters": {
                "rope_theta": 500.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "glm": ("glm", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": False}),
    "cwm": (
        "cwm",
        {"sliding_window": 9, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 8, "attention_out_bias": True}),
    "smollm3, layers without rotation": ("smollm3", {"no_rope_layer_interval": 2}),
    "ernie4_5": ("ernie4_5", {"head_dim": 8, "use_bias": True}),
    "exaone4": ("exaone4", {"sliding_window": None, "head_dim": 8}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "layer_norm_eps": 1e-3}),
    "stablelm, parallel blocks": (
        "stablelm",
        {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
    ),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4, "n_positions": 64}),
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4, **NO_SIZES, "hidden_size": 32}),
    "mpt": ("mpt", {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64, **NO_SIZES}),
    "mpt, limited queries": (
        "mpt",
        {
            "d_model": 32,
            "n_layers": 3,
            "n_heads": 4,
            "max_seq_len": 64,
            **NO_SIZES,
            "attn_config": {"clip_qkv": 0.5},
        },
    ),
    "falcon, one head of keys": ("falcon", {**FALCON, "multi_query": True, "parallel_attn": True}),
    "falcon, two norms": (
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon, position biases": (
        "falcon",
        {**FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
    ),
    "phi, normalized queries": ("phi", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "starcoder2, window": ("starcoder2", {"sliding_window": 13}),
    "nemotron": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "jais2": ("jais2", {}),
    "cohere, scaled logits": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2, windows": ("cohere2", {**FOUR, "attention_bias": True}),
    "olmo": ("olmo", {}),
    "gpt2": ("gpt2", {**GPT, "n_positions": 64}),
    "gpt2, scaled by layer": (
        "gpt2",
        {**GPT, "n_positions": 64, "scale_attn_by_inverse_layer_idx": True, "n_inner": 48},
    ),
    "gpt_bigcode, one head of keys": ("gpt_bigcode", {**GPT, "n_positions": 64}),
    "gpt_bigcode": ("gpt_bigcode", {**GPT, "n_positions": 64, "multi_query": False}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "gpt_neox, blocks in turn": (
        "gpt_neox",
        {
            "num_key_value_heads": None,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
        },
    ),
    "persimmon": ("persimmon", {"num_key_value_heads": None}),
    "opt": (
        "opt",
        {
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "intermediate_size": None,
            "num_key_value_heads": None,
        },
    ),
    "olmo, limited queries": ("olmo", {"clip_qkv": 0.5}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "apertus": ("apertus", {"attention_bias": True, "head_dim": 16}),
    "hunyuan_v1_dense, a longer base": (
        "hunyuan_v1_dense",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_theta": 500.0,
                "rope_type": "dynamic",
                "factor": 1.0,
                "alpha": 50.0,
            },
        },
    ),
    "exaone4, windows": ("exaone4", {**FOUR, "sliding_window_pattern": 2, "head_dim": 8}),
}


def halve_biases(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct transformers, whose eager attention of Falcon adds position biases twice: in the mask
    and to the scores."""
    if config.get("alibi"):
        biases = modeling_falcon.build_alibi_tensor
        monkeypatch.setattr(
            modeling_falcon, "build_alibi_tensor", lambda *args, **more: biases(*args, **more) / 2
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(
    write: Any, check_parity: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model_type, config = ARCHITECTURES[name]
    reference = write(model_type, **config)
    halve_biases(config, monkeypatch)
    check_parity(reference)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["gemma3, windows", "granite, multipliers", "olmo2", "bloom", "gpt2", "apertus"]
)
def test_preemption_and_two_answers(
    write: Any, check_parity: Any, check_cached: Any, name: str
) -> None:
    """The memory is enough for one request and a half. Repeated prompts are in the prefix cache."""
    model_type, config = ARCHITECTURES[name]
    reference = write(model_type, **config)
    check_parity(reference, lengths=(3, 20, 40, 33), num_gpu_blocks_override=27, max_model_len=56)
    check_cached(reference, (37, 30, 13))


def test_a_checkpoint_of_the_base_model(write: Any, check_parity: Any) -> None:
    """The names of GPT-2 on the hub: without the part that the model with a head adds."""
    reference = write("gpt2", **ARCHITECTURES["gpt2"][1])
    path = reference.directory / "model.safetensors"
    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()},
        path,
    )
    check_parity(reference)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded(
    write: Any, check_recorded: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model_type, config = ARCHITECTURES[name]
    reference = write(model_type, **config)
    halve_biases(config, monkeypatch)
    check_recorded(reference)
