"""Kind `structured_output` (provisional): grammars. E compiles constraints outside the engine loop
and fills token masks from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    import numpy as np

    from pegboard.interfaces.tokenizer import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputSpec(Spec):
    """supports: `constraint`, the set of kinds that it enforces. `compact`, True if it honors
    `Constraint.disable_any_whitespace`. `text`, True if its `suits` judges the text of a
    constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputNeed(Need):
    """text: the text of the constraint. `pegboard plugins why` passes the JSON value instead of its
    text."""

    constraint: str | None = None
    text: Any = None
    compact: bool = False


@dataclass(frozen=True)
class StructuredOutputSetup:
    """vocab_size: V, the width of the model's logits. load: reads the tokenizer's vocabulary.
    eos_token_ids: ids that end an output according to the checkpoint. num_threads: threads that
    filling and compiling may use.

    A backend is built while the engine starts, even if no request ever has a constraint, so the
    constructor must be cheap. The vocabulary is read on first use, which should be in `compile`.
    """

    vocab_size: int
    load: Callable[[], "Vocabulary"]
    eos_token_ids: tuple[int, ...] = ()
    num_threads: int = 1

    @cached_property
    def vocabulary(self) -> "Vocabulary":
        """The vocabulary with exactly V tokens. Ids that the tokenizer does not know are b"" and
        special."""
        known = self.load()
        missing = self.vocab_size - known.size
        token_bytes = [*known.token_bytes[: self.vocab_size], *[b""] * missing]
        special = known.special_token_ids | set(range(known.size, self.vocab_size))
        return replace(known, token_bytes=token_bytes, special_token_ids=frozenset(special))

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output, starting with those of the checkpoint."""
        return tuple(dict.fromkeys([*self.eos_token_ids, *self.vocabulary.eos_token_ids]))


@dataclass(frozen=True, slots=True)
class Constraint:
    """text: a JSON schema, regular expression, grammar, JSON list of choices, or structural tag, as
    `kind` says. The options are those of `StructuredOutputsParams`. If a backend cannot honor one,
    `reject` says so. A "grammar" is EBNF or Lark, depending on the backend. Core has already
    checked that texts which must be JSON are JSON."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class Grammar(Protocol):
    """The state of one completion within its constraint. It never gets stop tokens: core accepts
    those where `fill` allows them."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance the state by the valid tokens at the start of `token_ids`, and return how many
        these are."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""

    def fork(self) -> "Grammar":
        """Return an independent copy in the same state, for n > 1 and cached compilations. Called
        while other copies are in use."""


class StructuredOutput(Protocol):
    """One instance per engine. Several threads call `compile` at once, and any thread calls
    `reject`. Only the engine's thread calls the rest."""

    def reject(self, constraint: Constraint) -> str | None:
        """Return what part of the constraint cannot be enforced, in words. None means that all of
        it can be, as far as this is known without compiling. Cheap. A backend must never silently
        drop a part of a constraint."""

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint. Cold: it runs in a thread with a time limit, and core caches the
        result. Raises RequestError if the constraint is invalid or turns out not to be enforceable.
        Core then asks the next backend."""

    def fill(self, grammars: Sequence[Grammar], masks: "np.ndarray") -> None:
        """Set row i of masks (uint32 [M, ceil(V / 32)], zeros at first) to the tokens that grammar
        i allows now. Where its text may end, allow all `stop_token_ids`. Bits from V on are
        ignored. No grammar occurs twice. Hot."""
