"""Voxtral (Liu et al. 2025): the encoder of Whisper, two linear layers, and a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Build, read, size_of
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.projectors import MLPProjector
from pegboard_models.whisper_encoder import WhisperEncoder
from pegboard_models.whisper_sizes import LARGE, WhisperSizes


class Voxtral(WithLanguageModel):
    """The encoder is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_audio(config, build)

    def build_audio(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs. Raises ModelError if an item cannot be cut into rows."""
        sizes = WhisperSizes.of(config.get("audio_config") or {}, LARGE)
        self.width = sizes.intermediate_size
        if sizes.max_positions * sizes.hidden_size % self.width:
            raise ModelError(
                f"the checkpoint's audio encoder makes {sizes.max_positions} features of "
                f"{sizes.hidden_size} numbers, which are not rows of {self.width}; correct its "
                "config"
            )
        root = root_of(build)
        self.encoder = WhisperEncoder(root.at("audio_tower"), sizes)
        self.projector = MLPProjector(
            root.at("multi_modal_projector"),
            self.width,
            size_of(text_config(config), "hidden_size"),
            read(config, "projector_hidden_act", str) or "gelu",
            bias=False,
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: input_features [parts, mel bins, frames] → [rows, hidden] of each. The features
        that follow each other are one row: as many as have the width of the projector."""
        parts = [item["input_features"] for item in items]
        # one by one, because an hour at once would need gigabytes
        features = [self.encoder.forward([part])[0] for part in torch.cat(parts)]
        rows = self.projector.forward(torch.cat(features).view(-1, self.width))
        per_part = len(rows) // sum(len(each) for each in parts)
        return [*rows.split([len(each) * per_part for each in parts])]
