"""Gemma 3 with its vision tower (Gemma Team 2025): the patches of an image are averaged to 256
rows, whose tokens attend to all of the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, size_of
from pegboard_model_gemma_vision.sizes import pooled_side, sizes_of
from pegboard_model_gemma_vision.tower import NormalizedTower
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.norms import OffsetNorm
from pegboard_models.parameters import Parameters


class Gemma3Vision(WithLanguageModel):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = {"tie_word_embeddings": True, **config}
        super().__init__(config, replace(build, sees_items=True))
        if not build.has_first_layer:
            return
        root = root_of(build)
        sizes = sizes_of(config)
        self.grid = sizes.grid
        self.side = pooled_side(config, sizes)
        self.tower = NormalizedTower(root.at("vision_tower"), sizes)
        projector = root.at("multi_modal_projector").alone()
        self.norm = OffsetNorm(projector.at("mm_soft_emb_norm"), sizes.hidden_size, sizes.eps)
        width = size_of(text_config(config), "hidden_size")
        shape = (sizes.hidden_size, width)
        self.projection = Parameters(projector, {"mm_input_projection_weight": shape})

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [1 + crops, 3, size, size] → [rows, hidden] of each."""
        images = [item["pixel_values"] for item in items]
        features = self.tower.forward([*torch.cat(images)])
        each = self.grid // self.side
        blocks = features.unflatten(1, (self.side, each, self.side, each))
        rows = blocks.mean((2, 4)).flatten(0, 2)
        vectors = self.norm(rows) @ self.projection["mm_input_projection_weight"]
        return vectors.split([len(image) * self.side**2 for image in images])
