"""Top-nσ sampling (Tang et al. 2024, https://arxiv.org/abs/2411.07641): tokens far below the
largest logit are noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_logits_processor_top_n_sigma.request import asked


class TopNSigma:
    argmax_invariant = True  # the largest logit stays, so greedy requests skip the processor
    host_tokens = False

    def __init__(self, options: None, setup: LogitsProcessorSetup) -> None:
        # inf = the row did not ask
        self._n = torch.full((setup.limits.max_num_seqs,), torch.inf, device=setup.device)
        self._rows: set[int] = set()

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        for row in removed.tolist():
            self._set(row, None)
        for row, params, _, _ in added:
            self._set(row, asked(params))

    def _set(self, row: int, n: object) -> None:
        if isinstance(n, int | float):
            self._n[row] = n
            self._rows.add(row)
        elif row in self._rows:
            self._n[row] = torch.inf
            self._rows.remove(row)

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        """The deviation is that of the tokens that are still allowed, whose logits are finite."""
        if not self._rows:
            return logits
        allowed = logits.isfinite()
        count = allowed.sum(1, keepdim=True)
        mean = logits.where(allowed, 0).sum(1, keepdim=True) / count
        deviation = ((logits - mean).where(allowed, 0).square().sum(1, keepdim=True) / count).sqrt()
        n = self._n[rows.long()].unsqueeze(1)
        least = (logits.amax(1, keepdim=True) - n * deviation).where(n.isfinite(), -torch.inf)
        return logits.masked_fill_(logits < least, -torch.inf)

    def extend(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """Do nothing: new tokens change nothing here."""
