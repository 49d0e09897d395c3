"""The method "none": weights are kept as floats and not quantized."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.quantization import (
    EmbeddingLayer,
    ExpertMemory,
    LinearLayer,
    Part,
    QuantizationSetup,
    wanted_parts,
)
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight, WeightPiece
from pegboard.ops.linear import make_float_weight

Bound = Callable[[Tensor], Tensor]


class Plain:
    """Takes every layer. The checkpoint must contain plain types."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        if setup.config:
            raise ConfigError(
                f"the checkpoint is quantized ({setup.config.get('quant_method')!r}); "
                "quantization 'none' reads only plain weights"
            )
        self.setup = setup

    def linear(self, layer: LinearLayer) -> "PlainWeight":
        return PlainWeight((layer.out_features, layer.in_features), layer.parts, self)

    def embedding(self, layer: EmbeddingLayer) -> "PlainWeight":
        return PlainTable((layer.num_rows, layer.width), [layer.part], self)

    def kv_cache(self, layer: object) -> None:
        return None


class PlainWeight:
    """One matrix [rows, columns], filled part by part."""

    IS_TABLE = False

    def __init__(self, shape: tuple[int, int], parts: Sequence[Part], method: Plain) -> None:
        self.weight = make_float_weight(method.setup, shape, self.IS_TABLE)
        self.parts: dict[str, list[Part]] = {}
        for part in parts:
            self.parts.setdefault(part.name, []).append(part)

    def declare(self, available: Mapping[str, TensorEntry]) -> list[WantedWeight]:
        parts = itertools.chain.from_iterable(self.parts.values())
        return wanted_parts(parts, self.weight.shape[1])

    def accept(self, piece: WeightPiece) -> None:
        if not isinstance(piece.data, Tensor):
            raise ModelError(
                f"tensor {piece.name} is stored as {piece.stored}, which quantization 'none' "
                "cannot read"
            )
        for part in self.parts[piece.name]:
            shape = part.shape(self.weight.shape[1])
            if piece.data.shape != shape:
                raise ModelError(
                    f"tensor {piece.name} has shape {tuple(piece.data.shape)}; the model expects "
                    f"{shape}"
                )
            rows = piece.data if part.cut is None else part.cut.of(piece.data)
            self.weight.plain()[slice(*part.rows)] = rows

    def finish(self) -> None:
        self.weight.finish()

    def bind(self, kernels: Mapping[str, Callable[..., Any]]) -> Bound:
        return self.weight.bind()

    def bind_experts(
        self, kernels: Mapping[str, Callable[..., Any]], num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        bound: Callable[[Tensor, Tensor], Tensor] = self.weight.bind_experts(num_experts, bias)
        return bound

    def expert_memory(self, num_experts: int) -> ExpertMemory | None:
        memory: ExpertMemory | None = self.weight.expert_memory(num_experts)
        return memory

    def dequantize(self) -> Tensor:
        return self.weight.dense().float()

    def tensors(self) -> list[Tensor]:
        return list(self.weight.tensors())


class PlainTable(PlainWeight):
    """An embedding table. The same matrix may also be the output head."""

    IS_TABLE = True

    def bind(self, kernels: Mapping[str, Callable[..., Any]]) -> Bound:
        return self.weight.bind_lookup()

    def bind_head(self, kernels: Mapping[str, Callable[..., Any]]) -> Bound:
        return self.weight.bind()
