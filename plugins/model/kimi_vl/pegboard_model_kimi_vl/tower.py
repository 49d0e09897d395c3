"""MoonViT: a vision tower for images of any size (Kimi Team 2025, "Kimi-VL")."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear, QKVLinear
from pegboard_model_kimi_vl.sizes import MoonViTSizes
from pegboard_models.parameters import Parameters
from pegboard_models.patch_tower import Rotation, attended, in_blocks

EPS = 1e-5
THETA = 10_000.0


class MoonViT(nn.Module):
    """(patches [n, 3, patch, patch], how many of them are below and beside each other) → features
    [rows, merge², width]."""

    def __init__(self, build: Build, sizes: MoonViTSizes) -> None:
        super().__init__()
        build = build.alone()
        self.sizes = sizes
        shapes: dict[str, tuple[int, ...]] = {
            "proj.weight": (sizes.width, 3, sizes.patch, sizes.patch),
            "proj.bias": (sizes.width,),
            "pos_emb.weight": (*sizes.grid, sizes.width),
        }
        self.patches = Parameters(build.at("patch_embed"), shapes)
        encoder = build.at("encoder")
        self.layers = nn.ModuleList(
            MoonViTLayer(encoder.at("blocks").at(index), sizes) for index in range(sizes.depth)
        )
        self.norm = LayerNorm(encoder.at("final_layernorm"), sizes.width, EPS)

    def forward(self, pixels: Tensor, height: int, width: int) -> Tensor:
        given = self.patches
        weight = given["proj.weight"].flatten(1)
        hidden = functional.linear(pixels.flatten(1).to(weight.dtype), weight, given["proj.bias"])
        positions = resampled(given["pos_emb.weight"], height, width)
        hidden = hidden + positions.to(hidden.dtype)
        channels = self.sizes.width // self.sizes.num_heads
        rotation = rotation_of(height, width, channels, hidden.device)
        for layer in self.layers:
            hidden = layer.forward(hidden, rotation)
        plane = self.norm(hidden).unflatten(0, (height, width))
        return in_blocks(plane, self.sizes.merge)


def resampled(table: Tensor, height: int, width: int) -> Tensor:
    """Return a position for each patch, [height · width, size], of a learned table [lines, columns,
    size], by bicubic interpolation. Of a table of the same size, it is the table."""
    if table.shape[:2] == (height, width):
        return table.flatten(0, 1)
    plane = table.float().permute(2, 0, 1)[None]
    larger = functional.interpolate(plane, size=(height, width), mode="bicubic")
    return larger[0].permute(1, 2, 0).flatten(0, 1)


def rotation_of(height: int, width: int, channels: int, device: torch.device) -> Rotation:
    """Return cos and sin for each patch, each [patches, 1, channels / 2] float32. The angles of the
    column and of the line take turns. channels: of a head."""
    quarter = channels // 4
    exponents = torch.arange(quarter, dtype=torch.float32, device=device) / quarter
    frequencies = 1.0 / THETA**exponents
    lines = torch.arange(height, dtype=torch.float32, device=device)[:, None].expand(-1, width)
    columns = torch.arange(width, dtype=torch.float32, device=device).expand(height, -1)
    places = torch.stack([columns, lines], 2).flatten(0, 1)
    angles = (places[:, None] * frequencies[:, None]).flatten(1)[:, None]
    return angles.cos(), angles.sin()


def rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate [n, heads, channels]. A pair is two channels beside each other."""
    cos, sin = rotation
    first, last = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([first * cos - last * sin, last * cos + first * sin], -1)
    return pairs.flatten(-2).to(heads.dtype)


class MoonViTLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). Patches of an image attend to all of
    it."""

    def __init__(self, build: Build, sizes: MoonViTSizes) -> None:
        super().__init__()
        width = sizes.width
        heads = sizes.num_heads
        self.attention_norm = LayerNorm(build.at("norm0"), width, EPS)
        self.qkv = QKVLinear(build, width, heads, heads, width // heads, bias=True, names=("wqkv",))
        self.out = Linear(build.at("wo"), width, width, bias=True)
        self.last_norm = LayerNorm(build.at("norm1"), width, EPS)
        self.up = Linear(build.at("mlp").at("fc0"), width, sizes.inner, bias=True)
        self.down = Linear(build.at("mlp").at("fc1"), sizes.inner, width, bias=True)
        self.activation = partial(functional.gelu, approximate="tanh")

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        query, key, value = self.qkv(self.attention_norm(hidden))
        runs = [(1, len(hidden))]
        mixed = attended(rotated(query, rotation), rotated(key, rotation), value, runs)
        hidden = hidden + self.out(mixed.flatten(1))
        return hidden + self.down(self.activation(self.up(self.last_norm(hidden))))
