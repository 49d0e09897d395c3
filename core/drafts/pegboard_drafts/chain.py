"""Drafts of a model that computes one token after the other."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.draft import ComputedTokens, Drafts, DraftSetup, DraftStep, Forwards
from pegboard_drafts.lengths import DraftLengths

NONE = np.zeros(0, np.int32)


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
    draft model says after those before it, or is the most likely one (see `DrawsDrafts`)."""

    def __init__(self, setup: DraftSetup, follow: Follows) -> None:
        assert setup.forwards is not None, "the plugin's spec has a source"
        self.forwards: Forwards = setup.forwards
        self._follow = follow
        self._lengths = DraftLengths(setup)
        model = setup.forwards.model
        self._gives = hasattr(model, "start")
        self._token_ids: Tensor | None = getattr(model, "token_ids", None)
        self._vocab_size = setup.limits.vocab_size
        self._draw = setup.draw or (lambda logits, rows: (logits.argmax(-1), None))

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
        if not counts.any():
            return Drafts(self._lengths.cut(step, [NONE] * len(step.rows)))
        columns, probs, places = self._extend(step.rows, positions, counts, hidden)
        kept = self._lengths.cut(step, [columns[place] for place in places])
        if probs is not None:
            index = [place[: len(ids)] for place, ids in zip(places, kept, strict=True)]
            probs = probs[torch.from_numpy(np.concatenate(index)).to(probs.device)]
        return Drafts(kept, probs)

    def _extend(
        self, rows: np.ndarray, positions: np.ndarray, counts: np.ndarray, hidden: Tensor
    ) -> tuple[np.ndarray, Tensor | None, list[np.ndarray]]:
        """Return the ids of all drafts [n], the probabilities with which they were drawn [n, V],
        and the places of each row's drafts among them. The first draft of a row comes from its
        hidden states."""
        order = np.argsort(-counts, kind="stable")  # rows that need fewer drafts leave at the end
        rows = rows[order]
        positions = positions[order]
        sizes = [int((counts > depth).sum()) for depth in range(int(counts.max()))]
        hidden = hidden[torch.from_numpy(order[: sizes[0]]).to(hidden.device)]
        drawn = [self._drawn(self.forwards.logits(hidden), rows[: sizes[0]])]
        for depth, size in enumerate(sizes[1:]):
            given = hidden[:size] if self._gives else None
            hidden, logits = self.forwards.next(
                rows[:size], positions[:size] + depth, drawn[-1][0][:size], given
            )
            drawn.append(self._drawn(logits, rows[:size]))
        columns = torch.cat([ids for ids, _ in drawn]).cpu().numpy().astype(np.int32)
        ends = np.cumsum([0, *sizes])
        places = [ends[:0]] * len(rows)
        for place, row in enumerate(order[: sizes[0]].tolist()):
            places[row] = ends[: counts[row]] + place
        if all(probs is None for _, probs in drawn):
            return columns, None, places
        every = [
            hidden.new_zeros(len(ids), self._vocab_size, dtype=torch.float32)
            if probs is None
            else probs
            for ids, probs in drawn
        ]
        return columns, torch.cat(every), places

    def _drawn(self, logits: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Draw a token for each row, [B], in the target's vocabulary, from these probabilities [B,
        V]."""
        ids, probs = self._draw(logits, rows)
        if self._token_ids is None:
            return ids, probs
        if probs is not None:
            every = probs.new_zeros(len(probs), self._vocab_size)
            probs = every.index_copy_(1, self._token_ids, probs)
        return self._token_ids[ids], probs


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
