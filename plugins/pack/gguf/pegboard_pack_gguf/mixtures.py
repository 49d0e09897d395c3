"""The architectures with experts. GGUF stacks the experts of a layer into one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pegboard_pack_gguf.table_parts import (
    ATTENTION,
    GATED,
    GRANITE_SCALES,
    LAYER,
    QKV_BIAS,
    REQUIRED,
    RMS,
    TOP,
    UNPERMUTE,
    Architecture,
    Has,
    Key,
)


def _experts(pattern: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Returns `Architecture.experts`. pattern: of the modules, with the expert's number and then
    the name as `{}`."""
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
_WIDTH: dict[str, Any] = {
    "moe_intermediate_size": Key("expert_feed_forward_length", "count", REQUIRED)
}
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
    layer={
        **_MLP_LAYER,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **_shared("mlp.shared_expert"),
    },
    experts=_MLP_EXPERTS,
    config={
        **_COUNTS,
        **_WIDTH,
        "shared_expert_intermediate_size": Key(
            "expert_shared_feed_forward_length", "count", REQUIRED
        ),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
_NO_SHARED_EXPERT = {
    name: value for name, value in QWEN_MOE.config.items() if not name.startswith("shared_expert")
}
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
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2, class_name="DeepseekV3ForCausalLM", model_type="deepseek_v3", whole=_CORRECTION
)
_GRANITE_EXPERTS = _experts("block_sparse_moe.{}.{}", "gate_proj", "up_proj", "output_linear")
GRANITE_MOE = Architecture(
    class_name="GraniteMoeForCausalLM",
    model_type="granitemoe",
    layer={**LAYER, "ffn_gate_inp": "block_sparse_moe.router.layer"},
    experts=_GRANITE_EXPERTS,
    changes=UNPERMUTE,
    config={**_LOCAL_COUNTS, "attention_bias": QKV_BIAS, **GRANITE_SCALES},
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    class_name="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    layer={
        **GRANITE_MOE.layer,
        "ffn_gate_shexp": "shared_mlp.gate_proj",
        "ffn_up_shexp": "shared_mlp.up_proj",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    joined={"shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj")},
    config={
        **GRANITE_MOE.config,
        "shared_intermediate_size": Key("expert_shared_feed_forward_length", "count", REQUIRED),
    },
)
_BAILING_LAYER = {
    **_MLP_LAYER,
    **_shared("mlp.shared_experts"),
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_qkv": "attention.query_key_value",
    "attn_q_norm": "attention.query_layernorm",
    "attn_k_norm": "attention.key_layernorm",
    "attn_output": "attention.dense",
}
BAILING = Architecture(
    class_name="BailingMoeForCausalLM",
    model_type="bailing_moe",
    top={**TOP, "token_embd": "model.word_embeddings"},
    layer=_BAILING_LAYER,
    split={},
    experts=_MLP_EXPERTS,
    changes=UNPERMUTE,
    joined={
        "attention.query_key_value": ("attention.q_proj", "attention.k_proj", "attention.v_proj")
    },
    config={
        **_COUNTS,
        **_WIDTH,
        "num_shared_experts": Key("expert_shared_count", "count", 0),
        "first_k_dense_replace": Key("leading_dense_block_count", "count", 0),
        "norm_topk_prob": Key("expert_weights_norm", default=False),
        "routed_scaling_factor": Key("expert_weights_scale", default=1.0),
        "use_qkv_bias": QKV_BIAS,
        "use_bias": Has(("blk.0.attn_output.bias",)),
    },
)
_LLAMA4_EXPERTS = _experts("feed_forward.experts.{}.{}", "gate_proj", "up_proj", "down_proj")

MIXTURES: dict[str, Architecture] = {
    "deepseek": Architecture(
        class_name="DeepseekForCausalLM",
        model_type="deepseek",
        layer={**_MLP_LAYER, **_shared("mlp.shared_experts")},
        experts=_MLP_EXPERTS,
        changes=UNPERMUTE,
        config={**_DEEPSEEK, "attention_bias": QKV_BIAS},
    ),
    "granitemoe": GRANITE_MOE,
    "bailingmoe": BAILING,
    "bailingmoe2": replace(
        BAILING,
        class_name="BailingMoeV2ForCausalLM",
        model_type="bailing_moe_v2",
        changes={},
        joined={},
        whole={"exp_probs_b.bias": "mlp.gate.expert_bias"},
        config={
            **BAILING.config,
            "use_qk_norm": Has(("blk.0.attn_q_norm.weight",)),
            "n_group": Key("expert_group_count", "count", 1),
            "topk_group": Key("expert_group_used_count", "count", 1),
        },
        is_partly_rotary=True,
    ),
    "gpt-oss": Architecture(
        class_name="GptOssForCausalLM",
        model_type="gpt_oss",
        layer={
            **ATTENTION,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        experts=_MLP_EXPERTS,
        whole={"attn_sinks.weight": "self_attn.sinks"},
        full_every=2,
        config={
            **_LOCAL_COUNTS,
            "intermediate_size": Key("expert_feed_forward_length", "count", REQUIRED),
            "sliding_window": Key("attention.sliding_window", "count", REQUIRED),
            "attention_bias": QKV_BIAS,
        },
    ),
    "llama4": Architecture(
        class_name="Llama4ForCausalLM",
        model_type="llama4_text",
        layer={
            **LAYER,
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            **_shared("feed_forward.shared_expert"),
        },
        experts=_LLAMA4_EXPERTS,
        config={
            **_LOCAL_COUNTS,
            "intermediate_size": Key("expert_feed_forward_length", "count", REQUIRED),
            "intermediate_size_mlp": Key("feed_forward_length", "count", REQUIRED),
            "interleave_moe_layer_step": Key("interleave_moe_layer_step", "count", 1),
            "attention_bias": QKV_BIAS,
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
    ),
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
        layer={
            **_MLP_LAYER,
            "post_attention_norm": "post_attention_layernorm",
            **_shared("mlp.shared_experts"),
        },
        experts=_MLP_EXPERTS,
        whole=_CORRECTION,
        config={
            **_DEEPSEEK,
            "attention_bias": QKV_BIAS,
            "use_qk_norm": Has(("blk.0.attn_q_norm.weight",)),
        },
        is_partly_rotary=True,
    ),
    "afmoe": Architecture(
        class_name="AfmoeForCausalLM",
        model_type="afmoe",
        layer={
            **LAYER,
            **_shared("mlp.shared_experts"),
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
        },
        experts=_MLP_EXPERTS,
        whole={"exp_probs_b.bias": "mlp.expert_bias"},
        full_every=4,
        config={
            **_COUNTS,
            **_WIDTH,
            "num_shared_experts": Key("expert_shared_count", "count", 0),
            "num_dense_layers": Key("leading_dense_block_count", "count", 0),
            "route_scale": Key("expert_weights_scale", default=1.0),
            "route_norm": Key("expert_weights_norm", default=True),
            "sliding_window": Key("attention.sliding_window", "count", REQUIRED),
            "attention_bias": QKV_BIAS,
            "mup_enabled": True,
        },
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
