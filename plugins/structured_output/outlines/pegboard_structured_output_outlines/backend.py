"""Structured output with outlines-core: an automaton over tokens is built in advance, so a mask is
a table look-up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.structured_output import Constraint, StructuredOutputSetup
from pegboard_chat.parsing.constraint_size import too_many_states
from pegboard_structured_output_outlines.pattern import MAX_STATES, pattern_of, rejection, too_wide

MAX_ROLLBACK = 4096
"""The number of states that are kept for undoing."""


class OutlinesState:
    """The position of one completion in an index. `tokens`: the tokens accepted so far, for
    forks."""

    def __init__(self, index: Any, tokens: Sequence[int] = ()) -> None:
        import outlines_core

        self.index = index
        self.guide = outlines_core.Guide(index, MAX_ROLLBACK)
        self.tokens: list[int] = []
        self.accept(tokens)

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            try:
                self.guide.advance(token, return_tokens=False)
            except ValueError:  # there is no such transition
                return count
            self.tokens.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        del self.tokens[-num_tokens:]
        if num_tokens <= self.guide.get_allowed_rollback():
            self.guide.rollback_state(num_tokens)
        else:
            self.guide = OutlinesState(self.index, self.tokens).guide

    def fork(self) -> OutlinesState:
        return OutlinesState(self.index, self.tokens)


class Outlines:
    """Implements `pegboard.interfaces.structured_output.StructuredOutput`. The library is imported
    with the first constraint."""

    def __init__(self, options: None, setup: StructuredOutputSetup) -> None:
        self.setup = setup
        self._lock = threading.Lock()

    def reject(self, constraint: Constraint) -> str | None:
        return rejection(constraint)

    def compile(self, constraint: Constraint) -> OutlinesState:
        import outlines_core

        if not self.setup.stop_token_ids:
            raise RequestError(
                "the tokenizer has no end-of-sequence token", parameter="structured_outputs"
            )
        with self._lock:
            vocabulary = self._vocabulary
        try:
            pattern = pattern_of(constraint)
            if (reason := too_wide(pattern) or too_many_states(pattern, MAX_STATES)) is not None:
                raise RequestError(reason, parameter="structured_outputs")
            return OutlinesState(outlines_core.Index(pattern, vocabulary))
        except RequestError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            # the library raises these for bad input
            raise RequestError(
                " ".join(str(error).split()), parameter="structured_outputs"
            ) from error

    def fill(self, grammars: Sequence[OutlinesState], masks: np.ndarray) -> None:
        for grammar, mask in zip(grammars, masks, strict=True):
            grammar.guide.write_mask_into(mask.ctypes.data, mask.size, mask.itemsize)
            # the library supports only one end-of-sequence token
            if mask[self._stop_words[0]] & self._stop_bits[0]:
                for word, bit in zip(self._stop_words, self._stop_bits, strict=True):
                    mask[word] |= bit

    @cached_property
    def _vocabulary(self) -> Any:
        import outlines_core

        vocabulary = self.setup.vocabulary
        by_bytes: dict[bytes, list[int]] = {}
        for token, text in enumerate(vocabulary.token_bytes):
            if text and token not in vocabulary.special_token_ids:
                by_bytes.setdefault(text, []).append(token)
        return outlines_core.Vocabulary(self.setup.stop_token_ids[0], by_bytes)

    @cached_property
    def _stop_words(self) -> list[int]:
        return [token >> 5 for token in self.setup.stop_token_ids]

    @cached_property
    def _stop_bits(self) -> list[np.uint32]:
        return [np.uint32(1 << (token & 31)) for token in self.setup.stop_token_ids]
