"""The vision tower InternViT (Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import Build, LayerNorm, Linear, Norm, read
from pegboard_models.parameters import Parameters
from pegboard_models.vision import activation_of
from pegboard_models.vision_sizes import VisionSizes

NORMS = {"layer_norm": LayerNorm, "rms_norm": Norm}


class InternVisionTower(nn.Module):
    """(pixels [images, 3, size, size]) → features [images, patches, hidden]. depth: how many layers
    are built. config: the vision_config."""

    def __init__(
        self, build: Build, config: Mapping[str, Any], sizes: VisionSizes, depth: int
    ) -> None:
        super().__init__()
        build = build.alone()
        self.embeddings = Embeddings(build.at("embeddings"), config, sizes)
        layers = build.at("encoder").at("layer")
        self.layers = nn.ModuleList(
            InternVisionLayer(layers.at(index), config, sizes) for index in range(depth)
        )
        is_pooled = read(config, "use_mean_pooling", bool) is not False
        self.last_norm = (
            None
            if is_pooled or depth < sizes.num_layers
            else LayerNorm(build.at("layernorm"), sizes.hidden_size, sizes.eps)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.embeddings.forward(pixels)
        count, positions, _ = hidden.shape
        rows = hidden.flatten(0, 1)
        for layer in self.layers:
            rows = layer.forward(rows, count)
        if self.last_norm is not None:
            rows = self.last_norm(rows)
        return rows.view(count, positions, -1)[:, 1:]


class Embeddings(nn.Module):
    """(pixels [images, 3, size, size]) → the vectors of the class token and of the patches [images,
    positions, hidden]."""

    def __init__(self, build: Build, config: Mapping[str, Any], sizes: VisionSizes) -> None:
        super().__init__()
        self.size = sizes.patch_size
        hidden = sizes.hidden_size
        has_positions = read(config, "use_absolute_position_embeddings", bool) is not False
        shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, hidden)}
        if has_positions:
            shapes["position_embeddings"] = (1, sizes.grid**2 + 1, hidden)
        self.has_positions = has_positions
        self.given = Parameters(build, shapes)
        self.patches = Parameters(
            build.at("patch_embeddings").at("projection"),
            {"weight": (hidden, 3, self.size, self.size), "bias": (hidden,)},
        )

    def forward(self, pixels: Tensor) -> Tensor:
        weight = self.patches["weight"].flatten(1)
        unfolded = functional.unfold(pixels.to(weight.dtype), self.size, stride=self.size)
        vectors = functional.linear(unfolded.transpose(1, 2), weight, self.patches["bias"])
        vectors = torch.cat([self.given["cls_token"].expand(len(vectors), -1, -1), vectors], 1)
        return vectors + self.given["position_embeddings"] if self.has_positions else vectors


class InternVisionLayer(nn.Module):
    """x + lambda_1 · attention(norm(x)), then x + lambda_2 · feed_forward(norm(x)). Positions of an
    image attend to all of it."""

    def __init__(self, build: Build, config: Mapping[str, Any], sizes: VisionSizes) -> None:
        super().__init__()
        kind = read(config, "norm_type", str) or "layer_norm"
        if kind not in NORMS:
            raise ModelError(
                f"the checkpoint's vision_config has norm_type={kind!r}; expected one of "
                f"{', '.join(NORMS)}"
            )
        size = sizes.hidden_size
        width = sizes.intermediate_size
        has_bias = read(config, "attention_bias", bool) or False
        attention = build.at("attention")
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), size)
        self.heads = sizes.num_heads
        self.first_norm = NORMS[kind](build.at("layernorm_before"), size, sizes.eps)
        self.qkv = Linear(attention, size, 3 * size, parts=parts, bias=has_bias)
        self.norms = (
            [Norm(attention.at(name), size, 1e-6) for name in ("q_norm", "k_norm")]
            if read(config, "use_qk_norm", bool)
            else []
        )
        self.out = Linear(attention.at("projection_layer"), size, size, bias=True)
        self.last_norm = NORMS[kind](build.at("layernorm_after"), size, sizes.eps)
        self.up = Linear(build.at("mlp").at("fc1"), size, width, bias=True)
        self.down = Linear(build.at("mlp").at("fc2"), width, size, bias=True)
        self.activation = activation_of(sizes.activation)
        self.factors = Parameters(build, {"lambda_1": (size,), "lambda_2": (size,)})

    def forward(self, hidden: Tensor, count: int) -> Tensor:
        """[count · positions, hidden] → the same. count: images."""
        q, k, v = self.qkv(self.first_norm(hidden)).chunk(3, 1)
        if self.norms:
            q, k = (norm(part) for norm, part in zip(self.norms, (q, k), strict=True))
        split = [
            part.reshape(count, -1, self.heads, part.shape[1] // self.heads).transpose(1, 2)
            for part in (q, k, v)
        ]
        mixed = functional.scaled_dot_product_attention(*split).transpose(1, 2)
        hidden = hidden + self.factors["lambda_1"] * self.out(mixed.reshape(hidden.shape))
        inner = self.activation(self.up(self.last_norm(hidden)))
        return hidden + self.factors["lambda_2"] * self.down(inner)
