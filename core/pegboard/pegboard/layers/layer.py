"""Layer: a module that core loads and binds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WeightPiece, WeightSlice
from pegboard.layers.build import Build


class Layer(nn.Module):
    """Base of all layers with weights. Subclasses implement `declare`, `accept`, `finish` and `bind`.

    `bind` stores the composed callable as `self.forward`; calling the layer is calling that, without nn.Module's hook
    machinery (2.5 µs a call, several hundred calls a step).
    """

    forward: Callable[..., Any]

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build
        build.declared.layers.append(self)

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def declare(self, available: Mapping[str, Any]) -> list[WeightSlice]:
        """Weight slices this layer wants. `available`: the checkpoint's tensor index."""
        raise TypeError(f"{type(self).__name__} does not declare its weights")

    def accept(self, piece: WeightPiece) -> None:
        """One wanted piece."""
        raise TypeError(f"{type(self).__name__} takes no weights")

    def finish(self) -> None:
        """All pieces are here."""

    def bind(self) -> None:
        """Compose `self.forward`."""


class PlainTensor:
    """A small unquantized tensor (norm weight, bias) of a layer, loaded in pieces along dim 0. Reload keeps the address."""

    def __init__(self, names: Mapping[str, tuple[int, int]], shape: tuple[int, ...], build: Build) -> None:
        self.names = dict(names)
        self.data = torch.empty(shape, dtype=getattr(torch, build.dtype), device=build.device)

    def accept(self, piece: WeightPiece) -> None:
        """Copy a piece to its rows; ModelError when it does not fit."""
        if not isinstance(piece.data, Tensor):
            raise ModelError(f"tensor {piece.name} is stored as {piece.stored}; a plain type was expected here")
        start, stop = self.names[piece.name]
        target = self.data[start:stop]
        if piece.data.shape != target.shape:
            raise ModelError(f"tensor {piece.name} has shape {tuple(piece.data.shape)}; the model expects {tuple(target.shape)}")
        target.copy_(piece.data)
