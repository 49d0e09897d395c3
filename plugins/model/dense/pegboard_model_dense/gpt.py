"""Decoders with LayerNorm.

Orion, StableLM   Llama with LayerNorm (OrionStar 2024, Bellagente et al. 2024)
Falcon (RW)       parallel blocks, one or few heads of keys (Almazrouei et al. 2023)
GPT-J             parallel blocks, rotates pairs of a part of each head (Wang & Komatsuzaki 2021)
Phi-1, Phi-2      parallel blocks, biases everywhere, also in the head (Li et al. 2023)
StarCoder 2       windows (Lozhkov et al. 2024)
Nemotron, JAIS 2  squared ReLU; Nemotron stores the weights of norms minus 1 (Parmar et al. 2024,
Inception 2025) Cohere            parallel blocks, scaled logits; the second version has windows and
layers without rotation (Cohere 2024, 2025) OLMo 1            norms without weights (Groeneveld et
al. 2024) GPT-NeoX          parallel blocks with two norms (Black et al. 2022)
Persimmon         normalized queries and keys, squared ReLU (Elsen et al. 2023)
GPT-2, BigCode    learned positions; BigCode has one head of keys (Radford et al. 2019, Allal et al.
2023) OPT               learned positions, ReLU (Zhang et al. 2022)
MPT, Bloom, JAIS  position biases (MosaicML 2023, Le Scao et al. 2022, Sengupta et al. 2023)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.layers import read, size_of
from pegboard_model_dense.current import windowed
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.parts import alibi_slopes
from pegboard_model_dense.traits import Names, Traits, common, refuse, renamed, types_of_layers

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


class Orion(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        bias = bool(read(config, "attention_bias", bool))
        return common(config, norm="layer", qkv_bias=bias, out_bias=bias)


class StableLM(Decoder):
    """Also StableLMEpoch, which has other names for two values."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"qk_layernorm": False})
        own = renamed(config, partial_rotary_factor="rope_pct", layer_norm_eps="norm_eps")
        own["rms_norm_eps"] = read(own, "layer_norm_eps", float) or 1e-5
        traits = common(
            own, norm="layer", partial=0.25, qkv_bias=bool(read(config, "use_qkv_bias", bool))
        )
        if not read(config, "use_parallel_residual", bool):
            return traits
        return replace(traits, order="parallel", names=replace(traits.names, before_mlp=""))


class Falcon(Decoder):
    """Also under its first name, RW. Position biases are added before scores are scaled, so the
    slopes are scaled, too."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        own = renamed(
            config, num_hidden_layers="n_layer", num_attention_heads="n_head", hidden_size="n_embed"
        )
        heads = size_of(own, "num_attention_heads")
        hidden = size_of(own, "hidden_size")
        kv_heads = read(config, "num_kv_heads", int) or read(config, "n_head_kv", int)
        is_new = read(config, "new_decoder_architecture", bool)
        is_new = "n_head_kv" in config if is_new is None else is_new
        is_single = not is_new and read(config, "multi_query", bool) is not False
        own |= {
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
        traits = common(
            own,
            names=names,
            norm="layer",
            gated=False,
            order="parallel" if is_parallel else "before",
            row_order="parts" if is_single else "groups",
            qkv_bias=has_bias,
            out_bias=has_bias,
            up_bias=has_bias,
            down_bias=has_bias,
        )
        if not read(config, "alibi", bool):
            return traits
        slopes = tuple(slope * traits.head_dim**-0.5 for slope in alibi_slopes(heads))
        return replace(traits, ropes=(), alibi=slopes)


class GPTJ(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        names = replace(
            GPT,
            before_mlp="",
            qkv=("q_proj", "k_proj", "v_proj"),
            out="out_proj",
            up=("fc_in",),
            down="fc_out",
        )
        own = renamed(
            config,
            hidden_size="n_embd",
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            intermediate_size="n_inner",
            max_position_embeddings="n_positions",
            hidden_act="activation_function",
            rms_norm_eps="layer_norm_epsilon",
        )
        own["intermediate_size"] = read(own, "intermediate_size", int) or 4 * size_of(
            own, "hidden_size"
        )
        traits = common(
            own,
            names=names,
            norm="layer",
            gated=False,
            order="parallel",
            pairs=True,
            up_bias=True,
            down_bias=True,
            head_bias=not read(config, "tie_word_embeddings", bool),
        )
        rotated = read(config, "rotary_dim", int) or traits.head_dim
        return replace(traits, ropes=(replace(traits.ropes[0], dim=rotated),))


class Phi(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        names = Names(
            norm="model.final_layernorm",
            before_mlp="",
            out="dense",
            q_norm="q_layernorm",
            k_norm="k_layernorm",
            up=("fc1",),
            down="fc2",
        )
        own = {
            "rms_norm_eps": read(config, "layer_norm_eps", float) or 1e-5,
            "hidden_act": "gelu_new",
            **config,
        }
        return common(
            own,
            names=names,
            norm="layer",
            gated=False,
            order="parallel",
            partial=0.5,
            qkv_bias=True,
            out_bias=True,
            up_bias=True,
            down_bias=True,
            head_bias=not read(config, "tie_word_embeddings", bool),
            qk_norm="heads" if read(config, "qk_layernorm", bool) else "",
        )


class Starcoder2(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        bias = read(config, "use_bias", bool) is not False
        own = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", **config}
        own["rms_norm_eps"] = read(config, "norm_epsilon", float) or 1e-5
        traits = common(
            own,
            names=Names(up=("c_fc",), down="c_proj"),
            norm="layer",
            gated=False,
            qkv_bias=bias,
            out_bias=bias,
            up_bias=bias,
            down_bias=bias,
        )
        window = read(config, "sliding_window", int)
        return replace(
            traits, layers=windowed(traits, ["sliding_attention"] * len(traits.layers), window)
        )


class Nemotron(Decoder):
    """Also JAIS 2, which has biases and stores norms as they are."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        is_jais = config.get("model_type") == "jais2"
        bias, mlp_bias = (
            read(config, name, bool) or (is_jais and name not in config)
            for name in ("attention_bias", "mlp_bias")
        )
        own = {"hidden_act": "relu2", **renamed(config, partial_rotary_factor="rope_percent")}
        own["rms_norm_eps"] = (
            read(config, "layer_norm_eps" if is_jais else "norm_eps", float) or 1e-5
        )
        return common(
            own,
            names=Names(up=("up_proj",)),
            norm="layer" if is_jais else "layer+1",
            gated=False,
            partial=1.0 if is_jais else 0.5,
            qkv_bias=bool(bias),
            out_bias=bool(bias),
            up_bias=bool(mlp_bias),
            down_bias=bool(mlp_bias),
        )


class Cohere(Decoder):
    """Also Command R7B and A, most layers of which have a window. Only these layers rotate."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        is_second = config.get("model_type") == "cohere2"
        bias = bool(read(config, "attention_bias", bool))
        own = {
            "tie_word_embeddings": True,
            **config,
            "rms_norm_eps": read(config, "layer_norm_eps", float) or 1e-5,
        }
        scale = read(config, "logit_scale", float)
        traits = common(
            own,
            names=Names(before_mlp=""),
            norm="layer, no bias",
            order="parallel",
            pairs=True,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="own" if read(config, "use_qk_norm", bool) and not is_second else "",
            logits_scale=0.0625 if scale is None else scale,
        )
        if not is_second:
            return traits
        every = read(config, "sliding_window_pattern", int) or 4
        default = [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention"
            for i in range(len(traits.layers))
        ]
        types = types_of_layers(config, default)
        window = read(config, "sliding_window", int) or 4096
        layers = windowed(traits, types, window)
        return replace(
            traits,
            layers=tuple(replace(own, rope=None if own.window is None else 0) for own in layers),
        )


class Olmo(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        bias = bool(read(config, "attention_bias", bool))
        limit = read(config, "clip_qkv", float)
        own = {**config, "rms_norm_eps": 1e-5}
        return common(own, norm="layer, no weight", qkv_bias=bias, out_bias=bias, qkv_limit=limit)


class MPT(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        attention = config.get("attn_config") or {}
        attention = attention if isinstance(attention, Mapping) else {}
        refuse(config, {"no_bias": True, "logit_scale": None, "embedding_fraction": 1.0})
        refuse(attention, {"qk_ln": False, "prefix_lm": False, "alibi": True})
        own = renamed(
            config,
            hidden_size="d_model",
            num_hidden_layers="n_layers",
            num_attention_heads="n_heads",
            max_position_embeddings="max_seq_len",
        )
        own |= {
            "intermediate_size": (read(config, "expansion_ratio", int) or 4)
            * size_of(own, "hidden_size"),
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
        traits = common(own, names=names, norm="layer, no bias", gated=False, qkv_limit=limit)
        slopes = alibi_slopes(traits.num_heads, read(attention, "alibi_bias_max", float) or 8.0)
        scale = read(attention, "softmax_scale", float)
        return replace(
            traits,
            ropes=(),
            alibi=slopes,
            layers=tuple(replace(own, scale=scale) for own in traits.layers),
        )


class Bloom(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"apply_residual_connection_post_layernorm": False})
        own = renamed(
            config,
            hidden_size="n_embed",
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            rms_norm_eps="layer_norm_epsilon",
            max_position_embeddings="seq_length",
        )
        own |= {
            "intermediate_size": 4 * size_of(own, "hidden_size"),
            "tie_word_embeddings": read(config, "tie_word_embeddings", bool) is not False,
            "hidden_act": "gelu_new",
        }
        names = replace(BLOOM, embedding_norm="transformer.word_embeddings_layernorm")
        traits = common(
            {"rms_norm_eps": 1e-5, **own},
            names=names,
            norm="layer",
            gated=False,
            row_order="groups",
            qkv_bias=True,
            out_bias=True,
            up_bias=True,
            down_bias=True,
        )
        return replace(traits, ropes=(), alibi=alibi_slopes(traits.num_heads))


class Jais(Decoder):
    """SwiGLU, position biases, and the factors of µP: of the embedding, of the logits and of
    scores."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(
            config,
            {
                "position_embedding_type": "alibi",
                "activation_function": "swiglu",
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
            },
        )
        own = renamed(
            config,
            hidden_size="n_embd",
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            intermediate_size="n_inner",
            max_position_embeddings="n_positions",
            rms_norm_eps="layer_norm_epsilon",
        )
        own["intermediate_size"] = read(own, "intermediate_size", int) or 4 * size_of(
            own, "hidden_size"
        )
        own["tie_word_embeddings"] = read(config, "tie_word_embeddings", bool) is not False
        names = replace(GPT, up=("c_fc2", "c_fc"))
        traits = common(
            {"rms_norm_eps": 1e-5, **own},
            names=names,
            norm="layer",
            transposed=True,
            qkv_bias=True,
            out_bias=True,
            up_bias=True,
            down_bias=True,
        )
        power = 1.0 if read(config, "mup_scale_qk_dot_by_d", bool) else 0.5
        return replace(
            traits,
            ropes=(),
            alibi=alibi_slopes(traits.num_heads),
            layers=tuple(replace(own, scale=traits.head_dim**-power) for own in traits.layers),
            embedding_scale=read(config, "mup_embeddings_scale", float) or 1.0,
            logits_scale=(read(config, "mup_output_alpha", float) or 1.0)
            * (read(config, "mup_width_scale", float) or 1.0),
        )


class GPTNeoX(Decoder):
    """Also Pythia. Blocks may follow each other."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        own = {
            "hidden_act": "gelu",
            **renamed(config, partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base"),
        }
        own["rms_norm_eps"] = read(config, "layer_norm_eps", float) or 1e-5
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
            own,
            names=names,
            norm="layer",
            gated=False,
            order="parallel" if is_parallel else "before",
            partial=0.25,
            row_order="groups",
            qkv_bias=bias,
            out_bias=bias,
            up_bias=True,
            down_bias=True,
        )


class Persimmon(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        own = {
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
            own,
            names=names,
            norm="layer",
            gated=False,
            partial=0.5,
            row_order="groups",
            qkv_bias=True,
            out_bias=True,
            up_bias=True,
            down_bias=True,
            qk_norm="" if read(config, "qk_layernorm", bool) is False else "heads",
        )


class GPT2(Decoder):
    """Also BigCode (SantaCoder, StarCoder 1), whose matrices are not transposed."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        is_code = config.get("model_type") == "gpt_bigcode"
        refuse(config, {"scale_attn_weights": True, "add_cross_attention": False})
        own = renamed(
            config,
            hidden_size="n_embd",
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            intermediate_size="n_inner",
            max_position_embeddings="n_positions",
            rms_norm_eps="layer_norm_epsilon",
        )
        own["intermediate_size"] = read(own, "intermediate_size", int) or 4 * size_of(
            own, "hidden_size"
        )
        is_single = is_code and read(config, "multi_query", bool) is not False
        own |= {
            "tie_word_embeddings": read(config, "tie_word_embeddings", bool) is not False,
            "num_key_value_heads": 1 if is_single else size_of(own, "num_attention_heads"),
            "hidden_act": read(config, "activation_function", str) or "gelu_new",
        }
        traits = common(
            {"rms_norm_eps": 1e-5, **own},
            names=replace(GPT, positions="transformer.wpe"),
            norm="layer",
            gated=False,
            transposed=not is_code,
            row_order="groups" if is_code and not is_single else "parts",
            qkv_bias=True,
            out_bias=True,
            up_bias=True,
            down_bias=True,
        )
        layers = tuple(replace(each, rope=None) for each in traits.layers)
        if read(config, "scale_attn_by_inverse_layer_idx", bool) and not is_code:
            layers = tuple(
                replace(each, scale=traits.head_dim**-0.5 / (i + 1))
                for i, each in enumerate(layers)
            )
        return replace(traits, ropes=(), layers=layers)


class OPT(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
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
        own = {
            "hidden_act": "relu",
            "rms_norm_eps": 1e-5,
            **renamed(config, intermediate_size="ffn_dim", hidden_act="activation_function"),
        }
        own["tie_word_embeddings"] = read(config, "tie_word_embeddings", bool) is not False
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
        traits = common(
            own,
            names=names,
            norm="layer",
            gated=False,
            first_position=2,
            qkv_bias=bias,
            out_bias=bias,
            up_bias=bias,
            down_bias=bias,
        )
        return replace(
            traits, ropes=(), layers=tuple(replace(each, rope=None) for each in traits.layers)
        )
