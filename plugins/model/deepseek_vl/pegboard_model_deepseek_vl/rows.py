"""Rows of views of an image: the projector, and lines that end with a vector of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, Linear
from pegboard_model_deepseek_vl.sizes import ProjectorSizes
from pegboard_models.parameters import Parameters

NEWLINE = "image_newline"
SEPARATOR = "view_seperator"
"""The checkpoints write it so."""


class Projector(nn.Module):
    """Features [views, patches, in] of square views → rows [views, rows, out]."""

    def __init__(self, build: Build, sizes: ProjectorSizes) -> None:
        super().__init__()
        self.ratio = sizes.ratio
        layers = build.at("layers")
        places = (
            [layers] if sizes.is_linear else [layers.at(2 * i) for i in range(len(sizes.widths))]
        )
        widths = [sizes.input_dim * sizes.ratio**2, *sizes.widths]
        self.layers = nn.ModuleList(
            Linear(place, widths[i], widths[i + 1], bias=True) for i, place in enumerate(places)
        )

    def forward(self, features: Tensor) -> Tensor:
        blocks = merged(features, self.ratio)
        rows = blocks.flatten(0, 1)
        for index, layer in enumerate(self.layers):
            rows = layer(functional.gelu(rows) if index else rows)
        return rows.unflatten(0, blocks.shape[:2])


def merged(features: Tensor, ratio: int) -> Tensor:
    """Make one vector of the patches of each block of ratio · ratio patches: [views, patches, size]
    → [views, blocks, size · ratio²]. A channel's values in the block are beside each other. Blocks
    that go over the edge have zeros there."""
    side = math.isqrt(features.shape[1])
    missing = -side % ratio
    plane = features.unflatten(1, (side, side))
    whole = functional.pad(plane, (0, 0, 0, missing, 0, missing))
    cut = whole.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio))
    return cut.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)


class Lines(nn.Module):
    """The order of an image's rows. The vectors of an end of a line, and of what is between the
    views, are learned."""

    def __init__(self, build: Build, width: int) -> None:
        super().__init__()
        self.vectors = Parameters(build, {NEWLINE: (width,), SEPARATOR: (width,)})

    def of(self, views: Tensor, below: int = 1, beside: int = 1) -> Tensor:
        """Return the lines of tiles as rows: [below · beside, rows, width] → [rows, width]."""
        side = math.isqrt(views.shape[1])
        tiles = views.unflatten(1, (side, side)).unflatten(0, (below, beside))
        plane = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        ends = self.vectors[NEWLINE].expand(len(plane), 1, -1)
        return torch.cat([plane, ends], 1).flatten(0, 1)

    @property
    def separator(self) -> Tensor:
        """The row between views, [1, width]."""
        return self.vectors[SEPARATOR][None]
