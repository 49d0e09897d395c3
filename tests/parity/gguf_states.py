"""Models with states in the form of GGUF files: decays as they are used, convolutions without the
dimension of one. See `gguf_layouts`."""

from __future__ import annotations

from typing import Any

import torch
from gguf_layouts import (
    ATTENTION,
    EXPERTS,
    TOP,
    Layout,
    Tensors,
    halves,
    in_file,
    in_pairs,
    replaced,
    scales,
    stacked,
)

MIXER = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "out_proj": "ssm_out",
    "norm": "ssm_norm",
    "dt_layernorm": "ssm_dt_norm",
    "b_layernorm": "ssm_b_norm",
    "c_layernorm": "ssm_c_norm",
}
FEED_FORWARD = {f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}


def states(tensors: Tensors, groups: int = 1, is_second: bool = True) -> Tensors:
    """Returns the tensors as converters store them. Decays and skips have no ending, which the
    names of modules need here."""
    column = (lambda t: t[:, None]) if is_second else (lambda t: t)
    tensors = replaced(tensors, "A_log", lambda t: {"A.bare": column(-t.exp())})
    tensors = replaced(tensors, ".D", lambda t: {".D.bare": column(t)})
    tensors = replaced(tensors, "dt_bias", lambda t: {"dt_proj.bias": t})
    tensors = replaced(tensors, "conv1d.weight", lambda t: {"conv1d.weight": t.squeeze(1)})
    if is_second:
        for ending in ("mixer.norm.weight", "mamba.norm.weight"):
            tensors = replaced(tensors, ending, lambda t, e=ending: {e: t.view(groups, -1)})
    return tensors


def bare(tensors: Tensors) -> Tensors:
    """Drops the ending of decays and skips."""
    return {name.removesuffix(".bare.weight"): tensor for name, tensor in tensors.items()}


def mixer(path: str) -> dict[str, str]:
    return {
        **{f"{path}.{name}": to for name, to in MIXER.items()},
        f"{path}.A.bare": "ssm_a.bare",
        f"{path}.D.bare": "ssm_d.bare",
    }


BACKBONE = {
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
    "lm_head": "output",
    "norm": "attn_norm",
    **mixer("mixer"),
}


def first(tensors: Tensors, config: Any) -> Tensors:
    return bare(in_file(states(tensors, is_second=False), BACKBONE))


def second(tensors: Tensors, config: Any) -> Tensors:
    return bare(in_file(states(tensors, config.n_groups), BACKBONE))


def nemotron(tensors: Tensors, config: Any) -> Tensors:
    names = {**BACKBONE, "model.embeddings": "token_embd", "model.norm_f": "output_norm"}
    names |= {f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"} | {
        "mixer.o_proj": "attn_output"
    }
    for part in ("up", "down"):
        names |= {
            f"mixer.{part}_proj": f"ffn_{part}",
            f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp",
            f"mixer.experts.{part}_proj": f"ffn_{part}_exps",
        }
        tensors = replaced(
            tensors, f"experts.{part}_proj", lambda t, p=part: {f"experts.{p}_proj.weight": t}
        )
    names |= {
        "mixer.gate": "ffn_gate_inp",
        "mixer.gate.correction": "exp_probs_b",
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
    }
    tensors = replaced(tensors, "e_score_correction_bias", lambda t: {"correction.bias": t})
    return bare(in_file(in_pairs(states(tensors, config.n_groups), config), names))


def granite(tensors: Tensors, config: Any) -> Tensors:
    """The feed-forward block of a model without experts has the names of dense models, and else of
    a shared expert."""
    tensors = states(stacked(in_pairs(tensors, config)), config.mamba_n_groups)
    tensors = replaced(tensors, "input_linear.weight", halves)
    ending = "_shexp" if config.num_local_experts else ""
    names = {**TOP, **ATTENTION, **mixer("mamba"), "block_sparse_moe.router": "ffn_gate_inp"}
    names |= {f"shared_mlp.{name}": f"{to}{ending}" for name, to in FEED_FORWARD.items()}
    names |= {
        "shared_mlp.output_linear": f"ffn_down{ending}",
        **{f"block_sparse_moe.{name}": to for name, to in EXPERTS.items()},
    }
    return bare(in_file(tensors, names))


def falcon(tensors: Tensors, config: Any) -> Tensors:
    """The factors are in the weights."""
    inner = config.mamba_d_ssm
    shared = config.mamba_n_groups * config.mamba_d_state
    repeats = torch.tensor([inner, inner, shared, shared, config.mamba_n_heads])
    of_parts = (
        torch.tensor(config.ssm_multipliers).repeat_interleave(repeats)[:, None]
        * config.ssm_in_multiplier
    )
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "mamba.in_proj": of_parts,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "self_attn.o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    for path, factor in factors.items():
        tensors = replaced(
            tensors, f"{path}.weight", lambda t, p=path, f=factor: {f"{p}.weight": t * f}
        )
    names = {
        **TOP,
        **ATTENTION,
        **mixer("mamba"),
        **{f"feed_forward.{name}": to for name, to in FEED_FORWARD.items()},
    }
    names |= {"model.final_layernorm": "output_norm", "pre_ff_layernorm": "ffn_norm"}
    return bare(in_file(states(tensors, config.mamba_n_groups), names))


def jamba(tensors: Tensors, config: Any) -> Tensors:
    block = {"router": "ffn_gate_inp", **FEED_FORWARD, **EXPERTS}
    names = {
        **TOP,
        **ATTENTION,
        **mixer("mamba"),
        **{f"feed_forward.{name}": to for name, to in block.items()},
    }
    names |= {"model.final_layernorm": "output_norm", "pre_ff_layernorm": "ffn_norm"}
    return bare(in_file(states(stacked(tensors), is_second=False), names))


def lfm2(tensors: Tensors, config: Any) -> Tensors:
    tensors = replaced(tensors, "conv.conv.weight", lambda t: {"conv.conv.weight": t.squeeze(1)})
    names = {
        **TOP,
        **ATTENTION,
        "model.embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "feed_forward.w1": "ffn_gate",
        "self_attn.k_layernorm": "attn_k_norm",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
        "feed_forward.gate": "ffn_gate_inp",
        "feed_forward.expert": "exp_probs_b",
        **{f"feed_forward.{name}": to for name, to in EXPERTS.items()},
        **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
    }
    return in_file(stacked(replaced(tensors, "expert_bias", lambda t: {"expert.bias": t})), names)


def qwen(tensors: Tensors, config: Any, is_old: bool = False) -> Tensors:
    """is_old: the projections of linear attention are stored as checkpoints have them."""
    values = (
        config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    )
    sizes = [config.linear_key_head_dim] * 2 + [values] * 2

    def apart(t: torch.Tensor) -> Tensors:
        q, k, v, z = (
            part.flatten(0, 1)
            for part in t.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, 1)
        )
        return {"in_proj_qkv.weight": torch.cat((q, k, v)), "in_proj_z.weight": z}

    tensors = {
        name: t + 1 if name.endswith("norm.weight") and "linear_attn.norm" not in name else t
        for name, t in tensors.items()
    }
    tensors = replaced(
        states(stacked(tensors), is_second=False),
        "shared_expert_gate.weight",
        lambda t: {"shared_expert_gate.weight": t.squeeze(0)},
    )
    tensors = tensors if is_old else replaced(tensors, "in_proj_qkvz.weight", apart)
    names = {
        **TOP,
        **ATTENTION,
        "post_attention_layernorm": "post_attention_norm",
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        **{f"mlp.{name}": to for name, to in EXPERTS.items()},
        **{f"mlp.shared_expert.{name}": f"{to}_shexp" for name, to in FEED_FORWARD.items()},
        **mixer("linear_attn"),
        "linear_attn.in_proj_qkvz": "ssm_in",
        "linear_attn.in_proj_ba": "ssm_ba",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
    }
    return bare(in_file(tensors, names))


def ssm(kernel: int, inner: int, state: int, rank: int, groups: int = 0) -> dict[str, int]:
    found = {
        "conv_kernel": kernel,
        "inner_size": inner,
        "state_size": state,
        "time_step_rank": rank,
        "group_count": groups,
    }
    return {f"ssm.{name}": value for name, value in found.items() if value}


NONE = {"attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0}
NO_ATTENTION = {"intermediate_size": None, "num_attention_heads": None, "num_key_value_heads": None}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16}
GRANITE = {
    **MAMBA2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
QWEN = {
    "rms_norm_eps": 0.1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}


def qwen_metadata(config: Any) -> dict[str, Any]:
    return {
        **ssm(4, 64, 8, 4, 2),
        "full_attention_interval": 2,
        "expert_count": 6,
        "expert_used_count": 2,
        "expert_feed_forward_length": 24,
        "expert_shared_feed_forward_length": 32,
        "rope.dimension_count": 4,
    }


SECOND = ssm(4, 64, 16, 8, 2)
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "num_hidden_layers": None,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
}


def nemotron_metadata(config: Any) -> dict[str, Any]:
    return {
        **SECOND,
        "attention.head_count_kv": [0, 0, 2, 0],
        "feed_forward_length": [0, 32, 0, 32],
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 40,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.8,
        "expert_group_count": 1,
    }


STATES = {
    "mamba": Layout(
        "mamba",
        "mamba",
        {**NO_ATTENTION, "state_size": 4},
        first,
        lambda config: {**NONE, **ssm(4, 64, 4, 2)},
    ),
    "mamba of Falcon": Layout(
        "mamba",
        "falcon_mamba",
        {**NO_ATTENTION, "state_size": 8},
        first,
        lambda config: {**NONE, **ssm(4, 64, 8, 2), "ssm.dt_b_c_rms": True},
    ),
    "mamba2": Layout(
        "mamba2",
        "mamba2",
        {**NO_ATTENTION, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16},
        second,
        lambda config: {**NONE, **SECOND},
    ),
    "nemotron_h": Layout(
        "nemotron_h",
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "num_hidden_layers": None,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 16,
            "head_dim": 16,
            "mlp_bias": True,
        },
        nemotron,
        lambda config: {
            **SECOND,
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 48, 0, 0],
        },
    ),
    "nemotron_h_moe": Layout("nemotron_h_moe", "nemotron_h", NEMOTRON, nemotron, nemotron_metadata),
    "nemotron_h_moe, latent experts": Layout(
        "nemotron_h_moe",
        "nemotron_h",
        {**NEMOTRON, "moe_latent_size": 16, "mlp_bias": True},
        nemotron,
        lambda config: {**nemotron_metadata(config), "moe_latent_size": 16},
    ),
    "lfm2moe": Layout(
        "lfm2moe",
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.3,
        },
        lfm2,
        lambda config: {
            "attention.head_count_kv": [0, 2, 0],
            "shortconv.l_cache": 3,
            "leading_dense_block_count": 1,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 24,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.3,
        },
    ),
    "granitehybrid": Layout(
        "granitehybrid",
        "granitemoehybrid",
        {**GRANITE, "num_local_experts": 0},
        granite,
        lambda config: {
            **SECOND,
            **scales(config),
            "attention.head_count_kv": [0, 2, 0],
            "expert_shared_feed_forward_length": 40,
            "rope.scaling.finetuned": False,
        },
    ),
    "granitehybrid, experts, rope": Layout(
        "granitehybrid",
        "granitemoehybrid",
        {
            **GRANITE,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
        },
        granite,
        lambda config: {
            **SECOND,
            **scales(config),
            "attention.head_count_kv": [0, 2, 0],
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_shared_feed_forward_length": 40,
            "rope.scaling.finetuned": True,
        },
    ),
    "falcon-h1": Layout(
        "falcon-h1",
        "falcon_h1",
        {
            **MAMBA2,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mlp_multipliers": [0.7, 1.3],
            "ssm_multipliers": [0.5, 0.8, 1.2, 0.9, 1.1],
            "ssm_in_multiplier": 0.6,
            "ssm_out_multiplier": 0.7,
            "attention_in_multiplier": 1.4,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.6,
        },
        falcon,
        lambda config: SECOND,
    ),
    "jamba": Layout(
        "jamba",
        "jamba",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "mamba_d_state": 8,
        },
        jamba,
        lambda config: {
            **ssm(4, 64, 8, 2),
            "attention.head_count_kv": [0, 0, 2],
            "expert_count": 4,
            "expert_used_count": 2,
        },
    ),
    "qwen3next": Layout("qwen3next", "qwen3_next", QWEN, qwen, qwen_metadata),
    "qwen3next of older converters": Layout(
        "qwen3next",
        "qwen3_next",
        QWEN,
        lambda tensors, config: qwen(tensors, config, is_old=True),
        qwen_metadata,
    ),
    "lfm2": Layout(
        "lfm2",
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
        lfm2,
        lambda config: {
            "attention.head_count_kv": [0, 2, 0],
            "feed_forward_length": 32,
            "shortconv.l_cache": 3,
        },
    ),
}
