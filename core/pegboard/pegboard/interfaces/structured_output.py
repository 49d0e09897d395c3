"""Kind `structured_output` (provisional): grammars. E compiles constraints off the loop and fills token masks from them."""

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
    """supports: `constraint`, the set of kinds it enforces; `compact`, True if it honours `Constraint.disable_any_whitespace`;
    `text`, True if its `suits` judges the text of a constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputNeed(Need):
    """text: of the constraint, or the value it is the JSON of: `pegboard plugins why` asks with it."""

    constraint: str | None = None
    text: Any = None
    compact: bool = False


@dataclass(frozen=True)
class StructuredOutputSetup:
    """vocab_size: V, the width of the model's logits. load: reads the tokenizer's vocabulary. eos_token_ids: ids that end an
    output according to the checkpoint. num_threads: threads that filling and compiling may use.

    Building a backend happens while the engine starts, whether or not a constraint ever comes: it must be cheap. The vocabulary
    is read on first use, which should be in `compile`.
    """

    vocab_size: int
    load: Callable[[], "Vocabulary"]
    eos_token_ids: tuple[int, ...] = ()
    num_threads: int = 1

    @cached_property
    def vocabulary(self) -> "Vocabulary":
        """Exactly V tokens: ids the tokenizer does not know are b"" and special."""
        known = self.load()
        missing = self.vocab_size - known.size
        token_bytes = [*known.token_bytes[: self.vocab_size], *[b""] * missing]
        special = known.special_token_ids | set(range(known.size, self.vocab_size))
        return replace(known, token_bytes=token_bytes, special_token_ids=frozenset(special))

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output, those of the checkpoint first."""
        return tuple(dict.fromkeys([*self.eos_token_ids, *self.vocabulary.eos_token_ids]))


@dataclass(frozen=True, slots=True)
class Constraint:
    """kind and its text: a JSON schema, regular expression, grammar, JSON list of choices, or structural tag. The options are
    those of `StructuredOutputsParams`; a backend that cannot honour one says so in `reject`. "grammar" is EBNF or Lark, as the
    backend says; core has checked that what must be JSON is JSON."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class Grammar(Protocol):
    """The state of one completion inside its constraint. It never gets stop tokens: core accepts them where `fill` allows one."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens were valid; the state advances by these."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""

    def fork(self) -> "Grammar":
        """An independent copy in the same state (n > 1, cached compilations). Called while other copies are in use."""


class StructuredOutput(Protocol):
    """One per engine. `compile` is called from several threads at once, `reject` from any; the rest from the engine's thread."""

    def reject(self, constraint: Constraint) -> str | None:
        """What of the constraint cannot be enforced, in words; None = all of it, as far as can be told without compiling. Cheap.
        Never drops a constraint silently."""

    def compile(self, constraint: Constraint) -> Grammar:
        """Cold, in a thread with a time limit; cached by core. RequestError when the constraint is invalid, or turns out not to
        be enforceable; the next backend is asked then."""

    def fill(self, grammars: Sequence[Grammar], masks: "np.ndarray") -> None:
        """Row i of masks (uint32 [M, ceil(V / 32)], zeros) = tokens grammar i allows now; all `stop_token_ids` where its text may
        end. Bits from V on are ignored. Hot."""
