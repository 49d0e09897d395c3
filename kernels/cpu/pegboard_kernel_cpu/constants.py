"""Tensors that a model computes from its weights alone, such as 1 + weight, while it is recorded.

A recording holds such a tensor, and no replay computes it. When the weights are replaced, it is
computed again into the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from pegboard_kernel_cpu.values import Value, leaves


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A tensor, and what it was computed with."""

    result: Tensor
    function: Callable[..., Tensor]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def sources(self) -> Iterator[Tensor]:
        return (x for x in leaves((*self.args, *self.kwargs.values())) if isinstance(x, Tensor))


class ConstantNotes(TorchFunctionMode):
    """Inside, notes every tensor that is computed from tensors and from no stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[Computed] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if type(result) is Tensor:
            entry = Computed(result, function, args, kwargs or {})
            memories = {
                memory_of(source) for source in entry.sources() if type(source) is not Value
            }
            is_plain = not any(type(source) is Value for source in entry.sources())
            if is_plain and memories and memory_of(result) not in memories:
                self.computed.append(entry)
        return result


class Constants:
    """The constants that a recording holds. held: everything that its calls hold."""

    def __init__(self, computed: Sequence[Computed], held: Sequence[Any]) -> None:
        needed = {memory_of(x) for x in leaves(held) if isinstance(x, Tensor)}
        self.computed: list[Computed] = []
        for entry in reversed(computed):
            if memory_of(entry.result) in needed:
                needed |= {memory_of(source) for source in entry.sources()}
                self.computed.insert(0, entry)
        # A tensor that is made while recording, such as a range, has no version, and never changes.
        results = {memory_of(entry.result) for entry in self.computed}
        self.sources = [
            source
            for entry in self.computed
            for source in entry.sources()
            if memory_of(source) not in results and not source.is_inference()
        ]
        self.versions = self._versions()

    def refresh(self) -> None:
        """Compute the constants again, if a tensor that they depend on was written."""
        versions = self._versions()
        if versions == self.versions:
            return
        self.versions = versions
        for entry in self.computed:
            entry.result.copy_(entry.function(*entry.args, **entry.kwargs))

    def _versions(self) -> list[int]:
        return [source._version for source in self.sources]


def memory_of(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
