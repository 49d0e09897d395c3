"""Weights that are made of other weights: side by side, or with a transform of the activations
before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import QuantizationSetup
from pegboard.ops.linear import FloatWeight
from pegboard_weights.hadamard import hadamard

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

    def bind(self) -> Bound:
        """Return the callable [T, columns] → [T, columns]."""

    def undone(self, dense: Tensor) -> Tensor:
        """Return the matrix [out, in] whose product with x is that of `dense` with the transformed
        x."""

    def values(self) -> Tensor:
        """Return the numbers that determine the transform."""

    def write(self, values: Tensor) -> None:
        """Replace the numbers, for a reload. Bound callables see the new ones."""

    def to(self, setup: QuantizationSetup) -> Transform:
        """Return the transform with the kernels, device and type of activations of a setup."""

    def tensors(self) -> list[Tensor]:
        """Return the memory that is held."""


class ColumnScales:
    """x[t, c] · scales[c]. scales: [columns]."""

    def __init__(self, scales: Tensor) -> None:
        self.scales = scales

    def bind(self) -> Bound:
        return lambda x: x * self.scales

    def undone(self, dense: Tensor) -> Tensor:
        return dense * self.scales.float()

    def values(self) -> Tensor:
        return self.scales

    def write(self, values: Tensor) -> None:
        self.scales.copy_(values)

    def to(self, setup: QuantizationSetup) -> ColumnScales:
        return ColumnScales(self.scales.to(setup.device, getattr(torch, setup.dtype), copy=True))

    def tensors(self) -> list[Tensor]:
        return [self.scales]


class MatrixTransform:
    """x · M for every n consecutive columns. matrix: M [n, n]. kind: the weight format
    `float_weight`, which holds it."""

    def __init__(
        self,
        matrix: Tensor,
        kind: Callable[..., Any] = FloatWeight,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.size = len(matrix)
        self.weight = kind((self.size, self.size), dtype, device)
        self.write(matrix)

    def bind(self) -> Bound:
        multiply = self.weight.bind()
        return lambda x: multiply(x.reshape(-1, self.size)).view(x.shape)

    def undone(self, dense: Tensor) -> Tensor:
        parts = dense.reshape(len(dense), -1, self.size)
        return (parts @ self.values().float().T).view(dense.shape)

    def values(self) -> Tensor:
        matrix: Tensor = self.weight.dense().T
        return matrix

    def write(self, values: Tensor) -> None:
        self.weight.plain().copy_(values.T)
        self.weight.finish()

    def to(self, setup: QuantizationSetup) -> MatrixTransform:
        kind = setup.kernels["float_weight"]
        return MatrixTransform(self.values(), kind, getattr(torch, setup.dtype), setup.device)

    def tensors(self) -> list[Tensor]:
        held: list[Tensor] = self.weight.tensors()
        return held


class Hadamard:
    """See `pegboard_weights.hadamard`, for every `size` consecutive columns. transform: the op."""

    def __init__(self, size: int, transform: Callable[..., Tensor] = hadamard) -> None:
        self.size = size
        self.transform = transform

    def bind(self) -> Bound:
        return partial(self.transform, size=self.size)

    def undone(self, dense: Tensor) -> Tensor:
        return hadamard(dense, self.size)

    def values(self) -> Tensor:
        return torch.tensor([self.size])

    def write(self, values: Tensor) -> None:
        """The size is all there is, and `replace` has compared it."""

    def to(self, setup: QuantizationSetup) -> Hadamard:
        return Hadamard(self.size, setup.kernels["hadamard"])

    def tensors(self) -> list[Tensor]:
        return []


class SignedHadamard:
    """The `Hadamard` of x[t, c] · signs[c], or, if is_inverse, the signs times the `Hadamard` of x.
    signs: 1 or -1, [columns]."""

    def __init__(
        self,
        signs: Tensor,
        size: int,
        is_inverse: bool,
        transform: Callable[..., Tensor] = hadamard,
    ) -> None:
        self.signs = signs
        self.size = size
        self.is_inverse = is_inverse
        self.transform = transform

    @classmethod
    def of(cls, matrix: Tensor, columns: int, is_inverse: bool) -> SignedHadamard | None:
        """Return the transform by this matrix [size, size] / √size, or by its transpose if
        is_inverse. None = it is not one of these."""
        size = len(matrix)
        if size & (size - 1):
            return None
        signs = matrix[:, 0].sign()
        plain = (hadamard(torch.eye(size), size) * size**0.5).round()
        if not torch.equal(matrix, signs.unsqueeze(1) * plain):
            return None
        return cls(signs.repeat(columns // size), size, is_inverse)

    def bind(self) -> Bound:
        signs = self.signs
        transform = partial(self.transform, size=self.size)
        if self.is_inverse:
            return lambda x: transform(x) * signs
        return lambda x: transform(x * signs)

    def undone(self, dense: Tensor) -> Tensor:
        signs = self.signs.float()
        if self.is_inverse:
            return hadamard(dense * signs, self.size)
        return hadamard(dense, self.size) * signs

    def values(self) -> Tensor:
        return torch.cat((self.signs, self.signs.new_tensor([self.size, self.is_inverse])))

    def write(self, values: Tensor) -> None:
        self.signs.copy_(values[:-2])

    def to(self, setup: QuantizationSetup) -> SignedHadamard:
        signs = self.signs.to(setup.device, getattr(torch, setup.dtype), copy=True)
        return SignedHadamard(signs, self.size, self.is_inverse, setup.kernels["hadamard"])

    def tensors(self) -> list[Tensor]:
        return [self.signs]


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
    transform.write(other.values())


class Transformed:
    """A weight with a transform of the activations before it."""

    def __init__(self, weight: Any, transform: Transform) -> None:
        self.weight = weight
        self.transform = transform

    def bind(self) -> Bound:
        transformed = self.transform.bind()
        call = self.weight.bind()
        return lambda x: call(transformed(x))

    def bind_experts(self, num_experts: int, bias: Tensor | None) -> BoundExperts:
        transformed = self.transform.bind()
        call = self.weight.bind_experts(num_experts, bias)
        return lambda x, starts: call(transformed(x), starts)

    def dense(self) -> Tensor:
        return self.transform.undone(self.weight.dense().float())

    def tensors(self) -> list[Tensor]:
        return [*self.weight.tensors(), *self.transform.tensors()]
