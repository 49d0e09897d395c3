"""Normalization layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers.build import Build, Layer, PlainTensor


class Norm(Layer):
    """(x) → normalized x. (x, residual) → (normalized sum, sum), where `residual` is overwritten with the sum.

    It divides by the root mean square of the last dimension. A per-head norm is therefore a Norm of size head_dim on [T, H, D].
    """

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__(build)
        self.size, self.eps = size, eps

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        name = f"{self.build.path}.weight"
        self.weight = PlainTensor({name: (0, self.size)}, (self.size,), self.build)
        return [WantedWeight(name, (self.size,))]

    def accept(self, piece: WeightPiece) -> None:
        self.weight.accept(piece)

    def bind(self) -> None:
        weight, eps = self.weight.data, self.eps
        rms_norm, add_rms_norm = self.build.kernels["rms_norm"], self.build.kernels["add_rms_norm"]

        def forward(x: Tensor, residual: Tensor | None = None) -> Any:
            return rms_norm(x, weight, eps) if residual is None else add_rms_norm(x, residual, weight, eps)

        self.forward = forward
