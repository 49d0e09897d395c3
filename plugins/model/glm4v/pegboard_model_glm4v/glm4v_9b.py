"""GLM-4V-9B (GLM Team 2024): a ChatGLM that reads images of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pegboard.layers import Build, size_of
from pegboard_model_glm4v.eva_sizes import POSITION, EvaSizes
from pegboard_model_glm4v.eva_tower import EvaTower
from pegboard_models.language import LanguageStages

LANGUAGE = "ChatGLMModel"
"""The architecture of the language model."""


class Glm4v9b(LanguageStages):
    """The tower is built only where prompts are embedded. All patches of an image have the same
    position."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        self.language = build.language_model({**config, "architectures": [LANGUAGE]})
        build.declared.axes.append(POSITION)
        if build.has_first_layer:
            sizes = EvaSizes.of(config)
            outer = size_of(config, "hidden_size")
            inner = size_of(config, "ffn_hidden_size")
            self.tower = EvaTower(build.at("transformer.vision"), sizes, outer, inner)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [3, size, size] → [rows, hidden] of each."""
        # one by one, so that rows do not depend on what is encoded with them
        return [self.tower.forward(item["pixel_values"][None])[0] for item in items]
