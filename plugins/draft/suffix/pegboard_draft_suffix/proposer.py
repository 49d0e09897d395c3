"""The proposer: the text of each row, and the answers of finished requests, which all rows
share."""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np

from pegboard.interfaces.draft import Drafts, DraftSetup, DraftStep
from pegboard_draft_suffix.continuation import Continuation, continuation
from pegboard_draft_suffix.options import SuffixOptions
from pegboard_draft_suffix.text import END, Text
from pegboard_drafts.lengths import DraftLengths

TOKEN_BYTES = 220
"""What a kept token takes with its place in the index, if no run of tokens occurs twice."""
WORK_TOKENS = 4096
"""How many tokens one call adds to the index, about two milliseconds. A step never waits for a long
answer."""

NONE = np.zeros(0, np.int32)


class Answers:
    """The last answers of finished requests, one after another in one text. most: how many are
    kept. most_tokens: how many tokens they have together. Calls do a bounded part of the work, so
    an answer may be found some steps later."""

    def __init__(self, most: int, most_tokens: int) -> None:
        self.text = Text()
        self._most = most
        self._most_tokens = most_tokens
        self._waiting = deque[list[int]]()
        self._lengths = deque[int]()
        self._num_tokens = 0
        self._floor = 0  # what the floor of the text will be

    def add(self, token_ids: list[int]) -> None:
        """Keep an answer, or its last tokens if it is too long."""
        if self._most and self._most_tokens:
            answer = [*token_ids, END][-self._most_tokens :]
            self._waiting.append(answer)
            self._lengths.append(len(answer))
            self._num_tokens += len(answer)
            while len(self._lengths) > self._most or self._num_tokens > self._most_tokens:
                self._num_tokens -= (oldest := self._lengths.popleft())
                self._floor += oldest
        self.work()

    def work(self) -> bool:
        """Do a part of the work that is left. Return whether there was any."""
        left = WORK_TOKENS
        while self._waiting and left:
            answer = self._waiting.popleft()
            self.text.append(answer[:left])
            if answer[left:]:
                self._waiting.appendleft(answer[left:])
            left -= min(left, len(answer))
        old = min(2 * WORK_TOKENS, min(self._floor, self.text.end) - self.text.floor)
        if old:
            self.text.forget(old)
        return bool(old) or left < WORK_TOKENS


class SuffixProposer:
    """Implements `pegboard.interfaces.draft.DraftProposer`."""

    def __init__(self, options: SuffixOptions, setup: DraftSetup) -> None:
        self._options = options
        self._depth = options.suffix_decoding_max_tree_depth
        most_tokens = (options.suffix_decoding_max_cached_mib << 20) // TOKEN_BYTES
        self._answers = Answers(options.suffix_decoding_max_cached_requests, most_tokens)
        self._lengths = DraftLengths(setup)
        self._texts: dict[int, Text] = {}
        self._starts: dict[int, int] = {}

    def add(self, row: int, token_ids: np.ndarray) -> None:
        """See `DraftProposer.add`."""
        self._lengths.add(row)
        self._texts[row] = text = Text()
        text.append(token_ids.tolist())
        self._starts[row] = text.end

    def remove(self, rows: np.ndarray) -> None:
        """See `DraftProposer.remove`. What the rows have generated is kept, after the end of what
        came before it."""
        for row in rows.tolist():
            text = self._texts.pop(row, None)
            if text is not None and text.end > (start := self._starts.pop(row)):
                self._answers.add(text.tokens[max(0, start - self._depth) :].tolist())

    def propose(self, step: DraftStep) -> Drafts:
        """See `DraftProposer.propose`."""
        proposals = []
        self._answers.work()
        answers = self._answers.text
        for row, history, most in zip(
            step.rows.tolist(), step.history, self._lengths.wanted(step), strict=True
        ):
            text = self._texts[row]
            text.append(history[text.end :].tolist())
            if not most:
                proposals.append(NONE)
                continue
            tail = text.tokens[-self._depth :]
            best = self._continuation(text, tail, most)
            if answers.tokens and best.score < most:
                shared = self._continuation(answers, tail, most)
                best = shared if shared.score > best.score else best
            ids = best.token_ids
            proposals.append(np.array(ids, np.int32) if ids else NONE)
        return Drafts(self._lengths.cut(step, proposals))

    def _continuation(self, text: Text, tail: array[int], most: int) -> Continuation:
        options = self._options
        return continuation(
            text,
            tail,
            most,
            options.suffix_decoding_max_spec_factor,
            options.suffix_decoding_min_token_prob,
        )
