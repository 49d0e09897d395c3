"""The parts with which tests build layers and models: plain float weights and reference ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pegboard.config.schema import PluginConfig
from pegboard.interfaces.kernel import KernelSpec, key_of
from pegboard.interfaces.quantization import (
    EmbeddingLayer,
    ExpertMemory,
    LinearLayer,
    Part,
    wanted_parts,
)
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight, WeightPiece
from pegboard.layers import Build, Layer
from pegboard.ops import REFERENCES, AdapterRows
from pegboard.ops.experts import one_by_one
from pegboard.plugins.registry import Registry


def adapter_rows(slots: Sequence[int], num_slots: int) -> AdapterRows:
    """Return rows with these adapter slots, grouped as a worker does it."""
    rows = torch.tensor(list(slots), dtype=torch.int64)
    starts = torch.zeros(num_slots + 2, dtype=torch.int32)
    starts[1:] = torch.bincount(rows, minlength=num_slots + 1).cumsum(0)
    return AdapterRows(rows.argsort(stable=True).int(), starts)


def adapter_product(slots: Any, slot: int) -> Tensor:
    """Return what the adapter in a slot of a layer (`layers.lora.AdapterSlots`) adds to the layer's
    weight [out, in]."""
    a = slots.a[slot - 1]
    b = slots.b[slot - 1]
    rank = slots.max_rank
    firsts = range(0, a.shape[1], slots.width)
    bounds = zip(firsts, slots.bounds, slots.bounds[1:], strict=False)
    return torch.cat(
        [a[:, first : first + rank] @ b[:, start:stop] for first, start, stop in bounds], 1
    ).T


class FakeQuantization:
    """A quantization method with plain float32 weights on `device`."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def linear(self, layer: LinearLayer) -> "FakeWeight":
        return FakeWeight(layer.parts, layer.out_features, layer.in_features, device=self.device)

    def embedding(self, layer: EmbeddingLayer) -> "FakeWeight":
        return FakeWeight(
            (layer.part,), layer.num_rows, layer.width, is_table=True, device=self.device
        )

    def kv_cache(self, layer: object) -> None:
        return None


class FakeWeight:
    """One matrix. Reading it before `finish` fails."""

    def __init__(
        self,
        parts: Sequence[Part],
        rows: int,
        columns: int,
        *,
        is_table: bool = False,
        device: str = "cpu",
    ) -> None:
        self.parts = parts
        self.weight = torch.full((rows, columns), float("nan"), device=device)
        self.is_table = is_table
        self.num_finishes = 0

    def declare(self, available: Mapping[str, TensorEntry]) -> list[WantedWeight]:
        return wanted_parts(self.parts, self.weight.shape[1])

    def accept(self, piece: WeightPiece) -> None:
        assert isinstance(piece.data, Tensor)
        for part in self.parts:
            if part.name == piece.name:
                assert piece.data.shape == part.shape(self.weight.shape[1])
                rows = piece.data if part.cut is None else part.cut.of(piece.data)
                self.weight[slice(*part.rows)] = rows

    def finish(self) -> None:
        self.num_finishes += 1

    def bind(self, kernels: Mapping[str, Callable[..., Any]]) -> Callable[[Tensor], Tensor]:
        assert self.num_finishes, "bind before finish"
        return (lambda ids: self.weight[ids]) if self.is_table else self.bind_head(kernels)

    def bind_head(self, kernels: Mapping[str, Callable[..., Any]]) -> Callable[[Tensor], Tensor]:
        return lambda x: x @ self.weight.T

    def bind_experts(
        self, kernels: Mapping[str, Callable[..., Any]], num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        assert self.num_finishes, "bind before finish"
        weights = self.weight.view(num_experts, -1, self.weight.shape[1])
        return one_by_one([lambda x, w=w: x @ w.T for w in weights], weights.shape[1], bias)  # type: ignore[misc]

    def expert_memory(self, num_experts: int) -> ExpertMemory:
        weights = self.weight.view(num_experts, -1)
        return ExpertMemory([*weights.shape], [[weight] for weight in weights])

    def dequantize(self) -> Tensor:
        return self.weight

    def tensors(self) -> list[Tensor]:
        return [self.weight]


class FakeLoader:
    """Delivers tensors that are in memory, in the order of their names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.held = dict(tensors)

    def index(self) -> dict[str, TensorEntry]:
        return {
            n: TensorEntry(n, tuple(t.shape), "float32", "memory", 0, t.nbytes)
            for n, t in self.held.items()
        }

    def tensors(self, checkpoint: object, wanted: Sequence[WantedWeight]) -> Any:
        for piece in sorted(wanted, key=lambda piece: piece.name):
            data = self.held[piece.name]
            yield WeightPiece(piece.name, "float32", tuple(data.shape), data)


@cache
def references() -> Mapping[str, Callable[..., Any]]:
    """Return the reference of every op: core's, and those that installed plugins declare."""
    registry = Registry.discover(PluginConfig())
    declared = {}
    for entry in registry.entries("kernel"):
        spec = registry.spec(entry)
        if isinstance(spec, KernelSpec) and spec.declares:
            declared[key_of(entry.name, spec)] = registry.load(entry)
    return {**REFERENCES, **declared}


def fake_build(**more: Any) -> Build:
    """Return a Build on the CPU in float32. more: fields of Build."""
    method = FakeQuantization(more.get("device", "cpu"))
    usual = {"quantization": method, "plain": method, "kernels": references()}
    return Build(**{**usual, "dtype": "float32", "device": "cpu", **more})


def load_layers(
    layers: Sequence[Layer], tensors: Mapping[str, Tensor], *, bind: bool = True
) -> set[str]:
    """Fill layers from tensors by checkpoint name and bind them, as the worker does. Return the
    names that were used."""
    loader = FakeLoader(tensors)
    used = set()
    for layer in layers:
        wanted = layer.declare(loader.index())
        for piece in loader.tensors(None, wanted):
            layer.accept(piece)
            used.add(piece.name)
        layer.finish()
    for layer in layers if bind else ():
        layer.bind()
    return used
