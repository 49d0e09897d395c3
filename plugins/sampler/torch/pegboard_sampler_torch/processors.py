"""Runs the custom logits processors: tells them which rows have changed before the next step, and
applies them in two stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import PluginFailure, expect
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessor


class ProcessorChain:
    """`changing` processors may change the most likely token, so they see every row. `invariant`
    processors may not, so greedy rows skip them. `listening` processors are told every new
    token."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self.all = tuple(processors)
        self.changing = tuple(p for p in self.all if not p.argmax_invariant)
        self.invariant = tuple(p for p in self.all if p.argmax_invariant)
        self.listening = tuple(p for p in self.all if getattr(p, "host_tokens", False))
        self._announced: set[int] = set()
        self._added: dict[int, AddedRow] = {}
        self._removed: set[int] = set()

    def add(
        self, row: int, params: SamplingParams, prompt: np.ndarray, outputs: np.ndarray
    ) -> None:
        if self.all:
            self._added[row] = AddedRow(row, params, prompt, outputs)

    def remove(self, row: int) -> None:
        self._added.pop(row, None)
        if row in self._announced:
            self._removed.add(row)

    def flush(self) -> None:
        """Tell the processors which rows have changed. A row that was freed and then taken again is
        in both lists, and is removed first."""
        if not self._added and not self._removed:
            return
        added = list(self._added.values())
        removed = np.array(sorted(self._removed), np.int32)
        for processor in self.all:
            processor.update(added, removed)
        self._announced = (self._announced - self._removed) | set(self._added)
        self._added = {}
        self._removed = set()

    def extend(self, rows: np.ndarray, token_ids: Tensor, counts: Tensor) -> None:
        """Pass the first counts[i] of token_ids[i] [B, D + 1] to the listening processors. These
        are the new tokens of rows[i]."""
        if self.listening:
            tokens = [
                ids[:count] for ids, count in zip(token_ids.tolist(), counts.tolist(), strict=True)
            ]
            for processor in self.listening:
                processor.extend(rows, tokens)

    @staticmethod
    def apply(
        processors: Sequence[LogitsProcessor],
        logits: Tensor,
        rows: Tensor,
        depth: Tensor,
        drafts: Callable[[], list[list[int]]],
    ) -> Tensor:
        for processor in processors:
            changed = expect(
                processor.apply(logits, rows, depth, drafts), Tensor, processor, "apply"
            )
            if changed.shape != logits.shape:
                got = tuple(changed.shape)
                wanted = tuple(logits.shape)
                message = (
                    f"{type(processor).__name__}.apply() returned logits of shape {got}, expected "
                    f"{wanted}"
                )
                raise PluginFailure(message, plugin=type(processor).__module__)
            logits = changed
        return logits
