"""The SigLIP tower, whose last states are normalized."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pegboard.layers import Build, LayerNorm
from pegboard_models.vision import VisionTower
from pegboard_models.vision_sizes import Selection, VisionSizes


class NormalizedTower(nn.Module):
    """(images [3, size, size]) → [images, patches, hidden]"""

    def __init__(self, build: Build, sizes: VisionSizes) -> None:
        super().__init__()
        self.tower = VisionTower(build, sizes, Selection((sizes.num_layers,), drops_first=False))
        inner = build.at("vision_model")
        place = (inner if build.has(inner.path) else build).alone().at("post_layernorm")
        self.norm = LayerNorm(place, sizes.hidden_size, sizes.eps)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        features = self.tower.forward(images)
        rows: Tensor = self.norm(features.flatten(0, 1))
        return rows.view(features.shape)
