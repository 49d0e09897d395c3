"""The logits processor `whisper_times`: the answer says when each part of it begins and ends
(Radford et al. 2022, section 4.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_model_whisper.times_request import times_of

FIRST_MOST = 50
"""The answer begins at most this many times after the first one, which is a second."""


@dataclass(slots=True)
class Row:
    """end, none, first: ids of the end of the answer, of "no times", and of the first time."""

    end: int
    none: int
    first: int
    outputs: list[int]


class TimesProcessor:
    """Implements `pegboard.interfaces.logits_processor.LogitsProcessor`."""

    argmax_invariant = False
    host_tokens = True

    def __init__(self, options: None, setup: LogitsProcessorSetup) -> None:
        self._rows: dict[int, Row] = {}

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        """See `LogitsProcessor.update`."""
        for row in removed.tolist():
            self._rows.pop(row, None)
        for row, params, _, outputs in added:
            if (ids := times_of(params)) is not None:
                self._rows[row] = Row(*ids, outputs.tolist())

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        """See `LogitsProcessor.apply`."""
        if not self._rows:
            return logits
        for place, row in enumerate(rows.tolist()):
            if (state := self._rows.get(row)) is not None:
                before = drafts()[place] if int(depth[place]) else []
                follow_rules(logits[place], state, [*state.outputs, *before])
        return logits

    def extend(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """See `LogitsProcessor.extend`."""
        for row, tokens in zip(rows.tolist(), token_ids, strict=True):
            if (state := self._rows.get(row)) is not None:
                state.outputs.extend(tokens)


def follow_rules(logits: Tensor, row: Row, outputs: Sequence[int]) -> None:
    """Ban what cannot follow `outputs` in logits [V]: a part begins with a time and ends with one,
    the next part's comes at once, times do not run backwards, and an answer begins early. If a time
    is likelier than every other token, it is a time."""
    first = row.first
    logits[row.none] = -torch.inf
    if not outputs:
        logits[:first] = -torch.inf
        logits[first + FIRST_MOST + 1 :] = -torch.inf
        return
    times = [token for token in outputs if token >= first]
    ends_part = outputs[-1] >= first and len(outputs) > 1 and outputs[-2] < first
    if ends_part:
        logits[: row.end] = -torch.inf
    elif outputs[-1] >= first:
        logits[first:] = -torch.inf
    if times:
        logits[first : times[-1] + (not ends_part)] = -torch.inf
    scores = logits.float()
    if bool(scores[first:].logsumexp(0) > scores[:first].max()):
        logits[:first] = -torch.inf
