"""PLaMo 3 (Preferred Networks 2025): a norm before and after each block, windows on most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pegboard.errors import ModelError
from pegboard.layers import read
from pegboard_model_dense.architecture import Architecture, Names, Rotary
from pegboard_model_dense.config import common, refuse, windows_by_type
from pegboard_model_dense.decoder import Decoder
from pegboard_models.norms import OffsetNorm, each_head


class Plamo3(Decoder):
    """Every n-th layer attends to everything, with YaRN if the context was extended. The others
    have a window and a rotary embedding of their own. The checkpoint stores the weights of norms
    minus 1, and those after a block minus 1/5 and 5^-1.5."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"scale_embedding": False, "linear_type": "normal"})
        names = Names(
            layers="model.layers.layers",
            attention="mixer",
            qkv=("qkv_proj",),
            up=("gate_up_proj",),
            before_attention="pre_mixer_norm",
            after_attention="post_mixer_norm",
            before_mlp="pre_mlp_norm",
            after_mlp="post_mlp_norm",
        )
        plain = {
            name: value
            for name, value in config.items()
            if name not in ("rope_parameters", "rope_scaling")
        }
        base = {
            "tie_word_embeddings": True,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            **plain,
            "hidden_act": "silu",
        }
        model = common(
            base,
            names=names,
            norm=OffsetNorm,
            head_norm=each_head,
            after_norms=(partial(OffsetNorm, offset=1 / 5), partial(OffsetNorm, offset=5**-1.5)),
        )
        every = read(config, "sliding_window_pattern", int) or 8
        layers = windows_by_type(config, model, _window(config), lambda i: (i + 1) % every == 0)
        layers = tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in layers)
        return replace(model, layers=layers, ropes=_ropes(config, model.head_dim))


def _window(config: Mapping[str, Any]) -> int:
    """Return the window of the layers that have one. Old configs have a list with one entry for
    each layer."""
    value = config.get("sliding_window")
    if isinstance(value, list):
        windows = {window for window in value if window is not None}
        if len(windows) > 1:
            raise ModelError(
                f"the checkpoint's config has sliding_window={value}; this architecture has "
                "windows of one length"
            )
        config = {"window_size": next(iter(windows), None)}
    return read(config, "sliding_window", int) or read(config, "window_size", int) or 128


def _ropes(config: Mapping[str, Any], head_dim: int) -> tuple[Rotary, Rotary]:
    """Return the rotary embeddings of layers without and with a window."""
    base = (
        read(config, "rope_theta", float) or read(config, "rope_global_theta", float) or 150_000.0
    )
    factor = read(config, "rope_scaling_factor", float) or 1.0
    scaling = {}
    if factor != 1.0:
        original = read(config, "initial_context_length", int)
        if not original:
            raise ModelError(
                f"the checkpoint's config has rope_scaling_factor={factor} without "
                "initial_context_length"
            )
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "truncate": False,
        }
    local = read(config, "rope_local_theta", float) or 10_000.0
    return Rotary(base, scaling, head_dim), Rotary(local, {}, head_dim)
