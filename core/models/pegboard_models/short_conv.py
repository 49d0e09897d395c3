"""The short convolution that most layers with states begin with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pegboard.layers import Build
from pegboard.layers.shards import Span
from pegboard.ops import StateRows
from pegboard_models.parameters import Parameters


class ShortConv(Parameters):
    """(x [T, C], state [blocks, C, K - 1], rows) → [T, C]: see `state_ops.causal_conv`. The
    checkpoint has its weight as [C, 1, K]. held: the channels that this rank holds; None = all."""

    def __init__(
        self,
        build: Build,
        channels: int,
        width: int,
        *,
        bias: bool,
        activates: bool,
        held: Sequence[Span] | None = None,
    ) -> None:
        shapes: dict[str, tuple[int, ...]] = {"weight": (channels, 1, width)}
        if bias:
            shapes["bias"] = (channels,)
        super().__init__(build, shapes, held=held)
        self.activates = activates

    def bind(self) -> None:
        conv = self.build.kernels["causal_conv"]
        activates = self.activates
        weight = self["weight"].squeeze(1)
        bias = self["bias"] if "bias" in self.shapes else None

        def forward(x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
            out: Tensor = conv(x, weight, bias, state, rows, activates)
            return out

        self.forward = forward
