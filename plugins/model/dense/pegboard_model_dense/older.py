"""Relatives of Llama whose code is in their checkpoints. They are described from their configs and
papers.

Aquila, Xverse, InternLM 1 and 3, MiMo, Pangu Embedded, Fairseq2   other biases or names of tensors
Baichuan         merged projections; the 13B models have position biases, version 2 a normalized
head (Yang et al. 2023) InternLM 2       a merged projection in groups of heads (Cai et al. 2024)
QWen             merged projections under GPT-2's names (Bai et al. 2023)
TeleChat         keys and values are merged per head (Wang et al. 2024)
TeleFLM, MiniCPM factors of µP (Li et al. 2024, Hu et al. 2024)
Solar Pro        inputs of earlier layers are mixed into those of later ones
DeciLM           layers with their own sizes, or without a block (Bercovich et al. 2024)
ChatGLM 2–4      rotates pairs of half of each head (GLM Team 2024)
EXAONE 3         names like GPT-2's (LG AI Research 2024)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.errors import ModelError
from pegboard.layers import read, size_of
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.parts import alibi_slopes
from pegboard_model_dense.traits import (
    LayerTraits,
    Names,
    RopeTraits,
    Traits,
    common,
    refuse,
    renamed,
)


def is_on(config: Mapping[str, Any], *names: str) -> bool:
    """Return whether one of these values is true."""
    return any(read(config, name, bool) for name in names)


class Biased(Decoder):
    """Llama with the biases that the config names: Aquila, Xverse, InternLM 1 and 3, Pangu
    Embedded, MiMo."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        bias = is_on(config, "bias", "attention_bias")
        qkv_bias = bias if read(config, "qkv_bias", bool) is None else is_on(config, "qkv_bias")
        is_mimo = config.get("model_type") == "mimo"
        mlp_bias = is_on(config, "mlp_bias") or (
            config.get("model_type") == "internlm3" and is_on(config, "bias")
        )
        return common(
            config,
            qkv_bias=qkv_bias or is_mimo,
            out_bias=bias and not is_mimo,
            up_bias=mlp_bias,
            down_bias=mlp_bias,
        )


class Fairseq2(Decoder):
    """Llama as fairseq2 names it. Rows of Q and K are in the paper's order, pairs of neighbors."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        names = Names(
            embedding="decoder_frontend.embed",
            layers="decoder.layers",
            norm="decoder.layer_norm",
            head="final_proj",
            before_attention="self_attn_layer_norm",
            before_mlp="ffn_layer_norm",
            out="output_proj",
            mlp="ffn",
            up=("gate_proj", "inner_proj"),
            down="output_proj",
        )
        return common(config, names=names, pairs=True)


class Baichuan(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        traits = common(
            config,
            names=Names(qkv=("W_pack",)),
            normalized_head=size_of(config, "vocab_size") == 125696,
        )
        rotates = traits.hidden_size == 4096 or (
            traits.hidden_size != 5120 and "max_position_embeddings" in config
        )
        return (
            traits if rotates else replace(traits, ropes=(), alibi=alibi_slopes(traits.num_heads))
        )


class InternLM2(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        names = Names(
            embedding="model.tok_embeddings",
            head="output",
            before_attention="attention_norm",
            before_mlp="ffn_norm",
            attention="attention",
            qkv=("wqkv",),
            out="wo",
            mlp="feed_forward",
            up=("w1", "w3"),
            down="w2",
        )
        bias = is_on(config, "bias")
        return common(config, names=names, row_order="groups", qkv_bias=bias, out_bias=bias)


class QWen(Decoder):
    """Scaling by the logarithm of the length and the dynamic base begin beyond `seq_length`, which
    core takes as the limit."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        names = Names(
            embedding="transformer.wte",
            layers="transformer.h",
            norm="transformer.ln_f",
            before_attention="ln_1",
            before_mlp="ln_2",
            attention="attn",
            qkv=("c_attn",),
            out="c_proj",
            up=("w2", "w1"),
            down="c_proj",
        )
        width = size_of(config, "intermediate_size") // 2
        own = renamed(
            config,
            rms_norm_eps="layer_norm_epsilon",
            head_dim="kv_channels",
            rope_theta="rotary_emb_base",
            partial_rotary_factor="rotary_pct",
        )
        refuse(config, {"rotary_pct": 1.0})
        bias = read(config, "no_bias", bool) is False
        return common(
            {**own, "intermediate_size": width},
            names=names,
            qkv_bias=True,
            out_bias=bias,
            up_bias=bias,
            down_bias=bias,
        )


class TeleChat(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        names = Names(
            embedding="transformer.word_embeddings",
            layers="transformer.h",
            norm="transformer.ln_f",
            attention="self_attention",
            qkv=("query", "key_value"),
            out="dense",
        )
        own = renamed(
            config,
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            intermediate_size="ffn_hidden_size",
            rms_norm_eps="layer_norm_epsilon",
            max_position_embeddings="seq_length",
        )
        return common(own, names=names, row_order="kv heads", out_bias=True, down_bias=True)


class TeleFLM(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        traits = common(config)
        if not is_on(config, "use_mup"):
            return traits
        factors = [
            read(config, name, float) or 1.0
            for name in ("input_mult", "output_mult", "mup_scale_factor")
        ]
        return replace(traits, embedding_scale=factors[0], logits_scale=factors[1] / factors[2])


class MiniCPM(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"num_experts": 0})
        traits = common({"tie_word_embeddings": True, **config})
        depth = read(config, "scale_depth", float)
        base = read(config, "dim_model_base", int)
        return replace(
            traits,
            embedding_scale=read(config, "scale_emb", float) or 1.0,
            residual_scale=depth / len(traits.layers) ** 0.5 if depth else 1.0,
            logits_scale=base / traits.hidden_size if base else 1.0,
        )


class Solar(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        traits = common(config)
        skips = list[tuple[int, int, float]]()
        shares: Any = read(config, "bskcn_tv", list) or [1.0]
        if not isinstance(share := shares[-1], int | float):
            raise ModelError(
                f"the checkpoint's config has bskcn_tv={config.get('bskcn_tv')!r}, expected a "
                "list of numbers"
            )
        for start, end in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
            starts: Any = read(config, start, list) or []
            ends: Any = read(config, end, list) or []
            for to in ends:
                before = [
                    at
                    for at in starts
                    if isinstance(at, int) and isinstance(to, int) and 0 <= at <= to
                ]
                if not before:
                    raise ModelError(
                        f"the checkpoint's config has {end}={config[end]!r}, but no earlier layer "
                        f"in {start}"
                    )
                skips.append((max(before), to, float(share)))
        return replace(traits, skips=tuple(skips))


class Deci(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        blocks = config.get("block_configs")
        if not isinstance(blocks, list):
            counts: Any = read(config, "num_key_value_heads_per_layer", list)
            traits = common({**config, "num_key_value_heads": None})
            if (
                not counts
                or len(counts) != len(traits.layers)
                or not all(isinstance(count, int) for count in counts)
            ):
                raise ModelError(
                    "the checkpoint's config has neither block_configs nor "
                    "num_key_value_heads_per_layer for each layer"
                )
            layers = tuple(
                replace(own, num_kv_heads=n) for own, n in zip(traits.layers, counts, strict=True)
            )
            return replace(traits, layers=layers)
        traits = common({"intermediate_size": 0, "num_key_value_heads": None, **config})
        if len(blocks) != len(traits.layers):
            raise ModelError(
                f"block_configs has {len(blocks)} entries for {len(traits.layers)} layers"
            )
        return replace(traits, layers=tuple(deci_layer(block, traits) for block in blocks))


def deci_layer(block: Any, traits: Traits) -> LayerTraits:
    attention, mlp = (
        block.get(name) if isinstance(block, Mapping) else None for name in ("attention", "ffn")
    )
    if not isinstance(attention, Mapping) or not isinstance(mlp, Mapping):
        raise ModelError(f"block_configs has {block!r}; expected an object with attention and ffn")
    refuse(attention, {"replace_with_linear": False})
    refuse(mlp, {"replace_with_linear": False})
    group = read(attention, "n_heads_in_group", int)
    factor = read(mlp, "ffn_mult", float)
    heads = 0 if is_on(attention, "no_op") else traits.num_heads // (group or 1)
    exact = int(2 * (factor or 0) * traits.hidden_size / 3)
    return LayerTraits(heads, 0 if is_on(mlp, "no_op") else -(-exact // 256) * 256)


class ChatGLM(Decoder):
    """ChatGLM 2 and 3, and GLM-4 as its checkpoints with code name it."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
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
        own = renamed(
            config,
            vocab_size="padded_vocab_size",
            num_hidden_layers="num_layers",
            intermediate_size="ffn_hidden_size",
            head_dim="kv_channels",
            rms_norm_eps="layernorm_epsilon",
            max_position_embeddings="seq_length",
        )
        own["vocab_size"] = config.get("padded_vocab_size", own.get("vocab_size"))
        if is_on(config, "multi_query_attention"):
            own["num_key_value_heads"] = size_of(config, "multi_query_group_num")
        bias = is_on(config, "add_bias_linear")
        traits = common(
            own, names=names, qkv_bias=bias or is_on(config, "add_qkv_bias"), out_bias=bias
        )
        base = 10000.0 * (read(config, "rope_ratio", float) or 1.0)
        rope = RopeTraits(base, {}, traits.head_dim // 2, pairs=True)
        return replace(traits, ropes=(rope,), up_bias=bias, down_bias=bias)


class Exaone(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        names = Names(
            embedding="transformer.wte",
            layers="transformer.h",
            norm="transformer.ln_f",
            before_attention="ln_1",
            before_mlp="ln_2",
            attention="attn.attention",
            out="out_proj",
            up=("c_fc_0", "c_fc_1"),
            down="c_proj",
        )
        own = renamed(
            config,
            num_hidden_layers="num_layers",
            rms_norm_eps="layer_norm_epsilon",
            hidden_act="activation_function",
        )
        return common({"rms_norm_eps": 1e-5, **own}, names=names)
