"""Layers of vision towers that see images and videos of any size, with rotary embeddings of the
line and the column of a patch (Wang et al. 2024, "Qwen2-VL")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear, Norm, QKVLinear
from pegboard_models.patch_sizes import TowerSizes
from pegboard_models.vision import activation_of

Rotation = tuple[Tensor, Tensor]
Runs = Sequence[tuple[int, int]]
"""Parts of an image or a video, below each other: (parts, patches of each)."""


def rotation_of(sizes: TowerSizes, height: int, width: int, order: Tensor) -> Rotation:
    """Return cos and sin for each patch of an image, each [n, 1, channels of a head / 2] float32.
    height, width: in patches. order: of the rows."""
    device = order.device
    lines = torch.arange(height, device=device)[:, None].expand(height, width)
    columns = torch.arange(width, device=device)[None].expand(height, width)
    places = in_blocks(torch.stack([lines, columns], 2), sizes.merge)[order].flatten(0, 1)
    quarter = sizes.width // sizes.num_heads // 4
    exponents = torch.arange(quarter, dtype=torch.float32, device=device) / quarter
    angles = (places[:, :, None] * (1.0 / sizes.theta**exponents)).flatten(1)[:, None]
    return angles.cos(), angles.sin()


def in_blocks(plane: Tensor, merge: int) -> Tensor:
    """Return the vectors of each block of merge · merge patches: [height, width, size] → [blocks,
    merge², size]."""
    cut = plane.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))
    return cut.transpose(1, 2).flatten(0, 1).flatten(1, 2)


class TowerLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, build: Build, sizes: TowerSizes) -> None:
        super().__init__()
        width = sizes.width
        heads = sizes.num_heads
        attention = build.at("attn")
        self.attention_norm = norm_of(build.at("norm1"), sizes)
        self.qkv = QKVLinear(
            attention, width, heads, heads, width // heads, bias=sizes.qkv_bias, names=sizes.qkv
        )
        self.out = Linear(attention.at("proj"), width, width, bias=sizes.bias)
        self.last_norm = norm_of(build.at("norm2"), sizes)
        kind = Gated if sizes.is_gated else TwoLayers
        self.feed_forward = kind(build.at("mlp"), sizes)

    def forward(self, hidden: Tensor, rotation: Rotation, runs: Runs) -> Tensor:
        query, key, value = self.qkv(self.attention_norm(hidden))
        query = rotated(query, rotation)
        key = rotated(key, rotation)
        mixed = attended(query, key, value, runs)
        hidden = hidden + self.out(mixed.flatten(1))
        return hidden + self.feed_forward.forward(self.last_norm(hidden))


def norm_of(build: Build, sizes: TowerSizes) -> Norm:
    """Return a norm of the vectors of patches."""
    kind = Norm if sizes.is_gated else LayerNorm
    return kind(build, sizes.width, sizes.eps)


def rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate [n, heads, channels]."""
    cos, sin = rotation
    first, last = heads.float().chunk(2, -1)
    return torch.cat([first * cos - last * sin, last * cos + first * sin], -1).to(heads.dtype)


def attended(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> Tensor:
    """Return the attention of each part to itself: [n, heads, channels] → the same."""
    mixed = []
    sizes = [count * length for count, length in runs]
    split = [part.split(sizes) for part in (query, key, value)]
    for (count, _), *parts in zip(runs, *split, strict=True):
        batch = [part.unflatten(0, (count, -1)).transpose(1, 2) for part in parts]
        mixed.append(functional.scaled_dot_product_attention(*batch).transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed)


class TwoLayers(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, build: Build, sizes: TowerSizes) -> None:
        super().__init__()
        first, last = sizes.names
        self.up = Linear(build.at(first), sizes.width, sizes.inner, bias=sizes.bias)
        self.down = Linear(build.at(last), sizes.inner, sizes.width, bias=sizes.bias)
        self.activation = activation_of(sizes.activation)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.down(self.activation(self.up(x)))
        return rows


class Gated(nn.Module):
    """down(activation(gate(x)) · up(x))."""

    def __init__(self, build: Build, sizes: TowerSizes) -> None:
        super().__init__()
        self.gate = Linear(build.at("gate_proj"), sizes.width, sizes.inner, bias=sizes.bias)
        self.up = Linear(build.at("up_proj"), sizes.width, sizes.inner, bias=sizes.bias)
        self.down = Linear(build.at("down_proj"), sizes.inner, sizes.width, bias=sizes.bias)
        self.activation = activation_of(sizes.activation)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return rows
