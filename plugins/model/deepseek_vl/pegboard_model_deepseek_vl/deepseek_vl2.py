"""DeepSeek-VL2 (Wu et al. 2024): SigLIP reads an image as a whole and as tiles, blocks of patches
are one row, and a DeepSeek model with experts reads the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, size_of
from pegboard_model_deepseek_vl.language import with_language
from pegboard_model_deepseek_vl.rows import Lines, Projector
from pegboard_model_deepseek_vl.sizes import check_width, is_head, projector_of, tower_of
from pegboard_models.language import WithLanguageModel
from pegboard_models.parameters import Parameters
from pegboard_models.vision import TIMM, VisionLayer
from pegboard_models.vision_sizes import VisionSizes


class DeepseekVL2(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    part = "language"

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = with_language(config)
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision(config, build.alone())

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        tower = tower_of(config)
        projector = projector_of(config, tower.hidden_size)
        check_width(projector, size_of(config["text_config"], "hidden_size"))
        self.is_head = is_head(config)
        self.tower = Tower(build.at("vision"), tower)
        self.projector = Projector(build.at("projector"), projector)
        self.lines = Lines(build, projector.n_embed)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [1 + tiles, 3, size, size], the whole image and its tiles, and tiles
        [2], how many of them are below and beside each other → [rows, hidden] of each."""
        # one by one, so that rows do not depend on what is encoded with them
        return [
            self.ordered(
                self.projector.forward(self.tower.forward(item["pixel_values"])),
                *item["tiles"].tolist(),
            )
            for item in items
        ]

    def ordered(self, views: Tensor, below: int, beside: int) -> Tensor:
        """Return the rows of an image, [rows, hidden]."""
        whole = self.lines.of(views[:1])
        tiles = self.lines.of(views[1:], below, beside)
        first, last = (whole, tiles) if self.is_head else (tiles, whole)
        return torch.cat([first, self.lines.separator, last])


class Tower(nn.Module):
    """SigLIP (Zhai et al. 2023) with the names of timm: (pixels [views, 3, size, size]) → features
    [views, patches, hidden]."""

    def __init__(self, build: Build, sizes: VisionSizes) -> None:
        super().__init__()
        self.patch = sizes.patch_size
        hidden = sizes.hidden_size
        self.positions = Parameters(build, {"pos_embed": (1, sizes.num_positions, hidden)})
        self.patches = Parameters(
            build.at("patch_embed.proj"),
            {"weight": (hidden, 3, self.patch, self.patch), "bias": (hidden,)},
        )
        blocks = build.at("blocks")
        self.layers = nn.ModuleList(
            VisionLayer(blocks.at(index), sizes, TIMM) for index in range(sizes.num_layers)
        )
        self.last_norm = LayerNorm(build.at("norm"), hidden, sizes.eps)

    def forward(self, pixels: Tensor) -> Tensor:
        weight = self.patches["weight"].flatten(1)
        unfolded = functional.unfold(pixels.to(weight.dtype), self.patch, stride=self.patch)
        vectors = functional.linear(unfolded.transpose(1, 2), weight, self.patches["bias"])
        hidden = vectors + self.positions["pos_embed"]
        count = len(hidden)
        rows = hidden.flatten(0, 1)
        for layer in self.layers:
            rows = layer.forward(rows, count)
        features: Tensor = self.last_norm(rows).unflatten(0, (count, -1))
        return features
