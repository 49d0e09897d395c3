"""Aria (Li et al. 2024): a SigLIP tower for images of any shape, queries that read its features,
and a language model with experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear, size_of
from pegboard_model_aria.sizes import queries_of, sizes_of
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.parameters import Parameters
from pegboard_models.spread import spread_places
from pegboard_models.spread_tower import SpreadTower
from pegboard_models.vision_sizes import Selection, VisionSizes

EPS = 1e-5


class Aria(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision({"vision_feature_layer": -1, **config}, root_of(build).alone())

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes = sizes_of(config)
        selection = Selection.of(config, sizes, "full")
        self.tower = Tower(build.at("vision_tower"), sizes, selection.depths[0])
        width = size_of(text_config(config), "hidden_size")
        self.projector = Projector(
            build.at("multi_modal_projector"), sizes, queries_of(config), width
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [tiles, 3, size, size], and patches [tiles, 2], how many of them have
        something of the image, below and beside each other → [rows, hidden] of each."""
        return [
            torch.cat(
                [
                    self.projector.forward(
                        self.tower.features(tile, *shown), self.tower.count(tile)
                    )
                    for tile, shown in zip(
                        item["pixel_values"], item["patches"].tolist(), strict=True
                    )
                ]
            )
            for item in items
        ]


class Tower(SpreadTower):
    """Sees the part of a tile that has something of the image."""

    def __init__(self, build: Build, sizes: VisionSizes, depth: int) -> None:
        super().__init__(build, sizes, depth)
        self.sizes = sizes

    def count(self, tile: Tensor) -> int:
        """Return the patches of a tile, with those that are not seen."""
        return int((tile.shape[1] // self.sizes.patch_size) ** 2)

    def features(self, tile: Tensor, height: int, width: int) -> Tensor:
        """Return the features [patches, hidden] of a tile [3, size, size]. height, width: the
        patches below and beside each other that are seen."""
        patch = self.sizes.patch_size
        seen = tile[:, : height * patch, : width * patch]
        cut = functional.unfold(seen[None], patch, stride=patch)[0].T
        return self.forward(cut, spread_places(height, width, self.sizes.grid, seen))


class Projector(nn.Module):
    """(features [patches, hidden] of a tile, its patches with those that are not seen) → [rows,
    outer]. queries: the rows of a tile with some number of patches."""

    def __init__(
        self, build: Build, sizes: VisionSizes, queries: Mapping[int, int], outer: int
    ) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.num_heads = sizes.num_heads
        self.queries = queries
        self.query = Parameters(build, {"query": (max(queries.values()), size)})
        reading = build.at("cross_attn")
        self.query_norm = LayerNorm(reading.at("layer_norm"), size, EPS)
        self.feature_norm = LayerNorm(reading.at("layer_norm_kv"), size, EPS)
        self.first = nn.ModuleList(
            Linear(reading.at(f"{name}_proj"), size, size) for name in ("q", "k", "v")
        )
        inner = reading.at("multihead_attn")
        self.second = Parameters(
            inner, {"in_proj_weight": (3 * size, size), "in_proj_bias": (3 * size,)}
        )
        self.out = Linear(inner.at("out_proj"), size, size, bias=True)
        self.linear = Linear(reading.at("linear"), size, size, bias=True)
        self.last_norm = LayerNorm(build.at("layer_norm"), size, EPS)
        feed = build.at("feed_forward")
        self.up = Linear(feed.at("linear_in"), size, outer)
        self.down = Linear(feed.at("linear_out"), outer, outer)

    def forward(self, features: Tensor, num_patches: int) -> Tensor:
        query = self.query_norm(self.query["query"][: self.queries[num_patches]])
        key = self.feature_norm(features)
        parts = [each(rows) for each, rows in zip(self.first, (query, key, key), strict=True)]
        weights = self.second["in_proj_weight"].chunk(3)
        biases = self.second["in_proj_bias"].chunk(3)
        split = [
            functional.linear(part, weight, bias).unflatten(1, (self.num_heads, -1)).transpose(0, 1)
            for part, weight, bias in zip(parts, weights, biases, strict=True)
        ]
        mixed = functional.scaled_dot_product_attention(*(part[None] for part in split))[0]
        read = self.linear(self.out(mixed.transpose(0, 1).flatten(1)))
        hidden = self.up(self.last_norm(read))
        rows: Tensor = self.down(functional.gelu(hidden, approximate="tanh"))
        return rows
