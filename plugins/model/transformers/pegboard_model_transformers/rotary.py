"""Rotary embeddings of transformers, as tables of all positions.

A rotary module turns the positions of a step into cosines and sines. It does so anew in every
step, with some ten small operations. If the results depend on nothing but the position, they are
computed once, and a step looks them up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.layers import Build, Layer

CHUNK = 4096
"""Positions that are computed at a time."""


@dataclass(frozen=True, slots=True)
class RotaryCall:
    """A call of a rotary module: (x, position_ids [1, T], …) → two tensors [1, T, n]."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def key(self) -> tuple[Hashable, ...]:
        return key_of(self.args, self.kwargs)

    def of(self, positions: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return what the module makes of other positions [n]: tensors [n, …]."""

        def replaced(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            is_positions = not value.is_floating_point()
            return positions[None] if is_positions else positions.new_empty(1, 1, 1, dtype=dtype)

        kwargs = {name: replaced(value) for name, value in self.kwargs.items()}
        results = type(self.module).forward(self.module, *map(replaced, self.args), **kwargs)
        return [each[0] for each in results]


def key_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """Return the arguments of a call other than tensors."""
    named = [*enumerate(args), *sorted(kwargs.items())]
    return tuple((name, value) for name, value in named if not isinstance(value, Tensor))


def rotary_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> RotaryCall | None:
    """Return the call of a module if it may be that of a rotary module, by what it was given and
    what it returned."""
    numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    positions = [value for value in numbers if not value.is_floating_point()]
    is_plain = not list(module.children()) and not list(module.parameters())
    if not is_plain or len(positions) != 1 or len(numbers) > 2 or positions[0].dim() != 2:
        return None
    if not isinstance(output, tuple) or len(output) != 2:
        return None
    shape = positions[0].shape
    if any(not isinstance(each, Tensor) or each.dim() != 3 for each in output):
        return None
    if any(each.shape[:2] != shape or not each.is_floating_point() for each in output):
        return None
    return RotaryCall(module, args, kwargs)


class ModuleRotary(Layer):
    """Replaces the forward of a rotary module. length: number of positions."""

    def __init__(self, build: Build, calls: Sequence[RotaryCall], length: int) -> None:
        super().__init__(build)
        self.calls = tuple(calls)
        self.length = min(length, build.max_positions or length)

    def bind(self) -> None:
        tables = {call.key: self._tables(call) for call in self.calls}
        if any(each is None for each in tables.values()):
            return

        def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            (positions,) = (
                value
                for value in (*args, *kwargs.values())
                if isinstance(value, Tensor) and not value.is_floating_point()
            )
            return tuple(table[positions] for table in tables[key_of(args, kwargs)] or ())

        module: Any = self.calls[0].module
        module.forward = forward

    def _tables(self, call: RotaryCall) -> list[Tensor] | None:
        """Return a table [length, n] for each result. None = they depend on the other positions
        of a step."""
        dtype = getattr(torch, self.build.dtype)
        with torch.no_grad():
            positions = torch.arange(self.length, device=self.build.device)
            parts = [call.of(part, dtype) for part in positions.split(CHUNK)]
            tables = [torch.cat(part) for part in zip(*parts, strict=True)]
            some = positions[:CHUNK].flip(0)[::3]
            again = call.of(some, dtype)
        is_same = all(torch.equal(table[some], x) for table, x in zip(tables, again, strict=True))
        return tables if is_same else None
