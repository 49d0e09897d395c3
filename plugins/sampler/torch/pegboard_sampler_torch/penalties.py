"""Repetition, frequency and presence penalties, for the rows that use them.

Only the logits of tokens that have occurred change. A row therefore keeps a list of these tokens
(with repeats) and their output counts. A step gathers their logits, changes them and scatters them
back. The work grows with the history, not with the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pegboard_sampler_torch.upload import Upload


class PenaltyTable:
    """Slots with the token history of rows with penalties. They are allocated when the first such
    row is added.

    tokens: int64 [S, capacity] on the device, of which the first lengths[s] are valid. counts:
    int32 [S, V], occurrences in the output.
    """

    def __init__(self, vocab_size: int, upload: Upload) -> None:
        self.vocab_size = vocab_size
        self.device = upload.device
        self.upload = upload
        self.slots: dict[int, int] = {}
        self._free: list[int] = []
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=self.device)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=self.device)
        self.lengths = np.zeros(0, np.int64)

    def add(self, row: int, prompt: np.ndarray, outputs: np.ndarray) -> None:
        """Give the row a slot. prompt: tokens to which only the repetition penalty applies; empty
        if the row has no such penalty. Negative ids are skipped."""
        prompt = np.unique(self._known(prompt))
        outputs = self._known(outputs)
        if not self._free:
            self._reserve(max(4, 2 * len(self.lengths)), self.tokens.shape[1])
        slot = self.slots[row] = self._free.pop()
        history = np.concatenate([prompt, outputs])
        self._reserve(len(self.lengths), len(history))
        self.lengths[slot] = len(history)
        self.tokens[slot, : len(history)] = self.upload(history)
        self.counts[slot] = self.upload(np.bincount(outputs, minlength=self.vocab_size))

    def remove(self, row: int) -> None:
        """Free the row's slot, if it has one."""
        slot = self.slots.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def append(self, rows: list[int], tokens: Tensor) -> None:
        """Add one new output token of [n] to each of these rows. All of them have a slot."""
        slots = np.fromiter((self.slots[row] for row in rows), np.int64, len(rows))
        self._reserve(len(self.lengths), int(self.lengths[slots].max()) + 1)
        index, ends = (self.upload(a) for a in (slots, self.lengths[slots]))
        self.tokens[index, ends] = tokens
        self.counts.index_put_(
            (index, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True
        )
        self.lengths[slots] += 1

    def apply(
        self,
        logits: Tensor,
        places: Tensor,
        rows: list[int],
        parameters: Tensor,
        drafts: Tensor | None,
    ) -> None:
        """Change logits [N, V] in place at `places` int64 [n]. rows: the row of each place.
        parameters: float32 [3, n], repetition, frequency and presence. drafts: int64 [n, D], tokens
        that count as outputs before the place; −1 = none.

        Repetition looks at prompt and outputs: logit / r if it is positive, else logit · r. Then
        logit −= frequency · count + presence · (count > 0), which look at the outputs alone."""
        slots = np.fromiter((self.slots[row] for row in rows), np.int64, len(rows))
        lengths = self.lengths[slots]
        index, length = (self.upload(a) for a in (slots, lengths))
        ids = self.tokens[index, : int(lengths.max())]
        valid = torch.arange(ids.shape[1], device=self.device) < length.unsqueeze(-1)
        if drafts is not None:
            ids = torch.cat([ids, drafts], -1)
            valid = torch.cat([valid, drafts >= 0], -1)
        if not ids.shape[1]:
            return
        # Invalid places repeat a valid id of the row, so all writes to an id are equal. A row
        # without a valid id must not change.
        ids = torch.where(valid, ids, ids.gather(-1, valid.byte().argmax(-1, keepdim=True))).clamp_(
            min=0
        )
        occurred = valid.any(-1, keepdim=True)
        counts = self.counts[index.unsqueeze(-1), ids]
        if drafts is not None:
            counts = counts + (ids.unsqueeze(-1) == drafts.unsqueeze(1)).sum(-1)
        repetition, frequency, presence = parameters.unsqueeze(-1)
        before = logits[places.unsqueeze(-1), ids]
        after = torch.where(before > 0, before / repetition, before * repetition)
        after = after - frequency * counts - presence * (counts > 0)
        logits[places.unsqueeze(-1), ids] = torch.where(occurred, after, before)

    def _known(self, token_ids: np.ndarray) -> np.ndarray:
        token_ids = token_ids.astype(np.int64)
        return token_ids[(token_ids >= 0) & (token_ids < self.vocab_size)]

    def _reserve(self, num_slots: int, capacity: int) -> None:
        """Make room for this number of slots and tokens, by doubling the capacity."""
        if capacity > self.tokens.shape[1]:
            wider = max(capacity, 2 * self.tokens.shape[1], 64)
            self.tokens = torch.nn.functional.pad(self.tokens, (0, wider - self.tokens.shape[1]))
        more = num_slots - len(self.lengths)
        if more > 0:
            self._free += range(len(self.lengths), num_slots)
            self.lengths = np.pad(self.lengths, (0, more))
            self.tokens = torch.nn.functional.pad(self.tokens, (0, 0, 0, more))
            self.counts = torch.nn.functional.pad(self.counts, (0, 0, 0, more))
