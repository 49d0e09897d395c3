"""Fuyu (Bavishi et al. 2023): patches of an image are embedded as tokens are, by a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, Linear, size_of
from pegboard_model_fuyu.sizes import patch_of, with_text
from pegboard_models.language import WithLanguageModel, root_of, text_config


class Fuyu(WithLanguageModel):
    """The matrix of patches is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = with_text(config)
        super().__init__(config, build)
        if build.has_first_layer:
            place = root_of(build).alone().at("vision_embed_tokens")
            outer = size_of(text_config(config), "hidden_size")
            self.patches = Linear(place, 3 * patch_of(config) ** 2, outer, bias=True)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: patches [patches, patch · patch · 3] → [patches, hidden] of each."""
        each = [item["patches"] for item in items]
        dtype = getattr(torch, self.patches.build.dtype)
        return self.patches(torch.cat(each).to(dtype)).split([len(one) for one in each])
