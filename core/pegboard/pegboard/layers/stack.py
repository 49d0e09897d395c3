"""LayerStack: the loop over a model's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pegboard.layers.build import Build
from pegboard.layers.norm import Norm


class LayerStack(nn.Module):
    """(hidden [T, size], *step) → the sum of what all layers have added, normalized.

    make(build, index) builds layer `index` at build.path. Each layer is called as layer(hidden,
    residual, *step) and returns (hidden, residual), two parts of the sum so far; a residual of None
    is zero, as for the first layer. So a layer begins with `Norm.add`, which adds them. norm: of
    the sum; None = the layers' last hidden states are the result.
    """

    def __init__(
        self,
        build: Build,
        num_layers: int,
        make: Callable[[Build, int], nn.Module],
        norm: Norm | None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(build.at(i), i) for i in range(num_layers))
        self.norm = norm
        self.steps = [layer.forward for layer in self.layers]

    def forward(self, hidden: Tensor, *step: Any) -> Tensor:
        residual = None
        for layer in self.steps:
            hidden, residual = layer(hidden, residual, *step)
        return hidden if self.norm is None else self.norm.add(hidden, residual)[0]

    __call__ = forward
