"""The vision tower of Pixtral (Agrawal et al. 2024): images of any size, and rotated positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import Build, Linear, Norm, QKVLinear
from pegboard.layers.config import rope_parameters
from pegboard_models.parameters import Parameters
from pegboard_models.vision import activation_of
from pegboard_models.vision_sizes import Selection, VisionSizes


class PixtralTower(nn.Module):
    """(images [3, height, width], of any sizes) → features [patches, width] of each, line by line.
    The layers after the last selected one are not built. config: the vision_config."""

    def __init__(
        self, build: Build, config: Mapping[str, Any], sizes: VisionSizes, selection: Selection
    ) -> None:
        super().__init__()
        if selection.drops_first:
            raise ModelError(
                "the checkpoint's vision tower has no first position to leave out; set "
                "vision_feature_select_strategy='full' in its config"
            )
        build = build.alone()
        size = sizes.hidden_size
        self.depths = selection.depths
        self.width = size * len(self.depths)
        self.patch = sizes.patch_size
        self.frequencies = frequencies_of(config, size // sizes.num_heads)
        shape = (size, 3, self.patch, self.patch)
        self.patches = Parameters(build.at("patch_conv"), {"weight": shape})
        self.pre_norm = Norm(build.at("ln_pre"), size, sizes.eps)
        layers = build.at("transformer").at("layers")
        self.layers = nn.ModuleList(
            PixtralLayer(layers.at(index), sizes) for index in range(max(self.depths))
        )

    def forward(self, images: Sequence[Tensor]) -> list[Tensor]:
        weight = self.patches["weight"]
        cut = [
            functional.unfold(image[None].to(weight.dtype), self.patch, stride=self.patch)[0].T
            for image in images
        ]
        counts = [len(each) for each in cut]
        angles = torch.cat([self.angles(image) for image in images])
        rotation = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)
        states = [self.pre_norm(functional.linear(torch.cat(cut), weight.flatten(1)))]
        for layer in self.layers:
            states.append(layer.forward(states[-1], rotation, counts))
        features = torch.cat([states[depth] for depth in self.depths], 1)
        return [*features.split(counts)]

    def angles(self, image: Tensor) -> Tensor:
        """Return the angle of each pair of channels: [patches, 1, pairs] float32."""
        rows, columns = (
            torch.arange(side // self.patch, dtype=torch.float32, device=image.device)
            for side in image.shape[1:]
        )
        by_row, by_column = (each.to(image.device) for each in self.frequencies)
        height = (rows[:, None] * by_row)[:, None].expand(-1, len(columns), -1)
        width = (columns[:, None] * by_column).expand(len(rows), -1, -1)
        return torch.cat([height, width], 2).flatten(0, 1)[:, None]


def frequencies_of(config: Mapping[str, Any], head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the angles per row and per column of a vision_config's tower: of every second pair of
    channels each. Raises ModelError for other rules."""
    base, rule = rope_parameters(config)
    kind = rule.get("rope_type") or rule.get("type") or "axial"
    if kind not in ("axial", "default") or head_dim % 4:
        raise ModelError(
            f"the checkpoint's vision_config has rotary embeddings {kind!r} of {head_dim} "
            "channels; expected 'axial' of a multiple of 4"
        )
    inverse = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return inverse[0::2], inverse[1::2]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels: x [patches, heads, D], cos and sin [patches, 1, D / 2]. A pair is
    one channel of the first half and one of the second."""
    first, second = x.chunk(2, 2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 2)


class PixtralLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). Patches of an image attend to all of
    it."""

    def __init__(self, build: Build, sizes: VisionSizes) -> None:
        super().__init__()
        size = sizes.hidden_size
        heads = sizes.num_heads
        width = sizes.intermediate_size
        attention = build.at("attention")
        self.attention_norm = Norm(build.at("attention_norm"), size, sizes.eps)
        self.qkv = QKVLinear(attention, size, heads, heads, size // heads)
        self.out = Linear(attention.at("o_proj"), size, size)
        feed = build.at("feed_forward")
        self.last_norm = Norm(build.at("ffn_norm"), size, sizes.eps)
        self.gate_up = Linear(feed, size, 2 * width, parts={"gate_proj": width, "up_proj": width})
        self.down = Linear(feed.at("down_proj"), width, size)
        self.activation = activation_of(sizes.activation)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], counts: Sequence[int]
    ) -> Tensor:
        """[patches of all images, hidden] → the same. counts: patches of each image."""
        q, k, v = self.qkv(self.attention_norm(hidden))
        split = [
            part.transpose(0, 1).split(list(counts), 1)
            for part in (rotated(q, *rotation), rotated(k, *rotation), v)
        ]
        mixed = [
            functional.scaled_dot_product_attention(*(part[None] for part in image))[0]
            for image in zip(*split, strict=True)
        ]
        hidden = hidden + self.out(torch.cat(mixed, 1).transpose(0, 1).flatten(1))
        gate, up = self.gate_up(self.last_norm(hidden)).chunk(2, 1)
        return hidden + self.down(self.activation(gate) * up)
