"""EVA2-CLIP (Sun et al. 2023): a vision transformer whose layers normalize the results of their
blocks, and the projector of GLM-4V."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear
from pegboard_model_glm4v.eva_sizes import MERGED, EvaSizes
from pegboard_models.parameters import Parameters
from pegboard_models.vision import LayerNames, VisionLayer

NAMES = LayerNames(
    norms=("input_layernorm", "post_attention_layernorm"),
    attention="attention",
    qkv=("query_key_value",),
    out="dense",
)
EPS = 1e-5
"""Of the projector's norm."""


class EvaTower(nn.Module):
    """(images [images, 3, size, size]) → rows [images, rows, outer]. inner: channels of the
    projector's SwiGLU."""

    def __init__(self, build: Build, sizes: EvaSizes, outer: int, inner: int) -> None:
        super().__init__()
        build = build.alone()
        self.sizes = sizes
        vision = sizes.vision
        size = vision.hidden_size
        self.patches = Parameters(
            build.at("patch_embedding"),
            {
                "proj.weight": (size, 3, vision.patch_size, vision.patch_size),
                "proj.bias": (size,),
                "cls_embedding": (1, size),
                "position_embedding.weight": (vision.num_positions, size),
            },
        )
        layers = build.at("transformer.layers")
        self.layers = nn.ModuleList(
            EvaLayer(layers.at(index), vision, NAMES) for index in range(vision.num_layers)
        )
        self.last = Parameters(
            build,
            {
                "conv.weight": (outer, size, MERGED, MERGED),
                "conv.bias": (outer,),
                "boi": (1, 1, outer),
                "eoi": (1, 1, outer),
            },
        )
        self.projector = Projector(build.at("linear_proj"), outer, inner)

    def forward(self, images: Tensor) -> Tensor:
        given = self.patches
        weight = given["proj.weight"]
        patch = self.sizes.vision.patch_size
        cut = functional.unfold(images.to(weight.dtype), patch, stride=patch).transpose(1, 2)
        vectors = functional.linear(cut, weight.flatten(1), given["proj.bias"])
        count = len(vectors)
        first = given["cls_embedding"].expand(count, 1, -1)
        hidden = torch.cat([first, vectors], 1) + given["position_embedding.weight"]
        rows = hidden.flatten(0, 1)
        for layer in self.layers:
            rows = layer.forward(rows, count)
        return self.joined(rows.unflatten(0, (count, -1))[:, 1:])

    def joined(self, features: Tensor) -> Tensor:
        """Return the rows of images, of features [images, patches, width]."""
        grid = self.sizes.vision.grid
        plane = features.unflatten(1, (grid, grid)).permute(0, 3, 1, 2)
        last = self.last
        merged = functional.conv2d(plane, last["conv.weight"], last["conv.bias"], stride=MERGED)
        vectors = merged.flatten(2).transpose(1, 2)
        count = len(vectors)
        rows = self.projector.forward(vectors.flatten(0, 1)).unflatten(0, (count, -1))
        first, end = (last[name].expand(count, 1, -1) for name in ("boi", "eoi"))
        return torch.cat([first, rows, end], 1) / self.sizes.factor


class EvaLayer(VisionLayer):
    """x + norm(attention(x)), then x + norm(feed_forward(x))."""

    def forward(self, hidden: Tensor, count: int, seen: Tensor | None = None) -> Tensor:
        hidden = hidden + self.attention_norm(self.attend(hidden, count, seen))
        return hidden + self.last_norm(self.down(self.activation(self.up(hidden))))


class Projector(nn.Module):
    """([rows, size]) → the same: a linear layer, a norm, GELU and a SwiGLU."""

    def __init__(self, build: Build, size: int, inner: int) -> None:
        super().__init__()
        self.first = Linear(build.at("linear_proj"), size, size)
        self.norm = LayerNorm(build.at("norm1"), size, EPS)
        self.gate = Linear(build.at("gate_proj"), size, inner)
        self.up = Linear(build.at("dense_h_to_4h"), size, inner)
        self.down = Linear(build.at("dense_4h_to_h"), inner, size)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = functional.gelu(self.norm(self.first(rows)))
        out: Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return out
