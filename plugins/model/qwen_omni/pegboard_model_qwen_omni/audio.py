"""The audio encoders of Qwen-Omni."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, Linear
from pegboard_model_qwen_omni.sizes import WindowedSizes
from pegboard_models.whisper_encoder import WhisperEncoder, sinusoids


class WindowedEncoder(nn.Module):
    """The layers of Whisper in windows (Xu et al. 2025, "Qwen2.5-Omni"): [mel bins, frames] → rows
    [(frames + 1) // 4, outer]. Windows do not see each other, and positions begin again in each. A
    row is the mean of two features."""

    def __init__(self, build: Build, sizes: WindowedSizes) -> None:
        super().__init__()
        width = sizes.encoder.hidden_size
        positions = sinusoids(sizes.frames // 2, width, build.device)
        self.frames = sizes.frames
        self.encoder = WhisperEncoder(build, sizes.encoder, positions, "ln_post")
        self.project = Linear(build.at("proj").alone(), width, sizes.outer, bias=True)

    def forward(self, mel: Tensor) -> Tensor:
        states = torch.cat(self.encoder.states(mel.split(self.frames, 1)))
        means = functional.avg_pool1d(states.T, 2).T
        rows: Tensor = self.project(self.encoder.norm(means))
        return rows
