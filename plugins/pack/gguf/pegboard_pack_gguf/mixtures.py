"""The architectures with experts. GGUF stacks the experts of a layer into one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pegboard_pack_gguf.table_parts import (
    GATED,
    LAYER,
    QKV_BIAS,
    REQUIRED,
    RMS,
    UNPERMUTE,
    Architecture,
    Has,
    Key,
)


def _experts(pattern: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Returns `Architecture.experts`. pattern: of the modules, with the expert's number and then the name as `{}`."""
    names = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {stacked: pattern.format("{}", name) for stacked, name in names.items()}


def _shared(module: str) -> dict[str, str]:
    """Returns the names of a shared expert, which is at `module` of a layer."""
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


_MLP_EXPERTS = _experts("mlp.experts.{}.{}", "gate_proj", "up_proj", "down_proj")
_W_EXPERTS = _experts("block_sparse_moe.experts.{}.{}", "w1", "w3", "w2")
_MLP_LAYER = {**LAYER, "ffn_gate_inp": "mlp.gate"}
_USED: dict[str, Any] = {**RMS, "num_experts_per_tok": Key("expert_used_count", "count", REQUIRED)}
_COUNTS = {**_USED, "num_experts": Key("expert_count", "count", REQUIRED)}
_LOCAL_COUNTS = {**_USED, "num_local_experts": Key("expert_count", "count", REQUIRED)}
_WIDTH: dict[str, Any] = {"moe_intermediate_size": Key("expert_feed_forward_length", "count", REQUIRED)}
_CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_DEEPSEEK: dict[str, Any] = {
    **RMS,
    **_WIDTH,
    "n_routed_experts": Key("expert_count", "count"),
    "num_experts_per_tok": Key("expert_used_count", "count"),
    "n_shared_experts": Key("expert_shared_count", "count"),
    "first_k_dense_replace": Key("leading_dense_block_count", "count", 0),
    "routed_scaling_factor": Key("expert_weights_scale", default=1.0),
    "norm_topk_prob": Key("expert_weights_norm", default=False),
    "n_group": Key("expert_group_count", "count", 1),
    "topk_group": Key("expert_group_used_count", "count", 1),
}
"""What DeepSeek's models and those that choose experts as they do have in their configurations."""

MIXTRAL = Architecture(
    class_name="MixtralForCausalLM",
    model_type="mixtral",
    layer={**LAYER, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts=_W_EXPERTS,
    changes=UNPERMUTE,
    config={**_LOCAL_COUNTS},
)
QWEN_MOE = Architecture(
    class_name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    layer={**_MLP_LAYER, "ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_shared("mlp.shared_expert")},
    experts=_MLP_EXPERTS,
    config={
        **_COUNTS,
        **_WIDTH,
        "shared_expert_intermediate_size": Key("expert_shared_feed_forward_length", "count", REQUIRED),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
_NO_SHARED_EXPERT = {name: value for name, value in QWEN_MOE.config.items() if not name.startswith("shared_expert")}
DEEPSEEK_V2 = Architecture(
    class_name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    layer={
        **GATED,
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
        **_shared("mlp.shared_experts"),
    },
    experts=_MLP_EXPERTS,
    config={
        **_DEEPSEEK,
        "q_lora_rank": Key("attention.q_lora_rank", "count"),
        "kv_lora_rank": Key("attention.kv_lora_rank", "count", REQUIRED),
    },
    is_latent=True,
)
DEEPSEEK_V3 = replace(DEEPSEEK_V2, class_name="DeepseekV3ForCausalLM", model_type="deepseek_v3", whole=_CORRECTION)

MIXTURES: dict[str, Architecture] = {
    "qwen2moe": QWEN_MOE,
    "qwen3moe": replace(
        QWEN_MOE,
        class_name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        config={**_NO_SHARED_EXPERT, "norm_topk_prob": True},
    ),
    "olmoe": Architecture(
        class_name="OlmoeForCausalLM",
        model_type="olmoe",
        layer=_MLP_LAYER,
        experts=_MLP_EXPERTS,
        config={**_COUNTS, "norm_topk_prob": False, "clip_qkv": Key("attention.clamp_kqv")},
    ),
    "deepseek2": DEEPSEEK_V2,
    "dots1": Architecture(
        class_name="Dots1ForCausalLM",
        model_type="dots1",
        layer={**_MLP_LAYER, **_shared("mlp.shared_experts")},
        experts=_MLP_EXPERTS,
        whole=_CORRECTION,
        config={**_DEEPSEEK, "attention_bias": QKV_BIAS},
    ),
    "glm4moe": Architecture(
        class_name="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        layer={**_MLP_LAYER, "post_attention_norm": "post_attention_layernorm", **_shared("mlp.shared_experts")},
        experts=_MLP_EXPERTS,
        whole=_CORRECTION,
        config={**_DEEPSEEK, "attention_bias": QKV_BIAS, "use_qk_norm": Has(("blk.0.attn_q_norm.weight",))},
        is_partly_rotary=True,
    ),
    "phimoe": Architecture(
        class_name="PhimoeForCausalLM",
        model_type="phimoe",
        layer={**LAYER, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts=_W_EXPERTS,
        config={
            **_LOCAL_COUNTS,
            "sliding_window": Key("attention.sliding_window", "count"),
            "attention_bias": QKV_BIAS,
            "lm_head_bias": Has(("output.bias",)),
        },
    ),
    "minimax-m2": Architecture(
        class_name="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        layer={**LAYER, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts=_W_EXPERTS,
        whole={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        config={
            **_LOCAL_COUNTS,
            "intermediate_size": Key("expert_feed_forward_length", "count", REQUIRED),
            "rotary_dim": Key("rope.dimension_count", "count", REQUIRED),
        },
        is_partly_rotary=True,
    ),
    "ernie4_5-moe": Architecture(
        class_name="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        layer={**_MLP_LAYER, **_shared("mlp.shared_experts")},
        experts=_MLP_EXPERTS,
        whole={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        config={
            **RMS,
            **_WIDTH,
            "moe_num_experts": Key("expert_count", "count", REQUIRED),
            "moe_k": Key("expert_used_count", "count", REQUIRED),
            "moe_num_shared_experts": Key("expert_shared_count", "count", 0),
            "moe_layer_start_index": Key("leading_dense_block_count", "count", 0),
            "moe_layer_interval": Key("interleave_moe_layer_step", "count", 1),
            "use_bias": Has(("blk.0.attn_output.bias",)),
        },
    ),
    "hunyuan-moe": Architecture(
        class_name="HunYuanMoEV1ForCausalLM",
        model_type="hunyuan_v1_moe",
        layer={
            **LAYER,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
            **_shared("mlp.shared_mlp"),
        },
        experts=_MLP_EXPERTS,
        config={
            **RMS,
            **_WIDTH,
            "num_experts": Key("expert_count", "count", REQUIRED),
            "moe_topk": Key("expert_used_count", "count", REQUIRED),
            "num_shared_expert": Key("expert_shared_count", "count", REQUIRED),
            "intermediate_size": Key("expert_shared_feed_forward_length", "count", REQUIRED),
            "attention_bias": QKV_BIAS,
        },
    ),
}
