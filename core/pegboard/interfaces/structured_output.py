"""Kind `structured_output` (provisional): grammars. A checks constraints, E compiles them off the loop and fills token masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    import numpy as np

    from pegboard.interfaces.tokenizer import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputSpec(Spec):
    """supports: `constraint`, the set of kinds it enforces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputNeed(Need):
    constraint: str | None = None


@dataclass(frozen=True, slots=True)
class StructuredOutputSetup:
    vocabulary: "Vocabulary"
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """kind and its text: a JSON schema, regular expression, grammar, JSON list of choices, or structural tag. The options are
    those of `StructuredOutputsParams`; a backend that cannot honour one says so in `reject`."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class Grammar(Protocol):
    """The state of one completion inside its constraint."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens were valid; the state advances by these."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""

    def is_finished(self) -> bool:
        """Only a stop token may follow."""

    def fork(self) -> "Grammar":
        """An independent copy in the same state (n > 1, cached compilations)."""


class StructuredOutput(Protocol):
    def reject(self, constraint: Constraint) -> str | None:
        """What of the constraint cannot be enforced, in words; None = all of it. Never drops a constraint silently."""

    def compile(self, constraint: Constraint) -> Grammar:
        """Cold, in a thread with a time limit; cached by core. RequestError when the constraint is invalid."""

    def fill(self, grammars: Sequence[Grammar], masks: "np.ndarray") -> None:
        """Row i of masks (uint32 [M, ceil(V/32)]) = tokens grammar i allows now. Hot."""
