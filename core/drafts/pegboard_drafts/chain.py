"""Drafts of a model that computes one token after the other."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.draft import ComputedTokens, Drafts, DraftSetup, DraftStep, Forwards
from pegboard_drafts.drawing import DraftColumns, Drawing
from pegboard_drafts.lengths import DraftLengths


class Follows(Protocol):
    """What the draft model computes of the target's steps."""

    def add(self, row: int) -> None:
        """A request in this row starts or resumes."""

    def __call__(
        self, step: DraftStep, computed: ComputedTokens, counts: np.ndarray, lengths: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """Compute what the target has computed. Returns the hidden states [S, size] that the first
        draft of each row comes from, and the position [S] at which that is computed. counts: [S],
        how many drafts each row gets. lengths: [S], of the histories."""


class ChainProposer:
    """Implements `pegboard.interfaces.draft.DraftProposer`. Each draft token is drawn from what the
    draft model says after those before it."""

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
    requires rethinking feature uncertainty")."""

    def __init__(self, setup: DraftSetup) -> None:
        assert setup.forwards is not None, "the plugin's spec has a source"
        self.forwards: Forwards = setup.forwards

    def add(self, row: int) -> None:
        """See `Follows.add`."""

    def __call__(
        self, step: DraftStep, computed: ComputedTokens, counts: np.ndarray, lengths: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """See `Follows`."""
        given = self.forwards.model.start(*computed.hidden)
        hidden = self.forwards.tokens(
            computed.rows, computed.starts, computed.counts, given, ahead=1
        )
        last = np.cumsum(computed.counts)[computed.samples] - 1
        return hidden[torch.from_numpy(last).to(hidden.device)], lengths - 1


class FollowTokens:
    """The draft model is a model like the target, and reads only tokens (Leviathan, Kalman, Matias
    2023, "Fast inference from transformers via speculative decoding"). It keeps the keys and values
    of drafts that were right."""

    def __init__(self, setup: DraftSetup) -> None:
        assert setup.forwards is not None, "the plugin's spec has a source"
        self.forwards: Forwards = setup.forwards
        self._stored = np.full(setup.limits.max_num_seqs, -1)
        self._drafted = np.zeros(setup.limits.max_num_seqs, np.int64)

    def add(self, row: int) -> None:
        """See `Follows.add`."""
        self._stored[row] = -1
        self._drafted[row] = 0

    def __call__(
        self, step: DraftStep, computed: ComputedTokens, counts: np.ndarray, lengths: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """See `Follows`."""
        self._stored[step.rows] += np.minimum(step.num_new - 1, self._drafted[step.rows])
        self._drafted[step.rows] = np.maximum(counts - 1, 0)
        stored = self._stored[computed.rows]
        starts = np.where(stored < 0, computed.starts, stored)
        stops = computed.starts + computed.counts
        stops[computed.samples] += counts > 0  # the token that was sampled
        self._stored[computed.rows] = stops
        has = stops > starts
        if not has.any():
            return torch.empty(0), lengths
        rows = computed.rows[has]
        hidden = self.forwards.tokens(rows, starts[has], (stops - starts)[has])
        ends = np.zeros(len(has), np.int64)
        ends[has] = np.cumsum((stops - starts)[has]) - 1
        last = np.maximum(ends[computed.samples], 0)
        return hidden[torch.from_numpy(last).to(hidden.device)], lengths
