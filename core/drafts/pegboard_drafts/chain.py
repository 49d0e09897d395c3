"""Drafts of a model that computes one token after the other."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.draft import (
    ComputedTokens,
    Drafts,
    DraftSetup,
    DraftStep,
    Forwards,
    PaddedStep,
)
from pegboard_drafts.drawing import DraftColumns, Drawing
from pegboard_drafts.lengths import DraftLengths

MOST_WAITING = 64
"""Tokens that a draft model computes later. They are those of all rows."""


class Follows(Protocol):
    """What the draft model computes of the target's steps."""

    def add(self, row: int) -> None:
        """A request in this row starts or resumes."""

    def remove(self, rows: np.ndarray) -> None:
        """These rows are free now. Their blocks in the KV cache still have their content."""

    def __call__(
        self, step: DraftStep, computed: ComputedTokens, counts: np.ndarray, lengths: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """Compute what the target has computed. Returns the hidden states [S, size] that the first
        draft of each row comes from, and the position [S] at which that is computed. counts: [S],
        how many drafts each row gets. lengths: [S], of the histories."""

    def padded(self, step: PaddedStep) -> tuple[Tensor, int]:
        """Do the same, with drafts that were wrong. The second result is how many places after the
        newest token of each row its first draft is computed."""


class ChainProposer:
    """Implements `pegboard.interfaces.draft.PaddedProposer`. Each draft token is drawn from what
    the draft model says after those before it."""

    def __init__(self, setup: DraftSetup, follow: Follows) -> None:
        assert setup.forwards is not None, "the plugin's spec has a source"
        self.forwards: Forwards = setup.forwards
        model = setup.forwards.model
        self._follow = follow
        self._lengths = DraftLengths(setup)
        self._gives = hasattr(model, "start")
        self._drawing = Drawing(setup, getattr(model, "token_ids", None))

    def add(self, row: int, token_ids: np.ndarray) -> None:
        """See `DraftProposer.add`."""
        self._lengths.add(row)
        self._follow.add(row)

    def remove(self, rows: np.ndarray) -> None:
        """See `DraftProposer.remove`."""
        self._follow.remove(rows)

    def propose(self, step: DraftStep) -> Drafts:
        """See `DraftProposer.propose`."""
        assert step.computed is not None, "the plugin's spec has a source"
        lengths = np.array([len(text) for text in step.history], np.int64)
        room = self.forwards.room(step.rows) - lengths + 1
        wanted = np.array(self._lengths.wanted(step), np.int64)
        counts = np.clip(wanted, 0, room) if len(room) else wanted
        hidden, positions = self._follow(step, step.computed, counts, lengths)
        columns = DraftColumns(self._drawing, step.rows, counts)
        if columns.sizes:
            started = time.perf_counter()
            self._extend(columns, positions[columns.order], hidden)
            self._lengths.took(len(columns.sizes), time.perf_counter() - started)
        return columns.drafts(step, self._lengths)

    def propose_padded(self, step: PaddedStep) -> tuple[Tensor, Tensor | None]:
        """See `PaddedProposer.propose_padded`."""
        hidden, after = self._follow.padded(step)
        rows = step.rows[step.samples]
        columns = DraftColumns(self._drawing, rows, np.full(len(rows), step.depths))
        if columns.sizes:
            ids = columns.add(self.forwards.logits(hidden))
            largest = (step.starts + step.counts)[step.samples] + after + step.depths - 2
            for depth in range(1, step.depths):
                given = hidden if self._gives else None
                if depth == 1:
                    exact = step.ends + after
                    hidden, logits = self.forwards.next(rows, largest, ids, given, exact=exact)
                else:
                    hidden, logits = self.forwards.after(ids, given)
                ids = columns.add(logits)
        return columns.padded()

    def _extend(self, columns: DraftColumns, positions: np.ndarray, hidden: Tensor) -> None:
        """Draw all depths. The first draft of a row comes from its hidden states [S, size]."""
        hidden = hidden[torch.from_numpy(columns.order).to(hidden.device)]
        ids = columns.add(self.forwards.logits(hidden))
        for depth, size in enumerate(columns.sizes[1:]):
            given = hidden[:size] if self._gives else None
            hidden, logits = self.forwards.next(
                columns.rows[:size], positions[:size] + depth, ids[:size], given
            )
            ids = columns.add(logits)


class FollowStates:
    """The draft model gets the target's hidden states with each token: at position p those of the
    target there, and the token after it (EAGLE: Li et al. 2024, "EAGLE: speculative sampling
    requires rethinking feature uncertainty").

    When nothing is proposed, the tokens of several steps wait, because the draft model computes
    them in less time together."""

    def __init__(self, setup: DraftSetup) -> None:
        assert setup.forwards is not None, "the plugin's spec has a source"
        self.forwards: Forwards = setup.forwards
        self._waiting: list[ComputedTokens] = []
        self._num_waiting = 0
        self._ends = np.full(setup.limits.max_num_seqs, -1)  # after the waiting tokens of each row
        self._most = most_waiting(setup)

    def add(self, row: int) -> None:
        """See `Follows.add`."""

    def remove(self, rows: np.ndarray) -> None:
        """See `Follows.remove`."""
        if (self._ends[rows] >= 0).any():
            self._compute()

    def __call__(
        self, step: DraftStep, computed: ComputedTokens, counts: np.ndarray, lengths: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """See `Follows`."""
        num_tokens = int(computed.counts.sum())
        ends = self._ends[computed.rows]
        can_wait = num_tokens == len(ends) and ((ends < 0) | (ends == computed.starts)).all()
        if not can_wait and self._waiting:
            self._compute()
        self._waiting.append(computed)
        self._num_waiting += num_tokens
        self._ends[computed.rows] = computed.starts + computed.counts
        if can_wait and not counts.any() and self._num_waiting < self._most:
            kept = tuple(each.clone() for each in computed.hidden)
            self._waiting[-1] = replace(computed, hidden=kept)
            return torch.empty(0), lengths
        rows, last, hidden = self._compute()
        last = last[np.searchsorted(rows, computed.rows[computed.samples])]
        return hidden[torch.from_numpy(last).to(hidden.device)], lengths - 1

    def padded(self, step: PaddedStep) -> tuple[Tensor, int]:
        """See `Follows.padded`."""
        hidden = self.forwards.tokens(
            step.rows,
            step.starts,
            step.counts,
            self.forwards.model.start(*step.hidden),
            ahead=1,
            exact=step.exact,
            ids=(step.places, step.token_ids),
        )
        return hidden.index_select(0, step.last), 0

    def _compute(self) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """Compute all tokens that wait. Returns their rows in ascending order, and the places of
        the last token of each row in the hidden states, which are the third."""
        rows, starts, counts, states = _joined(self._waiting)
        self._waiting = []
        self._num_waiting = 0
        self._ends[rows] = -1
        given = self.forwards.model.start(*states)
        hidden = self.forwards.tokens(rows, starts, counts, given, ahead=1)
        return rows, np.cumsum(counts) - 1, hidden


def _joined(
    steps: list[ComputedTokens],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[Tensor, ...]]:
    """Return the rows, starts, counts and hidden states of the tokens of several steps as those of
    one, with the rows in ascending order."""
    first = steps[0]
    if len(steps) == 1 and (np.diff(first.rows) > 0).all():
        return first.rows, first.starts, first.counts, first.hidden
    token_rows = np.concatenate([np.repeat(each.rows, each.counts) for each in steps])
    positions = np.concatenate([_positions(each) for each in steps])
    order = np.lexsort((positions, token_rows))
    rows, places, counts = np.unique(token_rows[order], return_index=True, return_counts=True)
    whole = [torch.cat(parts) for parts in zip(*(each.hidden for each in steps), strict=True)]
    index = torch.from_numpy(order).to(whole[0].device)
    return rows, positions[order][places], counts, tuple(states[index] for states in whole)


def most_waiting(setup: DraftSetup) -> int:
    """Return how many tokens may wait, in all rows together."""
    assert setup.forwards is not None, "the plugin's spec has a source"
    if not setup.forwards.can_wait:
        return 0
    limits = setup.limits
    # with those of one more step, which has a token of each row and a new one
    return min(MOST_WAITING, limits.max_num_batched_tokens - limits.max_num_seqs)


def _positions(computed: ComputedTokens) -> np.ndarray:
    """Return the position of each token."""
    ends = np.cumsum(computed.counts)
    return np.arange(ends[-1]) + np.repeat(
        computed.starts - ends + computed.counts, computed.counts
    )


class FollowTokens:
    """The draft model is a model like the target, and reads only tokens (Leviathan, Kalman, Matias
    2023, "Fast inference from transformers via speculative decoding"). It keeps the keys and values
    of drafts that were right. When nothing is proposed, the tokens of several steps wait."""

    def __init__(self, setup: DraftSetup) -> None:
        assert setup.forwards is not None, "the plugin's spec has a source"
        self.forwards: Forwards = setup.forwards
        self._stored = np.full(setup.limits.max_num_seqs, -1)
        self._known = np.full(setup.limits.max_num_seqs, -1)
        self._drafted = np.zeros(setup.limits.max_num_seqs, np.int64)
        self._most = most_waiting(setup)

    def add(self, row: int) -> None:
        """See `Follows.add`."""
        self._stored[row] = self._known[row] = -1
        self._drafted[row] = 0

    def remove(self, rows: np.ndarray) -> None:
        """See `Follows.remove`."""
        waiting = rows[self._known[rows] > self._stored[rows]]
        if len(waiting):
            self._compute(waiting)
        self._stored[rows] = self._known[rows] = -1

    def __call__(
        self, step: DraftStep, computed: ComputedTokens, counts: np.ndarray, lengths: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """See `Follows`."""
        rows = computed.rows
        self._stored[step.rows] += np.minimum(step.num_new - 1, self._drafted[step.rows])
        self._drafted[step.rows] = np.maximum(counts - 1, 0)
        waiting = np.flatnonzero(self._known > self._stored)
        is_decode = computed.counts.sum() == len(rows)
        if len(waiting) and not is_decode:
            self._compute(waiting)
        is_new = self._stored[rows] < 0
        self._stored[rows[is_new]] = computed.starts[is_new]
        self._known[rows] = computed.starts + computed.counts
        self._known[step.rows] += counts > 0  # the token that was sampled
        waiting = np.flatnonzero(self._known > self._stored)
        num_waiting = int((self._known - self._stored)[waiting].sum())
        can_wait = is_decode and not counts.any() and num_waiting < self._most
        if can_wait or not len(waiting):
            return torch.empty(0), lengths
        ends, hidden = self._compute(waiting)
        last = np.zeros(len(step.rows), np.int64)
        has = np.isin(step.rows, waiting)
        last[has] = ends[np.searchsorted(waiting, step.rows[has])]
        return hidden[torch.from_numpy(last).to(hidden.device)], lengths

    def padded(self, step: PaddedStep) -> tuple[Tensor, int]:
        """See `Follows.padded`. Each token is computed at the end of the step that has sampled it,
        so the first token of a row is computed alone."""
        is_new = self._stored[step.rows] < 0
        if is_new.any():
            rows = step.rows[is_new]
            self.forwards.tokens(rows, step.starts[is_new], np.ones(len(rows), np.int64))
            self._stored[rows] = step.starts[is_new]
        hidden = self.forwards.tokens(
            step.rows,
            step.starts + 1,
            step.counts,
            exact=step.exact + 1,
            ids=(step.places, step.token_ids),
        )
        return hidden.index_select(0, step.last), 1

    def _compute(self, rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Compute the tokens of rows [B] that wait. Returns the places [B] of their last tokens in
        the hidden states, which are the second."""
        starts = self._stored[rows]
        counts = self._known[rows] - starts
        hidden = self.forwards.tokens(rows, starts, counts)
        self._stored[rows] = self._known[rows]
        return np.cumsum(counts) - 1, hidden
