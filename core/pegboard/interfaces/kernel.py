"""Kind `kernel` (provisional): a fast version of one op of `pegboard.ops`. Entry-point name "<op>.<implementation>"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec(Spec):
    """`implementation` names a function with the op's exact signature (see the reference in `pegboard.ops`).
    symbol: C entry for recorded programs. fuses: op sequence this kernel replaces in a program."""

    symbol: str | None = None
    fuses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNeed(Need):
    op: str | None = None
    dtype: str | None = None


class Recorder(Protocol):
    """The op `program`: writes down a forward or an output head, to be replayed without Python. Built as `Recorder(max_tokens)`.

    Core calls the model once with values of the recorder's own making in place of tensors. Each layer hands them to the `record`
    method of what it computes with: `op.record(recorder, *the op's arguments)` returns the results' values. A callable without
    that method cannot be recorded, and then the model runs eagerly.
    """

    def token_ids(self) -> Any:
        """The step's token ids [T]; lookups take them."""

    def enter(self, hidden: Any) -> None:
        """The program may also be entered here, with these hidden states given."""

    def hidden(self, width: int) -> Any:
        """The hidden states [T, width] the program starts from. What was recorded before is forgotten."""

    def at_positions(self, tables: "tuple[Tensor, ...]") -> tuple[Any, ...]:
        """Of each table [max_positions, width] (float32, contiguous) the rows of the step's positions, [T, width]."""

    def finish(self, output: Any) -> "Callable[[Tensor, Tensor | None], Tensor]":
        """The program: (token ids [T] or hidden [T, width], positions [T], None where it has no tables) → the recorded output,
        valid until the next call. It takes token ids when it was recorded from them, and hidden states where it is entered."""
