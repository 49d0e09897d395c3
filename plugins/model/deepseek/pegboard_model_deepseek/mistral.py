"""Mistral Large 3 (Mistral 2025): DeepSeek-V3's layers. Experts are chosen without corrections, by
softmax, and the queries of late tokens may have factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pegboard.layers import Build
from pegboard_model_deepseek.deepseek import DeepseekModel
from pegboard_model_deepseek.shape import Shape
from pegboard_models.lateness import Lateness, tuning_of


class MistralLarge3Model(DeepseekModel):
    """Groups of experts count by their best expert."""

    method = "group_limited_greedy"

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        tuning = tuning_of(config)
        length = Shape(config).max_positions
        self.lateness = None if tuning is None else Lateness(build, tuning, length)

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        assert self.rope is not None
        factors = None if self.lateness is None else self.lateness(*positions)
        return self.layers(hidden, self.rope(*positions), factors)
