"""Feed-forward blocks without a gate, and experts of them (nomic-embed-text-v2, Nussbaum and
Duderstadt 2025, "Training sparse mixture of experts text embedding models")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight, WeightPiece
from pegboard.layers import Build, Experts, Linear
from pegboard.ops.experts import RouterRule
from pegboard_model_encoder.parts import activation_of
from pegboard_models.parameters import Parameters

FIRST = "w1"
LAST = "w2"


@dataclass(frozen=True)
class ExpertSizes:
    """every: layers 1, 1 + every, … have experts. count: of them. rule: how they are chosen."""

    every: int
    count: int
    rule: RouterRule

    def are_in(self, index: int) -> bool:
        """Return whether the layer has experts."""
        return index % self.every == 1


class PlainMLP(nn.Module):
    """down(activation(up(x))). biases: whether the matrices have one."""

    def __init__(
        self, build: Build, hidden: int, width: int, activation: str, biases: tuple[bool, ...]
    ) -> None:
        super().__init__()
        self.up = Linear(build.at("mlp.fc1"), hidden, width, bias=biases[0], split="rows")
        self.activation = activation_of(activation)
        self.down = Linear(build.at("mlp.fc2"), width, hidden, bias=biases[1], split="columns")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.activation(self.up(x)))
        return result


class ExpertMLP(nn.Module):
    """The weighted sum of the chosen experts, each without biases, and one bias for the sum."""

    def __init__(
        self, build: Build, hidden: int, width: int, activation: str, sizes: ExpertSizes
    ) -> None:
        super().__init__()
        self.router = Linear(build.at("mlp.router.layer"), hidden, sizes.count)
        self.experts = RowsOfExperts(
            build.at("mlp.experts.mlp"),
            sizes.count,
            hidden,
            width,
            rule=sizes.rule,
            activation=Ungated(activation),
            names=(FIRST, LAST),
        )
        self.bias = Parameters(build.at("mlp.experts"), {"bias": (hidden,)})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.experts(x, self.router(x)) + self.bias["bias"]
        return result


class Ungated:
    """See `pegboard.layers.ExpertActivation`: [T, F] → [T, F]."""

    def __init__(self, name: str) -> None:
        self.activation = activation_of(name)

    def bind(
        self, kernels: Mapping[str, Callable[..., Any]], is_interleaved: bool
    ) -> Callable[[Tensor], Tensor]:
        return self.activation


class RowsOfExperts(Experts):
    """Experts whose tensors are below each other: `w1` and `w2`, each [E · F, hidden]. The last one
    is transposed."""

    def declare(self, available: Mapping[str, TensorEntry]) -> list[WantedWeight]:
        stacked = {
            name: replace(entry, shape=self._stacked(entry.shape))
            for name, entry in available.items()
            if name in (self.build.at(FIRST).path, self.build.at(LAST).path)
        }
        wanted = super().declare({**available, **stacked})
        return [
            WantedWeight(each.name, available[each.name].shape) if each.name in stacked else each
            for each in wanted
        ]

    def accept(self, piece: WeightPiece) -> None:
        shape = self._stacked(piece.shape)
        data = piece.data.view(shape) if isinstance(piece.data, Tensor) else piece.data
        super().accept(replace(piece, shape=shape, data=data))

    def _stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        size = self.num_experts
        is_divisible = len(shape) == 2 and shape[0] % size == 0
        return (size, shape[0] // size, shape[1]) if is_divisible else tuple(shape)

    def _is_transposed(self, module: str, shape: Any) -> bool:
        return module == LAST
