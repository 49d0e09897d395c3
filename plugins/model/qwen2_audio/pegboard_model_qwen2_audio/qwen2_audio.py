"""The encoder of Whisper, whose features are averaged in pairs, a projector, and a language model:

Qwen2-Audio       an item of at most 30 seconds, and a linear layer (Chu et al. 2024)
Audio Flamingo 3  an item of several windows, and two linear layers (Goel et al. 2025)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.layers import Build, Linear, read, size_of
from pegboard_model_qwen2_audio.defaults import SEEN
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.projectors import MLPProjector
from pegboard_models.whisper_encoder import WhisperEncoder
from pegboard_models.whisper_sizes import LARGE, WhisperSizes


class Qwen2Audio(WithLanguageModel):
    """The encoder is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_audio(config, build)

    def build_audio(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        sizes = WhisperSizes.of(config.get("audio_config") or {}, LARGE)
        root = root_of(build)
        self.encoder = WhisperEncoder(root.at("audio_tower"), sizes)
        self.project = self.projector(
            root.at("multi_modal_projector"),
            config,
            sizes.hidden_size,
            size_of(text_config(config), "hidden_size"),
        )

    def projector(
        self, build: Build, config: Mapping[str, Any], in_features: int, out_features: int
    ) -> Callable[[Tensor], Tensor]:
        """Build what makes rows of features."""
        return Linear(build.at("linear").alone(), in_features, out_features, bias=True)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: input_features [mel bins, frames] and num_frames [1], of those that sound →
        [rows, hidden] of each."""
        frames = [int(item["num_frames"]) for item in items]
        return self.rows([item["input_features"] for item in items], frames)

    def rows(self, mels: Sequence[Tensor], frames: Sequence[int]) -> list[Tensor]:
        """Return the rows of windows. frames: those of each that sound. A row is the mean of two
        features."""
        states = self.encoder.states(mels, [(count + 1) // 2 for count in frames])
        means = [functional.avg_pool1d(each.T, 2).T for each in states]
        rows = self.project(self.encoder.norm(torch.cat(means)))
        return [*rows.split([len(each) for each in means])]


class AudioFlamingo3(Qwen2Audio):
    def projector(
        self, build: Build, config: Mapping[str, Any], in_features: int, out_features: int
    ) -> Callable[[Tensor], Tensor]:
        activation = read(config, "projector_hidden_act", str) or "gelu"
        bias = read(config, "projector_bias", bool) is not False
        return MLPProjector(build, in_features, out_features, activation, bias=bias)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: input_features [windows, mel bins, frames] and num_frames [windows], of those that
        sound → [rows, hidden] of each."""
        rows: list[Tensor] = []
        for item in items:
            frames = item["num_frames"].tolist()
            mels = zip(item["input_features"], frames, strict=True)
            # one by one, because ten minutes at once would need gigabytes
            rows.append(torch.cat([self.window(mel, count) for mel, count in mels]))
        return rows

    def window(self, mel: Tensor, count: int) -> Tensor:
        """Return the rows of a window. count: of the frames that sound."""
        return self.rows([mel[:, : count + SEEN]], [count])[0]
