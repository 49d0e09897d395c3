"""Gemma 1–3 (Gemma Team 2024, 2025): the weights of norms are stored minus 1, and embeddings are
scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.layers import Build, read
from pegboard_model_dense.architecture import Architecture, LayerSizes
from pegboard_model_dense.config import (
    BOTH_NORMS,
    common,
    refuse,
    ropes_of_types,
    windows_by_type,
)
from pegboard_model_dense.decoder import Decoder
from pegboard_models.norms import OffsetNorm, each_head


def gemma(config: Mapping[str, Any], **more: Any) -> Architecture:
    activation = read(config, "hidden_activation", str) or "gelu_pytorch_tanh"
    defaults = {"tie_word_embeddings": True, "head_dim": 256, **config}
    model = common(defaults, norm=OffsetNorm, activation=activation, **more)
    bias = bool(read(config, "attention_bias", bool))
    return replace(model, embedding_scale=model.hidden_size**0.5, qkv_bias=bias, out_bias=bias)


class Gemma(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        return gemma(config)


class Gemma2(Decoder):
    """Every second layer has a window. Scores and logits are capped."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"use_bidirectional_attention": False})
        model = gemma(config, names=BOTH_NORMS, **caps(config, 50.0, 30.0))
        window = read(config, "sliding_window", int) or 4096
        layers = windows_by_type(config, model, window, lambda i: i % 2 == 1)
        return replace(model, layers=scaled_layers(config, layers))


class Gemma3(Decoder):
    """Five of six layers have a window and their own rotary embedding. Queries and keys are
    normalized."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        if not build.sees_all:
            refuse(config, {"use_bidirectional_attention": False})
        super().__init__(config, build)

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        model = gemma(
            {"rope_theta": 1_000_000.0, **config},
            names=BOTH_NORMS,
            head_norm=each_head,
            **caps(config, None, None),
        )
        every = read(config, "sliding_window_pattern", int) or 6
        window = read(config, "sliding_window", int) or 4096
        if read(config, "use_bidirectional_attention", bool):
            window //= 2  # to each side
        layers = windows_by_type(config, model, window, lambda i: (i + 1) % every == 0)
        layers = scaled_layers(config, layers)
        local = {"base": read(config, "rope_local_base_freq", float) or 10000.0, "scaling": {}}
        layers = tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in layers)
        return replace(model, layers=layers, ropes=ropes_of_types(config, model, local))


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
    config: Mapping[str, Any], layers: tuple[LayerSizes, ...]
) -> tuple[LayerSizes, ...]:
    scale = (read(config, "query_pre_attn_scalar", float) or 256.0) ** -0.5
    return tuple(replace(layer, scale=scale) for layer in layers)
