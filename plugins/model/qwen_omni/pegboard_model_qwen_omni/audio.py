"""The audio encoders of Qwen-Omni."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear
from pegboard_model_qwen_omni.sizes import ChunkedSizes, WindowedSizes, num_rows
from pegboard_models.parameters import Parameters
from pegboard_models.vision import activation_of
from pegboard_models.whisper_encoder import EPS, EncoderLayer, WhisperEncoder, sinusoids

CONVOLUTIONS = ("conv2d1", "conv2d2", "conv2d3")
MOST_CHUNKS = 32
"""Convolved at once. More need gigabytes, and are not faster."""


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


class ChunkedEncoder(nn.Module):
    """Convolutions of chunks, and layers of Whisper in windows of some chunks (Xu et al. 2025,
    "Qwen3-Omni"): [mel bins, frames] → rows [n, outer], one for eight frames of a chunk. The last
    chunk is padded to the length of the others. Positions begin again in each."""

    def __init__(self, build: Build, sizes: ChunkedSizes) -> None:
        super().__init__()
        build = build.alone()
        encoder = sizes.encoder
        width = encoder.hidden_size
        channels = sizes.channels
        shapes: dict[str, tuple[int, ...]] = {}
        for name, inner in zip(CONVOLUTIONS, (1, channels, channels), strict=True):
            shapes |= {f"{name}.weight": (channels, inner, 3, 3), f"{name}.bias": (channels,)}
        self.sizes = sizes
        self.given = Parameters(build, shapes)
        bins = num_rows(encoder.num_bins)
        self.flat = Linear(build.at("conv_out"), channels * bins, width)
        self.positions = sinusoids(num_rows(sizes.frames), width, build.device)
        layers = build.at("layers")
        self.layers = nn.ModuleList(
            EncoderLayer(layers.at(index), encoder, key_bias=True)
            for index in range(encoder.num_layers)
        )
        self.norm = LayerNorm(build.at("ln_post"), width, EPS)
        self.first = Linear(build.at("proj1"), width, width, bias=True)
        self.last = Linear(build.at("proj2"), width, sizes.outer, bias=True)
        self.activation = activation_of(encoder.activation)

    def forward(self, mel: Tensor) -> Tensor:
        chunks = mel.split(self.sizes.frames, 1)
        longest = chunks[0].shape[1]
        padded = torch.stack(
            [functional.pad(chunk, (0, longest - chunk.shape[1])) for chunk in chunks]
        )
        batches = padded.split(min(MOST_CHUNKS, self.sizes.batch))
        states = torch.cat([self.convolved(batch) for batch in batches]).flatten(0, 1)
        hidden = states[: num_rows(longest) * (len(chunks) - 1) + num_rows(chunks[-1].shape[1])]
        lengths = windows(len(hidden), self.sizes.chunks * num_rows(longest))
        for layer in self.layers:
            hidden = layer.forward(hidden, lengths)
        rows: Tensor = self.last(self.activation(self.first(self.norm(hidden))))
        return rows

    def convolved(self, chunks: Tensor) -> Tensor:
        """[chunks, mel bins, frames] → [chunks, rows, width]."""
        hidden = chunks[:, None].to(self.given["conv2d1.weight"].dtype)
        for name in CONVOLUTIONS:
            weight = self.given[f"{name}.weight"]
            bias = self.given[f"{name}.bias"]
            hidden = functional.gelu(functional.conv2d(hidden, weight, bias, stride=2, padding=1))
        flat = hidden.permute(0, 3, 1, 2).flatten(2)
        rows = self.flat(flat.flatten(0, 1)).unflatten(0, flat.shape[:2])
        return rows + self.positions[: flat.shape[1]].to(rows.dtype)


def windows(count: int, size: int) -> list[int]:
    """Return the lengths of windows of `count` rows. size: of all but the last."""
    whole, rest = divmod(count, size)
    return [size] * whole + [rest] * bool(rest)
