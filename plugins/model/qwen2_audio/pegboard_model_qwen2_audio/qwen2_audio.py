"""Qwen2-Audio (Chu et al. 2024): the encoder of Whisper, a linear layer, and a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.layers import Build, Linear, size_of
from pegboard_model_qwen2_audio.defaults import AUDIO
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.whisper_encoder import WhisperEncoder
from pegboard_models.whisper_sizes import WhisperSizes


class Qwen2Audio(WithLanguageModel):
    """The encoder is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_audio(config, build)

    def build_audio(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes = WhisperSizes.of(config.get("audio_config") or {}, AUDIO)
        root = root_of(build)
        self.encoder = WhisperEncoder(root.at("audio_tower"), sizes)
        place = root.at("multi_modal_projector").at("linear").alone()
        hidden_size = size_of(text_config(config), "hidden_size")
        self.projector = Linear(place, sizes.hidden_size, hidden_size, bias=True)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: input_features [mel bins, frames] and num_frames [1], of those that sound →
        [rows, hidden] of each. A row is the mean of two features."""
        counts = [(int(item["num_frames"]) + 1) // 2 for item in items]
        states = self.encoder.states([item["input_features"] for item in items], counts)
        means = [functional.avg_pool1d(each.T, 2).T for each in states]
        rows = self.projector(self.encoder.norm(torch.cat(means)))
        return [*rows.split([len(each) for each in means])]
