"""A language model of any architecture, and one linear layer for colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.layers import Build, Linear, size_of


class Colours(nn.Module):
    """Implements `Model` and `MultiModal` of `pegboard.interfaces.model`."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        text = config["text_config"]
        self.language: Any = build.at("language_model").language_model(text)
        if build.has_first_layer:  # only the first pipeline stage embeds
            self.colours = Linear(build.alone().at("colours"), 3, size_of(text, "hidden_size"))

    def embed(self, input_ids: Tensor) -> Tensor:
        rows: Tensor = self.language.embed(input_ids)
        return rows

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: "colours" [16, 3] → [16, hidden] of each."""
        rows: Tensor = self.colours(torch.cat([item["colours"] for item in items]))
        return list(rows.split(16))

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        states: Tensor = self.language.forward(hidden, positions)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.language.logits(hidden)
        return logits
