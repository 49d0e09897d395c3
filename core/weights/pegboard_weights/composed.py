"""Weights that are made of other weights: side by side, or with a transform of the activations
before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pegboard.errors import ModelError

Bound = Callable[[Tensor], Tensor]
BoundExperts = Callable[[Tensor, Tensor], Tensor]


class Held(Protocol):
    """A matrix [out, in] that is finished: an op that holds weights, or one of the classes here."""

    def bind(self) -> Bound:
        """Return the callable [T, in] → [T, out]."""

    def dense(self) -> Tensor:
        """Return the matrix [out, in]."""

    def tensors(self) -> list[Tensor]:
        """Return the memory that is held."""


class SideBySide:
    """Matrices with the same input. Their rows follow each other."""

    def __init__(self, weights: Sequence[Held]) -> None:
        self.weights = weights

    def bind(self) -> Bound:
        calls = [weight.bind() for weight in self.weights]
        return lambda x: torch.cat([call(x) for call in calls], -1)

    def dense(self) -> Tensor:
        return torch.cat([weight.dense().float() for weight in self.weights])

    def tensors(self) -> list[Tensor]:
        return [tensor for weight in self.weights for tensor in weight.tensors()]


class Transform(Protocol):
    """What is done to activations before they are multiplied with a weight that was quantized for
    the result. It is computed in the type of the activations."""

    def of(self, x: Tensor) -> Tensor:
        """Return x [T, columns], transformed."""

    def undone(self, dense: Tensor) -> Tensor:
        """Return the matrix [out, in] whose product with x is that of `dense` with the transformed
        x."""

    def values(self) -> Tensor:
        """Return the numbers that determine the transform. A reload writes to them."""

    def to(self, dtype: torch.dtype, device: str) -> Transform:
        """Return the transform for activations of this type."""


class ColumnScales:
    """x[t, c] · scales[c]. scales: [columns]."""

    def __init__(self, scales: Tensor) -> None:
        self.scales = scales

    def of(self, x: Tensor) -> Tensor:
        return x * self.scales

    def undone(self, dense: Tensor) -> Tensor:
        return dense * self.scales.float()

    def values(self) -> Tensor:
        return self.scales

    def to(self, dtype: torch.dtype, device: str) -> ColumnScales:
        return ColumnScales(self.scales.to(device, dtype, copy=True))


class MatrixTransform:
    """x · M for every n consecutive columns. matrix: M [n, n]."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def of(self, x: Tensor) -> Tensor:
        return (x.reshape(len(x), -1, len(self.matrix)) @ self.matrix).view(x.shape)

    def undone(self, dense: Tensor) -> Tensor:
        return (dense.reshape(len(dense), -1, len(self.matrix)) @ self.matrix.float().T).view(
            dense.shape
        )

    def values(self) -> Tensor:
        return self.matrix

    def to(self, dtype: torch.dtype, device: str) -> MatrixTransform:
        return MatrixTransform(self.matrix.to(device, dtype, copy=True))


class Hadamard:
    """x · H / √n for every n consecutive columns, n a power of two, where H is Sylvester's: H₁ = 1,
    H₂ₙ = (Hₙ Hₙ; Hₙ −Hₙ). It is its own inverse. It takes n · log₂ n additions, and no memory for a
    matrix."""

    def __init__(self, size: int) -> None:
        self.size = size

    def of(self, x: Tensor) -> Tensor:
        out = x
        width = 1
        while width < self.size:
            pairs = out.reshape(len(x), -1, 2, width)
            low = pairs[:, :, 0]
            high = pairs[:, :, 1]
            out = torch.stack((low + high, low - high), 2)
            width = 2 * width
        return out.reshape(x.shape) * self.size**-0.5

    def undone(self, dense: Tensor) -> Tensor:
        return self.of(dense)

    def values(self) -> Tensor:
        return torch.tensor([self.size])

    def to(self, dtype: torch.dtype, device: str) -> Hadamard:
        return self


def are_equal(one: Transform | None, other: Transform | None) -> bool:
    """Return whether two transforms do the same."""
    if one is None or other is None:
        return one is other
    return type(one) is type(other) and torch.equal(one.values(), other.values())


def replace(transform: Transform, other: Transform | None, path: str) -> None:
    """Write the values of another transform into one, for a reload of the weight at `path`."""
    if (
        other is None
        or type(other) is not type(transform)
        or other.values().shape != transform.values().shape
    ):
        raise ModelError(
            f"{path} comes with another transform than it was first loaded with; load it in a new "
            "engine"
        )
    transform.values().copy_(other.values())


class Transformed:
    """A weight with a transform of the activations before it."""

    def __init__(self, weight: Any, transform: Transform) -> None:
        self.weight = weight
        self.transform = transform

    def bind(self) -> Bound:
        transformed = self.transform.of
        call = self.weight.bind()
        return lambda x: call(transformed(x))

    def bind_experts(self, num_experts: int, bias: Tensor | None) -> BoundExperts:
        transformed = self.transform.of
        call = self.weight.bind_experts(num_experts, bias)
        return lambda x, starts: call(transformed(x), starts)

    def dense(self) -> Tensor:
        return self.transform.undone(self.weight.dense().float())

    def tensors(self) -> list[Tensor]:
        return [*self.weight.tensors(), self.transform.values()]
