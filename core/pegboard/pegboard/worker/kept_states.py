"""The states of requests before their drafts, for models whose layers have states. A step with
drafts changes a state at once for all of them, so that of the accepted ones alone does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegboard.data.batch import Batch
from pegboard.interfaces.attention import KVPlan, State
from pegboard.interfaces.platform import Copies
from pegboard.worker.buffers import sent_once
from pegboard.worker.memory import copy_blocks
from pegboard.worker.step_inputs import RowState

NOW = 0
BEFORE = 1
"""The entries of a block table: the state, and the one before the drafts."""


class KeptStates:
    """The engine lets all tokens of a step be computed again if one of its drafts was wrong: the
    next step of the request begins where that one did. state: whose block tables name the
    blocks."""

    def __init__(
        self,
        plan: KVPlan,
        views: Mapping[int, Mapping[str, Any]],
        state: RowState,
        device: str,
        copies: Copies | None,
    ) -> None:
        self._groups = [
            (group, state.block_tables[index])
            for index, group in enumerate(plan.groups)
            if isinstance(group.spec.retain, State) and group.spec.retain.takes_drafts
        ]
        self._views = views
        self._send = lambda columns: sent_once(columns, device, copies)
        self._starts = np.full(len(state.num_tokens), -1)  # of the last step, if it had drafts

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, row: int) -> None:
        """A request in this row starts or resumes."""
        self._starts[row] = -1

    def begin(self, batch: Batch) -> None:
        """Take back the states of rows that compute the tokens of their last step again, and keep
        those of rows with drafts."""
        rows = batch.rows
        starts = batch.num_computed_tokens
        has_drafts = batch.num_draft_tokens > 0
        self._copy(rows[self._starts[rows] == starts], BEFORE, NOW)
        self._copy(rows[has_drafts], NOW, BEFORE)
        self._starts[rows] = np.where(has_drafts, starts, -1)

    def _copy(self, rows: np.ndarray, source: int, destination: int) -> None:
        if not len(rows):
            return
        for group, table in self._groups:
            blocks = self._send(table[rows].T.astype(np.int64, order="C"))
            copy_blocks(self._views, group, blocks[source], blocks[destination])
