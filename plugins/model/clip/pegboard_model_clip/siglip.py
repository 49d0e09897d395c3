"""SigLIP (Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training"): vectors of texts and
of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear
from pegboard_model_clip.sizes import (
    SIGLIP_KIND,
    SIGLIP_TEXT,
    TextSizes,
    check_siglip,
    vision_sizes,
)
from pegboard_model_clip.texts import TextModel
from pegboard_models.parameters import Parameters
from pegboard_models.vision import VisionTower, activation_of
from pegboard_models.vision_sizes import Selection, VisionSizes


class Siglip(TextModel):
    """All tokens of a padded text attend to each other, and the last one has its vector."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        check_siglip(config)
        vision = vision_sizes(config, SIGLIP_KIND)
        size = vision.hidden_size
        whole = replace(build, sees_items=True)
        super().__init__("SigLIP", whole, TextSizes.of(config, SIGLIP_TEXT), size)
        alone = build.alone()
        self.project = Linear(alone.at("text_model").at("head"), self.width, size, bias=True)
        tower = alone.at("vision_model")
        last = Selection((vision.num_layers,), drops_first=False)
        self.tower = VisionTower(tower, vision, last)
        self.norm = LayerNorm(tower.at("post_layernorm"), size, vision.eps)
        self.head = PoolingHead(tower.at("head"), vision)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [3, size, size] → [1, width + hidden + 1] of each."""
        features = self.tower.forward([item["pixel_values"] for item in items])
        states = self.norm(features.flatten(0, 1)).view(features.shape)
        return self.rows_of(self.head.forward(states))


class PoolingHead(nn.Module):
    """(features [images, patches, hidden]) → [images, hidden]: one learned query attends to all
    patches, and a feed-forward block follows."""

    def __init__(self, build: Build, sizes: VisionSizes) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.num_heads = sizes.num_heads
        self.query = Parameters(build, {"probe": (1, 1, size)})
        attention = build.at("attention")
        shapes: dict[str, tuple[int, ...]] = {
            "in_proj_weight": (3 * size, size),
            "in_proj_bias": (3 * size,),
        }
        self.merged = Parameters(attention, shapes)
        self.out = Linear(attention.at("out_proj"), size, size, bias=True)
        self.norm = LayerNorm(build.at("layernorm"), size, sizes.eps)
        self.up = Linear(build.at("mlp").at("fc1"), size, sizes.intermediate_size, bias=True)
        self.down = Linear(build.at("mlp").at("fc2"), sizes.intermediate_size, size, bias=True)
        self.activation = activation_of(sizes.activation)

    def forward(self, features: Tensor) -> Tensor:
        query = self.query["probe"].expand(len(features), -1, -1)
        weights = self.merged["in_proj_weight"].chunk(3)
        biases = self.merged["in_proj_bias"].chunk(3)
        inputs = (query, features, features)
        split = [
            functional.linear(rows, weight, bias).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for rows, weight, bias in zip(inputs, weights, biases, strict=True)
        ]
        mixed = functional.scaled_dot_product_attention(*split).transpose(1, 2)
        hidden = self.out(mixed.flatten(1))
        vectors: Tensor = hidden + self.down(self.activation(self.up(self.norm(hidden))))
        return vectors
