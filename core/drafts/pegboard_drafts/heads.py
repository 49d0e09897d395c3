"""Drafts of heads that have no KV cache. They read the target's hidden states of one token."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.draft import (
    Drafts,
    DraftSetup,
    DraftStep,
    Forwards,
    PaddedStep,
)
from pegboard_drafts.drawing import DraftColumns, Drawing
from pegboard_drafts.lengths import DraftLengths

Compute = Callable[[Tensor, Tensor, DraftColumns], None]
"""(hidden, last_ids, columns) draws all depths of the columns. hidden: [R, size], of the rows that
get drafts, in their order. last_ids: [R] int64, the tokens that were sampled from them."""


class HeadsProposer:
    """Implements `pegboard.interfaces.draft.PaddedProposer`. Drafts come from the target's hidden
    states of the last token that it has computed, from which it has sampled the last token of the
    history. The draft model has `most_drafts`, how many tokens it can propose. compute: how it
    does."""

    def __init__(self, setup: DraftSetup, compute: Compute) -> None:
        assert setup.forwards is not None, "the plugin's spec has a source"
        self.forwards: Forwards = setup.forwards
        self._compute = compute
        self._lengths = DraftLengths(setup)
        model = setup.forwards.model
        self._drawing = Drawing(setup, getattr(model, "token_ids", None))
        self._most_drafts: int = model.most_drafts

    def add(self, row: int, token_ids: np.ndarray) -> None:
        """See `DraftProposer.add`."""
        self._lengths.add(row)

    def remove(self, rows: np.ndarray) -> None:
        """See `DraftProposer.remove`."""

    def propose(self, step: DraftStep) -> Drafts:
        """See `DraftProposer.propose`."""
        assert step.computed is not None, "the plugin's spec has a source"
        wanted = np.array(self._lengths.wanted(step), np.int64)
        counts = np.minimum(wanted, self._most_drafts)
        columns = DraftColumns(self._drawing, step.rows, counts)
        if columns.sizes:
            ends = np.cumsum(step.computed.counts)[step.computed.samples]
            (states,) = step.computed.hidden
            hidden = states[torch.from_numpy(ends[columns.order] - 1).to(states.device)]
            last_ids = np.array([step.history[place][-1] for place in columns.order], np.int64)
            started = time.perf_counter()
            self._compute(hidden, torch.from_numpy(last_ids).to(hidden.device), columns)
            self._lengths.took(len(columns.sizes), time.perf_counter() - started)
        return columns.drafts(step, self._lengths)

    def propose_padded(self, step: PaddedStep) -> tuple[Tensor, Tensor | None]:
        """See `PaddedProposer.propose_padded`."""
        rows = step.rows[step.samples]
        counts = np.full(len(rows), min(step.depths, self._most_drafts))
        columns = DraftColumns(self._drawing, rows, counts)
        if columns.sizes:
            (states,) = step.hidden
            self._compute(states.index_select(0, step.last), step.newest, columns)
        return columns.padded()
