"""The vision tower of GLM-4V (GLM-V Team 2025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear
from pegboard_model_glm4v.sizes import Glm4vSizes
from pegboard_models.parameters import Parameters
from pegboard_models.patch_tower import TowerLayer, in_blocks, norm_of, rotation_of
from pegboard_models.vision import activation_of


class Tower(nn.Module):
    """(patches [n, 3 · frames · patch · patch], how many of them are behind, below and beside each
    other) → rows [n / merge², outer]. The patches of a row are below each other. Those of different
    times do not attend to each other."""

    def __init__(self, build: Build, given: Glm4vSizes) -> None:
        super().__init__()
        build = build.alone()
        sizes = given.tower
        self.sizes = sizes
        self.side = given.side
        width = sizes.width
        shape = (width, 3, sizes.frames, sizes.patch, sizes.patch)
        self.patches = Parameters(
            build.at("patch_embed").at("proj"), {"weight": shape, "bias": (width,)}
        )
        self.places = Parameters(
            build.at("embeddings").at("position_embedding"), {"weight": (given.side**2, width)}
        )
        self.first_norm = norm_of(build.at("post_conv_layernorm"), sizes)
        blocks = build.at("blocks")
        self.layers = nn.ModuleList(
            TowerLayer(blocks.at(index), sizes) for index in range(sizes.depth)
        )
        self.last_norm = norm_of(build.at("post_layernorm"), sizes)
        block = (sizes.outer, width, sizes.merge, sizes.merge)
        self.merged = Parameters(build.at("downsample"), {"weight": block, "bias": block[:1]})
        self.merger = Merger(build.at("merger"), given)

    def forward(self, pixels: Tensor, count: int, height: int, width: int) -> Tensor:
        weight = self.patches["weight"].flatten(1)
        patches = functional.linear(pixels.to(weight.dtype), weight, self.patches["bias"])
        hidden = self.first_norm(patches)
        hidden = hidden + self.positions(height, width).repeat(count, 1).to(hidden.dtype)
        order = torch.arange(height * width // self.sizes.merge**2, device=pixels.device)
        cos, sin = rotation_of(self.sizes, height, width, order)
        rotation = cos.repeat(count, 1, 1), sin.repeat(count, 1, 1)
        for layer in self.layers:
            hidden = layer.forward(hidden, rotation, [(count, height * width)])
        blocks = self.last_norm(hidden).unflatten(0, (-1, self.sizes.merge**2))
        weight = self.merged["weight"].flatten(1)
        rows = functional.linear(blocks.transpose(1, 2).flatten(1), weight, self.merged["bias"])
        return self.merger.forward(rows)

    def positions(self, height: int, width: int) -> Tensor:
        """Return the learned positions of the patches of an image, [patches, width] float32,
        between those of the table."""
        table = self.places["weight"].float().T.unflatten(1, (self.side, self.side))
        plane = functional.interpolate(table[None], (height, width), mode="bicubic")
        return in_blocks(plane[0].permute(1, 2, 0), self.sizes.merge).flatten(0, 1)


class Merger(nn.Module):
    """[n, outer] → the same."""

    def __init__(self, build: Build, sizes: Glm4vSizes) -> None:
        super().__init__()
        outer = sizes.tower.outer
        self.first = Linear(build.at("proj"), outer, outer)
        self.norm = LayerNorm(build.at("post_projection_norm"), outer, 1e-5)
        self.gate = Linear(build.at("gate_proj"), outer, sizes.inner)
        self.up = Linear(build.at("up_proj"), outer, sizes.inner)
        self.down = Linear(build.at("down_proj"), sizes.inner, outer)
        self.activation = activation_of(sizes.tower.activation)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = functional.gelu(self.norm(self.first(rows)))
        merged: Tensor = self.down(self.activation(self.gate(hidden)) * self.up(hidden))
        return merged
