"""PaliGemma (Beyer et al. 2024) and PaliGemma 2 (Steiner et al. 2024): the tokens of a prompt
attend to all of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, Linear, size_of
from pegboard_model_gemma_vision.sizes import sizes_of
from pegboard_model_gemma_vision.tower import NormalizedTower
from pegboard_models.language import WithLanguageModel, root_of, text_config


class PaliGemma(WithLanguageModel):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        text = text_config({"tie_word_embeddings": True, **config})
        # the config says that a prompt is attended to as a whole, which its tokens decide here
        text.pop("use_bidirectional_attention", None)
        whole = {**config, "text_config": text}
        super().__init__(whole, replace(build, sees_items=True))
        if not build.has_first_layer:
            return
        root = root_of(build)
        sizes = sizes_of(config)
        self.tower = NormalizedTower(root.at("vision_tower"), sizes)
        projector = root.at("multi_modal_projector").alone()
        width = size_of(text, "hidden_size")
        self.projection = Linear(projector.at("linear"), sizes.hidden_size, width, bias=True)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [3, size, size] → [patches, hidden] of each."""
        features = self.tower.forward([item["pixel_values"] for item in items])
        rows: Tensor = self.projection(features.flatten(0, 1))
        return torch.unbind(rows.view(*features.shape[:2], -1))
