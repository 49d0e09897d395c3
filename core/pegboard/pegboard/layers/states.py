"""Layers with one state per request: what a model declares for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.attention import KVTensor
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers.build import Build, Layer, PlainTensor


class StateLayer(Layer):
    """() → (states by name, each [blocks, *shape]; where the rows of this step have theirs). Ops
    such as those of `pegboard_models.state_ops` take both.

    layer_index: names the layer's states, as an attention layer's index names its cache; no other
    layer may have it. tensors: the state of one request, those of wider types first.
    """

    def __init__(self, build: Build, layer_index: int, *tensors: KVTensor) -> None:
        super().__init__(build)
        declared = build.declared
        if layer_index in declared.attention or layer_index in declared.states:
            raise ModelError(f"{build.path}: layer index {layer_index} already has a cache")
        self.layer_index = layer_index
        declared.states[layer_index] = tensors

    def bind(self) -> None:
        self.forward = self.build.attention[self.layer_index]


class Parameters(Layer):
    """Plain tensors of the checkpoint module at build.path, by name: parameters["D"]. dtype: torch
    name; None = the compute type. They can be read from `bind` on."""

    def __init__(
        self, build: Build, shapes: Mapping[str, tuple[int, ...]], dtype: str | None = None
    ) -> None:
        super().__init__(build)
        self.shapes = dict(shapes)
        self.dtype = dtype

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        self.tensors = {}
        for name, shape in self.shapes.items():
            full = f"{self.build.path}.{name}"
            self.tensors[full] = PlainTensor({full: (0, shape[0])}, shape, self.build, self.dtype)
        return [
            WantedWeight(name, tuple(tensor.data.shape)) for name, tensor in self.tensors.items()
        ]

    def accept(self, piece: WeightPiece) -> None:
        self.tensors[piece.name].accept(piece)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{self.build.path}.{name}"].data
