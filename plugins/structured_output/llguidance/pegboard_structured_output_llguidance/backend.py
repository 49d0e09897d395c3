"""Structured output with llguidance: an Earley parser over lexemes, with masks computed on
demand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.structured_output import Constraint, StructuredOutputSetup
from pegboard_structured_output_llguidance.grammar import grammar_text, rejection, special_ids

MAX_ITEMS = 5000
"""The largest number of items of the parser for one mask or token; the library's default is 50,000.
An ambiguous rule (`a: a a | /./`) needs more with every token. One mask then took up to 5 s with
the default, and takes 0.1 s with this. Masks of ordinary JSON schemas need a few hundred."""


class GuidanceState:
    """The matcher of one completion. special_ids: ids of special tokens that the grammar names."""

    def __init__(self, matcher: Any, special_ids: frozenset[int] = frozenset()) -> None:
        self.matcher = matcher
        self.special_ids = special_ids

    def accept(self, token_ids: Sequence[int]) -> int:
        count = int(self.matcher.try_consume_tokens(list(token_ids)))
        if self.matcher.is_error():
            raise _error(self.matcher)
        return count

    def rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    def fork(self) -> GuidanceState:
        return GuidanceState(self.matcher.deep_copy(), self.special_ids)


class Guidance:
    """Implements `pegboard.interfaces.structured_output.StructuredOutput`. The library is imported
    with the first constraint."""

    def __init__(self, options: None, setup: StructuredOutputSetup) -> None:
        self.setup = setup
        self._lock = threading.Lock()

    def reject(self, constraint: Constraint) -> str | None:
        return rejection(constraint)

    def compile(self, constraint: Constraint) -> GuidanceState:
        import llguidance

        if not self.setup.stop_token_ids:
            raise RequestError(
                "the tokenizer has no end-of-sequence token", parameter="structured_outputs"
            )
        with self._lock:
            tokenizer = self._tokenizer
        try:
            text = grammar_text(constraint)
        except (
            ValueError,
            KeyError,
            TypeError,
            AssertionError,
            AttributeError,
        ) as error:  # Assertion: for tags
            raise RequestError(
                str(error) or type(error).__name__, parameter="structured_outputs"
            ) from error
        limits = llguidance.LLParserLimits(verbose_errors=False, step_max_items=MAX_ITEMS)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        # exceeds limits that a matcher meets only here
        mask = None if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise _error(matcher)
        if not any(mask or b""):
            raise RequestError("no text fits the constraint", parameter="structured_outputs")
        return GuidanceState(matcher, special_ids(constraint))

    def fill(self, grammars: Sequence[GuidanceState], masks: np.ndarray) -> None:
        """Raises RequestError if a matcher has exceeded a limit of the library."""
        rows = [(grammar.matcher, i) for i, grammar in enumerate(grammars)]
        self._check(grammars)
        self._executor.unsafe_compute_mask_ptr(
            rows, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks)
        )
        self._check(grammars)
        for grammar, mask in zip(grammars, masks, strict=True):
            if grammar.special_ids and not grammar.matcher.is_accepting():
                self._only_valid(grammar, mask)

    def _check(self, grammars: Sequence[GuidanceState]) -> None:
        for grammar in grammars:
            if grammar.matcher.is_error():
                raise _error(grammar.matcher)

    def _only_valid(self, grammar: GuidanceState, mask: np.ndarray) -> None:
        """Allow only the special tokens that are valid here. The library's masks allow all of them
        wherever either text may continue or a special token may follow. Its check of single tokens
        is right."""
        valid = [
            token for token in grammar.special_ids if grammar.matcher.validate_tokens([token]) == 1
        ]
        mask &= self._ordinary
        for token in valid:
            mask[token >> 5] |= np.uint32(1 << (token & 31))

    @cached_property
    def _ordinary(self) -> np.ndarray:
        """Bits of all tokens except special ones and those that end an output: uint32 [words]."""
        allowed = np.ones(-(-self.setup.vocab_size // 32) * 32, np.uint8)
        allowed[[*self.setup.vocabulary.special_token_ids, *self.setup.stop_token_ids]] = 0
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    @cached_property
    def _tokenizer(self) -> Any:
        import llguidance

        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(self.setup)),
            eos_token=list(self.setup.stop_token_ids),
        )

    @cached_property
    def _executor(self) -> Any:
        import llguidance

        return llguidance.LLExecutor(num_threads=self.setup.num_threads)


def _error(matcher: Any) -> RequestError:
    return RequestError(
        f"guidance: {' '.join(matcher.get_error().split())[:1000]}", parameter="structured_outputs"
    )


class _Tokens:
    """The vocabulary in the library's form. Calling it encodes a text and takes the longest token
    first. The library calls it only for texts in grammars."""

    def __init__(self, setup: StructuredOutputSetup) -> None:
        vocabulary = setup.vocabulary
        self.tokens = list(vocabulary.token_bytes)
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        self.eos_token_id = setup.stop_token_ids[0]
        self.bos_token_id = vocabulary.bos_token_id
        self._ids = {text: token for token, text in reversed(list(enumerate(self.tokens))) if text}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        tokens = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                if (token := self._ids.get(data[start:end])) is not None:
                    tokens.append(token)
                    break
            else:
                end = start + 1  # a byte without a token
            start = end
        return tokens
