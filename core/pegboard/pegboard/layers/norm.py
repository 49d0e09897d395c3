"""Normalization layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers.build import Build, Layer, PlainTensor


class Norm(Layer):
    """(x) → normalized x. `add`: (x, residual) → (normalized sum, sum), where `residual` is
    overwritten with the sum. A residual of None is zero.

    It divides by the root mean square of the last dimension. A per-head norm is therefore a Norm of
    size head_dim on [T, H, D].
    """

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__(build)
        self.size = size
        self.eps = eps

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        name = f"{self.build.path}.weight"
        self.weight = PlainTensor({name: (0, self.size)}, (self.size,), self.build)
        return [WantedWeight(name, (self.size,))]

    def accept(self, piece: WeightPiece) -> None:
        self.weight.accept(piece)

    def bind(self) -> None:
        weight = self.weight.data
        eps = self.eps
        rms_norm = self.build.kernels["rms_norm"]
        add_rms_norm = self.build.kernels["add_rms_norm"]

        def forward(x: Tensor) -> Tensor:
            return rms_norm(x, weight, eps)

        def add(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            if residual is None:
                return rms_norm(x, weight, eps), x
            return add_rms_norm(x, residual, weight, eps)

        self.forward = forward
        self.add = add


class LayerNorm(Norm):
    """Like Norm, but it subtracts the mean and adds a bias (Ba et al. 2016). has_weight, has_bias:
    whether the checkpoint has them."""

    def __init__(
        self, build: Build, size: int, eps: float, *, has_weight: bool = True, has_bias: bool = True
    ) -> None:
        super().__init__(build, size, eps)
        self.has_weight = has_weight
        self.has_bias = has_bias

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        names = {name: f"{self.build.path}.{name}" for name in ("weight", "bias")}
        self.weight, bias = (
            PlainTensor({name: (0, self.size)}, (self.size,), self.build) for name in names.values()
        )
        self.bias = bias if self.has_bias else None
        if not self.has_weight:
            self.weight.data.fill_(1.0)
        has = {"weight": self.has_weight, "bias": self.has_bias}
        return [WantedWeight(name, (self.size,)) for part, name in names.items() if has[part]]

    def accept(self, piece: WeightPiece) -> None:
        target = (
            self.bias if self.bias is not None and piece.name in self.bias.names else self.weight
        )
        target.accept(piece)

    def bind(self) -> None:
        weight = self.weight.data
        eps = self.eps
        bias = None if self.bias is None else self.bias.data
        layer_norm = self.build.kernels["layer_norm"]
        add_layer_norm = self.build.kernels["add_layer_norm"]

        def forward(x: Tensor) -> Tensor:
            return layer_norm(x, weight, bias, eps)

        def add(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            if residual is None:
                return layer_norm(x, weight, bias, eps), x
            return add_layer_norm(x, residual, weight, bias, eps)

        self.forward = forward
        self.add = add
