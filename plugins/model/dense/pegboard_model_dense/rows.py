"""Linear layers whose tensors are stored in another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Build, Linear, QKVLinear
from pegboard_model_dense.architecture import Architecture


class Rows:
    """How a checkpoint's tensor becomes the one that a layer needs. order: the checkpoint's row of
    each row; None = its own. transposed: the matrix is stored [in, out]."""

    def __init__(self, order: Tensor | None, transposed: bool) -> None:
        self.order = order
        self.transposed = transposed

    @property
    def is_plain(self) -> bool:
        return self.order is None and not self.transposed

    def wanted(
        self, weights: list[WantedWeight], available: Mapping[str, Any]
    ) -> list[WantedWeight]:
        """Return the weights without their shapes if the checkpoint stores them transposed. Those
        that are stored in another way are read as a whole."""
        if self.transposed and available:
            return [WantedWeight(weight.name) for weight in weights]
        return weights if self.is_plain else [replace(weight, boxes=()) for weight in weights]

    def arranged(self, piece: WeightPiece, in_features: int, out_features: int) -> WeightPiece:
        """Return the piece as [out_features, in_features]. Rows of blocks (GGUF) are moved as they
        are. Raises ModelError if the piece is quantized otherwise, or transposed."""
        if self.is_plain:
            return piece
        data = piece.data
        if (
            self.order is not None
            and not self.transposed
            and not isinstance(data, Tensor)
            and piece.shape[0] == len(self.order)
        ):
            rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(self.order), -1)
            return replace(piece, data=memoryview(rows[self.order].flatten().numpy()))
        if not isinstance(data, Tensor) or not piece.name.endswith((".weight", ".bias")):
            raise ModelError(
                f"tensor {piece.name} is stored as {piece.stored}. This architecture stores the "
                "rows in an order that can be changed only for plain types and those of GGUF; "
                "use a checkpoint that is not quantized"
            )
        if self.transposed and tuple(data.shape) == (in_features, out_features):
            data = data.T
        if self.order is not None and data.shape[0] == len(self.order):
            data = data[self.order]
        return replace(piece, shape=tuple(data.shape), data=data.contiguous())


class ArrangedLinear(Linear):
    """A Linear whose tensors are stored as `rows` says."""

    def __init__(
        self, build: Build, in_features: int, out_features: int, rows: Rows, **more: Any
    ) -> None:
        super().__init__(build, in_features, out_features, **more)
        self.rows = rows

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        return self.rows.wanted(super().declare(available), available)

    def accept(self, piece: WeightPiece) -> None:
        num_rows = self.modules_by_name.get(piece.name.rpartition(".")[0], self.out_features)
        super().accept(self.rows.arranged(piece, self.whole_in_features, num_rows))


class Limited(Linear):
    """A Linear whose results are limited to ±limit. None = they are not."""

    limit: float | None = None

    def bind(self) -> None:
        super().bind()
        if self.limit is not None:
            project = self.forward
            limit = self.limit
            self.forward = lambda x: project(x).clamp(-limit, limit)


class ArrangedQKV(QKVLinear, Limited):
    """The projections of queries, keys and values, stored as one, two (Q, and K with V) or three
    tensors."""

    def __init__(self, build: Build, model: Architecture, num_kv_heads: int) -> None:
        heads = model.num_heads
        dim = model.head_dim
        names = model.names.qkv
        super().__init__(
            build, model.hidden_size, heads, num_kv_heads, dim, bias=model.qkv_bias, names=names
        )
        self.limit = model.qkv_limit
        counts = {
            1: (heads + 2 * num_kv_heads,),
            2: (heads, 2 * num_kv_heads),
            3: (heads, num_kv_heads, num_kv_heads),
        }[len(names)]
        order = self.order(counts[-1], num_kv_heads)
        if order is not None:
            order = (order[:, None] * dim + torch.arange(dim)).reshape(-1)
        self.changed = f"{build.path}.{names[-1]}"
        self.rows = Rows(order, model.transposed)
        self.plain_rows = Rows(None, model.transposed)

    @staticmethod
    def order(count: int, num_kv_heads: int) -> Tensor | None:
        """Return the stored heads of the last tensor, which has this number of them, in the order
        Q, K, V; None = they are in it."""
        return None

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        return self.rows.wanted(super().declare(available), available)

    def accept(self, piece: WeightPiece) -> None:
        module = piece.name.rpartition(".")[0]
        rows = self.rows if module == self.changed else self.plain_rows
        super().accept(
            rows.arranged(piece, self.whole_in_features, self.modules_by_name.get(module, 0))
        )

    def bind(self) -> None:
        super().bind()
        if self.adapters is not None and self.rows.order is not None:
            self.adapters.orders = {self.changed: self.rows.order}


class GroupedQKV(ArrangedQKV):
    """The tensor has, for each KV head, its queries, its key and its value."""

    @staticmethod
    def order(count: int, num_kv_heads: int) -> Tensor:
        heads = torch.arange(count).view(num_kv_heads, -1)
        return torch.cat([heads[:, :-2].reshape(-1), heads[:, -2], heads[:, -1]])


class KeyValueQKV(ArrangedQKV):
    """Q is separate. The other tensor has a key and a value for each KV head."""

    @staticmethod
    def order(count: int, num_kv_heads: int) -> Tensor:
        return torch.arange(count).view(num_kv_heads, 2).T.reshape(-1)
