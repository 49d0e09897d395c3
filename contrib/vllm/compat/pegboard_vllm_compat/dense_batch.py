"""vLLM's batch without gaps, made of Pegboard's rows, which requests keep."""

from __future__ import annotations

from collections.abc import Iterable

from pegboard_vllm_compat.logits_interface import MoveDirectionality

Move = tuple[int, int, MoveDirectionality]


class DenseBatch:
    """index: row → index of its request. The indices are 0, 1, 2, … without gaps: a new request
    takes the place of one that has gone, and then the last requests move to where gaps are."""

    def __init__(self) -> None:
        self.index: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.index)

    def change(
        self, gone: Iterable[int], new: Iterable[int]
    ) -> tuple[list[int], list[int], list[Move]]:
        """Take rows out, and then others in. Return the indices that are no longer in use, those of
        `new`, and the moves, as a BatchUpdate has them."""
        gaps = sorted(self.index.pop(row) for row in gone if row in self.index)
        places = []
        for row in new:
            place = gaps.pop(0) if gaps else len(self.index)
            self.index[row] = place
            places.append(place)
        moves: list[Move] = []
        by_index = {place: row for row, place in self.index.items()}
        while gaps and gaps[0] < len(self.index):
            last = max(by_index)
            gap = gaps.pop(0)
            row = by_index.pop(last)
            by_index[gap] = row
            self.index[row] = gap
            moves.append((last, gap, MoveDirectionality.UNIDIRECTIONAL))
        return gaps, places, moves
