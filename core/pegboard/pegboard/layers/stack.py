"""LayerStack: the loop over a model's layers, core's own.

It keeps what does not belong in model files: the slice of a pipeline stage and the hidden states that a draft model taps.
Each variant is chosen at construction, so the plain stack is a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pegboard.layers.build import Build


class LayerStack(nn.Module):
    """(hidden [T, size], *step) → (hidden, residual or None) after this stage's layers.

    make(build, index) builds layer `index` at build.path; each layer is called as layer(hidden, residual, *step) and returns
    (hidden, residual). The first call of a stage gets residual None. `tapped` maps a tapped layer index to the hidden state
    (with residual folded in) behind it, filled anew in every step.
    """

    def __init__(self, build: Build, num_layers: int, make: Callable[[Build, int], nn.Module]) -> None:
        super().__init__()
        stop = num_layers if build.stage.stop is None else build.stage.stop
        self.first_index = build.stage.start
        self.layers = nn.ModuleList(make(build.at(i), i) for i in range(build.stage.start, stop))
        self.taps = frozenset(build.taps)
        self.tapped: dict[int, Tensor] = {}
        self.steps = [layer.forward for layer in self.layers]
        self.forward = self._tapped_loop if self.taps else self._plain_loop

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def _plain_loop(self, hidden: Tensor, *step: Any) -> tuple[Tensor, Tensor | None]:
        residual = None
        for layer in self.steps:
            hidden, residual = layer(hidden, residual, *step)
        return hidden, residual

    def _tapped_loop(self, hidden: Tensor, *step: Any) -> tuple[Tensor, Tensor | None]:
        residual = None
        for index, layer in enumerate(self.steps, self.first_index):
            hidden, residual = layer(hidden, residual, *step)
            if index in self.taps:
                self.tapped[index] = hidden if residual is None else hidden + residual
        return hidden, residual
