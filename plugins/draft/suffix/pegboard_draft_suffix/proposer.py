"""The proposer: the text of each row, and the answers of finished requests, which all rows share."""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np

from pegboard.interfaces.draft import Drafts, DraftSetup, DraftStep
from pegboard_draft_suffix.continuation import Continuation, continuation
from pegboard_draft_suffix.options import SuffixOptions
from pegboard_draft_suffix.text import END, Text


class Answers:
    """The last answers of finished requests, one after another in one text. most: how many are kept."""

    def __init__(self, most: int) -> None:
        self.text = Text()
        self._most = most
        self._lengths = deque[int]()

    def add(self, token_ids: list[int]) -> None:
        """Keep an answer. If there are too many, the oldest eighth is dropped at once, because each time moves the rest."""
        if not self._most:
            return
        self.text.append([*token_ids, END])
        self._lengths.append(len(token_ids) + 1)
        if len(self._lengths) > self._most:
            self.text.drop(sum(self._lengths.popleft() for _ in range(1 + self._most // 8)))


class SuffixProposer:
    """Implements `pegboard.interfaces.draft.DraftProposer`."""

    def __init__(self, options: SuffixOptions, setup: DraftSetup) -> None:
        self._options, self._depth = options, options.suffix_decoding_max_tree_depth
        self._answers = Answers(options.suffix_decoding_max_cached_requests)
        self._texts: dict[int, Text] = {}
        self._starts: dict[int, int] = {}

    def add(self, row: int, token_ids: np.ndarray) -> None:
        """See `DraftProposer.add`."""
        self._texts[row] = text = Text()
        text.append(token_ids.tolist())
        self._starts[row] = text.end

    def remove(self, rows: np.ndarray) -> None:
        """See `DraftProposer.remove`. What the rows have generated is kept, after the end of what came before it."""
        for row in rows.tolist():
            text = self._texts.pop(row, None)
            if text is not None and text.end > (start := self._starts.pop(row)):
                self._answers.add(text.tokens[max(0, start - self._depth) :].tolist())

    def propose(self, step: DraftStep) -> Drafts:
        """See `DraftProposer.propose`."""
        proposals = []
        for row, history, most in zip(step.rows.tolist(), step.history, step.max_drafts.tolist(), strict=True):
            text = self._texts[row]
            text.append(history[text.end :].tolist())
            tail = text.tokens[-self._depth :]
            best = self._continuation(text, tail, most)
            shared = self._continuation(self._answers.text, tail, most)
            proposals.append(np.array((shared if shared.score > best.score else best).token_ids, np.int32))
        return Drafts(proposals)

    def _continuation(self, text: Text, tail: array[int], most: int) -> Continuation:
        options = self._options
        return continuation(text, tail, most, options.suffix_decoding_max_spec_factor, options.suffix_decoding_min_token_prob)
