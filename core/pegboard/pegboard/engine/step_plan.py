"""One step while it is being planned: who computes how many tokens, and what is left of every budget."""

from __future__ import annotations

from typing import NamedTuple

from pegboard.data.request import Request
from pegboard.engine.kv.cache import NewBlocks
from pegboard.interfaces.scheduling_policy import StepBudget


class Entry(NamedTuple):
    """One row's share. num_tokens: to compute, drafts included. samples: it ends the known tokens, so a new one is sampled.
    new_blocks: appended to its tables. is_new: the worker gets the whole request."""

    num_tokens: int
    num_drafts: int
    samples: bool
    new_blocks: NewBlocks
    is_new: bool = False


class StepPlan:
    """Accumulates entries. A prefill is *partial* when its prompt does not end in this step, and *long* when the prompt exceeds
    the chunk limit."""

    def __init__(self, budget: StepBudget, encoder_tokens: int) -> None:
        self.budget = budget
        self.tokens_left = budget.max_tokens
        self.encoder_tokens_left = encoder_tokens
        self.entries: dict[Request, Entry] = {}
        self.encode: list[tuple[Request, int]] = []
        self.parents: dict[Request, int] = {}
        self.has_preempted = False
        self.has_trimmed_drafts = False
        self._num_partial = 0
        self._num_long_partial = 0

    @property
    def is_untouched(self) -> bool:
        """The whole token budget is left."""
        return self.tokens_left == self.budget.max_tokens

    def put(self, request: Request, entry: Entry) -> None:
        """Schedule the request."""
        self.entries[request] = entry
        self.tokens_left -= entry.num_tokens
        if not entry.samples:
            self._num_partial += 1
            self._num_long_partial += self.is_long(request)

    def withdraw(self, request: Request) -> bool:
        """Unschedule a request that lost its blocks. False, and nothing is changed, when media are encoded for it in this step:
        others may count on them already."""
        if any(owner is request for owner, _ in self.encode):
            return False
        entry = self.entries.pop(request, None)
        if entry is not None:
            self.tokens_left += entry.num_tokens
            if not entry.samples:
                self._num_partial -= 1
                self._num_long_partial -= self.is_long(request)
        return True

    def is_long(self, request: Request) -> bool:
        return request.num_prompt_tokens > self.budget.max_chunk

    def allows_partial(self, request: Request) -> bool:
        """One more prompt may be computed in parts."""
        if self.is_long(request) and self._num_long_partial >= self.budget.max_long_prefills:
            return False
        return self._num_partial < self.budget.max_prefills
