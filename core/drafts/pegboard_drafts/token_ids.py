"""The vocabulary of a head that knows only some of the target's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Build, Layer
from pegboard.layers.build import PlainTensor


class TokenIds(Layer):
    """The target's id of each token, [count] int64 in `ids.data`. limit: ids are below it.
    is_difference: the checkpoint has the target's id minus the head's."""

    def __init__(
        self, build: Build, count: int, limit: int, *, is_difference: bool = False
    ) -> None:
        super().__init__(build)
        self.count = count
        self.limit = limit
        self.is_difference = is_difference

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        self.ids = PlainTensor(
            {self.build.path: (0, self.count)}, (self.count,), self.build, "int64"
        )
        return [WantedWeight(self.build.path, (self.count,))]

    def accept(self, piece: WeightPiece) -> None:
        self.ids.accept(piece)

    def finish(self) -> None:
        if self.is_difference:
            self.ids.data += torch.arange(self.count, device=self.ids.data.device)
        low, high = (int(bound) for bound in self.ids.data.aminmax())
        if low < 0 or high >= self.limit:
            raise ModelError(
                f"{self.build.path} has token ids from {low} to {high}; expected ids from 0 to "
                f"{self.limit - 1}, those of the model that the heads were trained for"
            )
