"""Llama 4 with images (Meta 2025): a vision tower with rotated positions, blocks of patches that
are merged, an adapter, one linear layer, and a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear, QKVLinear, size_of
from pegboard.layers.config import rope_parameters
from pegboard_model_llama4.sizes import Llama4Sizes
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.parameters import Parameters
from pegboard_models.projectors import blocks_of
from pegboard_models.vision_sizes import VisionSizes

EPS = 1e-5


class Llama4(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision(config, root_of(build).alone())

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes = Llama4Sizes.of(config)
        self.sizes = sizes
        place = build.at("vision_model")
        theta = rope_parameters(config.get("vision_config") or {})[0]
        self.tower = Tower(place, sizes.tower, theta)
        adapter = place.at("vision_adapter").at("mlp")
        self.first = Linear(adapter.at("fc1"), sizes.tower.intermediate_size, sizes.inner)
        self.second = Linear(adapter.at("fc2"), sizes.outer, sizes.outer)
        self.last = Linear(
            build.at("multi_modal_projector").at("linear_1"),
            sizes.outer,
            size_of(text_config(config), "hidden_size"),
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [tiles, 3, size, size] → [rows, hidden] of each."""
        tiles = [item["pixel_values"] for item in items]
        features = self.tower.forward(torch.cat(tiles))
        merged = blocks_of(features, self.sizes.merged).flatten(0, 1)
        adapted = functional.gelu(self.second(functional.gelu(self.first(merged))))
        rows: Tensor = self.last(adapted)
        return rows.split([len(each) * self.sizes.num_rows for each in tiles])


class Tower(nn.Module):
    """(tiles [tiles, 3, size, size]) → features [tiles, patches, hidden]. A class token is behind
    the patches of each tile while they attend to each other. theta: of the rotary embedding."""

    def __init__(self, build: Build, sizes: VisionSizes, theta: float) -> None:
        super().__init__()
        self.sizes = sizes
        self.theta = theta
        size = sizes.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "patch_embedding.linear.weight": (size, 3 * sizes.patch_size**2),
            "class_embedding": (size,),
            "positional_embedding_vlm": (sizes.grid**2 + 1, size),
        }
        self.parameters_of = Parameters(build, shapes)
        self.first_norm = LayerNorm(build.at("layernorm_pre"), size, EPS)
        layers = build.at("model").at("layers")
        self.layers = nn.ModuleList(
            TowerLayer(layers.at(index), sizes) for index in range(sizes.num_layers)
        )
        self.last_norm = LayerNorm(build.at("layernorm_post"), size, EPS)

    def forward(self, tiles: Tensor) -> Tensor:
        given = self.parameters_of
        weight = given["patch_embedding.linear.weight"]
        patch = self.sizes.patch_size
        cut = functional.unfold(tiles.to(weight.dtype), patch, stride=patch).transpose(1, 2)
        last = given["class_embedding"].expand(len(tiles), 1, -1)
        vectors = torch.cat([functional.linear(cut, weight), last], 1)
        hidden = self.first_norm((vectors + given["positional_embedding_vlm"]).flatten(0, 1))
        angles = self.angles(tiles.device)
        rotation = angles.cos(), angles.sin()
        for layer in self.layers:
            hidden = layer.forward(hidden, len(tiles), rotation)
        features: Tensor = self.last_norm(hidden)
        return features.unflatten(0, (len(tiles), -1))[:, :-1]

    def angles(self, device: torch.device) -> Tensor:
        """Return the angle of each pair of channels, [positions, pairs] float32: of one half by the
        column of the patch, and of the other by its line. The class token is not rotated."""
        grid = self.sizes.grid
        pairs = self.sizes.hidden_size // self.sizes.num_heads // 4
        exponents = torch.arange(pairs, dtype=torch.float32, device=device) / pairs
        by_place = (torch.arange(grid, device=device) + 1)[:, None] / self.theta**exponents
        columns = by_place[None].expand(grid, -1, -1)
        lines = by_place[:, None].expand(-1, grid, -1)
        angles = torch.cat([columns, lines], 2).flatten(0, 1)
        return functional.pad(angles, (0, 0, 0, 1))


class TowerLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). Positions of a tile attend to all of
    it."""

    def __init__(self, build: Build, sizes: VisionSizes) -> None:
        super().__init__()
        size = sizes.hidden_size
        heads = sizes.num_heads
        width = sizes.intermediate_size
        attention = build.at("self_attn")
        self.attention_norm = LayerNorm(build.at("input_layernorm"), size, EPS)
        self.qkv = QKVLinear(attention, size, heads, heads, size // heads, bias=True)
        self.out = Linear(attention.at("o_proj"), size, size, bias=True)
        self.last_norm = LayerNorm(build.at("post_attention_layernorm"), size, EPS)
        self.up = Linear(build.at("mlp").at("fc1"), size, width, bias=True)
        self.down = Linear(build.at("mlp").at("fc2"), width, size, bias=True)

    def forward(self, hidden: Tensor, count: int, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """[count · positions, hidden] → the same. count: tiles. rotation: cos and sin."""
        query, key, value = (
            part.unflatten(0, (count, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(hidden))
        )
        mixed = functional.scaled_dot_product_attention(
            rotated(query, *rotation), rotated(key, *rotation), value
        ).transpose(1, 2)
        hidden = hidden + self.out(mixed.reshape(hidden.shape))
        return hidden + self.down(functional.gelu(self.up(self.last_norm(hidden))))


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels beside each other: [..., positions, channels] → the same."""
    first, second = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.flatten(-2).to(heads.dtype)
