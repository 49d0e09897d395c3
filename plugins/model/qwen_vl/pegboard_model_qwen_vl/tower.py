"""The vision towers of Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai et al. 2025): images and
videos of any size, with rotary embeddings of the line and the column of a patch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear, Norm, QKVLinear
from pegboard_model_qwen_vl.sizes import TowerSizes
from pegboard_models.parameters import Parameters
from pegboard_models.vision import activation_of

EPS = 1e-6
Rotation = tuple[Tensor, Tensor]
Runs = Sequence[tuple[int, int]]
"""Parts of an image or a video, below each other: (parts, patches of each)."""


class Tower(nn.Module):
    """(patches [n, 3 · frames · patch · patch], how many of them are behind, below and beside each
    other) → rows [n / merge², outer]. The patches of a row are below each other. Those of different
    times do not attend to each other."""

    def __init__(self, build: Build, sizes: TowerSizes) -> None:
        super().__init__()
        build = build.alone()
        self.sizes = sizes
        shape = (sizes.width, 3, sizes.frames, sizes.patch, sizes.patch)
        self.patches = Parameters(build.at("patch_embed").at("proj"), {"weight": shape})
        blocks = build.at("blocks")
        self.layers = nn.ModuleList(
            TowerLayer(blocks.at(index), sizes) for index in range(sizes.depth)
        )
        merger = build.at("merger")
        self.group = sizes.merge**2
        inner = sizes.width * self.group
        self.norm = norm_of(merger.at("ln_q"), sizes)
        self.first = Linear(merger.at("mlp").at(0), inner, inner, bias=True)
        self.last = Linear(merger.at("mlp").at(2), inner, sizes.outer, bias=True)

    def forward(self, pixels: Tensor, count: int, height: int, width: int) -> Tensor:
        weight = self.patches["weight"].flatten(1)
        merge = self.sizes.merge
        order, lengths = ordered(height // merge, width // merge, self.sizes.window)
        windows = [(parts, rows * self.group) for parts, rows in lengths] * count
        order = order.to(pixels.device)
        cos, sin = rotation_of(self.sizes, height, width, order)
        rotation = cos.repeat(count, 1, 1), sin.repeat(count, 1, 1)
        order = repeated(order, count)
        pixels = pixels.unflatten(0, (-1, self.group))[order].flatten(0, 1)
        hidden = functional.linear(pixels.to(weight.dtype), weight)
        frames = [(count, height * width)]
        whole = self.sizes.whole
        for index, layer in enumerate(self.layers):
            runs = frames if whole is None or index in whole else windows
            hidden = layer.forward(hidden, rotation, runs)
        grouped = self.norm(hidden).view(len(order), -1)
        rows: Tensor = self.last(functional.gelu(self.first(grouped)))
        return torch.empty_like(rows).index_copy_(0, order, rows)


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


def ordered(height: int, width: int, window: int) -> tuple[Tensor, Runs]:
    """Return the order in which the rows of an image are computed, and its windows in this order.
    Windows of the same size are below each other. height, width: of the image, in rows. window: of
    a side; 0 = the image is one. The lengths of windows are in rows."""
    places = torch.arange(height * width).view(height, width)
    side = window or max(height, width)
    windows = [part.flatten() for line in places.split(side) for part in line.split(side, 1)]
    windows.sort(key=len)
    counts: dict[int, int] = {}
    for each in windows:
        counts[len(each)] = counts.get(len(each), 0) + 1
    return torch.cat(windows), [(count, size) for size, count in counts.items()]


def repeated(order: Tensor, count: int) -> Tensor:
    """Return the order of `count` images of the same size that are below each other."""
    starts = torch.arange(count, device=order.device) * len(order)
    return (starts[:, None] + order).flatten()


class TowerLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, build: Build, sizes: TowerSizes) -> None:
        super().__init__()
        width = sizes.width
        heads = sizes.num_heads
        attention = build.at("attn")
        self.attention_norm = norm_of(build.at("norm1"), sizes)
        self.qkv = QKVLinear(
            attention, width, heads, heads, width // heads, bias=True, names=("qkv",)
        )
        self.out = Linear(attention.at("proj"), width, width, bias=True)
        self.last_norm = norm_of(build.at("norm2"), sizes)
        kind = TwoLayers if sizes.whole is None else Gated
        self.feed_forward = kind(build.at("mlp"), sizes)

    def forward(self, hidden: Tensor, rotation: Rotation, runs: Runs) -> Tensor:
        query, key, value = self.qkv(self.attention_norm(hidden))
        query = rotated(query, rotation)
        key = rotated(key, rotation)
        mixed = attended(query, key, value, runs)
        hidden = hidden + self.out(mixed.flatten(1))
        return hidden + self.feed_forward.forward(self.last_norm(hidden))


def norm_of(build: Build, sizes: TowerSizes) -> Norm:
    """Return a norm: without a mean and a bias in Qwen2.5-VL, and with them in others."""
    kind = LayerNorm if sizes.whole is None else Norm
    return kind(build, sizes.width, EPS)


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
        self.up = Linear(build.at(first), sizes.width, sizes.inner, bias=True)
        self.down = Linear(build.at(last), sizes.inner, sizes.width, bias=True)
        self.activation = activation_of(sizes.activation)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.down(self.activation(self.up(x)))
        return rows


class Gated(nn.Module):
    """down(activation(gate(x)) · up(x))."""

    def __init__(self, build: Build, sizes: TowerSizes) -> None:
        super().__init__()
        self.gate = Linear(build.at("gate_proj"), sizes.width, sizes.inner, bias=True)
        self.up = Linear(build.at("up_proj"), sizes.width, sizes.inner, bias=True)
        self.down = Linear(build.at("down_proj"), sizes.inner, sizes.width, bias=True)
        self.activation = activation_of(sizes.activation)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return rows
