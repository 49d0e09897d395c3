"""Quantization method `gguf`: every weight is dequantized once, at load, straight into its rows of the merged weight.

One float table [out, in] per layer, whatever mix of GGUF types its parts are stored in. It costs the memory of an unquantized
model; methods that compute on the stored blocks are other plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import (
    EmbeddingLayer,
    ExpertsLayer,
    LinearLayer,
    Part,
    QuantizationSetup,
    WeightMethod,
    WeightSizes,
)
from pegboard.ops.linear import FloatWeight
from pegboard_pack_gguf.dequantize import dequantize_into
from pegboard_pack_gguf.ggml_types import BY_STORED

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.attention import AttentionLayer, KVQuantization
    from pegboard.interfaces.weight_loader import WeightPiece

Kernels = Mapping[str, Callable[..., Any]]


class GGUFQuantization:
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        self.dtype: torch.dtype = getattr(torch, setup.dtype)
        self.device = torch.device(setup.device)

    def linear(self, layer: LinearLayer) -> WeightMethod:
        weight = FloatWeight((layer.out_features, layer.in_features), self.dtype, self.device)
        return DequantizedLinear(layer.path, weight, layer.parts)

    def experts(self, layer: ExpertsLayer) -> None:
        """No layer of core computes with experts yet; the loader names each expert's tensors for the day one does."""
        return None

    def embedding(self, layer: EmbeddingLayer) -> WeightMethod:
        table = FloatWeight((layer.num_rows, layer.width), self.dtype, self.device, keep_plain=True)
        return DequantizedEmbedding(layer.path, table, (layer.part,))

    def kv_cache(self, layer: "AttentionLayer") -> "KVQuantization | None":
        return None


class DequantizedWeight:
    """The shared life of both layers: one matrix, filled part by part as pieces come. Rows no part fills (a padded vocabulary)
    stay zero."""

    def __init__(self, path: str, weight: FloatWeight, parts: Iterable[Part]) -> None:
        self.path = path
        self.weight = weight
        self.parts = {part.name: part for part in parts}
        self.missing = set(self.parts)

    def declare(self) -> list[str]:
        """Blocks carry their own scales. Splits are checked by the loader, which knows the stored type."""
        return []

    def accept(self, piece: "WeightPiece") -> None:
        part = self.parts.get(piece.name)
        if part is None:
            raise ModelError(f"{self.path} has no place for {piece.name!r}; its parts are {', '.join(self.parts)}")
        target = self.weight.plain()[part.rows[0] : part.rows[1]]
        if tuple(piece.shape) != tuple(target.shape):
            raise ModelError(f"{piece.name!r} has shape {tuple(piece.shape)}, {self.path} expects {tuple(target.shape)}")
        if isinstance(piece.data, torch.Tensor):
            target.copy_(piece.data)
        elif piece.stored in BY_STORED:
            dequantize_into(piece.data, piece.stored, target)
        else:
            raise ModelError(f"{piece.name!r} is stored as {piece.stored!r}, which is no GGUF type")
        self.missing.discard(piece.name)

    def finish(self) -> None:
        """The next `accept` starts a reload, which the bound callables see when it is finished."""
        if self.missing:
            raise ModelError(f"{self.path}: the checkpoint did not deliver {', '.join(sorted(self.missing))}")
        self.missing = set(self.parts)
        self.weight.finish()

    def dequantize(self) -> "Tensor":
        return self.weight.dense().float()

    def sizes(self) -> WeightSizes:
        num_bytes = self.weight.nbytes
        return WeightSizes(resident_bytes=num_bytes, mapped_bytes=0, forward_bytes=num_bytes)


class DequantizedLinear(DequantizedWeight):
    def bind(self, kernels: Kernels) -> "Callable[[Tensor], Tensor]":
        return self.weight.bind()


class DequantizedEmbedding(DequantizedWeight):
    """The table; it can be the output head too."""

    def bind(self, kernels: Kernels) -> "Callable[[Tensor], Tensor]":
        weight = self.weight.plain()

        def look_up(token_ids: "Tensor") -> "Tensor":
            return F.embedding(token_ids, weight)

        return look_up

    def bind_head(self, kernels: Kernels) -> "Callable[[Tensor], Tensor]":
        return self.weight.bind()
