"""Relatives of GPT-2, with LayerNorm:

GPT-2, BigCode    learned positions; BigCode has one head of keys (Radford et al. 2019, Allal et al.
                  2023)
OPT               learned positions, ReLU (Zhang et al. 2022)
GPT-J             parallel blocks, rotates pairs of a part of each head (Wang & Komatsuzaki 2021)
GPT-NeoX          parallel blocks with two norms (Black et al. 2022)
Persimmon         normalized queries and keys, squared ReLU (Elsen et al. 2023)
StarCoder 2       windows (Lozhkov et al. 2024)
Orion, StableLM   Llama with LayerNorm (OrionStar 2024, Bellagente et al. 2024)
Nemotron, JAIS 2  squared ReLU; Nemotron stores the weights of norms minus 1 (Parmar et al. 2024,
                  Inception 2025)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.layers import LayerNorm, read, size_of
from pegboard_model_dense.architecture import Architecture, Names
from pegboard_model_dense.blocks import Parallel, PlainMLP, pre_norm
from pegboard_model_dense.config import common, refuse, renamed, windowed
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.rows import ArrangedQKV, GroupedQKV
from pegboard_models.norms import OffsetLayerNorm, each_head

BLOOM = Names(
    embedding="transformer.word_embeddings",
    layers="transformer.h",
    norm="transformer.ln_f",
    attention="self_attention",
    qkv=("query_key_value",),
    out="dense",
    up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)
GPT = Names(
    embedding="transformer.wte",
    layers="transformer.h",
    norm="transformer.ln_f",
    before_attention="ln_1",
    before_mlp="ln_2",
    attention="attn",
    qkv=("c_attn",),
    out="c_proj",
    up=("c_fc",),
    down="c_proj",
)


def with_gpt_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with GPT-2's values under the names of Llama's config."""
    standard = renamed(
        config,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
        rms_norm_eps="layer_norm_epsilon",
    )
    width = read(standard, "intermediate_size", int) or 4 * size_of(standard, "hidden_size")
    return {**standard, "intermediate_size": width}


class GPT2(Decoder):
    """Also BigCode (SantaCoder, StarCoder 1), whose matrices are not transposed."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        is_code = config.get("model_type") == "gpt_bigcode"
        refuse(config, {"scale_attn_weights": True, "add_cross_attention": False})
        standard = with_gpt_names(config)
        is_single = is_code and read(config, "multi_query", bool) is not False
        standard |= {
            "tie_word_embeddings": read(config, "tie_word_embeddings", bool) is not False,
            "num_key_value_heads": 1 if is_single else size_of(standard, "num_attention_heads"),
            "hidden_act": read(config, "activation_function", str) or "gelu_new",
        }
        model = common(
            {"rms_norm_eps": 1e-5, **standard},
            names=replace(GPT, positions="transformer.wpe"),
            norm=LayerNorm,
            mlp=PlainMLP,
            transposed=not is_code,
            qkv=GroupedQKV if is_code and not is_single else ArrangedQKV,
            bias=True,
        )
        layers = tuple(replace(each, rope=None) for each in model.layers)
        if read(config, "scale_attn_by_inverse_layer_idx", bool) and not is_code:
            layers = tuple(
                replace(each, scale=model.head_dim**-0.5 / (i + 1)) for i, each in enumerate(layers)
            )
        return replace(model, ropes=(), layers=layers)


class OPT(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        hidden = size_of(config, "hidden_size")
        refuse(
            config,
            {
                "do_layer_norm_before": True,
                "word_embed_proj_dim": hidden,
                "_remove_final_layer_norm": False,
                "layer_norm_elementwise_affine": True,
            },
        )
        standard = {
            "hidden_act": "relu",
            "rms_norm_eps": 1e-5,
            **renamed(config, intermediate_size="ffn_dim", hidden_act="activation_function"),
        }
        standard["tie_word_embeddings"] = read(config, "tie_word_embeddings", bool) is not False
        names = Names(
            embedding="model.decoder.embed_tokens",
            positions="model.decoder.embed_positions",
            layers="model.decoder.layers",
            norm="model.decoder.final_layer_norm",
            before_attention="self_attn_layer_norm",
            before_mlp="final_layer_norm",
            out="out_proj",
            mlp="",
            up=("fc1",),
            down="fc2",
        )
        bias = read(config, "enable_bias", bool) is not False
        model = common(
            standard,
            names=names,
            norm=LayerNorm,
            mlp=PlainMLP,
            first_position=2,
            bias=bias,
        )
        return replace(
            model, ropes=(), layers=tuple(replace(each, rope=None) for each in model.layers)
        )


class GPTJ(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        names = replace(
            GPT,
            before_mlp="",
            qkv=("q_proj", "k_proj", "v_proj"),
            out="out_proj",
            up=("fc_in",),
            down="fc_out",
        )
        standard = with_gpt_names(renamed(config, hidden_act="activation_function"))
        model = common(
            standard,
            names=names,
            norm=LayerNorm,
            mlp=PlainMLP,
            block=Parallel,
            pairs=True,
            up_bias=True,
            down_bias=True,
            head_bias=not read(config, "tie_word_embeddings", bool),
        )
        rotated = read(config, "rotary_dim", int) or model.head_dim
        return replace(model, ropes=(replace(model.ropes[0], dim=rotated),))


class GPTNeoX(Decoder):
    """Also Pythia. Blocks may follow each other."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        standard = {
            "hidden_act": "gelu",
            **renamed(config, partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base"),
        }
        standard["rms_norm_eps"] = read(config, "layer_norm_eps", float) or 1e-5
        names = replace(
            BLOOM,
            embedding="gpt_neox.embed_in",
            layers="gpt_neox.layers",
            norm="gpt_neox.final_layer_norm",
            head="embed_out",
            attention="attention",
        )
        bias = read(config, "attention_bias", bool) is not False
        is_parallel = read(config, "use_parallel_residual", bool) is not False
        return common(
            standard,
            names=names,
            norm=LayerNorm,
            mlp=PlainMLP,
            block=Parallel if is_parallel else pre_norm,
            partial=0.25,
            qkv=GroupedQKV,
            qkv_bias=bias,
            out_bias=bias,
            up_bias=True,
            down_bias=True,
        )


class Persimmon(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        standard = {
            "hidden_act": "relu2",
            **config,
            "rms_norm_eps": read(config, "layer_norm_eps", float) or 1e-5,
        }
        names = Names(
            norm="model.final_layernorm",
            qkv=("query_key_value",),
            out="dense",
            q_norm="q_layernorm",
            k_norm="k_layernorm",
            up=("dense_h_to_4h",),
            down="dense_4h_to_h",
        )
        return common(
            standard,
            names=names,
            norm=LayerNorm,
            mlp=PlainMLP,
            partial=0.5,
            qkv=GroupedQKV,
            bias=True,
            head_norm=None if read(config, "qk_layernorm", bool) is False else each_head,
        )


class Starcoder2(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        bias = read(config, "use_bias", bool) is not False
        standard = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", **config}
        standard["rms_norm_eps"] = read(config, "norm_epsilon", float) or 1e-5
        model = common(
            standard,
            names=Names(up=("c_fc",), down="c_proj"),
            norm=LayerNorm,
            mlp=PlainMLP,
            bias=bias,
        )
        window = read(config, "sliding_window", int)
        return replace(
            model, layers=windowed(model, ["sliding_attention"] * len(model.layers), window)
        )


class Orion(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        bias = bool(read(config, "attention_bias", bool))
        return common(config, norm=LayerNorm, qkv_bias=bias, out_bias=bias)


class StableLM(Decoder):
    """Also StableLMEpoch, which has other names for two values."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"qk_layernorm": False})
        standard = renamed(config, partial_rotary_factor="rope_pct", layer_norm_eps="norm_eps")
        standard["rms_norm_eps"] = read(standard, "layer_norm_eps", float) or 1e-5
        model = common(
            standard,
            norm=LayerNorm,
            partial=0.25,
            qkv_bias=bool(read(config, "use_qkv_bias", bool)),
        )
        if not read(config, "use_parallel_residual", bool):
            return model
        return replace(model, block=Parallel, names=replace(model.names, before_mlp=""))


class Nemotron(Decoder):
    """Also JAIS 2, which has biases and stores norms as they are."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        is_jais = config.get("model_type") == "jais2"
        bias, mlp_bias = (
            read(config, name, bool) or (is_jais and name not in config)
            for name in ("attention_bias", "mlp_bias")
        )
        standard = {"hidden_act": "relu2", **renamed(config, partial_rotary_factor="rope_percent")}
        standard["rms_norm_eps"] = (
            read(config, "layer_norm_eps" if is_jais else "norm_eps", float) or 1e-5
        )
        return common(
            standard,
            names=Names(up=("up_proj",)),
            norm=LayerNorm if is_jais else OffsetLayerNorm,
            mlp=PlainMLP,
            partial=1.0 if is_jais else 0.5,
            qkv_bias=bool(bias),
            out_bias=bool(bias),
            up_bias=bool(mlp_bias),
            down_bias=bool(mlp_bias),
        )
