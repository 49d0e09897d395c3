"""The resampler of MiniCPM-V: learned queries read the patches of a slice."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear
from pegboard_model_minicpmv.sizes import heads_of
from pegboard_models.parameters import Parameters

EPS = 1e-6


class Resampler(nn.Module):
    """(features [patches, inner], the patches below and beside each other) → [queries, width]."""

    def __init__(self, build: Build, inner: int, width: int, queries: int) -> None:
        super().__init__()
        self.width = width
        self.num_heads = heads_of(width)
        self.given = Parameters(build, {"query": (queries, width), "proj": (width, width)})
        attention = build.at("attn")
        self.mixing = Parameters(
            attention, {"in_proj_weight": (3 * width, width), "in_proj_bias": (3 * width,)}
        )
        self.out = Linear(attention.at("out_proj"), width, width, bias=True)
        self.keys = None if inner == width else Linear(build.at("kv_proj"), inner, width)
        self.query_norm = LayerNorm(build.at("ln_q"), width, EPS)
        self.key_norm = LayerNorm(build.at("ln_kv"), width, EPS)
        self.last_norm = LayerNorm(build.at("ln_post"), width, EPS)

    def forward(self, features: Tensor, lines: int, columns: int) -> Tensor:
        query = self.query_norm(self.given["query"])
        value = self.key_norm(features if self.keys is None else self.keys(features))
        key = value + positions(lines, columns, self.width, value.device).to(value.dtype)
        weights = self.mixing["in_proj_weight"].chunk(3)
        biases = self.mixing["in_proj_bias"].chunk(3)
        split = [
            functional.linear(part, weight, bias).unflatten(1, (self.num_heads, -1)).transpose(0, 1)
            for part, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]
        mixed = functional.scaled_dot_product_attention(*(part[None] for part in split))[0]
        read = self.last_norm(self.out(mixed.transpose(0, 1).flatten(1)))
        return read @ self.given["proj"]


def positions(lines: int, columns: int, width: int, device: torch.device) -> Tensor:
    """Return the positions of patches line by line, float32 [lines · columns, width]: the sines and
    the cosines of the column, and then those of the line."""
    quarter = width // 4
    exponents = torch.arange(quarter, dtype=torch.float32, device=device) / quarter
    frequencies = 1.0 / 10000.0**exponents

    def waves(count: int) -> Tensor:
        places = torch.arange(count, dtype=torch.float32, device=device)
        angles = places[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], 1)

    of_columns = waves(columns)[None].expand(lines, -1, -1)
    of_lines = waves(lines)[:, None].expand(-1, columns, -1)
    return torch.cat([of_columns, of_lines], 2).flatten(0, 1)
