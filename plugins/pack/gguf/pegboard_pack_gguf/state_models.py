"""The architectures whose layers keep a state: state-space models, and hybrids that mix such layers
with attention.

Converters store the decays of states as they are used (-exp of the logarithm that checkpoints
have), convolutions without the dimension of one, and norms of groups with one row for each group. A
file says which layers have attention with its number of KV heads by layer, which is 0 for the
others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pegboard_pack_gguf.metadata import Metadata
from pegboard_pack_gguf.table_parts import (
    ATTENTION,
    GRANITE_SCALES,
    REQUIRED,
    RMS,
    TOP,
    UNPERMUTE,
    Architecture,
    Change,
    Has,
    Key,
)

_CHANGES: dict[str, Change] = {
    "ssm_a": "logarithm",
    "ssm_d": "flat",
    "ssm_norm": "flat",
    "ssm_conv1d": "convolution",
}
_EPS = {"layer_norm_epsilon": RMS["rms_norm_eps"]}


def _size(name: str) -> Key:
    return Key(f"ssm.{name}", "count", REQUIRED)


def _has(tensor: str) -> Has:
    """True if any layer has it. Not all layers do."""
    return Has((tensor,), in_any_layer=True)


def _mixer(path: str) -> dict[str, str]:
    return {
        "ssm_in": f"{path}.in_proj",
        "ssm_conv1d": f"{path}.conv1d",
        "ssm_out": f"{path}.out_proj",
    }


def _first(path: str) -> dict[str, Any]:
    """Returns the fields of a table of a model with Mamba layers at this path."""
    layer = {**_mixer(path), "ssm_x": f"{path}.x_proj", "ssm_dt": f"{path}.dt_proj"}
    return {"layer": layer, "whole": {"ssm_a": f"{path}.A_log", "ssm_d": f"{path}.D"}}


def _second(path: str) -> dict[str, Any]:
    """Returns the fields of a table of a model with Mamba-2 layers at this path."""
    whole = {"ssm_a": f"{path}.A_log", "ssm_d": f"{path}.D", "ssm_dt.bias": f"{path}.dt_bias"}
    return {"layer": {**_mixer(path), "ssm_norm": f"{path}.norm"}, "whole": whole}


def _named(**names: str) -> dict[str, Any]:
    """Returns what the config of Mamba-2 layers has, by the names of the model."""
    sizes = {
        "heads": "time_step_rank",
        "groups": "group_count",
        "state": "state_size",
        "kernel": "conv_kernel",
    }
    return {names[key]: _size(value) for key, value in sizes.items()}


def _feed_forward(path: str, gate: str, up: str, down: str) -> dict[str, str]:
    return {"ffn_gate": f"{path}.{gate}", "ffn_up": f"{path}.{up}", "ffn_down": f"{path}.{down}"}


_BACKBONE = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
}
_HYBRID = _named(
    heads="mamba_n_heads", groups="mamba_n_groups", state="mamba_d_state", kernel="mamba_d_conv"
)
_HYBRID |= {"mamba_d_ssm": _size("inner_size"), "mamba_conv_bias": _has("ssm_conv1d.bias")}
_PLAIN_FFN = _feed_forward("feed_forward", "gate_proj", "up_proj", "down_proj")
_GRANITE_FFN = _feed_forward("shared_mlp", "gate_linear", "up_linear", "output_linear")

MAMBA = Architecture(
    class_name="MambaForCausalLM",
    model_type="mamba",
    top=_BACKBONE,
    layers="backbone.layers",
    layer={**_first("mixer")["layer"], "attn_norm": "norm"},
    whole=_first("mixer")["whole"],
    changes=_CHANGES,
    keeps_states=True,
    config={
        **_EPS,
        "state_size": _size("state_size"),
        "conv_kernel": _size("conv_kernel"),
        "intermediate_size": _size("inner_size"),
        "time_step_rank": _size("time_step_rank"),
        "use_bias": _has("ssm_in.bias"),
        "use_conv_bias": _has("ssm_conv1d.bias"),
    },
)
FALCON_MAMBA = replace(MAMBA, class_name="FalconMambaForCausalLM", model_type="falcon_mamba")
_EXPERTS = {
    "num_experts_per_tok": Key("expert_used_count", "count", REQUIRED),
    "moe_intermediate_size": Key("expert_feed_forward_length", "count", REQUIRED),
    "norm_topk_prob": Key("expert_weights_norm", default=True),
    "routed_scaling_factor": Key("expert_weights_scale", default=1.0),
}
NEMOTRON_H = Architecture(
    class_name="NemotronHForCausalLM",
    model_type="nemotron_h",
    top=_BACKBONE,
    layers="backbone.layers",
    layer={
        **_second("mixer")["layer"],
        **{name: path.replace("self_attn", "mixer") for name, path in ATTENTION.items()},
        "attn_norm": "norm",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
    },
    whole=_second("mixer")["whole"],
    changes=_CHANGES,
    keeps_states=True,
    config={
        **_EPS,
        **_named(
            heads="mamba_num_heads", groups="n_groups", state="ssm_state_size", kernel="conv_kernel"
        ),
        "use_bias": _has("ssm_in.bias"),
        "use_conv_bias": _has("ssm_conv1d.bias"),
        "mlp_bias": _has("ffn_up.bias"),
        "time_step_min": 0.001,
    },
)
LFM2 = Architecture(
    class_name="Lfm2ForCausalLM",
    model_type="lfm2",
    top={
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",
        "output": "lm_head",
    },
    layer={
        **ATTENTION,
        **_feed_forward("feed_forward", "w1", "w3", "w2"),
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
    },
    whole={
        f"shortconv.{name}.{ending}": f"conv.{name}.{ending}"
        for name in ("conv", "in_proj", "out_proj")
        for ending in ("weight", "bias")
    },
    changes={"shortconv.conv.weight": "convolution"},
    keeps_states=True,
    config={
        "norm_eps": RMS["rms_norm_eps"],
        "conv_L_cache": Key("shortconv.l_cache", "count", REQUIRED),
        "conv_bias": _has("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    },
)
STATE_MODELS: dict[str, Architecture] = {
    "mamba": MAMBA,
    "mamba2": Architecture(
        class_name="Mamba2ForCausalLM",
        model_type="mamba2",
        top=_BACKBONE,
        layers="backbone.layers",
        layer={**_second("mixer")["layer"], "attn_norm": "norm"},
        whole=_second("mixer")["whole"],
        changes=_CHANGES,
        keeps_states=True,
        config={
            **_EPS,
            **_named(
                heads="num_heads", groups="n_groups", state="state_size", kernel="conv_kernel"
            ),
            "use_bias": _has("ssm_in.bias"),
            "use_conv_bias": _has("ssm_conv1d.bias"),
        },
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": replace(
        NEMOTRON_H,
        layer={
            **NEMOTRON_H.layer,
            "ffn_gate_inp": "mixer.gate",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        whole={**NEMOTRON_H.whole, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        experts={f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
        config={
            **NEMOTRON_H.config,
            **_EXPERTS,
            "n_routed_experts": Key("expert_count", "count", REQUIRED),
            "moe_shared_expert_intermediate_size": Key(
                "expert_shared_feed_forward_length", "count", REQUIRED
            ),
            "moe_latent_size": Key("moe_latent_size", "count"),
            "mlp_bias": _has("ffn_up_shexp.bias"),
            "n_group": Key("expert_group_count", "count", 1),
            "topk_group": Key("expert_group_used_count", "count", 1),
        },
    ),
    "granitehybrid": Architecture(
        class_name="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        layer={
            **_second("mamba")["layer"],
            **ATTENTION,
            **_GRANITE_FFN,
            **{f"{name}_shexp": path for name, path in _GRANITE_FFN.items()},
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
        },
        whole=_second("mamba")["whole"],
        experts={
            "ffn_gate_exps": "block_sparse_moe.{}.gate_linear",
            "ffn_up_exps": "block_sparse_moe.{}.up_linear",
            "ffn_down_exps": "block_sparse_moe.{}.output_linear",
        },
        joined={"shared_mlp.input_linear": ("shared_mlp.gate_linear", "shared_mlp.up_linear")},
        changes={**_CHANGES, **UNPERMUTE},
        keeps_states=True,
        config={
            **RMS,
            **_HYBRID,
            **GRANITE_SCALES,
            "mamba_proj_bias": _has("ssm_in.bias"),
            "attention_bias": _has("attn_q.bias"),
            "num_local_experts": Key("expert_count", "count", 0),
            "num_experts_per_tok": Key("expert_used_count", "count", 0),
        },
    ),
    "falcon-h1": Architecture(
        class_name="FalconH1ForCausalLM",
        model_type="falcon_h1",
        top={**TOP, "output_norm": "model.final_layernorm"},
        layer={
            **_second("mamba")["layer"],
            **ATTENTION,
            **_PLAIN_FFN,
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
        },
        whole=_second("mamba")["whole"],
        changes=_CHANGES,
        keeps_states=True,
        config={  # without factors: the converter has multiplied the weights by them
            **RMS,
            **_HYBRID,
            "mamba_rms_norm": _has("ssm_norm.weight"),
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": _has("ssm_in.bias"),
            "projectors_bias": _has("ssm_out.bias"),
            "attention_bias": _has("attn_q.bias"),
            "mlp_bias": _has("ffn_up.bias"),
        },
    ),
    "jamba": Architecture(
        class_name="JambaForCausalLM",
        model_type="jamba",
        top={**TOP, "output_norm": "model.final_layernorm"},
        layer={
            **_first("mamba")["layer"],
            **ATTENTION,
            **_PLAIN_FFN,
            **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate_inp": "feed_forward.router",
        },
        whole=_first("mamba")["whole"],
        experts={
            f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj"
            for part in ("gate", "up", "down")
        },
        changes=_CHANGES,
        keeps_states=True,
        config={
            **RMS,
            "mamba_d_state": _size("state_size"),
            "mamba_d_conv": _size("conv_kernel"),
            "mamba_dt_rank": _size("time_step_rank"),
            "mamba_conv_bias": _has("ssm_conv1d.bias"),
            "mamba_proj_bias": _has("ssm_in.bias"),
            "num_experts": Key("expert_count", "count", 1),
            "num_experts_per_tok": Key("expert_used_count", "count", 1),
        },
    ),
    "qwen3next": Architecture(
        class_name="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        layer={
            **ATTENTION,
            "ssm_in": "linear_attn.in_proj_qkvz",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **{
                f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj"
                for part in ("gate", "up", "down")
            },
        },
        whole={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
        split={},
        experts={
            f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")
        },
        joined={"linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")},
        joined_change="by_key_head",
        changes={"ssm_a": "logarithm", "ssm_conv1d": "convolution"},
        norm_offset=1.0,
        is_partly_rotary=True,
        keeps_states=True,
        config={
            **RMS,
            "linear_conv_kernel_dim": _size("conv_kernel"),
            "linear_key_head_dim": _size("state_size"),
            "linear_num_key_heads": _size("group_count"),
            "linear_num_value_heads": _size("time_step_rank"),
            "attention_bias": _has("attn_q.bias"),
            "num_experts": Key("expert_count", "count", REQUIRED),
            "num_experts_per_tok": Key("expert_used_count", "count", REQUIRED),
            "moe_intermediate_size": Key("expert_feed_forward_length", "count", REQUIRED),
            "shared_expert_intermediate_size": Key(
                "expert_shared_feed_forward_length", "count", REQUIRED
            ),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "lfm2": LFM2,
    "lfm2moe": replace(
        LFM2,
        class_name="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        layer={**LFM2.layer, "ffn_gate_inp": "feed_forward.gate"},
        whole={**LFM2.whole, "exp_probs_b.bias": "feed_forward.expert_bias"},
        experts={
            f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{number}"
            for part, number in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
        config={
            **LFM2.config,
            **_EXPERTS,
            "num_experts": Key("expert_count", "count", REQUIRED),
            "num_dense_layers": Key("leading_dense_block_count", "count", 0),
            "use_expert_bias": _has("exp_probs_b.bias"),
        },
    ),
}


def state_heads(metadata: Metadata, hidden_size: int, num_layers: int) -> dict[str, int]:
    """Returns the sizes of attention, {} if no layer has it."""
    counts = metadata.layer_counts("attention.head_count", num_layers)
    kv_counts = metadata.layer_counts("attention.head_count_kv", num_layers, counts)
    if not any(kv_counts):
        return {}
    num_heads = max(counts)
    num_kv_heads = max(kv_counts)
    if set(kv_counts) - {0, num_kv_heads} or not num_heads or num_heads % num_kv_heads:
        message = (
            f"is {sorted(set(kv_counts))} for {num_heads} heads; expected 0 or one divisor of "
            "them for every layer"
        )
        raise metadata.fail("attention.head_count_kv", message)
    head_dim = metadata.count("attention.key_length", max(hidden_size // num_heads, 1))
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }


HEAD_DIMS = {
    "num_heads": "head_dim",
    "mamba_num_heads": "mamba_head_dim",
    "mamba_n_heads": "mamba_d_head",
    "linear_num_value_heads": "linear_value_head_dim",
}
"""What the config calls the channels of a head, by what it calls the number of heads."""


def state_config(
    model_type: str,
    config: Mapping[str, Any],
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Returns what follows from the numbers of heads and channels by layer, and from the file's
    tensors."""
    num_layers = config["num_hidden_layers"]
    no_heads = [0] * num_layers
    attends = [
        bool(count)
        for count in metadata.layer_counts("attention.head_count_kv", num_layers, no_heads)
    ]
    widths = metadata.layer_counts("feed_forward_length", num_layers, no_heads)
    result: dict[str, Any] = (
        {"intermediate_size": max(widths)} if any(widths) and model_type != "mamba" else {}
    )
    if set(widths) - {0, max(widths)}:
        raise metadata.fail("feed_forward_length", "differs between layers, which is not supported")
    for heads, head_dim in HEAD_DIMS.items():
        if heads in config:
            inner = metadata.count("ssm.inner_size")
            if inner % config[heads]:
                raise metadata.fail(
                    "ssm.inner_size", f"is {inner}, which {config[heads]} heads cannot share"
                )
            result[head_dim] = inner // config[heads]
    if model_type == "nemotron_h":
        block = "moe" if "n_routed_experts" in config else "mlp"
        kinds = [block if width else "linear_attention" for width in widths]
        kinds = [
            "full_attention" if attends_here else kind
            for attends_here, kind in zip(attends, kinds, strict=True)
        ]
        result["layers_block_type"] = kinds
    elif model_type == "qwen3_next":
        every = metadata.count("full_attention_interval", 4)
        kinds = [
            "linear_attention" if (index + 1) % every else "full_attention"
            for index in range(num_layers)
        ]
        result["layer_types"] = kinds
    elif model_type == "jamba":
        with_experts = [f"blk.{index}.ffn_gate_inp.weight" in shapes for index in range(num_layers)]
        result |= _period(metadata, "attn_layer", attends) | _period(
            metadata, "expert_layer", with_experts
        )
        result["mamba_expand"] = _multiple(metadata, config["hidden_size"])
        if not any(with_experts):
            result["num_experts"] = 1
    elif model_type in ("lfm2", "lfm2_moe", "granitemoehybrid"):
        other = "linear_attention" if model_type == "granitemoehybrid" else "conv"
        result["layer_types"] = ["full_attention" if each else other for each in attends]
    if model_type == "granitemoehybrid":
        result["shared_intermediate_size"] = metadata.count(
            "expert_shared_feed_forward_length", max(widths) or None
        )
        rotates = metadata.get("rope.scaling.finetuned") is True
        if rotates and "partial_rotary_factor" in config:
            raise metadata.fail(
                "rope.dimension_count",
                "is a part of a head, as in Bamba, which is not read from GGUF files yet",
            )
        result["position_embedding_type"] = "rope" if rotates else "nope"
        if config["attention_multiplier"] is None and any(attends):
            result["attention_multiplier"] = config["head_dim"] ** -0.5
    return result


def _multiple(metadata: Metadata, hidden_size: int) -> int:
    inner = metadata.count("ssm.inner_size")
    if inner % hidden_size:
        raise metadata.fail(
            "ssm.inner_size",
            f"is {inner}, which is not a multiple of the embedding length {hidden_size}",
        )
    return inner // hidden_size


def _period(metadata: Metadata, name: str, layers: Sequence[bool]) -> dict[str, int]:
    """Returns which layers are chosen, as Jamba's config says it: every n-th layer, from an
    offset on."""
    chosen = [index for index, each in enumerate(layers) if each]
    offset = chosen[0] if chosen else len(layers)
    period = chosen[1] - offset if len(chosen) > 1 else max(len(layers), offset + 1)
    if [index for index in range(len(layers)) if index % period == offset] != chosen:
        raise metadata.fail(
            "block_count",
            f"is {len(layers)}; of these, {chosen} are {name}s, which are not evenly spaced",
        )
    return {f"{name}_period": period, f"{name}_offset": offset}
