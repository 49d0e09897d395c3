"""BLIP-2 (Li et al. 2023): a vision transformer, a Q-Former, and a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, Linear, size_of
from pegboard_model_blip2.sizes import check_language, queries_of, sizes_of
from pegboard_model_blip2.tower import Tower
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.parameters import Parameters
from pegboard_models.qformer import QFormer


class Blip2(WithLanguageModel):
    """The tower is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        check_language(config)
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision(config, root_of(build).alone())

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes = sizes_of(config)
        self.num_rows = queries_of(config)
        self.tower = Tower(build.at("vision_model"), config.get("vision_config") or {}, sizes)
        reader = config.get("qformer_config") or {}
        reader = {**reader, "encoder_hidden_size": sizes.hidden_size}
        self.qformer = QFormer(build.at("qformer"), reader, "qformer_config")
        width = self.qformer.hidden_size
        self.queries = Parameters(build, {"query_tokens": (1, self.num_rows, width)})
        outer = size_of(text_config(config), "hidden_size")
        self.projector = Linear(build.at("language_projection"), width, outer, bias=True)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [3, size, size] → [rows, hidden] of each."""
        features = self.tower.forward(torch.stack([item["pixel_values"] for item in items]))
        states = self.qformer.forward(self.queries["query_tokens"][0], features)
        return self.projector(states).split(self.num_rows)
