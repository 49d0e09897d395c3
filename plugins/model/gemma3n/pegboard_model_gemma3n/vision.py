"""The vision tower of Gemma 3n, the encoder of MobileNet-V5 (Gemma Team 2025)."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build
from pegboard_model_gemma3n.blocks import ConvNorm, InvertedBlock, block_of, normalized
from pegboard_model_gemma3n.sizes import VISION_SIDE
from pegboard_model_gemma3n.stages import Inverted, Stages
from pegboard_models.parameters import Parameters


class VisionTower(nn.Module):
    """Pixels [3, height, width] → features [16 · 16, width]. The features of the last two stages
    are joined."""

    def __init__(self, build: Build, stages: Stages) -> None:
        super().__init__()
        build = build.alone()
        size = stages.stem
        self.stem = ConvNorm(build.at("conv_stem"), 3, size, 3, stride=2, bias=True, is_active=True)
        self.blocks = nn.ModuleList()
        self.counts = [len(blocks) for blocks in stages.stages]
        widths = []
        for number, blocks in enumerate(stages.stages):
            for index, block in enumerate(blocks):
                place = build.at(f"blocks.{number}.{index}")
                self.blocks.append(block_of(place, size, block))
                size = block.channels
            widths.append(size)
        joined = Inverted(stages.width, 0, expansion=2)
        fusion = build.at("msfa")
        self.join = InvertedBlock(fusion.at("ffn"), sum(widths[-2:]), joined, is_scaled=False)
        self.norm = Parameters(fusion.at("norm"), {"weight": (stages.width,)})

    def forward(self, pixels: Tensor) -> Tensor:
        features = []
        hidden = self.stem.forward(pixels[None])
        blocks = iter(self.blocks)
        for count in self.counts:
            for block in islice(blocks, count):
                hidden = block.forward(hidden)
            features.append(hidden)
        fine, coarse = features[-2:]
        if coarse.shape != fine.shape:
            coarse = functional.interpolate(coarse, size=fine.shape[2:], mode="nearest")
        joined = resized(self.join.forward(torch.cat([fine, coarse], 1)))
        return normalized(joined, self.norm["weight"])[0].flatten(1).T


def resized(features: Tensor) -> Tensor:
    """Return features [1, channels, height, width] with 16 rows of 16."""
    height, width = features.shape[2:]
    side = VISION_SIDE
    if height % side or width % side:
        return functional.interpolate(features, size=(side, side), mode="bilinear")
    return functional.avg_pool2d(features, (height // side, width // side))
