"""Kind `kernel` (provisional): a fast version of one op of `pegboard.ops`. Entry-point name "<op>.<implementation>"."""

from __future__ import annotations

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


class Program(Protocol):
    """What was recorded. Results are valid until the next call. T: tokens of the step, N: rows that logits are wanted of."""

    def __call__(self, start: "Tensor", positions: "Tensor") -> "Tensor":
        """start: hidden [T, width] where the program is entered, or token ids [T] where it was recorded from them; positions [T]
        → hidden [T, width] behind the forward."""

    def logits(self, hidden: "Tensor") -> "Tensor":
        """[N, width] → [N, vocabulary]."""

    def step(self, token_ids: "Tensor", positions: "Tensor") -> "tuple[Tensor, Tensor]":
        """Hidden states and logits of every token, in one go: for T up to the rows the head was recorded for."""


class Recorder(Protocol):
    """The op `program`: writes down a forward and an output head, to be replayed without Python. Built as `Recorder(max_tokens)`.

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

    def head(self, hidden: Any, max_rows: int) -> Any:
        """The forward ends with `hidden`, the output head begins: for at most so many rows, of this value."""

    def finish(self, output: Any, logits: Any = None) -> Program:
        """output: of the forward; logits: of the head, None = there is none, and what was recorded of one is forgotten."""
