"""A structured output backend over token ids, for constraints of kind "grammar" written as
"modulus:residues:length".

"3:0,2:5" allows 5 tokens whose ids are 0, 2, 0, 2, 0 modulo 3 (stop tokens excepted), then only a
stop token.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.structured_output import Constraint, Grammar


class FakeGrammar:
    """A grammar: its state is the position in the pattern."""

    def __init__(
        self, modulus: int, residues: tuple[int, ...], length: int, stop_token_ids: frozenset[int]
    ) -> None:
        self._modulus = modulus
        self._residues = residues
        self._length = length
        self._stop = stop_token_ids
        self.accepted: list[int] = []

    def allows(self, token: int) -> bool:
        """Return whether the token may come next."""
        if self.is_finished():
            return token in self._stop
        place = len(self.accepted)
        return (
            token not in self._stop
            and token % self._modulus == self._residues[place % len(self._residues)]
        )

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if not self.allows(token):
                return count
            self.accepted.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.accepted)
        if num_tokens:
            del self.accepted[-num_tokens:]

    def is_finished(self) -> bool:
        return len(self.accepted) >= self._length

    def fork(self) -> FakeGrammar:
        copy = FakeGrammar(self._modulus, self._residues, self._length, self._stop)
        copy.accepted = list(self.accepted)
        return copy


class FakeStructuredOutput:
    """gate: if given, compiling waits until it is set. num_compiled counts compilations."""

    def __init__(
        self,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        *,
        gate: threading.Event | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._vocab_size = vocab_size
        self._stop = frozenset(stop_token_ids)
        self._gate = gate
        self.timeout_s = timeout_s
        self.num_compiled = 0

    def reject(self, constraint: Constraint) -> str | None:
        return (
            None if constraint.kind == "grammar" else f"kind {constraint.kind!r} is not supported"
        )

    def compile(self, constraint: Constraint) -> FakeGrammar:
        if self._gate is not None:
            assert self._gate.wait(30), "the gate was not opened"
        self.num_compiled += 1
        try:
            modulus, residues, length = constraint.text.split(":")
            return FakeGrammar(
                int(modulus), tuple(int(r) for r in residues.split(",")), int(length), self._stop
            )
        except ValueError as error:
            raise RequestError(
                f"bad grammar {constraint.text!r}", parameter="structured_outputs"
            ) from error

    def fill(self, grammars: Sequence[Grammar], masks: np.ndarray) -> None:
        for grammar, mask in zip(grammars, masks, strict=True):
            assert isinstance(grammar, FakeGrammar), "a backend accepts only its own grammars"
            allowed = np.zeros(masks.shape[1] * 32, np.uint8)
            allowed[[token for token in range(self._vocab_size) if grammar.allows(token)]] = 1
            mask[:] = np.packbits(allowed, bitorder="little").view(np.uint32)
