"""MiniCPM-o (OpenBMB 2025): MiniCPM-V that also hears speech, with the encoder of Whisper. Its
speech output is not built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.layers import Build, Linear, size_of
from pegboard_model_minicpmv.minicpmv import MiniCPMV
from pegboard_model_minicpmv.sizes import OMNI, AudioSizes, switch
from pegboard_models.whisper_encoder import WhisperEncoder


class MiniCPMO(MiniCPMV):
    """What the config says is not there (init_vision, init_audio) is not built."""

    known = OMNI

    def build_media(self, config: Mapping[str, Any], build: Build) -> None:
        if switch(config, "init_vision", True):
            super().build_media(config, build)
        if not switch(config, "init_audio", True):
            return
        self.sizes = AudioSizes.of(config)
        self.encoder = WhisperEncoder(build.at("apm"), self.sizes.encoder)
        width = size_of(config, "hidden_size")
        projection = build.at("audio_projection_layer")
        inner = self.sizes.encoder.hidden_size
        self.up = Linear(projection.at("linear1"), inner, width, bias=True)
        self.down = Linear(projection.at("linear2"), width, width, bias=True)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: of speech, input_features [mel bins, frames of all parts], and num_frames [parts]
        → [rows, hidden] of each. Others: see `MiniCPMV`."""
        if modality != "audio":
            return super().encode(modality, items)
        return [self.speech(item["input_features"], item["num_frames"].tolist()) for item in items]

    def speech(self, mel: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of an item. The published model pads all parts to the longest one, and
        features of the padding are seen, so they are computed here, too."""
        longest = max(counts)
        rows = []
        for part in mel.split([*counts], 1):
            num_frames = part.shape[1]
            padded = functional.pad(part, (0, longest - num_frames))
            seen = self.seen((longest + 1) // 2, num_frames, mel.device)
            (features,) = self.encoder.forward([padded], seen=[seen])
            projected = self.down(functional.relu(self.up(features)))
            count = self.sizes.num_rows(num_frames) * self.sizes.pooled
            rows.append(projected[:count].unflatten(0, (-1, self.sizes.pooled)).mean(1))
        return torch.cat(rows)

    def seen(self, count: int, num_frames: int, device: torch.device) -> Tensor:
        """Return which features each feature attends to, bool [count, count]: those before the end
        of its chunk. Of the padding, those are left out whose numbers are not below that of the
        frames, as in the published model."""
        places = torch.arange(count, device=device)
        ends = torch.full_like(places, count)
        if self.sizes.chunk is not None:
            ends = (places // self.sizes.chunk + 1) * self.sizes.chunk
        return places < ends.clamp(max=num_frames)[:, None]
