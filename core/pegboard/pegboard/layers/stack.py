"""LayerStack: the loop over a model's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers.build import Build
from pegboard.layers.norm import Norm


class LayerStack(nn.Module):
    """(hidden [T, size], *step) → the sum of what all layers have added, normalized.

    make(build, index) builds layer `index` at build.path. Each layer is called as layer(hidden,
    residual, *step) and returns (hidden, residual), two parts of the sum so far; a residual of None
    is zero, as for the first layer. So a layer begins with `Norm.add`, which adds them. norm: of
    the sum; None = the model does more with the sum. unit: the sum of the architecture, divided by
    that of these layers.

    If only a part of the layers is built, there are only these. Such a stack takes and returns
    sums; the one with the last layer normalizes. `build.taps` are depths at which the sum
    is put into `build.declared.taps`: before the layer with this index, or after the last one.
    """

    def __init__(
        self,
        build: Build,
        num_layers: int,
        make: Callable[[Build, int], nn.Module],
        norm: Norm | None,
        *,
        unit: float = 1.0,
    ) -> None:
        super().__init__()
        indices = build.own_layers(num_layers)
        if norm is None and (build.taps or build.is_divided):
            raise ModelError("the layers of this architecture cannot be divided or tapped")
        self.layers = nn.ModuleList(make(build.at(i), i) for i in indices)
        self.norm = norm if indices.stop == num_layers else None
        self.steps: list[Callable[..., tuple[Tensor, Tensor | None]]] = []
        for index, layer in zip(indices, self.layers, strict=True):
            self.steps += [tap(build, index, unit)] if index in build.taps else []
            self.steps.append(layer.forward)
        self.steps += [tap(build, indices.stop, unit)] if indices.stop in build.taps else []

    def forward(self, hidden: Tensor, *step: Any) -> Tensor:
        residual = None
        for layer in self.steps:
            hidden, residual = layer(hidden, residual, *step)
        if self.norm is not None:
            return self.norm.add(hidden, residual)[0]
        return hidden if residual is None else hidden + residual

    __call__ = forward


def tap(build: Build, depth: int, unit: float) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return what hands out the sum at this depth."""

    def hand_out(
        hidden: Tensor, residual: Tensor | None, *step: Any
    ) -> tuple[Tensor, Tensor | None]:
        # a product, because the layers overwrite what they get
        build.declared.taps[depth] = (hidden if residual is None else hidden + residual) * unit
        return hidden, residual

    return hand_out
