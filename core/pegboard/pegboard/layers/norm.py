"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from pegboard.interfaces.weight_loader import WeightPiece, WeightSlice
from pegboard.layers.build import Build, Layer, PlainTensor


class Norm(Layer):
    """(x) → normalised x; (x, residual) → (normalised sum, sum), where `residual` is overwritten with the sum.

    kind: "rms"; "gemma" = RMS with weight + 1; "layer" = LayerNorm with optional bias. Works on the last dimension, so a
    per-head norm is a Norm of size head_dim on [T, H, D].
    """

    def __init__(self, build: Build, size: int, eps: float, *, kind: Literal["rms", "gemma", "layer"] = "rms") -> None:
        super().__init__(build)
        self.size, self.eps, self.kind = size, eps, kind
        self.weight: PlainTensor | None = None
        self.bias: PlainTensor | None = None

    def declare(self, available: Mapping[str, Any]) -> list[WeightSlice]:
        name = f"{self.build.path}.weight"
        self.weight = PlainTensor({name: (0, self.size)}, (self.size,), self.build)
        wanted = [WeightSlice(name, shape=(self.size,))]
        bias = f"{self.build.path}.bias"
        if self.kind == "layer" and bias in available:
            self.bias = PlainTensor({bias: (0, self.size)}, (self.size,), self.build)
            wanted.append(WeightSlice(bias, shape=(self.size,)))
        return wanted

    def accept(self, piece: WeightPiece) -> None:
        target = self.bias if self.bias is not None and piece.name in self.bias.names else self.weight
        assert target is not None
        target.accept(piece)
        if self.kind == "gemma":
            target.data += 1

    def bind(self) -> None:
        assert self.weight is not None
        weight, eps, kernels = self.weight.data, self.eps, self.build.kernels
        if self.kind == "layer":
            layer_norm, bias = kernels["layer_norm"], self.bias.data if self.bias is not None else None

            def forward(x: Tensor, residual: Tensor | None = None) -> Any:
                if residual is None:
                    return layer_norm(x, weight, bias, eps)
                residual.add_(x)
                return layer_norm(residual, weight, bias, eps), residual
        else:
            rms_norm, add_rms_norm = kernels["rms_norm"], kernels["add_rms_norm"]

            def forward(x: Tensor, residual: Tensor | None = None) -> Any:
                return rms_norm(x, weight, eps) if residual is None else add_rms_norm(x, residual, weight, eps)

        self.forward = forward
