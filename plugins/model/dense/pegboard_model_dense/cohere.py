"""Cohere (2024, 2025): parallel blocks, scaled logits; the second version has windows and layers
without rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pegboard.interfaces.weight_loader import WantedWeight
from pegboard.layers import Build, LayerNorm, Norm, read
from pegboard.layers.build import PlainTensor
from pegboard_model_dense.architecture import Architecture, Names
from pegboard_model_dense.blocks import Parallel
from pegboard_model_dense.config import common, windows_by_type
from pegboard_model_dense.decoder import Decoder
from pegboard_models.norms import Heads


class HeadsNorm(Norm):
    """(x [T, heads, D]) → each head divided by its deviation from its mean, and multiplied with a
    weight of its own [heads, D] (Cohere)."""

    def __init__(self, build: Build, heads: Heads, head_dim: int, eps: float) -> None:
        super().__init__(build, head_dim, eps)
        self.heads = heads

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        name = f"{self.build.path}.weight"
        start, stop = self.heads.held
        count = stop - start
        self.weight = PlainTensor(
            {name: (0, count)}, (count, self.size), self.build, sources={name: ((start, stop),)}
        )
        return [WantedWeight(name, (self.heads.count, self.size))]

    def bind(self) -> None:
        factors = self.weight.data.flatten()
        eps = self.eps
        layer_norm = self.build.kernels["layer_norm"]
        ones = torch.ones(self.size, dtype=factors.dtype, device=factors.device)

        def forward(x: Tensor) -> Tensor:
            return (layer_norm(x, ones, None, eps).flatten(1) * factors).view(x.shape)

        self.forward = forward


def own_weights(
    build: Build, heads: Heads, head_dim: int, norm: Callable[..., Norm], eps: float
) -> Norm:
    """Return a norm of each head, which has weights of its own."""
    return HeadsNorm(build, heads, head_dim, eps)


class Cohere(Decoder):
    """Also Command R7B and A, most layers of which have a window. Only these layers rotate."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        is_second = config.get("model_type") == "cohere2"
        bias = bool(read(config, "attention_bias", bool))
        standard = {
            "tie_word_embeddings": True,
            **config,
            "rms_norm_eps": read(config, "layer_norm_eps", float) or 1e-5,
        }
        scale = read(config, "logit_scale", float)
        model = common(
            standard,
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
            layers=tuple(
                replace(layer, rope=None if layer.window is None else 0) for layer in layers
            ),
        )
