"""A draft model that computes with whole numbers, in a KV cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

RANGE = 2**31


def mixed(a: int, b: int) -> int:
    """Return a number that depends on both."""
    return (a * 1_000_003 + b * 8191 + 17) % RANGE


def folded(values: Sequence[int]) -> int:
    """Return a number that depends on all of them and on their order."""
    total = 1
    for value in values:
        total = mixed(total, value)
    return total


class FakeForwards:
    """Implements `pegboard.interfaces.draft.Forwards`. A token stores its id, mixed with what it is
    given; the hidden state after it is what all stored numbers of its row fold to. texts: row → the
    tokens that the host knows. Reading a slot that nothing has stored is an error."""

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        texts: Mapping[int, Sequence[int]],
        *,
        can_wait: bool = True,
        logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.can_wait = can_wait
        self._vocab_size = vocab_size
        self._texts = texts
        self._logits = logits
        self._stored: dict[int, dict[int, int]] = {}
        self._last: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def remove(self, rows: np.ndarray) -> None:
        """Forget what these rows have stored."""
        for row in rows.tolist():
            self._stored.pop(row, None)

    def room(self, rows: np.ndarray) -> np.ndarray:
        """There are always slots."""
        return np.full(len(rows), RANGE)

    def tokens(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        hidden: Tensor | None = None,
        *,
        ahead: int = 0,
        exact: Tensor | None = None,
        ids: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `Forwards.tokens`."""
        firsts = _firsts(starts, exact)
        token_rows = np.repeat(rows, counts).tolist()
        positions = [
            first + place
            for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
            for place in range(count)
        ]
        placed = {} if ids is None else dict(zip(*(part.tolist() for part in ids), strict=True))
        token_ids = [
            placed[place] if place in placed else self._texts[row][position + ahead]
            for place, (row, position) in enumerate(zip(token_rows, positions, strict=True))
        ]
        return self._compute(token_rows, positions, token_ids, hidden)

    def next(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        token_ids: Tensor,
        hidden: Tensor | None = None,
        *,
        exact: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Forwards.next`."""
        firsts = _firsts(positions, exact)
        self._last = rows, firsts, positions
        states = self._compute(rows.tolist(), firsts.tolist(), token_ids.tolist(), hidden)
        return states, self.logits(states)

    def after(self, token_ids: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Forwards.after`."""
        assert self._last is not None, "call `next` with `exact` first"
        rows, positions, largest = self._last
        return self.next(rows, largest, token_ids, hidden, exact=torch.from_numpy(positions + 1))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forwards.logits`."""
        if self._logits is not None:
            return self._logits(hidden)
        return torch.nn.functional.one_hot(hidden[:, 0].long() % self._vocab_size, self._vocab_size)

    def _compute(
        self, rows: list[int], positions: list[int], ids: list[int], hidden: Tensor | None
    ) -> Tensor:
        given = [0] * len(rows) if hidden is None else hidden[:, 0].long().tolist()
        for row, position, token, more in zip(rows, positions, ids, given, strict=True):
            self._stored.setdefault(row, {})[position] = mixed(token, more)
        states = []
        for row, position in zip(rows, positions, strict=True):
            stored = self._stored[row]
            missing = [p for p in range(position) if p not in stored]
            assert not missing, f"row {row}: nothing was stored at positions {missing}"
            states.append(folded([stored[p] for p in range(position + 1)]))
        return torch.tensor(states, dtype=torch.float64).unsqueeze(1)


def _firsts(starts: np.ndarray, exact: Tensor | None) -> np.ndarray:
    if exact is None:
        return starts
    firsts = exact.numpy()
    assert (firsts <= starts).all(), "`starts` must be the largest that the positions can be"
    return firsts
