"""Results of tokens: a matrix for each prompt, which is collected over steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pegboard.data.pooling_params import PoolingParams
from pegboard.interfaces.platform import Copies
from pegboard.interfaces.pooler import PoolStep

Read = Callable[[], np.ndarray]


def reader(values: Tensor, copies: Copies | None) -> Read:
    """Return what reads values as float32, later. The next steps may overwrite the values."""
    if copies is None:
        array = values.float().numpy().copy()
        return lambda: array
    wait = copies.download(values)
    return lambda: wait().float().numpy()


@dataclass(frozen=True)
class Piece:
    """The results of a prompt's tokens in one step: rows start … stop of what `read` returns.
    token_ids: of these tokens; None = they do not matter."""

    read: Read
    start: int
    stop: int
    token_ids: np.ndarray | None

    def rows(self) -> np.ndarray:
        return self.read()[self.start : self.stop]


class Matrices:
    """Collects pieces by row. compute: hidden states [n, size] → results [n, columns]. method: of
    the plan."""

    def __init__(
        self,
        compute: Callable[[Tensor, PoolStep], Tensor],
        copies: Copies | None,
        method: Mapping[str, str],
    ) -> None:
        self._compute = compute
        self._copies = copies
        self._steps = method["token_pooling"] == "STEP"
        self._tag: int | None = json.loads(method.get("step_tag_id", "null"))
        self._columns: list[int] | None = json.loads(method.get("returned_token_ids", "null"))
        self._kept: dict[int, list[Piece]] = {}

    def take(
        self, hidden: Tensor, step: PoolStep, places: Sequence[int]
    ) -> dict[int, Callable[[], np.ndarray]]:
        """Compute the results of the prompts at these places of the step. Returns what reads the
        whole matrix [tokens, columns] of those that end, by place."""
        starts = step.starts.tolist()
        parts = [hidden[starts[place] : starts[place + 1]] for place in places]
        rows = hidden if len(parts) == len(starts) - 1 else torch.cat(parts)
        read = reader(self._compute(rows, step), self._copies)
        ended = {}
        first = 0
        for place in places:
            row = int(step.rows[place])
            start = starts[place]
            stop = starts[place + 1]
            token_ids = step.token_ids[start:stop].copy() if self._steps else None
            pieces = self._kept.pop(row, []) if step.offsets[place] else []
            pieces.append(Piece(read, first, first + stop - start, token_ids))
            first += stop - start
            if step.ends[place]:
                ended[place] = self._matrix(pieces, step.params[place])
            else:
                self._kept[row] = pieces
        return ended

    def _matrix(self, pieces: Sequence[Piece], params: PoolingParams) -> Callable[[], np.ndarray]:
        tag = self._tag if params.step_tag_id is None else params.step_tag_id
        columns = params.returned_token_ids or self._columns

        def read() -> np.ndarray:
            matrix = np.concatenate([piece.rows() for piece in pieces])
            if self._steps and tag is not None:
                ids = np.concatenate([piece.token_ids for piece in pieces])
                matrix = matrix[ids == tag]
            return matrix if columns is None else matrix[:, list(columns)]

        return read

    def remove(self, row: int) -> None:
        """Forget what was kept of a row."""
        self._kept.pop(row, None)
