"""EXAONE. 3: names like those of GPT-2 (LG AI Research 2024). 4: norms of the results of blocks,
windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.layers import read, size_of
from pegboard_model_dense.architecture import Architecture, Names
from pegboard_model_dense.blocks import PostNorm
from pegboard_model_dense.config import common, renamed, windows_by_type
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.gpt import GPT
from pegboard_models.norms import each_head


class Exaone(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        names = replace(
            GPT,
            attention="attn.attention",
            qkv=("q_proj", "k_proj", "v_proj"),
            out="out_proj",
            up=("c_fc_0", "c_fc_1"),
        )
        standard = renamed(
            config,
            num_hidden_layers="num_layers",
            rms_norm_eps="layer_norm_epsilon",
            hidden_act="activation_function",
        )
        return common({"rms_norm_eps": 1e-5, **standard}, names=names)


class Exaone4(Decoder):
    """Norms of the results. If some layers have a window, the others do not rotate."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        names = Names(
            after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
        )
        model = common(
            {"rms_norm_eps": 1e-5, **config}, names=names, block=PostNorm, head_norm=each_head
        )
        window = read(config, "sliding_window", int)
        if not window:
            return model
        # a number, or letters that repeat: L local, G global
        pattern: Any = config.get("sliding_window_pattern") or 4
        letters = (
            pattern
            if isinstance(pattern, str)
            else "L" * (size_of({"pattern": pattern}, "pattern") - 1) + "G"
        )
        layers = windows_by_type(config, model, window, lambda i: letters[i % len(letters)] == "G")
        return replace(
            model,
            layers=tuple(
                replace(layer, rope=None if layer.window is None else 0) for layer in layers
            ),
        )
