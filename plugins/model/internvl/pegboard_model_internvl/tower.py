"""The vision tower InternViT (Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Form:
    """How a form of checkpoints differs from others: where its tensors are. tower: of all below.
    first, positions, patches: of the embeddings. layers: of all layers. norms: before attention and
    before the feed-forward block. qkv: () = one merged matrix has the name `merged`. qk_eps: of the
    norms of queries and keys; None = that of the other norms. factors: of the two residuals.
    projector: of it, its norm and its linear layers."""

    tower: str = "vision_tower"
    first: str = "cls_token"
    positions: str = "position_embeddings"
    patches: str = "patch_embeddings.projection"
    layers: str = "encoder.layer"
    norms: tuple[str, str] = ("layernorm_before", "layernorm_after")
    attention: str = "attention"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    merged: str = "qkv"
    qk_eps: float | None = 1e-6
    out: str = "projection_layer"
    factors: tuple[str, str] = ("lambda_1", "lambda_2")
    projector: tuple[str, str, str, str] = (
        "multi_modal_projector",
        "layer_norm",
        "linear_1",
        "linear_2",
    )


PUBLISHED = Form(
    tower="vision_model",
    first="class_embedding",
    positions="position_embedding",
    patches="patch_embedding",
    layers="encoder.layers",
    norms=("norm1", "norm2"),
    attention="attn",
    qkv=(),
    qk_eps=None,
    out="proj",
    factors=("ls1", "ls2"),
    projector=("mlp1", "0", "1", "3"),
)
"""The checkpoints that InternVL's authors publish. Other ones are in transformers' form."""


class InternVisionTower(nn.Module):
    """(pixels [images, 3, size, size]) → features [images, patches, hidden]. depth: how many layers
    are built. config: the vision_config."""

    def __init__(
        self,
        build: Build,
        config: Mapping[str, Any],
        sizes: VisionSizes,
        depth: int,
        form: Form,
    ) -> None:
        super().__init__()
        build = build.alone()
        self.embeddings = Embeddings(build.at("embeddings"), config, sizes, form)
        layers = build.at(form.layers)
        self.layers = nn.ModuleList(
            InternVisionLayer(layers.at(index), config, sizes, form) for index in range(depth)
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

    def __init__(
        self, build: Build, config: Mapping[str, Any], sizes: VisionSizes, form: Form
    ) -> None:
        super().__init__()
        self.size = sizes.patch_size
        self.form = form
        hidden = sizes.hidden_size
        has_positions = read(config, "use_absolute_position_embeddings", bool) is not False
        shapes: dict[str, tuple[int, ...]] = {form.first: (1, 1, hidden)}
        if has_positions:
            shapes[form.positions] = (1, sizes.grid**2 + 1, hidden)
        self.has_positions = has_positions
        self.given = Parameters(build, shapes)
        self.patches = Parameters(
            build.at(form.patches),
            {"weight": (hidden, 3, self.size, self.size), "bias": (hidden,)},
        )

    def forward(self, pixels: Tensor) -> Tensor:
        weight = self.patches["weight"].flatten(1)
        unfolded = functional.unfold(pixels.to(weight.dtype), self.size, stride=self.size)
        vectors = functional.linear(unfolded.transpose(1, 2), weight, self.patches["bias"])
        vectors = torch.cat([self.given[self.form.first].expand(len(vectors), -1, -1), vectors], 1)
        return vectors + self.given[self.form.positions] if self.has_positions else vectors


class InternVisionLayer(nn.Module):
    """x + lambda_1 · attention(norm(x)), then x + lambda_2 · feed_forward(norm(x)). Positions of an
    image attend to all of it."""

    def __init__(
        self, build: Build, config: Mapping[str, Any], sizes: VisionSizes, form: Form
    ) -> None:
        super().__init__()
        self.form = form
        kind = read(config, "norm_type", str) or "layer_norm"
        if kind not in NORMS:
            raise ModelError(
                f"the checkpoint's vision_config has norm_type={kind!r}; expected one of "
                f"{', '.join(NORMS)}"
            )
        size = sizes.hidden_size
        width = sizes.intermediate_size
        has_bias = read(config, "attention_bias", bool) or False
        attention = build.at(form.attention)
        parts = dict.fromkeys(form.qkv, size) or None
        qkv = attention if parts else attention.at(form.merged)
        self.heads = sizes.num_heads
        self.first_norm = NORMS[kind](build.at(form.norms[0]), size, sizes.eps)
        self.qkv = Linear(qkv, size, 3 * size, parts=parts, bias=has_bias)
        qk_eps = sizes.eps if form.qk_eps is None else form.qk_eps
        self.norms = (
            [Norm(attention.at(name), size, qk_eps) for name in ("q_norm", "k_norm")]
            if read(config, "use_qk_norm", bool)
            else []
        )
        self.out = Linear(attention.at(form.out), size, size, bias=True)
        self.last_norm = NORMS[kind](build.at(form.norms[1]), size, sizes.eps)
        self.up = Linear(build.at("mlp").at("fc1"), size, width, bias=True)
        self.down = Linear(build.at("mlp").at("fc2"), width, size, bias=True)
        self.activation = activation_of(sizes.activation)
        self.factors = Parameters(build, dict.fromkeys(form.factors, (size,)))

    def forward(self, hidden: Tensor, count: int) -> Tensor:
        """[count · positions, hidden] → the same. count: images."""
        first, last = (self.factors[name] for name in self.form.factors)
        q, k, v = self.qkv(self.first_norm(hidden)).chunk(3, 1)
        if self.norms:
            q, k = (norm(part) for norm, part in zip(self.norms, (q, k), strict=True))
        split = [
            part.reshape(count, -1, self.heads, part.shape[1] // self.heads).transpose(1, 2)
            for part in (q, k, v)
        ]
        mixed = functional.scaled_dot_product_attention(*split).transpose(1, 2)
        hidden = hidden + first * self.out(mixed.reshape(hidden.shape))
        inner = self.activation(self.up(self.last_norm(hidden)))
        return hidden + last * self.down(inner)
