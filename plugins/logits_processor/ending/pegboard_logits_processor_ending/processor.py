"""Adds to the logits of the tokens that end a sequence: nothing at first, `strength` at the last
token, linearly between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_logits_processor_ending.options import EndingOptions
from pegboard_logits_processor_ending.request import ending_tokens


@dataclass(slots=True)
class Row:
    """most: tokens that the request may have. span: over how many of the last ones the end becomes
    likelier. ends: the ids."""

    num_outputs: int
    most: int
    span: int
    ends: list[int]


class EndingProcessor:
    """Implements `pegboard.interfaces.logits_processor.LogitsProcessor`."""

    argmax_invariant = False
    host_tokens = True

    def __init__(self, options: EndingOptions, setup: LogitsProcessorSetup) -> None:
        self._strength = options.strength
        self._longest = setup.limits.max_model_len
        self._rows: dict[int, Row] = {}

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        """See `LogitsProcessor.update`."""
        for row in removed.tolist():
            self._rows.pop(row, None)
        for row, params, prompt, outputs in added:
            span = ending_tokens(params)
            room = self._longest - len(prompt)
            if isinstance(span, int) and params.eos_token_ids:
                most = min(params.max_tokens or room, room)
                self._rows[row] = Row(len(outputs), most, min(span, most), params.eos_token_ids)

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        """See `LogitsProcessor.apply`."""
        if not self._rows:
            return logits
        for place, (row, before) in enumerate(zip(rows.tolist(), depth.tolist(), strict=True)):
            state = self._rows.get(row)
            if state is None:
                continue
            num_left = state.most - state.num_outputs - before  # this token is one of them
            if num_left <= state.span:
                logits[place, state.ends] += (
                    self._strength * (state.span - num_left + 1) / state.span
                )
        return logits

    def extend(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """See `LogitsProcessor.extend`."""
        for row, tokens in zip(rows.tolist(), token_ids, strict=True):
            if (state := self._rows.get(row)) is not None:
                state.num_outputs += len(tokens)
