"""Ultravox (Fixie AI 2024): the encoder of Whisper, a projector of several features, and a language
model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import Build
from pegboard_model_ultravox.projectors import projector_of
from pegboard_model_ultravox.sizes import Stacking, encoder_sizes
from pegboard_models.language import WithLanguageModel, root_of
from pegboard_models.whisper_encoder import WhisperEncoder


class Ultravox(WithLanguageModel):
    """The encoder is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        text = config.get("text_config")
        if isinstance(text, Mapping) and text.get("text_config"):
            raise ModelError(
                f"the checkpoint's text_config has model_type={text.get('model_type')!r}, which "
                "has a text_config of its own; expected a model of text only. Use a version of "
                "Ultravox with such a model"
            )
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_audio(config, build)

    def build_audio(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs. Encoders that come from Whisper's own checkpoint are below
        "model.encoder"."""
        sizes = encoder_sizes(config)
        root = root_of(build)
        tower = root.at("audio_tower")
        whole = tower.at("model").at("encoder")
        self.stacking = Stacking.of(config, sizes)
        self.encoder = WhisperEncoder(whole if build.has(whole.path) else tower, sizes)
        self.project = projector_of(root.at("multi_modal_projector"), config, sizes)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: input_features [mel bins, frames] → [rows, hidden] of each."""
        return [self.rows(item["input_features"]) for item in items]

    def rows(self, mel: Tensor) -> Tensor:
        """Return the rows of an item."""
        first, *others = mel.split(self.stacking.frames, 1)
        attended = (first.shape[1] + 1) // 2
        # one by one, because an hour at once would need gigabytes
        chunks = [self.chunk(first, attended, attended), *map(self.next_chunk, others)]
        return torch.cat(chunks)

    def next_chunk(self, mel: Tensor) -> Tensor:
        """Return the rows of a chunk that is not the first one. The published model pads it with
        zeros and encodes these, too, so the last row has features of them. No feature attends to
        them."""
        attended = (mel.shape[1] + 1) // 2
        whole = 2 * self.stacking.stack * self.stacking.rows_of_chunk(mel.shape[1])
        padding = min(whole + 2, self.stacking.frames) - mel.shape[1]
        count = min(whole, self.stacking.frames) // 2
        return self.chunk(functional.pad(mel, (0, padding)), count, attended)

    def chunk(self, mel: Tensor, count: int, attended: int) -> Tensor:
        """Return the rows of a chunk. count: its features. attended: those that are attended to."""
        (features,) = self.encoder.forward([mel], [count], [attended])
        padding = -count % self.stacking.stack
        stacked = functional.pad(features, (0, 0, 0, padding)).unflatten(
            0, (-1, self.stacking.stack)
        )
        rows: Tensor = self.project(stacked.flatten(1))
        return rows
