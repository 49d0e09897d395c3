"""Ministral 3 (Mistral 2025): a Mistral that may multiply the queries of late tokens by factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pegboard.layers import Build
from pegboard_model_llama.llama import LlamaModel
from pegboard_models.lateness import LateAttention, Lateness, tuning_of


class Ministral3Model(LlamaModel):
    attention_class = LateAttention

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        tuning = tuning_of(config)
        length = self.shape_class(config).max_positions
        self.lateness = None if tuning is None else Lateness(build, tuning, length)

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        assert self.rope is not None
        factors = None if self.lateness is None else self.lateness(*positions)
        return self.layers(hidden, self.rope(*positions), factors)
