"""LayerStack: the loop over a model's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pegboard.layers.build import Build


class LayerStack(nn.Module):
    """(hidden [T, size], *step) → (hidden, residual or None) after all layers.

    make(build, index) builds layer `index` at build.path. Each layer is called as layer(hidden,
    residual, *step) and returns (hidden, residual). The first layer gets None as the residual.
    """

    def __init__(
        self, build: Build, num_layers: int, make: Callable[[Build, int], nn.Module]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(build.at(i), i) for i in range(num_layers))
        self.steps = [layer.forward for layer in self.layers]

    def forward(self, hidden: Tensor, *step: Any) -> tuple[Tensor, Tensor | None]:
        residual = None
        for layer in self.steps:
            hidden, residual = layer(hidden, residual, *step)
        return hidden, residual

    __call__ = forward
