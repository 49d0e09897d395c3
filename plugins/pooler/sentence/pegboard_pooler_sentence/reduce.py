"""Ways to make one state of the states of a prompt, which may come in several steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.pooler import PoolStep

AT_ONCE = 256
"""The number of tokens whose classes or words are computed at once: there may be many of them."""


class Reduction(Protocol):
    """Keeps by row what steps before have made."""

    def reduce(self, hidden: Tensor, step: PoolStep) -> Tensor:
        """Return the states [S, size] of the prompts that end, in the type of `hidden`. Called in
        every step, and never waits for the device."""

    def remove(self, row: int) -> None:
        """Forget what was kept of a row."""


class Last:
    """The state of the last token. Nothing is kept."""

    def reduce(self, hidden: Tensor, step: PoolStep) -> Tensor:
        """See `Reduction.reduce`."""
        return hidden if step.last is None else hidden[step.last]

    def remove(self, row: int) -> None:
        """See `Reduction.remove`."""


class First:
    """The state of the first token."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def reduce(self, hidden: Tensor, step: PoolStep) -> Tensor:
        """See `Reduction.reduce`."""
        if is_whole(step):
            return hidden[step.starts_on_device[:-1]]
        states = []
        for row, offset, start, ends in each_row(step):
            first = hidden[start] if offset == 0 else self._kept.pop(row, hidden[start])
            if ends:
                states.append(first)
            else:
                self._kept[row] = first.clone()
        return stacked(states, hidden)

    def remove(self, row: int) -> None:
        """See `Reduction.remove`."""
        self._kept.pop(row, None)


class Sum:
    """The sum of all states, divided by their number to the power of `power`: 1 = the mean, 0 = the
    sum. Sums are in float32."""

    def __init__(self, power: float) -> None:
        self._power = power
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def reduce(self, hidden: Tensor, step: PoolStep) -> Tensor:
        """See `Reduction.reduce`."""
        lengths = step.starts_on_device.diff()
        sums = reduced(hidden, lengths, "sum")
        counts = lengths.float()
        if is_whole(step):
            return self._divided(sums, counts).to(hidden.dtype)
        totals = []
        numbers = []
        for place, (row, offset, _, ends) in enumerate(each_row(step)):
            total = sums[place]
            number = counts[place]
            if offset and row in self._kept:
                before, number_before = self._kept.pop(row)
                total = total + before
                number = number + number_before
            if ends:
                totals.append(total)
                numbers.append(number)
            else:
                self._kept[row] = total.clone(), number.clone()
        if not totals:
            return hidden[:0]
        return self._divided(torch.stack(totals), torch.stack(numbers)).to(hidden.dtype)

    def _divided(self, sums: Tensor, counts: Tensor) -> Tensor:
        return sums / counts.pow(self._power)[:, None]

    def remove(self, row: int) -> None:
        """See `Reduction.remove`."""
        self._kept.pop(row, None)


class Max:
    """The largest value of each channel."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def reduce(self, hidden: Tensor, step: PoolStep) -> Tensor:
        """See `Reduction.reduce`."""
        largest = reduced(hidden, step.starts_on_device.diff(), "max").to(hidden.dtype)
        if is_whole(step):
            return largest
        states = []
        for place, (row, offset, _, ends) in enumerate(each_row(step)):
            state = largest[place]
            if offset and row in self._kept:
                state = torch.maximum(state, self._kept.pop(row))
            if ends:
                states.append(state)
            else:
                self._kept[row] = state.clone()
        return stacked(states, hidden)

    def remove(self, row: int) -> None:
        """See `Reduction.remove`."""
        self._kept.pop(row, None)


def make_reduction(name: str) -> Reduction:
    """Return what pools by this name of `pooling_type`."""
    makers: Mapping[str, Reduction] = {
        "LAST": Last(),
        "CLS": First(),
        "MEAN": Sum(1.0),
        "MEAN_SQRT": Sum(0.5),
        "SUM": Sum(0.0),
        "MAX": Max(),
    }
    return makers[name]


def reduced(hidden: Tensor, lengths: Tensor, how: str) -> Tensor:
    """Return the sum or the largest of each prompt's states, [R, size] float32."""
    # to check the lengths, the host would wait for them
    return torch.segment_reduce(hidden.float(), how, lengths=lengths, unsafe=True)


def is_whole(step: PoolStep) -> bool:
    """Return whether each prompt begins and ends in the step."""
    return bool(np.all(step.ends) and not np.any(step.offsets))


def each_row(step: PoolStep) -> list[tuple[int, int, int, bool]]:
    """Return row, offset, first place in the step and whether it ends, of each prompt."""
    columns = (step.rows, step.offsets, step.starts[:-1], step.ends)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def stacked(states: list[Tensor], hidden: Tensor) -> Tensor:
    return torch.stack(states) if states else hidden[:0]
