"""Families that are like Llama, with experts: MiniMax-M2 (MiniMax 2025), Ling (Ling Team 2025), the
first DeepSeek with experts (Dai et al. 2024), DBRX (Databricks 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from pegboard.errors import ModelError
from pegboard.layers import LayerNorm, RouterRule, read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes, Names
from pegboard_model_dense.config import (
    after_the_first,
    common,
    number_of_experts,
    refuse,
    renamed,
    rule_of,
    with_experts,
)
from pegboard_model_dense.decoder import Decoder
from pegboard_models.norms import all_heads, each_head


class MiniMaxM2(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(
            config, {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}
        )
        base = {"rope_theta": 5_000_000.0, "head_dim": 128, **config}
        share = (read(config, "rotary_dim", int) or size_of(base, "head_dim")) / size_of(
            base, "head_dim"
        )
        experts = ExpertSizes(
            count=number_of_experts(config),
            width=size_of(config, "intermediate_size"),
            rule=rule_of(config, score="sigmoid", renormalize=True),
            router="block_sparse_moe.gate",
            modules="block_sparse_moe.experts",
            names=("w1", "w3", "w2"),
            correction="block_sparse_moe.e_score_correction_bias",
        )
        return with_experts(common(base, partial=share, head_norm=all_heads), experts)


class Bailing(Decoder):
    """Ling. The second version has sigmoid scores, and normalizes queries and keys."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"norm_head": False, "multi_gate": False, "router_type": "topN"})
        bias = bool(read(config, "use_bias", bool))
        names = Names(
            embedding="model.word_embeddings",
            attention="attention",
            qkv=("query_key_value",),
            out="dense",
            q_norm="query_layernorm",
            k_norm="key_layernorm",
        )
        value = config.get("score_function")
        score: Literal["softmax", "sigmoid"] = "sigmoid" if value == "sigmoid" else "softmax"
        if value not in (None, score):
            raise ModelError(
                f"the checkpoint's config has score_function={value!r}; expected softmax or sigmoid"
            )
        model = common(
            config,
            names=names,
            head_norm=each_head if read(config, "use_qk_norm", bool) else None,
            qkv_bias=bias or bool(read(config, "use_qkv_bias", bool)),
            out_bias=bias,
            up_bias=bias,
            down_bias=bias,
        )
        width = size_of(config, "moe_intermediate_size")
        corrects = bool(read(config, "moe_router_enable_expert_bias", bool))
        shared = read(config, "moe_shared_expert_intermediate_size", int) or width
        experts = ExpertSizes(
            count=number_of_experts(config),
            width=width,
            rule=rule_of(config, score=score),
            correction="mlp.gate.expert_bias" if corrects else "",
            shared_width=shared * (read(config, "num_shared_experts", int) or 0),
        )
        return with_experts(model, experts, after_the_first(config))


class DeepSeekMoe(Decoder):
    """The first DeepSeek with experts, which has ordinary attention."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"scoring_func": "softmax"})
        bias = bool(read(config, "attention_bias", bool))
        width = size_of(config, "moe_intermediate_size")
        experts = ExpertSizes(
            count=number_of_experts(config),
            width=width,
            rule=rule_of(config, score="softmax"),
            shared_width=width * (read(config, "n_shared_experts", int) or 0),
        )
        return with_experts(
            common(config, qkv_bias=bias, out_bias=bias), experts, after_the_first(config)
        )


class Dbrx(Decoder):
    """Its experts' matrices are stored below each other."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        attention, blocks = (_section(config, name) for name in ("attn_config", "ffn_config"))
        activation = _section(blocks, "ffn_act_fn")
        standard = renamed(
            config,
            hidden_size="d_model",
            num_hidden_layers="n_layers",
            num_attention_heads="n_heads",
            max_position_embeddings="max_seq_len",
        )
        standard |= {
            "num_key_value_heads": read(attention, "kv_n_heads", int),
            "intermediate_size": read(blocks, "ffn_hidden_size", int),
            "hidden_act": read(activation, "name", str) or "silu",
            "rms_norm_eps": 1e-5,
        }
        if standard.get("rope_parameters") is None:
            standard["rope_theta"] = read(attention, "rope_theta", float) or 10000.0
        norm = blocks.get("moe_normalize_expert_weights", 1)
        refuse({"moe_normalize_expert_weights": norm}, {"moe_normalize_expert_weights": 1})
        names = Names(
            embedding="transformer.wte",
            layers="transformer.blocks",
            norm="transformer.norm_f",
            before_attention="norm_attn_norm.norm_1",
            before_mlp="norm_attn_norm.norm_2",
            attention="norm_attn_norm.attn",
            qkv=("Wqkv",),
            out="out_proj",
        )
        model = common(
            standard,
            names=names,
            norm=partial(LayerNorm, has_bias=False),
            qkv_limit=read(attention, "clip_qkv", float),
        )
        experts = ExpertSizes(
            count=size_of(blocks, "moe_num_experts"),
            width=size_of(blocks, "ffn_hidden_size"),
            rule=RouterRule(size_of(blocks, "moe_top_k"), renormalize=norm is not None),
            router="ffn.router.layer",
            modules="ffn.experts.mlp",
            names=("w1", "v1", "w2"),
        )
        return with_experts(model, experts)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of the config; {} = it has none. Raises ModelError if it is something else."""
    part = config.get(name) or {}
    if not isinstance(part, Mapping):
        raise ModelError(f"the checkpoint's config has {name}={part!r}; expected an object")
    return part
