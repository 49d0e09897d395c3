"""Mistral 3: the tower of Pixtral, patches that are merged, two linear layers, and a language
model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import Build, Linear, Norm, read, size_of
from pegboard_model_mistral3.processor import MERGED
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.pixtral import PixtralTower
from pegboard_models.projectors import MLPProjector
from pegboard_models.vision_sizes import Selection, VisionSizes, merge_size


class Mistral3(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision({"vision_feature_layer": -1, **config}, build)

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        vision = config.get("vision_config") or {}
        sizes = VisionSizes.of(vision, ("pixtral",))
        selection = Selection.of(config, sizes, "full")
        if len(selection.depths) > 1:
            raise ModelError(
                f"the checkpoint's config has vision_feature_layer={config['vision_feature_layer']}"
                "; Mistral 3 merges the features of one layer"
            )
        root = root_of(build)
        self.tower = PixtralTower(root.at("vision_tower"), vision, sizes, selection)
        place = root.at("multi_modal_projector").alone()
        text = text_config(config)
        self.norm = Norm(
            place.at("norm"), self.tower.width, read(text, "rms_norm_eps", float) or 1e-6
        )
        self.merger = PatchMerger(
            place.at("patch_merger"), self.tower.width, self.tower.patch, merge_size(config, MERGED)
        )
        self.projector = MLPProjector(
            place,
            self.tower.width,
            size_of(text, "hidden_size"),
            read(config, "projector_hidden_act", str) or "gelu",
            bias=read(config, "multimodal_projector_bias", bool) or False,
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [3, height, width], of any sizes → [rows, hidden] of each."""
        images = [item["pixel_values"] for item in items]
        features = self.tower.forward(images)
        counts = [len(each) for each in features]
        normed = self.norm(torch.cat(features)).split(counts)
        merged = self.merger.forward(normed, images)
        rows = self.projector.forward(torch.cat(merged))
        return rows.split([len(each) for each in merged])


class PatchMerger(nn.Module):
    """(features [patches, size] of each image, the images) → [patches / merged², size] of each: a
    linear layer makes one vector of `merged` patches of as many lines."""

    def __init__(self, build: Build, size: int, patch: int, merged: int) -> None:
        super().__init__()
        self.patch = patch
        self.merged = merged
        self.merge = Linear(build.at("merging_layer"), size * merged**2, size)

    def forward(self, features: Sequence[Tensor], images: Sequence[Tensor]) -> list[Tensor]:
        blocks = []
        for each, image in zip(features, images, strict=True):
            height, width = (side // self.patch for side in image.shape[1:])
            plane = each.T.unflatten(1, (height, width))[None]
            blocks.append(functional.unfold(plane, self.merged, stride=self.merged)[0].T)
        merged: Tensor = self.merge(torch.cat(blocks))
        return [*merged.split([len(each) for each in blocks])]
