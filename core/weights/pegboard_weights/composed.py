"""Weights that are made of other weights: side by side, or with a transform of the activations before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pegboard.errors import ModelError

Bound = Callable[[Tensor], Tensor]


class Held(Protocol):
    """A matrix [out, in] that is finished: an op that holds weights, or one of the classes here."""

    def bind(self) -> Bound:
        """Return the callable [T, in] → [T, out]."""

    def dense(self) -> Tensor:
        """Return the matrix [out, in]."""

    @property
    def nbytes(self) -> int:
        """Number of bytes held."""


class SideBySide:
    """Matrices with the same input. Their rows follow each other."""

    def __init__(self, weights: Sequence[Held]) -> None:
        self.weights = weights

    def bind(self) -> Bound:
        calls = [weight.bind() for weight in self.weights]
        return lambda x: torch.cat([call(x) for call in calls], -1)

    def dense(self) -> Tensor:
        return torch.cat([weight.dense().float() for weight in self.weights])

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


class Transform:
    """What is done to activations before they are multiplied with a weight that was quantized for the result.

    values: [columns], which multiply the columns of x; or a matrix M [n, n], which every n consecutive columns are multiplied by
    (x · M). Computed in the type of x.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def of(self, x: Tensor) -> Tensor:
        """Return x [T, columns], transformed."""
        values = self.values
        if values.dim() == 1:
            return x * values
        return (x.reshape(len(x), -1, len(values)) @ values).view(x.shape)

    def undone(self, dense: Tensor) -> Tensor:
        """Return the matrix [out, in] whose product with x is that of `dense` with the transformed x."""
        values = self.values.float()
        return dense * values if values.dim() == 1 else (dense.reshape(len(dense), -1, len(values)) @ values.T).view(dense.shape)

    def replace(self, other: Transform | None, path: str) -> None:
        """Take the values of another transform, for a reload of the weight at `path`, which keeps the addresses."""
        if other is None or other.values.shape != self.values.shape:
            raise ModelError(f"{path} comes with another transform than it was first loaded with; load it in a new engine")
        self.values.copy_(other.values)

    @property
    def nbytes(self) -> int:
        """Number of bytes held."""
        return int(self.values.nbytes)


class Transformed:
    """A weight with a transform of the activations before it."""

    def __init__(self, weight: Any, transform: Transform) -> None:
        self.weight, self.transform = weight, transform

    def bind(self) -> Bound:
        transformed, call = self.transform.of, self.weight.bind()
        return lambda x: call(transformed(x))

    def dense(self) -> Tensor:
        return self.transform.undone(self.weight.dense().float())

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes) + self.transform.nbytes
