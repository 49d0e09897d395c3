"""What makes rows of a language model of the features of a tower."""

from __future__ import annotations

import math

from torch import Tensor, nn

from pegboard.layers import Build, Linear
from pegboard_models.vision import activation_of


class MLPProjector(nn.Module):
    """([n, in_features]) → [n, out_features]: two linear layers with an activation between them.
    names: of the layers."""

    def __init__(
        self,
        build: Build,
        in_features: int,
        out_features: int,
        activation: str,
        *,
        bias: bool,
        names: tuple[str, str] = ("linear_1", "linear_2"),
    ) -> None:
        super().__init__()
        build = build.alone()
        self.first = Linear(build.at(names[0]), in_features, out_features, bias=bias)
        self.last = Linear(build.at(names[1]), out_features, out_features, bias=bias)
        self.activation = activation_of(activation)

    def forward(self, features: Tensor) -> Tensor:
        rows: Tensor = self.last(self.activation(self.first(features)))
        return rows


def blocks_of(features: Tensor, count: int) -> Tensor:
    """Make one vector of the patches of each block of count · count ("pixel shuffle"): [images,
    patches, size] → [images, blocks, count² · size]. Images are square."""
    side = math.isqrt(features.shape[1]) // count
    lines = features.unflatten(1, (side, count, side, count))
    return lines.transpose(2, 3).flatten(3).flatten(1, 2)
