"""The vision transformer of BLIP-2, which is that of EVA-CLIP (Fang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear, read
from pegboard_models.parameters import Parameters
from pegboard_models.vision import activation_of
from pegboard_models.vision_sizes import VisionSizes


class Tower(nn.Module):
    """(pixels [images, 3, size, size]) → features [images, 1 + patches, hidden]. config: the
    vision_config."""

    def __init__(self, build: Build, config: Mapping[str, Any], sizes: VisionSizes) -> None:
        super().__init__()
        self.patch = sizes.patch_size
        size = sizes.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "class_embedding": (1, 1, size),
            "patch_embedding.weight": (size, 3, self.patch, self.patch),
            "patch_embedding.bias": (size,),
            "position_embedding": (1, 1 + sizes.num_positions, size),
        }
        self.given = Parameters(build.at("embeddings"), shapes)
        bias = read(config, "qkv_bias", bool) is not False
        layers = build.at("encoder").at("layers")
        self.layers = nn.ModuleList(
            TowerLayer(layers.at(index), sizes, bias=bias) for index in range(sizes.num_layers)
        )
        self.norm = LayerNorm(build.at("post_layernorm"), size, sizes.eps)

    def forward(self, pixels: Tensor) -> Tensor:
        given = self.given
        weight = given["patch_embedding.weight"].flatten(1)
        cut = functional.unfold(pixels.to(weight.dtype), self.patch, stride=self.patch)
        vectors = functional.linear(cut.transpose(1, 2), weight, given["patch_embedding.bias"])
        first = given["class_embedding"].expand(len(pixels), 1, -1)
        hidden = (torch.cat([first, vectors], 1) + given["position_embedding"]).flatten(0, 1)
        for layer in self.layers:
            hidden = layer.forward(hidden, len(pixels))
        return self.norm(hidden).unflatten(0, (len(pixels), -1))


class TowerLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). Queries, keys and values are one
    matrix. bias: whether they have one."""

    def __init__(self, build: Build, sizes: VisionSizes, *, bias: bool) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.num_heads = sizes.num_heads
        attention = build.at("self_attn")
        self.attention_norm = LayerNorm(build.at("layer_norm1"), size, sizes.eps)
        self.qkv = Linear(attention.at("qkv"), size, 3 * size, bias=bias)
        self.out = Linear(attention.at("projection"), size, size, bias=True)
        self.last_norm = LayerNorm(build.at("layer_norm2"), size, sizes.eps)
        width = sizes.intermediate_size
        self.up = Linear(build.at("mlp").at("fc1"), size, width, bias=True)
        self.down = Linear(build.at("mlp").at("fc2"), width, size, bias=True)
        self.activation = activation_of(sizes.activation)

    def forward(self, hidden: Tensor, count: int) -> Tensor:
        """[count · positions, hidden] → the same. count: images."""
        parts = self.qkv(self.attention_norm(hidden)).unflatten(1, (3, self.num_heads, -1))
        split = parts.unflatten(0, (count, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*split).transpose(1, 2)
        hidden = hidden + self.out(mixed.reshape(hidden.shape))
        return hidden + self.down(self.activation(self.up(self.last_norm(hidden))))
