"""GLM (GLM Team 2024, 2025): pairs of half of each head are rotated. ChatGLM 2–4, GLM-4, GLM-4.5
with experts in groups; dots.llm1 is like the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.errors import ModelError
from pegboard.layers import read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes, Names, Rotary
from pegboard_model_dense.config import (
    after_the_first,
    common,
    is_on,
    number_of_experts,
    refuse,
    renamed,
    rule_of,
    windows_by_type,
    with_experts,
)
from pegboard_model_dense.decoder import Decoder
from pegboard_models.norms import each_head


class Glm(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        names = Names(up=("gate_up_proj",))
        bias = read(config, "attention_bias", bool) is not False
        if config.get("model_type") in ("glm4", "glm4v_text"):
            names = replace(
                names, after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"
            )
        return common(
            {"head_dim": 128, "rms_norm_eps": 1.5625e-07, **config},
            names=names,
            partial=0.5,
            pairs=True,
            qkv_bias=bias,
        )


class ChatGLM(Decoder):
    """ChatGLM 2 and 3, and GLM-4 as its checkpoints with code name it."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        if "position_encoding_2d" in config:
            raise ModelError(
                "this is the first ChatGLM, which has other layers than its successors; it is not "
                "supported"
            )
        refuse(
            config,
            {
                "apply_residual_connection_post_layernorm": False,
                "rmsnorm": True,
                "post_layer_norm": True,
            },
        )
        names = Names(
            embedding="transformer.embedding.word_embeddings",
            layers="transformer.encoder.layers",
            norm="transformer.encoder.final_layernorm",
            head="transformer.output_layer",
            attention="self_attention",
            qkv=("query_key_value",),
            out="dense",
            up=("dense_h_to_4h",),
            down="dense_4h_to_h",
        )
        standard = renamed(
            config,
            vocab_size="padded_vocab_size",
            num_hidden_layers="num_layers",
            intermediate_size="ffn_hidden_size",
            head_dim="kv_channels",
            rms_norm_eps="layernorm_epsilon",
            max_position_embeddings="seq_length",
        )
        standard["vocab_size"] = config.get("padded_vocab_size", standard.get("vocab_size"))
        if is_on(config, "multi_query_attention"):
            standard["num_key_value_heads"] = size_of(config, "multi_query_group_num")
        bias = is_on(config, "add_bias_linear")
        model = common(
            standard, names=names, qkv_bias=bias or is_on(config, "add_qkv_bias"), out_bias=bias
        )
        base = 10000.0 * (read(config, "rope_ratio", float) or 1.0)
        pairs = read(config, "original_rope", bool) is not False
        rope = Rotary(base, {}, model.head_dim // 2, pairs=pairs)
        return replace(model, ropes=(rope,), up_bias=bias, down_bias=bias)


class Glm4Moe(Decoder):
    """Also dots.llm1, with normalized queries and keys, and windows on some layers."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        is_dots = config.get("model_type") == "dots1"
        bias = bool(read(config, "attention_bias", bool))
        normalizes = is_dots or bool(read(config, "use_qk_norm", bool))
        base = {"rms_norm_eps": 1e-6 if is_dots else 1e-5, **config}
        model = common(
            base,
            partial=1.0 if is_dots else 0.5,
            head_norm=each_head if normalizes else None,
            qkv_bias=bias,
            out_bias=bias and is_dots,
        )
        window = read(config, "sliding_window", int)
        if is_dots and window and read(config, "use_sliding_window", bool) is not False:
            first = read(config, "max_window_layers", int) or 0
            model = replace(
                model, layers=windows_by_type(config, model, window, lambda i: i < first)
            )
        width = size_of(config, "moe_intermediate_size")
        experts = ExpertSizes(
            count=number_of_experts(config),
            width=width,
            rule=rule_of(config, score="sigmoid"),
            correction="mlp.gate.e_score_correction_bias",
            shared_width=width * (read(config, "n_shared_experts", int) or 0),
        )
        return with_experts(model, experts, after_the_first(config))
