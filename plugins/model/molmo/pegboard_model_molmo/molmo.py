"""Molmo (Deitke et al. 2024): a CLIP tower for the crops of an image, attention that makes one row
of 2 × 2 patches, and a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear, size_of
from pegboard_model_molmo.language import Language, width_of
from pegboard_model_molmo.sizes import POOL, TowerSizes
from pegboard_models.parameters import Parameters
from pegboard_models.patch_tower import in_blocks
from pegboard_models.vision import LayerNames, VisionLayer

NAMES = LayerNames(
    norms=("attention_norm", "ffn_norm"),
    attention="attention",
    qkv=("wq", "wk", "wv"),
    out="wo",
    feed_forward="feed_forward",
    linears=("w1", "w2"),
)


class Molmo(Language):
    """The tower is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            sizes = TowerSizes.of(config)
            place = build.at("model.vision_backbone").alone()
            self.tower = Tower(place.at("image_vit"), sizes)
            self.padding = Parameters(place, {"pad_embed": (2, sizes.width)})
            self.pooling = Pooling(place.at("image_pooling_2d"), sizes)
            outer = size_of(config, "hidden_size")
            inner = sizes.vision.hidden_size
            self.projector = Projector(place.at("image_projector"), inner, width_of(config), outer)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [crops, patches, patch · patch · 3]; masks [crops, patches], the
        share of each patch that shows something; places [rows], which blocks of 2 × 2 patches the
        rows are made of, counted over all crops → [rows, hidden] of each."""
        return [self.rows(**item) for item in items]

    def rows(self, pixel_values: Tensor, masks: Tensor, places: Tensor) -> Tensor:
        features = self.tower.forward(pixel_values)
        empty, partial = (
            kind[..., None].to(features.dtype) for kind in (masks == 0, (masks < 1) & (masks != 0))
        )
        padding = self.padding["pad_embed"]
        features = features + padding[0] * empty + padding[1] * partial
        grid = self.tower.grid
        blocks = [in_blocks(crop.unflatten(0, (grid, grid)), POOL) for crop in features]
        chosen = torch.cat(blocks)[places]
        return self.projector.forward(self.pooling.forward(chosen))


class Tower(nn.Module):
    """(patches [crops, patches, patch · patch · 3]) → features [crops, patches, width]. The layers
    after the last one whose states are features are not built."""

    def __init__(self, build: Build, sizes: TowerSizes) -> None:
        super().__init__()
        vision = sizes.vision
        size = vision.hidden_size
        self.grid = vision.grid
        self.depths = sizes.layers
        self.first = Parameters(
            build,
            {
                "patch_embedding.weight": (size, 3 * vision.patch_size**2),
                "class_embedding": (size,),
                "positional_embedding": (vision.num_positions, size),
            },
        )
        self.norm = LayerNorm(build.at("pre_ln"), size, vision.eps)
        layers = build.at("transformer.resblocks")
        self.layers = nn.ModuleList(
            VisionLayer(layers.at(index), vision, NAMES) for index in range(max(self.depths) + 1)
        )

    def forward(self, patches: Tensor) -> Tensor:
        given = self.first
        weight = given["patch_embedding.weight"]
        vectors = functional.linear(patches.to(weight.dtype), weight)
        count = len(vectors)
        first = given["class_embedding"].expand(count, 1, -1)
        hidden = torch.cat([first, vectors], 1) + given["positional_embedding"]
        rows = self.norm(hidden.flatten(0, 1))
        states = []
        for layer in self.layers:
            rows = layer.forward(rows, count)
            states.append(rows)
        features = torch.cat([states[depth] for depth in self.depths], 1)
        return features.unflatten(0, (count, -1))[:, 1:]


class Pooling(nn.Module):
    """(features of blocks [rows, patches of a block, width]) → [rows, size]. The mean of a block
    attends to the block."""

    def __init__(self, build: Build, sizes: TowerSizes) -> None:
        super().__init__()
        size = sizes.vision.hidden_size
        self.num_heads = sizes.vision.num_heads
        self.projections = nn.ModuleList(
            Linear(build.at(name), sizes.width, size, bias=True) for name in ("wq", "wk", "wv")
        )
        self.out = Linear(build.at("wo"), size, size, bias=True)

    def forward(self, blocks: Tensor) -> Tensor:
        count = len(blocks)
        patches = blocks.flatten(0, 1)
        split = [
            project(rows).unflatten(0, (count, -1)).unflatten(2, (self.num_heads, -1))
            for project, rows in zip(
                self.projections, (blocks.mean(1), patches, patches), strict=True
            )
        ]
        query, key, value = (part.transpose(1, 2) for part in split)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        rows: Tensor = self.out(mixed.flatten(1))
        return rows


class Projector(nn.Module):
    """([rows, inner]) → [rows, outer], a SwiGLU."""

    def __init__(self, build: Build, inner: int, width: int, outer: int) -> None:
        super().__init__()
        self.gate = Linear(build.at("w1"), inner, width)
        self.up = Linear(build.at("w3"), inner, width)
        self.down = Linear(build.at("w2"), width, outer)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(rows)) * self.up(rows))
        return out
