"""The states of requests before their drafts, for models whose layers have states. A step with
drafts changes a state at once for all of them, so that of the accepted ones alone does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pegboard.interfaces.attention import KVPlan, State
from pegboard.worker.memory import copy_blocks
from pegboard.worker.step_inputs import RowState

NOW = 0
BEFORE = 1
"""The entries of a block table: the state, and the one before the drafts."""


class KeptStates:
    """state: whose block tables name the blocks. The engine lets the tokens of a step whose drafts
    were not all right be computed again."""

    def __init__(
        self, plan: KVPlan, views: Mapping[int, Mapping[str, Any]], state: RowState, device: str
    ) -> None:
        self._groups = [
            (group, state.block_tables[index])
            for index, group in enumerate(plan.groups)
            if isinstance(group.spec.retain, State) and group.spec.retain.takes_drafts
        ]
        self._views = views
        self._device = device

    def __bool__(self) -> bool:
        return bool(self._groups)

    def keep(self, rows: np.ndarray) -> None:
        """Copy the states of rows [B] before a step that verifies their drafts."""
        self._copy(rows, NOW, BEFORE)

    def take_back(self, rows: np.ndarray) -> None:
        """Let rows [B] have the states again that `keep` has copied."""
        self._copy(rows, BEFORE, NOW)

    def _copy(self, rows: np.ndarray, source: int, destination: int) -> None:
        if not len(rows):
            return
        for group, table in self._groups:
            blocks = torch.from_numpy(table[rows].astype(np.int64)).to(self._device)
            copy_blocks(self._views, group, blocks[:, source], blocks[:, destination])
