"""Between layers, a token has several vectors (streams), a row of N·H. See
`pegboard_models.streams`."""

from __future__ import annotations

from torch import Tensor, nn

from pegboard.layers import Build, Linear, Norm
from pegboard_model_gemma3n.config import Shape
from pegboard_models.parameters import Parameters


class AltUp(nn.Module):
    """predict: streams [T, N·H] → the streams after the layer, as far as they can be known.
    correct: these, and what the layer made of the active one [T, H] → the streams after the layer.
    A gate for each token is computed from one stream."""

    def __init__(self, build: Build, shape: Shape) -> None:
        super().__init__()
        count = shape.num_streams
        self.size = shape.hidden_size
        self.index = shape.active
        self.router_norm = Norm(build.at("router_norm"), shape.hidden_size, shape.eps)
        self.router = Parameters(
            build.at("modality_router"), {"weight": (count, shape.hidden_size)}
        )
        self.prediction = Parameters(build.at("prediction_coefs"), {"weight": (count**2, count)})
        self.correction = Parameters(build.at("correction_coefs"), {"weight": (count, count)})
        self.weights = (
            Parameters(build, {"correct_output_scale": (shape.hidden_size,)})
            if shape.scales_correction
            else None
        )
        self.kernels = build.kernels

    def active(self, streams: Tensor) -> Tensor:
        """Return the stream that layers compute: [T, N·H] → [T, H]."""
        return streams[:, self.index * self.size : (self.index + 1) * self.size]

    def predict(self, streams: Tensor) -> Tensor:
        routed = self.router_norm(self.active(streams))
        out: Tensor = self.kernels["predict_streams"](
            streams, routed, self.router["weight"], self.prediction["weight"]
        )
        return out

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        routed = self.router_norm(computed)
        mixing = self.correction["weight"]
        out: Tensor = self.kernels["correct_streams"](
            predicted, computed, routed, self.router["weight"], mixing, self.index
        )
        return out

    def scaled(self, corrected: Tensor) -> Tensor:
        """Return the active stream for the layer's own input: [T, N·H] → [T, H]."""
        active = self.active(corrected)
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
        self.kernels = build.kernels

    def forward(self, streams: list[Tensor]) -> list[Tensor]:
        """N times [T, H] → N times [T, H]. The first stream stays."""
        first = streams[0]
        match = self.kernels["match_magnitude"]
        others = zip(self.projections, streams[1:], strict=True)
        return [first, *(match(project(stream), first) for project, stream in others)]
