"""Drafts of heads that have no KV cache. They read the target's hidden states of one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.draft import Drafts, DraftSetup, DraftStep, Forwards
from pegboard_drafts.lengths import DraftLengths

NONE = np.zeros(0, np.int32)

Compute = Callable[[Tensor, np.ndarray, list[int]], Sequence[Tensor]]
"""(hidden, last_ids, sizes) → the token ids [sizes[k]] of each depth k. hidden: [R, size], of the
rows that get drafts. last_ids: [R] int64, the tokens that were sampled from them. sizes: how many
rows get a draft at each depth; these are the first ones, so that sizes[0] is R."""


class HeadsProposer:
    """Implements `pegboard.interfaces.draft.DraftProposer`. Drafts come from the target's hidden
    states of the last token that it has computed, from which it has sampled the last token of the
    history. The draft model has `most_drafts`, how many tokens it can propose. compute: how it
    does."""

    def __init__(self, setup: DraftSetup, compute: Compute) -> None:
        assert setup.forwards is not None, "the plugin's spec has a source"
        self.forwards: Forwards = setup.forwards
        self._compute = compute
        self._lengths = DraftLengths(setup)
        self._most_drafts: int = setup.forwards.model.most_drafts

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
        proposals = [NONE] * len(step.rows)
        if counts.any():
            order = np.argsort(-counts, kind="stable")  # rows that need fewer drafts come last
            sizes = [int((counts > depth).sum()) for depth in range(int(counts.max()))]
            order = order[: sizes[0]]
            ends = np.cumsum(step.computed.counts)[step.computed.samples]
            (states,) = step.computed.hidden
            hidden = states[torch.from_numpy(ends[order] - 1).to(states.device)]
            last_ids = np.array([step.history[place][-1] for place in order], np.int64)
            drafts = self._compute(hidden, last_ids, sizes)
            columns = torch.cat(list(drafts)).cpu().numpy().astype(np.int32)
            starts = np.cumsum([0, *sizes])
            for index, place in enumerate(order.tolist()):
                proposals[place] = columns[starts[: counts[place]] + index]
        return Drafts(self._lengths.cut(step, proposals))
