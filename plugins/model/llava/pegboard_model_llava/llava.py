"""A vision tower, two linear layers, and a language model:

LLaVA 1.5      an image has the features of the tower (Liu et al. 2023); with the tower of Pixtral,
               images have any size
LLaVA-NeXT     an image is also cut into tiles, so that more of it is seen (Liu et al. 2024)
NeXT-Video     a frame of a video has a row for a few features (Zhang et al. 2024)
OneVision      the features of many tiles, and of frames, are made fewer (Li et al. 2024)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.layers import Build, read, size_of
from pegboard_model_llava.defaults import ONEVISION, pooling_of
from pegboard_models.anyres import Tiling
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.parameters import Parameters
from pegboard_models.pixtral import PixtralTower
from pegboard_models.projectors import MLPProjector
from pegboard_models.vision import VisionTower
from pegboard_models.vision_sizes import SQUARE, Selection, VisionSizes


class Llava(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision(config, build)

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        vision = config.get("vision_config") or {}
        sizes = VisionSizes.of(vision, (*SQUARE, "pixtral"))
        selection = Selection.of(config, sizes)
        root = root_of(build)
        place = root.at("vision_tower")
        self.tower: Any = (
            PixtralTower(place, vision, sizes, selection)
            if vision["model_type"] == "pixtral"
            else VisionTower(place, sizes, selection)
        )
        self.projector = MLPProjector(
            root.at("multi_modal_projector"),
            self.tower.width,
            size_of(text_config(config), "hidden_size"),
            read(config, "projector_hidden_act", str) or "gelu",
            bias=read(config, "multimodal_projector_bias", bool) is not False,
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [3, height, width] → [features, hidden] of each. Only Pixtral takes
        images of several sizes."""
        return self.rows([item["pixel_values"] for item in items])

    def rows(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Return the projected features [features, hidden] of images [3, height, width]."""
        features = self.tower.forward(images)
        rows = self.projector.forward(torch.cat([*features]))
        return [*rows.split([len(each) for each in features])]


class LlavaNext(Llava):
    """The rows of an image are those of the whole image, and then those of all tiles line by line.
    What the tiles were padded with is left out, and a learned row ends each line."""

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        sizes = VisionSizes.of(config.get("vision_config") or {})
        super().build_vision(config, build)
        self.tiling = Tiling.of(config, sizes, Selection.of(config, sizes))
        width = size_of(text_config(config), "hidden_size")
        self.ends = Parameters(root_of(build).alone(), {"image_newline": (width,)})

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [1 + tiles, 3, size, size] and image_sizes [2] (height, width) →
        [features, hidden] of each."""
        tiles = [item["pixel_values"] for item in items]
        rows = torch.stack(self.rows([*torch.cat(tiles)])).split([len(each) for each in tiles])
        sizes = [item["image_sizes"].tolist() for item in items]
        return [
            self.lines(each, (height, width))
            for each, (height, width) in zip(rows, sizes, strict=True)
        ]

    def lines(self, tiles: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the rows of one image: [1 + tiles, features, hidden] → [rows, hidden]."""
        side = self.tiling.grid
        cut = tiles[1:].unflatten(0, self.tiling.tiles(size)).unflatten(2, (side, side))
        plane = cut.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        top, left = self.tiling.padding(size)
        height, width = self.tiling.plane(size)
        plane = plane[top : top + height, left : left + width]
        if (shape := self.tiling.lines(size)) != (height, width):
            channels = plane.permute(2, 0, 1)[None]
            plane = functional.interpolate(channels, shape, mode="bilinear")[0].permute(1, 2, 0)
        ends = self.ends["image_newline"].expand(len(plane), 1, -1)
        return torch.cat([tiles[0], torch.cat([plane, ends], 1).flatten(0, 1)])


class LlavaNextVideo(LlavaNext):
    """The features of a frame are averaged before they are projected."""

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        super().build_vision(config, build)
        self.stride = pooling_of(config)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Videos: pixel_values_videos [frames, 3, size, size]."""
        if modality == "image":
            return super().encode(modality, items)
        return [self.video(item["pixel_values_videos"]) for item in items]

    def video(self, frames: Tensor) -> Tensor:
        side = self.tiling.grid
        features = self.tower.forward([*frames]).unflatten(1, (side, side)).permute(0, 3, 1, 2)
        pooled = functional.avg_pool2d(features, self.stride).flatten(2).transpose(1, 2)
        return self.projector.forward(pooled.flatten(0, 1))


class LlavaOnevision(LlavaNext):
    """A frame of a video has a quarter of the rows of an image, and a learned row ends a video."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__({**ONEVISION, **config}, build)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Videos: pixel_values_videos [frames, 3, size, size]."""
        if modality == "image":
            return super().encode(modality, items)
        return [self.video(item["pixel_values_videos"]) for item in items]

    def video(self, frames: Tensor) -> Tensor:
        side = self.tiling.grid
        rows = torch.stack(self.rows([*frames])).unflatten(1, (side, side)).permute(0, 3, 1, 2)
        half = math.ceil(side / 2)
        fewer = functional.interpolate(rows, (half, half), mode="bilinear")
        return torch.cat(
            [fewer.permute(0, 2, 3, 1).flatten(0, 2), self.ends["image_newline"][None]]
        )
