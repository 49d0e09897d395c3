"""Factors of the queries of late tokens (Nakanishi 2025, "Scalable-Softmax"), as Llama 4 and later
models of Mistral have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Build, Layer, Rotation, read
from pegboard_models.blocks import SelfAttention
from pegboard_models.rope import rope_parameters


class Lateness(Layer):
    """positions [T] → the factors of queries, float32 [T, 1], or None if no position of this engine
    needs one. The factor of position p is 1 + strength · log(1 + floor((p + shift) / step)).

    tuning: (step in positions, strength). length: how many positions the model may have.
    """

    def __init__(
        self, build: Build, tuning: tuple[int, float], length: int, *, shift: int = 0
    ) -> None:
        super().__init__(build)
        self.step, self.strength = tuning
        self.shift = shift
        last = build.max_positions
        self.length = length if last is None else min(length, last)

    def bind(self) -> None:
        if self.length - 1 + self.shift < self.step:
            self.forward = lambda positions: None
            return
        places = torch.arange(self.shift, self.length + self.shift)
        periods = (places // self.step).unsqueeze(1)
        factors = (1 + self.strength * torch.log1p(periods)).to(self.build.device)
        self.forward = lambda positions: factors[positions]


class LateAttention(SelfAttention):
    """Attention that multiplies queries by the factors of a step [T, 1]. None = all are 1."""

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, factors: Tensor | None = None
    ) -> Tensor:
        if factors is None:
            return super().forward(hidden, rotation)
        q, k, v = self.qkv_proj(hidden)
        out: Tensor = self.o_proj(self.attention(late(q, factors), k, v, rotation))
        return out


def late(q: Tensor, factors: Tensor | None) -> Tensor:
    """Return queries [T, H, D] times the factors of their tokens."""
    return q if factors is None else (q.flatten(1) * factors).to(q.dtype).view(q.shape)


def tuning_of(config: Mapping[str, Any]) -> tuple[int, float] | None:
    """Return (step, strength) of Mistral's models: from `llama_4_scaling`, as in params.json, or
    from the rotary parameters, as in Hugging Face layout. None = queries have no factors. Raises
    ModelError for a step that is not positive."""
    rule = config.get("llama_4_scaling")
    name = "beta"
    if not isinstance(rule, Mapping):
        _, rule = rope_parameters(config)
        name = "llama_4_scaling_beta"
    strength = read(rule, name, float)
    if not strength:
        return None
    step = read(rule, "original_max_position_embeddings", int) or 0
    if step < 1:
        raise ModelError(
            f"the checkpoint's config has {name}={strength}, which changes queries every "
            f"original_max_position_embeddings={step} positions; expected a positive number"
        )
    return step, strength
