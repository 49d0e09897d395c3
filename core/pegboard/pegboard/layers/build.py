"""Build: what a model's constructor gets; `at()` narrows its path. Layer: a module that core loads and binds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.interfaces.attention import AttentionLayer
from pegboard.interfaces.quantization import QuantizationMethod, WeightMethod
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece


@dataclass(frozen=True, slots=True)
class LoRALimits:
    """How many adapters may be loaded at once (slot 0 is the base model and not counted) and their largest rank."""

    num_slots: int
    max_rank: int


@dataclass(slots=True)
class Declared:
    """What the constructors of one model registered, in order."""

    layers: list[Layer] = field(default_factory=list)
    attention: dict[int, AttentionLayer] = field(default_factory=dict)


@dataclass(frozen=True)
class Build:
    """path: dotted checkpoint path of the module being built ("model.layers.3.self_attn").

    dtype, device: torch names for activations. quantization: how weights are stored; plain: the method for what
    `quantization` leaves alone. kernels: op name → bound callable. rope_style: how the checkpoint orders Q and K rows.
    attention: layer index → its bound attention, filled in by core before `bind`. lora_slots: gives the [T] adapter slots of
    the step's tokens; None when LoRA is off.
    """

    dtype: str
    device: str
    quantization: QuantizationMethod
    plain: QuantizationMethod
    kernels: Mapping[str, Callable[..., Any]]
    path: str = ""
    rope_style: str = "halves"
    lora: LoRALimits | None = None
    lora_slots: Callable[[], Tensor] | None = None
    declared: Declared = field(default_factory=Declared)
    attention: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def at(self, name: str | int) -> Build:
        """The same build one module deeper."""
        return replace(self, path=f"{self.path}.{name}" if self.path else str(name))


class Layer(nn.Module):
    """One step of a model's computation. Subclasses implement `bind`; those with weights also `declare`, `accept` and `finish`.

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

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        """The tensors this layer wants. `available`: the checkpoint's tensor index."""
        return []

    def accept(self, piece: WeightPiece) -> None:
        """Take one of the declared tensors."""
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


class WeightLayer(Layer):
    """A layer with one weight, whose format the quantization method chooses in `declare`, and perhaps a bias."""

    method: WeightMethod | None = None
    bias: PlainTensor | None = None

    def accept(self, piece: WeightPiece) -> None:
        target = self.bias if self.bias is not None and piece.name in self.bias.names else self.method
        assert target is not None
        target.accept(piece)

    def finish(self) -> None:
        if self.method is not None:
            self.method.finish()
