"""Families that transformers has, too. Built from these layers, they need fewer calls per step and
can be recorded.

Gemma 1–3        the norm's weight is stored minus 1; embeddings are scaled (Gemma Team 2024, 2025)
Phi-3            merged projections, LongRoPE (Abdin et al. 2024)
Granite          four multipliers (IBM 2024)
OLMo 2, OLMo 3   norms of the blocks' results, and of all queries and keys (OLMo Team 2024, 2025)
GLM-4            rotates pairs of half of each head; GLM-4-0414 normalizes the blocks' results, too
Apertus          an activation with learned numbers, without a gate; normalized queries and keys
(Apertus 2025) Ouro             the layers run several times (Zhu et al. 2025)
Cwm, Seed-OSS, SmolLM3, Ernie 4.5, EXAONE 4, Arcee   Llama with other biases, windows, activations
or layers without rotation Hunyuan          queries and keys are normalized after their rotation
(Tencent 2025)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.errors import ModelError, brief
from pegboard.layers import read, size_of
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.traits import (
    LayerTraits,
    Names,
    RopeTraits,
    Traits,
    common,
    refuse,
    renamed,
    types_of_layers,
)

BOTH_NORMS = Names(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

MAX_PASSES = 64
"""Each pass needs as much of the KV cache as a model of its own, so a config with more is a
mistake."""


def windowed(traits: Traits, types: list[str], window: int | None) -> tuple[LayerTraits, ...]:
    """Return the layers with a window, in tokens, for those of type "sliding_attention"."""
    return tuple(
        replace(own, window=window if kind == "sliding_attention" else None)
        for own, kind in zip(traits.layers, types, strict=True)
    )


def ropes_of_types(
    config: Mapping[str, Any], traits: Traits, local: Mapping[str, Any]
) -> tuple[RopeTraits, ...]:
    """Return the rotary embeddings of full and of sliding attention. They are given by type of
    layer (transformers 5), or `local` replaces values of the sliding layers."""
    full = traits.ropes[0]
    given = config.get("rope_parameters")
    if isinstance(given, Mapping) and "full_attention" in given:
        rules = [dict(given.get(kind) or {}) for kind in ("full_attention", "sliding_attention")]
        return tuple(
            replace(full, base=float(rule.pop("rope_theta", 10000.0)), scaling=rule)
            for rule in rules
        )
    return full, replace(full, **local)


def gemma_traits(config: Mapping[str, Any], **more: Any) -> Traits:
    activation = read(config, "hidden_activation", str) or "gelu_pytorch_tanh"
    defaults = {"tie_word_embeddings": True, "head_dim": 256, **config}
    traits = common(defaults, norm="rms+1", activation=activation, **more)
    bias = bool(read(config, "attention_bias", bool))
    return replace(traits, embedding_scale=traits.hidden_size**0.5, qkv_bias=bias, out_bias=bias)


class Gemma(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        return gemma_traits(config)


class Gemma2(Decoder):
    """Every second layer has a window. Scores and logits are capped."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"use_bidirectional_attention": False})
        traits = gemma_traits(config, names=BOTH_NORMS, **caps(config, 50.0, 30.0))
        types = types_of_layers(
            config, ["sliding_attention", "full_attention"] * len(traits.layers)
        )
        return replace(
            traits,
            layers=scaled_layers(
                config, windowed(traits, types, read(config, "sliding_window", int) or 4096)
            ),
        )


class Gemma3(Decoder):
    """Five of six layers have a window and their own rotary embedding. Queries and keys are
    normalized."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"use_bidirectional_attention": False})
        traits = gemma_traits(
            {"rope_theta": 1_000_000.0, **config},
            names=BOTH_NORMS,
            qk_norm="heads",
            **caps(config, None, None),
        )
        every = read(config, "sliding_window_pattern", int) or 6
        default = [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention"
            for i in range(len(traits.layers))
        ]
        types = types_of_layers(config, default)
        layers = scaled_layers(
            config, windowed(traits, types, read(config, "sliding_window", int) or 4096)
        )
        local = {"base": read(config, "rope_local_base_freq", float) or 10000.0, "scaling": {}}
        layers = tuple(replace(own, rope=0 if own.window is None else 1) for own in layers)
        return replace(traits, layers=layers, ropes=ropes_of_types(config, traits, local))


def caps(
    config: Mapping[str, Any], scores: float | None, logits: float | None
) -> dict[str, float | None]:
    """Return the soft caps. scores, logits: if the config does not name them; null means none."""
    names = {
        "soft_cap": ("attn_logit_softcapping", scores),
        "logits_cap": ("final_logit_softcapping", logits),
    }
    return {
        mine: read(config, name, float) if name in config else value
        for mine, (name, value) in names.items()
    }


def scaled_layers(
    config: Mapping[str, Any], layers: tuple[LayerTraits, ...]
) -> tuple[LayerTraits, ...]:
    scale = (read(config, "query_pre_attn_scalar", float) or 256.0) ** -0.5
    return tuple(replace(own, scale=scale) for own in layers)


class Phi3(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        traits = common(
            {"rms_norm_eps": 1e-5, **config}, names=Names(qkv=("qkv_proj",), up=("gate_up_proj",))
        )
        window = read(config, "sliding_window", int)
        return replace(
            traits, layers=windowed(traits, ["sliding_attention"] * len(traits.layers), window)
        )


class Granite(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        bias = bool(read(config, "attention_bias", bool))
        traits = common({"tie_word_embeddings": False, **config}, qkv_bias=bias, out_bias=bias)
        scale = read(config, "attention_multiplier", float)
        mlp_bias = bool(read(config, "mlp_bias", bool))
        return replace(
            traits,
            up_bias=mlp_bias,
            down_bias=mlp_bias,
            layers=tuple(
                replace(own, scale=1.0 if scale is None else scale) for own in traits.layers
            ),
            embedding_scale=read(config, "embedding_multiplier", float) or 1.0,
            residual_scale=read(config, "residual_multiplier", float) or 1.0,
            logits_scale=1 / (read(config, "logits_scaling", float) or 1.0),
        )


class Olmo2(Decoder):
    """Also OLMo 3, three of four layers of which have a window and rotate without scaling."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        bias = bool(read(config, "attention_bias", bool))
        names = Names(
            after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
        )
        traits = common(
            {"rms_norm_eps": 1e-5, **config},
            names=names,
            order="after",
            qk_norm="all",
            qkv_bias=bias,
            out_bias=bias,
        )
        if config.get("model_type") != "olmo3":
            return traits
        default = [
            "full_attention" if (i + 1) % 4 == 0 else "sliding_attention"
            for i in range(len(traits.layers))
        ]
        types = types_of_layers(config, default)
        layers = windowed(traits, types, read(config, "sliding_window", int) or 4096)
        layers = tuple(replace(own, rope=0 if own.window is None else 1) for own in layers)
        return replace(traits, layers=layers, ropes=ropes_of_types(config, traits, {"scaling": {}}))


class Glm(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        names = Names(up=("gate_up_proj",))
        bias = read(config, "attention_bias", bool) is not False
        if config.get("model_type") == "glm4":
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


class Cwm(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        traits = common(config)
        default = [
            "full_attention" if i % 4 == 0 else "sliding_attention"
            for i in range(len(traits.layers))
        ]
        window = read(config, "sliding_window", int) or 8192
        return replace(traits, layers=windowed(traits, types_of_layers(config, default), window))


class SeedOss(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        out_bias = bool(read(config, "attention_out_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        qkv_bias = read(config, "attention_bias", bool) is not False
        base = {"head_dim": 128, **config}
        return common(
            base, qkv_bias=qkv_bias, out_bias=out_bias, up_bias=mlp_bias, down_bias=mlp_bias
        )


class SmolLM3(Decoder):
    """Every fourth layer does not rotate."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        bias = bool(read(config, "attention_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        base = {"tie_word_embeddings": True, "rope_theta": 2_000_000.0, **config}
        traits = common(base, qkv_bias=bias, out_bias=bias, up_bias=mlp_bias, down_bias=mlp_bias)
        every = read(config, "no_rope_layer_interval", int) or 4
        rotates: Any = read(config, "no_rope_layers", list) or [
            (i + 1) % every for i in range(len(traits.layers))
        ]
        layers = traits.layers
        if len(rotates) < len(layers):
            raise ModelError(f"no_rope_layers has {len(rotates)} entries for {len(layers)} layers")
        if read(config, "use_sliding_window", bool):
            layers = windowed(
                traits,
                types_of_layers(config, "full_attention"),
                read(config, "sliding_window", int),
            )
        pairs = zip(layers, rotates, strict=False)
        return replace(
            traits, layers=tuple(replace(own, rope=0 if on else None) for own, on in pairs)
        )


class Ernie(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        bias = bool(read(config, "use_bias", bool))
        base = {
            "tie_word_embeddings": True,
            "rope_theta": 500_000.0,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            **config,
        }
        return common(base, pairs=True, qkv_bias=bias, out_bias=bias, up_bias=bias, down_bias=bias)


class Exaone4(Decoder):
    """Norms of the results. If some layers have a window, the others do not rotate."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        names = Names(
            after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
        )
        traits = common(
            {"rms_norm_eps": 1e-5, **config}, names=names, order="after", qk_norm="heads"
        )
        window = read(config, "sliding_window", int)
        if not window:
            return traits
        # a number, or letters that repeat: L local, G global
        pattern: Any = config.get("sliding_window_pattern") or 4
        letters = (
            pattern
            if isinstance(pattern, str)
            else "L" * (size_of({"pattern": pattern}, "pattern") - 1) + "G"
        )
        default = [
            "full_attention" if letters[i % len(letters)] == "G" else "sliding_attention"
            for i in range(len(traits.layers))
        ]
        layers = windowed(traits, types_of_layers(config, default), window)
        return replace(
            traits,
            layers=tuple(replace(own, rope=None if own.window is None else 0) for own in layers),
        )


class Arcee(Decoder):
    """Squared ReLU without a gate."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        bias = bool(read(config, "attention_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        base = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, **config}
        return common(
            base,
            names=Names(up=("up_proj",)),
            gated=False,
            qkv_bias=bias,
            out_bias=bias,
            up_bias=mlp_bias,
            down_bias=mlp_bias,
        )


class Apertus(Decoder):
    """xIELU without a gate. Queries and keys are normalized."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"mlp_bias": False, "qk_norm": True, "post_norm": False})
        base = {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0, **config}
        if config.get("rope_parameters") is None and "rope_scaling" not in config:
            base["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        names = Names(
            before_attention="attention_layernorm",
            before_mlp="feedforward_layernorm",
            up=("up_proj",),
        )
        bias = bool(read(config, "attention_bias", bool))
        traits = common(
            base, names=names, gated=False, qk_norm="heads", qkv_bias=bias, out_bias=bias
        )
        rows: Any = read(config, "xielu", list)  # of GGUF files; other checkpoints have tensors
        if rows is None:
            return traits
        if len(rows) != len(traits.layers) or not all(_are_numbers(row) for row in rows):
            told = f"the checkpoint's config has xielu={brief(rows)}"
            raise ModelError(
                f"{told}; expected three finite numbers for each of {len(traits.layers)} layers"
            )
        pairs = zip(traits.layers, rows, strict=True)
        return replace(
            traits, layers=tuple(replace(own, xielu=tuple(map(float, row))) for own, row in pairs)
        )


def _are_numbers(row: Any) -> bool:
    is_row = isinstance(row, list) and len(row) == 3
    return is_row and all(isinstance(value, int | float) and math.isfinite(value) for value in row)


class Ouro(Decoder):
    """The layers run several times. The gate with which a token could leave early is not used, as
    in the published configs."""

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"early_exit_step": None, "early_exit_threshold": 1.0})
        names = Names(after_attention="input_layernorm_2", after_mlp="post_attention_layernorm_2")
        passes = read(config, "total_ut_steps", int)
        if passes is not None and not 1 <= passes <= MAX_PASSES:
            raise ModelError(
                f"the checkpoint's config has total_ut_steps={passes}; expected 1 to {MAX_PASSES}"
            )
        traits = common(config, names=names, passes=4 if passes is None else passes)
        window = (
            read(config, "sliding_window", int)
            if read(config, "use_sliding_window", bool)
            else None
        )
        return replace(
            traits, layers=windowed(traits, types_of_layers(config, "full_attention"), window)
        )


class HunYuan(Decoder):
    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        refuse(config, {"use_cla": False})
        base = {"rms_norm_eps": 1e-5, **renamed(config, head_dim="attention_head_dim")}
        bias = bool(read(config, "attention_bias", bool))
        mlp_bias = bool(read(config, "mlp_bias", bool))
        normalizes = read(config, "use_qk_norm", bool) is not False
        names = Names(q_norm="query_layernorm", k_norm="key_layernorm")
        return common(
            base,
            names=names,
            qk_norm="rotated" if normalizes else "",
            qkv_bias=bias,
            out_bias=bias,
            up_bias=mlp_bias,
            down_bias=mlp_bias,
        )
