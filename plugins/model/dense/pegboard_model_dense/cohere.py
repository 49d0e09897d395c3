"""Cohere (2024, 2025): parallel blocks, scaled logits; the second version has windows and layers
without rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pegboard.layers import LayerNorm, read
from pegboard_model_dense.architecture import Architecture, Names
from pegboard_model_dense.blocks import Parallel
from pegboard_model_dense.config import common, windows_by_type
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.norms import own_weights


class Cohere(Decoder):
    """Also Command R7B and A, most layers of which have a window. Only these layers rotate."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        is_second = config.get("model_type") == "cohere2"
        bias = bool(read(config, "attention_bias", bool))
        own = {
            "tie_word_embeddings": True,
            **config,
            "rms_norm_eps": read(config, "layer_norm_eps", float) or 1e-5,
        }
        scale = read(config, "logit_scale", float)
        model = common(
            own,
            names=Names(before_mlp=""),
            norm=partial(LayerNorm, has_bias=False),
            block=Parallel,
            pairs=True,
            qkv_bias=bias,
            out_bias=bias,
            head_norm=own_weights if read(config, "use_qk_norm", bool) and not is_second else None,
            logits_scale=0.0625 if scale is None else scale,
        )
        if not is_second:
            return model
        every = read(config, "sliding_window_pattern", int) or 4
        window = read(config, "sliding_window", int) or 4096
        layers = windows_by_type(config, model, window, lambda i: (i + 1) % every == 0)
        return replace(
            model,
            layers=tuple(replace(own, rope=None if own.window is None else 0) for own in layers),
        )
