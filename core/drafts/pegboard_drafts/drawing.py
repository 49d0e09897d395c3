"""Draws the drafts of a step, one depth after the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.draft import Drafts, DraftSetup, DraftStep
from pegboard_drafts.lengths import DraftLengths

NONE = np.zeros(0, np.int32)


class Drawing:
    """How a proposer draws. token_ids: [V of the draft model], the target's id of each token; None
    = they are the same. The draws are those of the sampler (see `DrawsDrafts`)."""

    def __init__(self, setup: DraftSetup, token_ids: Tensor | None = None) -> None:
        self._draw = setup.draw or (lambda logits, rows: (logits.argmax(-1), None))
        self._token_ids = token_ids
        self._vocab_size = setup.limits.vocab_size

    def __call__(self, logits: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Draw a token for each of rows [B] from logits [B, V of the draft model]. Returns the ids
        [B] and the probabilities [B, V] with which they were drawn, both of the target."""
        ids, probs = self._draw(logits, rows)
        if self._token_ids is None:
            return ids, probs
        if probs is not None:
            every = probs.new_zeros(len(probs), self._vocab_size)
            probs = every.index_copy_(1, self._token_ids, probs)
        return self._token_ids[ids], probs


class DraftColumns:
    """The drafts of a step, of which some rows get fewer than others.

    order: the places [R] of the rows that get drafts, those with the most first. rows: [R] in that
    order. sizes: how many rows get a draft at each depth: these are the first ones.
    """

    def __init__(self, drawing: Drawing, rows: np.ndarray, counts: np.ndarray) -> None:
        self._drawing = drawing
        self._counts = counts
        depths = range(int(counts.max(initial=0)))
        self.sizes = [int((counts > depth).sum()) for depth in depths]
        order = np.argsort(-counts, kind="stable")
        self.order = order[: self.sizes[0] if self.sizes else 0]
        self.rows = rows[self.order]
        self._drawn: list[tuple[Tensor, Tensor | None]] = []

    def add(self, logits: Tensor) -> Tensor:
        """Draw the next depth from logits [sizes[depth], V]. Returns the ids."""
        drawn = self._drawing(logits, self.rows[: len(logits)])
        self._drawn.append(drawn)
        return drawn[0]

    def padded(self) -> tuple[Tensor, Tensor | None]:
        """Return the drafts [R, D] and their probabilities [R, D, V], if all rows get as many, in
        the order of the rows. D: the depths that were drawn."""
        if not self._drawn:
            return torch.zeros(0, 0, dtype=torch.int64), None
        ids = torch.stack([ids for ids, _ in self._drawn], 1)
        probs = [probs for _, probs in self._drawn if probs is not None]
        return ids, torch.stack(probs, 1) if probs else None

    def drafts(self, step: DraftStep, lengths: DraftLengths) -> Drafts:
        """Return the drafts of all depths that were drawn, as far as they are worth their time."""
        if not self._drawn:
            return Drafts(lengths.cut(step, [NONE] * len(step.rows)))
        columns = torch.cat([ids for ids, _ in self._drawn]).cpu().numpy().astype(np.int32)
        starts = np.cumsum([0, *self.sizes])
        places = [starts[:0]] * len(step.rows)
        for index, place in enumerate(self.order.tolist()):
            places[place] = starts[: self._counts[place]] + index
        kept = lengths.cut(step, [columns[each] for each in places])
        chosen = [each[: len(ids)] for each, ids in zip(places, kept, strict=True)]
        return Drafts(kept, self._probs(np.concatenate(chosen)))

    def _probs(self, places: np.ndarray) -> Tensor | None:
        """Return the probabilities of the drafts at these places; None = there was no chance in
        any."""
        known = [probs for _, probs in self._drawn if probs is not None]
        if not known:
            return None
        every = [
            known[0].new_zeros(len(ids), known[0].shape[1]) if probs is None else probs
            for ids, probs in self._drawn
        ]
        probs = torch.cat(every)
        return probs[torch.from_numpy(places).to(probs.device)]
