"""DeepSeek-OCR (Wei et al. 2025): SAM reads an image with windows, CLIP reads its features, and a
DeepSeek model with experts reads the rows of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.layers import Build, LayerNorm, size_of
from pegboard_model_deepseek_vl.language import with_language
from pegboard_model_deepseek_vl.ocr_sizes import OcrSizes, ocr_projector_of
from pegboard_model_deepseek_vl.rows import Lines, Projector
from pegboard_model_deepseek_vl.sam import SamTower, stretched
from pegboard_model_deepseek_vl.sizes import check_width
from pegboard_models.language import WithLanguageModel
from pegboard_models.parameters import Parameters
from pegboard_models.vision import LayerNames, VisionLayer
from pegboard_models.vision_sizes import VisionSizes

NAMES = replace(LayerNames(), qkv=("qkv_proj",))


class DeepseekOCR(WithLanguageModel):
    """The towers are built only where prompts are embedded. All tensors but the head are below
    "model", those of the language model without a name of their own."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = with_language(config)
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision(config, build.at("model").alone())

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes = OcrSizes.of(config)
        projector = ocr_projector_of(config, sizes)
        check_width(projector, size_of(config["text_config"], "hidden_size"))
        self.sam = SamTower(build.at("sam_model"), sizes)
        self.clip = ClipTower(build.at("vision_model"), sizes.clip)
        self.projector = Projector(build.at("projector"), projector)
        self.lines = Lines(build, projector.n_embed)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [3, size, size], the whole image; and, if it is also seen in tiles,
        crops [tiles, 3, size, size] and tiles [2], how many of them are below and beside each other
        → [rows, hidden] of each."""
        return [self.image(item) for item in items]

    def image(self, item: Mapping[str, Tensor]) -> Tensor:
        """Return the rows of an image: its tiles, the whole of it, and the end."""
        whole = self.lines.of(self.views(item["pixel_values"][None]))
        rows = [whole, self.lines.separator]
        if "crops" in item:
            rows = [self.lines.of(self.views(item["crops"]), *item["tiles"].tolist()), *rows]
        return torch.cat(rows)

    def views(self, pixels: Tensor) -> Tensor:
        """[views, 3, size, size] → [views, rows, hidden]."""
        plane = self.sam.forward(pixels)
        features = torch.cat([self.clip.forward(plane), plane.flatten(2).transpose(1, 2)], 2)
        return self.projector.forward(features)


class ClipTower(nn.Module):
    """CLIP (Radford et al. 2021) for features in place of patches: [views, width, side, side] →
    [views, side², width]."""

    def __init__(self, build: Build, sizes: VisionSizes) -> None:
        super().__init__()
        self.grid = sizes.grid
        width = sizes.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "class_embedding": (width,),
            "position_embedding.weight": (sizes.num_positions, width),
        }
        self.vectors = Parameters(build.at("embeddings"), shapes)
        self.pre_norm = LayerNorm(build.at("pre_layrnorm"), width, sizes.eps)
        layers = build.at("transformer.layers")
        self.layers = nn.ModuleList(
            VisionLayer(layers.at(index), sizes, NAMES) for index in range(sizes.num_layers)
        )

    def forward(self, plane: Tensor) -> Tensor:
        count, width, side, _ = plane.shape
        first, grid = self.vectors["position_embedding.weight"].split([1, self.grid**2])
        spread = stretched(grid.view(self.grid, self.grid, width), side).flatten(0, 1)
        vectors = plane.flatten(2).transpose(1, 2) + spread
        begin = (self.vectors["class_embedding"] + first).expand(count, 1, -1)
        rows = self.pre_norm(torch.cat([begin, vectors], 1).flatten(0, 1))
        for layer in self.layers:
            rows = layer.forward(rows, count)
        return rows.unflatten(0, (count, -1))[:, 1:]
