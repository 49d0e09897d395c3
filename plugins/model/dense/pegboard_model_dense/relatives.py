"""Relatives of Llama that differ in little. Many are described from their configs and papers,
because their code is in their checkpoints.

Aquila, Xverse, InternLM 1 and 3, MiMo, Pangu Embedded, Fairseq2, Seed-OSS: biases, names of tensors

Cwm, SmolLM3     windows, layers without rotation
Baichuan         merged projections; the 13B models have position biases, version 2 a normalized
                 head (Yang et al. 2023)
InternLM 2       a merged projection in groups of heads (Cai et al. 2024)
QWen             merged projections under the names of GPT-2 (Bai et al. 2023)
TeleChat         keys and values are merged per head (Wang et al. 2024)
TeleFLM, MiniCPM factors of µP (Li et al. 2024, Hu et al. 2024)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.layers import Build, Head, read, size_of
from pegboard_model_dense.architecture import Architecture, Names
from pegboard_model_dense.config import common, is_on, refuse, renamed, windows_by_type
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.gpt import BLOOM, GPT
from pegboard_model_dense.positions import alibi_slopes
from pegboard_model_dense.rows import GroupedQKV, KeyValueQKV


class Biased(Decoder):
    """Llama with the biases that the config names: Aquila, Xverse, InternLM 1 and 3, Pangu
    Embedded, MiMo."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
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
    def architecture(config: Mapping[str, Any]) -> Architecture:
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


class SeedOss(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        out_bias = bool(read(config, "attention_out_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        qkv_bias = read(config, "attention_bias", bool) is not False
        base = {"head_dim": 128, **config}
        return common(
            base, qkv_bias=qkv_bias, out_bias=out_bias, up_bias=mlp_bias, down_bias=mlp_bias
        )


class Cwm(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        model = common(config)
        window = read(config, "sliding_window", int) or 8192
        return replace(model, layers=windows_by_type(config, model, window, lambda i: i % 4 == 0))


class SmolLM3(Decoder):
    """Every fourth layer does not rotate."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        bias = bool(read(config, "attention_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        base = {"tie_word_embeddings": True, "rope_theta": 2_000_000.0, **config}
        model = common(base, qkv_bias=bias, out_bias=bias, up_bias=mlp_bias, down_bias=mlp_bias)
        every = read(config, "no_rope_layer_interval", int) or 4
        rotates: Any = read(config, "no_rope_layers", list) or [
            (i + 1) % every for i in range(len(model.layers))
        ]
        layers = model.layers
        if len(rotates) < len(layers):
            raise ModelError(f"no_rope_layers has {len(rotates)} entries for {len(layers)} layers")
        if read(config, "use_sliding_window", bool):
            layers = windows_by_type(config, model, read(config, "sliding_window", int))
        pairs = zip(layers, rotates, strict=False)
        return replace(
            model, layers=tuple(replace(layer, rope=0 if on else None) for layer, on in pairs)
        )


class Baichuan(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        model = common(
            config,
            names=Names(qkv=("W_pack",)),
            head=NormalizedHead if size_of(config, "vocab_size") == 125696 else Head,
        )
        rotates = model.hidden_size == 4096 or (
            model.hidden_size != 5120 and "max_position_embeddings" in config
        )
        return model if rotates else replace(model, ropes=(), alibi=alibi_slopes(model.num_heads))


class NormalizedHead(Head):
    """A head whose rows are divided by their lengths when they are loaded (Baichuan 2). It takes no
    adapters, because those would change the lengths."""

    def __init__(self, build: Build, *sizes: int, **more: Any) -> None:
        super().__init__(build.without_adapters(), *sizes, **more)

    def accept(self, piece: WeightPiece) -> None:
        if not isinstance(piece.data, Tensor):
            raise ModelError(
                f"tensor {piece.name} is stored as {piece.stored}; a head that is normalized must "
                "have a plain type"
            )
        super().accept(replace(piece, data=functional.normalize(piece.data.float())))


class InternLM2(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
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
        return common(config, names=names, qkv=GroupedQKV, qkv_bias=bias, out_bias=bias)


class QWen(Decoder):
    """Scaling by the logarithm of the length and the dynamic base begin beyond `seq_length`, which
    core takes as the limit."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        names = replace(GPT, up=("w2", "w1"))
        width = size_of(config, "intermediate_size") // 2
        standard = renamed(
            config,
            rms_norm_eps="layer_norm_epsilon",
            head_dim="kv_channels",
            rope_theta="rotary_emb_base",
            partial_rotary_factor="rotary_pct",
        )
        refuse(config, {"rotary_pct": 1.0})
        bias = read(config, "no_bias", bool) is False
        return common(
            {**standard, "intermediate_size": width},
            names=names,
            qkv_bias=True,
            out_bias=bias,
            up_bias=bias,
            down_bias=bias,
        )


class TeleChat(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        names = replace(
            BLOOM, qkv=("query", "key_value"), up=("gate_proj", "up_proj"), down="down_proj"
        )
        standard = renamed(
            config,
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            intermediate_size="ffn_hidden_size",
            rms_norm_eps="layer_norm_epsilon",
            max_position_embeddings="seq_length",
        )
        return common(standard, names=names, qkv=KeyValueQKV, out_bias=True, down_bias=True)


class TeleFLM(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        model = common(config)
        if not is_on(config, "use_mup"):
            return model
        factors = [
            read(config, name, float) or 1.0
            for name in ("input_mult", "output_mult", "mup_scale_factor")
        ]
        return replace(model, embedding_scale=factors[0], logits_scale=factors[1] / factors[2])


class MiniCPM(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"num_experts": 0})
        model = common({"tie_word_embeddings": True, **config})
        depth = read(config, "scale_depth", float)
        base = read(config, "dim_model_base", int)
        return replace(
            model,
            embedding_scale=read(config, "scale_emb", float) or 1.0,
            residual_scale=depth / len(model.layers) ** 0.5 if depth else 1.0,
            logits_scale=base / model.hidden_size if base else 1.0,
        )
