"""Models with position biases: Bloom (Le Scao et al. 2022), MPT (MosaicML 2023), JAIS (Sengupta et
al. 2023), and Falcon, which has parallel blocks, and usually rotary embeddings (Almazrouei et al.
2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pegboard.layers import LayerNorm, read, size_of
from pegboard_model_dense.architecture import Architecture
from pegboard_model_dense.blocks import Parallel, PlainMLP, pre_norm
from pegboard_model_dense.config import common, refuse, renamed
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.gpt import BLOOM, GPT, with_gpt_names
from pegboard_model_dense.positions import alibi_slopes
from pegboard_model_dense.rows import ArrangedQKV, GroupedQKV


class Bloom(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"apply_residual_connection_post_layernorm": False})
        standard = renamed(
            config,
            hidden_size="n_embed",
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            rms_norm_eps="layer_norm_epsilon",
            max_position_embeddings="seq_length",
        )
        standard |= {
            "intermediate_size": 4 * size_of(standard, "hidden_size"),
            "tie_word_embeddings": read(config, "tie_word_embeddings", bool) is not False,
            "hidden_act": "gelu_new",
        }
        names = replace(BLOOM, embedding_norm="transformer.word_embeddings_layernorm")
        model = common(
            {"rms_norm_eps": 1e-5, **standard},
            names=names,
            norm=LayerNorm,
            mlp=PlainMLP,
            qkv=GroupedQKV,
            bias=True,
        )
        return replace(model, ropes=(), alibi=alibi_slopes(model.num_heads))


class Falcon(Decoder):
    """Also under its first name, RW. Position biases are added before scores are scaled, so the
    slopes are scaled, too."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        standard = renamed(
            config, num_hidden_layers="n_layer", num_attention_heads="n_head", hidden_size="n_embed"
        )
        heads = size_of(standard, "num_attention_heads")
        hidden = size_of(standard, "hidden_size")
        kv_heads = read(config, "num_kv_heads", int) or read(config, "n_head_kv", int)
        is_new = read(config, "new_decoder_architecture", bool)
        is_new = "n_head_kv" in config if is_new is None else is_new
        is_single = not is_new and read(config, "multi_query", bool) is not False
        standard |= {
            "num_key_value_heads": (kv_heads or heads) if is_new else 1 if is_single else heads,
            "intermediate_size": read(config, "ffn_hidden_size", int) or 4 * hidden,
            "rms_norm_eps": read(config, "layer_norm_epsilon", float) or 1e-5,
            "tie_word_embeddings": read(config, "tie_word_embeddings", bool) is not False,
            "hidden_act": read(config, "activation", str) or "gelu",
        }
        has_bias = bool(read(config, "bias", bool))
        names = BLOOM
        is_parallel = is_new or read(config, "parallel_attn", bool) is not False
        if is_new and (read(config, "num_ln_in_parallel_attn", int) or 2) == 2:
            names = replace(names, before_attention="ln_attn", before_mlp="ln_mlp")
        elif is_parallel:
            names = replace(names, before_mlp="")
        model = common(
            standard,
            names=names,
            norm=LayerNorm,
            mlp=PlainMLP,
            block=Parallel if is_parallel else pre_norm,
            qkv=ArrangedQKV if is_single else GroupedQKV,
            bias=has_bias,
        )
        if not read(config, "alibi", bool):
            return model
        slopes = tuple(slope * model.head_dim**-0.5 for slope in alibi_slopes(heads))
        return replace(model, ropes=(), alibi=slopes)


class MPT(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        attention = config.get("attn_config") or {}
        attention = attention if isinstance(attention, Mapping) else {}
        refuse(config, {"no_bias": True, "logit_scale": None, "embedding_fraction": 1.0})
        refuse(attention, {"qk_ln": False, "prefix_lm": False, "alibi": True})
        standard = renamed(
            config,
            hidden_size="d_model",
            num_hidden_layers="n_layers",
            num_attention_heads="n_heads",
            max_position_embeddings="max_seq_len",
        )
        standard |= {
            "intermediate_size": (read(config, "expansion_ratio", int) or 4)
            * size_of(standard, "hidden_size"),
            "num_key_value_heads": read(attention, "kv_n_heads", int),
            "tie_word_embeddings": read(config, "tie_word_embeddings", bool) is not False,
            "rms_norm_eps": read(config, "layer_norm_epsilon", float) or 1e-5,
            "hidden_act": "gelu",
        }
        names = replace(
            GPT,
            layers="transformer.blocks",
            norm="transformer.norm_f",
            before_attention="norm_1",
            before_mlp="norm_2",
            qkv=("Wqkv",),
            out="out_proj",
            mlp="ffn",
            up=("up_proj",),
            down="down_proj",
        )
        limit = read(attention, "clip_qkv", float)
        model = common(
            standard,
            names=names,
            norm=partial(LayerNorm, has_bias=False),
            mlp=PlainMLP,
            qkv_limit=limit,
        )
        slopes = alibi_slopes(model.num_heads, read(attention, "alibi_bias_max", float) or 8.0)
        scale = read(attention, "softmax_scale", float)
        return replace(
            model,
            ropes=(),
            alibi=slopes,
            layers=tuple(replace(layer, scale=scale) for layer in model.layers),
        )


class Jais(Decoder):
    """SwiGLU, position biases, and the factors of µP: of the embedding, of the logits and of
    scores."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(
            config,
            {
                "position_embedding_type": "alibi",
                "activation_function": "swiglu",
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
            },
        )
        standard = with_gpt_names(config)
        standard["tie_word_embeddings"] = read(config, "tie_word_embeddings", bool) is not False
        names = replace(GPT, up=("c_fc2", "c_fc"))
        model = common(
            {"rms_norm_eps": 1e-5, **standard},
            names=names,
            norm=LayerNorm,
            transposed=True,
            bias=True,
        )
        power = 1.0 if read(config, "mup_scale_qk_dot_by_d", bool) else 0.5
        return replace(
            model,
            ropes=(),
            alibi=alibi_slopes(model.num_heads),
            layers=tuple(replace(layer, scale=model.head_dim**-power) for layer in model.layers),
            embedding_scale=read(config, "mup_embeddings_scale", float) or 1.0,
            logits_scale=(read(config, "mup_output_alpha", float) or 1.0)
            * (read(config, "mup_width_scale", float) or 1.0),
        )
