"""Between layers, a token has several vectors (streams). Each layer computes one of them; the
others are predicted from all, and corrected by what the layer found (Baykal et al. 2023,
"Alternating Updates for Efficient Transformers")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pegboard.layers import Build, Linear, Norm
from pegboard_model_gemma3n.config import Shape
from pegboard_models.parameters import Parameters

LEAST_MAGNITUDE = 1e-5
"""Of the mean square of a vector that is scaled to the magnitude of another."""


class AltUp(nn.Module):
    """predict: streams [T, N, H] → the streams after the layer, as far as they can be known.
    correct: these, and what the layer made of the active one [T, H] → the streams after the layer.
    A gate for each token is computed from one stream."""

    def __init__(self, build: Build, shape: Shape) -> None:
        super().__init__()
        self.count = shape.num_streams
        self.active = shape.active
        self.router_norm = Norm(build.at("router_norm"), shape.hidden_size, shape.eps)
        self.router = Parameters(
            build.at("modality_router"), {"weight": (self.count, shape.hidden_size)}
        )
        self.prediction = Parameters(
            build.at("prediction_coefs"), {"weight": (self.count**2, self.count)}
        )
        self.correction = Parameters(
            build.at("correction_coefs"), {"weight": (self.count, self.count)}
        )
        self.weights = (
            Parameters(build, {"correct_output_scale": (shape.hidden_size,)})
            if shape.scales_correction
            else None
        )
        self.scale = 1.0 / shape.hidden_size

    def gates(self, x: Tensor) -> Tensor:
        """[T, H] → [T, N]."""
        return torch.tanh(
            ((self.router_norm(x) * self.scale) @ self.router["weight"].T).float()
        ).to(x.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        mixing = self.gates(streams[:, self.active]) @ self.prediction["weight"].T
        return torch.baddbmm(streams, mixing.view(-1, self.count, self.count), streams)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        shares = self.gates(computed) @ self.correction["weight"].T + 1.0
        return predicted + (computed - predicted[:, self.active]).unsqueeze(1) * shares.unsqueeze(2)

    def scaled(self, corrected: Tensor) -> Tensor:
        """Return the active stream for the layer's own input: [T, N, H] → [T, H]."""
        active = corrected[:, self.active]
        return active if self.weights is None else active * self.weights["correct_output_scale"]


class Projections(nn.Module):
    """A matrix for each stream but the first. Results get the magnitude that the first stream
    has."""

    def __init__(self, build: Build, shape: Shape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.projections = nn.ModuleList(
            Linear(build.at(i), size, size) for i in range(shape.num_streams - 1)
        )

    def forward(self, streams: Tensor) -> Tensor:
        """[T, N, H] → [T, N, H]. The first stream stays."""
        first = streams[:, 0]
        magnitude = first.square().mean(-1, keepdim=True).sqrt()
        others = []
        for index, project in enumerate(self.projections, start=1):
            other = project(streams[:, index].contiguous())
            others.append(
                other
                * magnitude
                / other.square().mean(-1, keepdim=True).clamp(min=LEAST_MAGNITUDE).sqrt()
            )
        return torch.stack((first, *others), 1)
