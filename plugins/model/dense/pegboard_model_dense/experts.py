"""Experts whose tensors are stored in another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Experts


class FlatExperts(Experts):
    """Experts whose correction may be stored as [1, E] (Ernie), and whose matrices may be below
    each other as [E · F, hidden], the last one transposed (DBRX)."""

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        stacked = dict(available)
        for name in (f"{self.build.path}.{each}" for each in self.names):
            if name in stacked and len(stacked[name].shape) == 2:
                stacked[name] = replace(stacked[name], shape=self._stacked(name))
        weights = []
        for each in super().declare(stacked):
            is_correction = each.name == self.correction_name and available
            changed = stacked.get(each.name) is not available.get(each.name)
            shape = None if is_correction else available[each.name].shape if changed else each.shape
            weights.append(WantedWeight(each.name, shape))
        return weights

    def _stacked(self, name: str) -> tuple[int, int, int]:
        is_last = name.endswith(f".{self.names[-1]}")
        sizes = (
            (self.hidden_size, self.intermediate_size)
            if is_last
            else (self.intermediate_size, self.hidden_size)
        )
        return self.num_experts, *sizes

    def accept(self, piece: WeightPiece) -> None:
        if isinstance(piece.data, Tensor):
            if piece.name == self.correction_name:
                piece = replace(piece, data=piece.data.flatten())
            elif (
                piece.data.dim() == 2
                and piece.name.removeprefix(f"{self.build.path}.") in self.names
            ):
                data = self._unfolded(piece)
                piece = replace(piece, shape=tuple(data.shape), data=data)
        super().accept(piece)

    def _unfolded(self, piece: WeightPiece) -> Tensor:
        """Return [E · F, hidden] as a stack of the experts' matrices. Raises ModelError if the
        sizes do not fit."""
        count = self.num_experts
        rows = self.intermediate_size
        columns = self.hidden_size
        if tuple(piece.shape) != (count * rows, columns):
            message = (
                f"has shape {list(piece.shape)}; {count} experts need {[count * rows, columns]}"
            )
            raise ModelError(f"tensor {piece.name} {message}")
        data: Tensor = piece.data.view(count, rows, columns)
        return data.transpose(1, 2) if piece.name.endswith(f".{self.names[-1]}") else data
