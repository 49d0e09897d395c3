"""The grammar of one completion. It applies after the reasoning. It handles stop tokens itself, so
its backend never sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from pegboard.data.batch import Array
from pegboard.errors import PegboardError, RequestError, bare, blame
from pegboard.interfaces.structured_output import Grammar, StructuredOutput

CALL_S = 0.05
"""Seconds that one call of a backend may take without being counted. Ordinary constraints need 0.1
to 20 ms."""

EXCESS_S = 2.0
"""Seconds by which all calls for one completion together may exceed `CALL_S` each. The first mask
of a state may take 0.2 s."""

BUSY = 5
"""The time of a call is its processor time, or its duration divided by this if that is more. Its
whole duration would be unfair, because other programs may keep the processor busy."""


Blaming = Callable[[str], AbstractContextManager[None]]
"""`errors.blame`, called with the name of a backend."""


class ReasoningEnd:
    """Finds the end of reasoning in a completion's tokens. ends: token ids of the texts; any of
    them ends the reasoning. token_bytes: the bytes of each token. A text of ordinary tokens is
    found even if the model spells it with other tokens. A text with special tokens, which have no
    bytes, is found only as exactly these ids.
    """

    def __init__(self, ends: Sequence[Sequence[int]], token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._ids: list[list[int]] = []
        self._texts: list[bytes] = []
        for end in filter(None, ends):
            parts = [token_bytes[token] if token < len(token_bytes) else b"" for token in end]
            if all(parts):
                self._texts.append(b"".join(parts))
            else:
                self._ids.append(list(end))

    def ends_reasoning(self, token_ids: list[int]) -> bool:
        """Return whether the last of `token_ids` completes one of the texts."""
        if any(token_ids[-len(end) :] == end for end in self._ids):
            return True
        size = len(self._token_bytes)
        for text in self._texts:  # the text has at most one token per byte
            if text in b"".join(
                self._token_bytes[token] for token in token_ids[-len(text) :] if token < size
            ):
                return True
        return False


class RequestGrammar:
    """The value of `Request.grammar`. name: the name of the backend. stop_token_ids: tokens that
    are allowed where the text may end. After one of them only stop tokens are allowed; the output
    goes on only if the request ignores end of sequence. on_failure: called with the first error of
    the backend, or with an error which says that it is too slow for this completion. Afterwards
    `error` holds the error, no token is accepted, and the backend is not called again."""

    def __init__(
        self,
        name: str,
        backend: StructuredOutput,
        grammar: Grammar,
        *,
        vocab_size: int,
        stop_token_ids: Sequence[int] = (),
        reasoning: ReasoningEnd | None = None,
        on_failure: Callable[[PegboardError], None] = lambda error: None,
        blaming: Blaming = blame,
    ) -> None:
        self.name = name
        self._blame = blaming
        self.backend = backend
        self.grammar = grammar
        self._vocab_size = vocab_size
        self._stop = frozenset(stop_token_ids)
        self._reasoning = reasoning
        self._reasoned: list[int] = []
        self._num_inside = 0
        self._num_stops = 0
        self.is_active = reasoning is None
        self.error: PegboardError | None = None
        self._on_failure = on_failure
        self._excess_s = 0.0

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance the state by the valid tokens at the start of `token_ids`, and return their
        number."""
        for count, token in enumerate(token_ids):
            if not self._accept(token) or self.error is not None:
                return count
        return len(token_ids)

    def _accept(self, token: int) -> bool:
        if self.error is not None:
            return False
        if not self.is_active:
            assert self._reasoning is not None
            self._reasoned.append(token)
            self.is_active = self._reasoning.ends_reasoning(self._reasoned)
            return True
        if token in self._stop:
            if not self._num_stops and not self._allows(token):
                return False
            self._num_stops += 1
            return True
        if self._num_stops:
            return False
        with self._failing():
            accepted = self.grammar.accept([token])
            self._num_inside += accepted
            return accepted == 1
        return False

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        stops = min(num_tokens, self._num_stops)
        inside = min(num_tokens - stops, self._num_inside)
        reasoned = num_tokens - stops - inside
        self._num_stops -= stops
        if inside and self.error is None:
            self._num_inside -= inside
            with self._failing():
                self.grammar.rollback(inside)
        if reasoned:
            del self._reasoned[-reasoned:]
            self.is_active = False

    def fill(self, mask: Array) -> None:
        """Write the allowed next tokens into `mask`, uint32 [words] of zeros. After a failure these
        are all tokens."""
        if not self.is_active or self.error is not None:
            mask[:] = np.iinfo(np.uint32).max
        elif self._num_stops:
            for token in self._stop:
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        else:
            with self._failing():
                self.backend.fill([self.grammar], mask[np.newaxis])
                return
            self.fill(mask)

    @property
    def fills_from_backend(self) -> bool:
        """Whether `fill` would call the backend, which can fill the masks of many grammars at
        once."""
        return self.is_active and not self._num_stops and self.error is None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Call the backend in the block. Its error, or too much time, ends this grammar and does
        not leave the block."""
        started = time.perf_counter()
        used = time.thread_time()
        try:
            with self._blame(self.name):
                yield
            self._count(max(time.thread_time() - used, (time.perf_counter() - started) / BUSY))
        except PegboardError as error:
            self._on_failure(error)
            self.error = bare(error)

    def _count(self, seconds: float) -> None:
        self._excess_s = max(0.0, self._excess_s + seconds - CALL_S)
        if self._excess_s > EXCESS_S:
            raise RequestError(
                f"structured_output {self.name} is too slow for this constraint: its last call "
                f"took {seconds:.2f} s; all calls together may take {EXCESS_S:g} s more than "
                f"{CALL_S:g} s each. Simplify the constraint, for example a rule that can read "
                "the same text in several ways",
                parameter="structured_outputs",
            )

    def has_ended(self) -> bool:
        """Return whether only a stop token may follow."""
        if not self.is_active:
            return False
        allowed = np.unpackbits(self._mask().view(np.uint8), bitorder="little")[: self._vocab_size]
        allowed[[token for token in self._stop if token < self._vocab_size]] = 0
        return not allowed.any()

    def _allows(self, token: int) -> bool:
        return bool(int(self._mask()[token >> 5]) >> (token & 31) & 1)

    def _mask(self) -> Array:
        mask = np.zeros(-(-self._vocab_size // 32), np.uint32)
        self.fill(mask)
        return mask
