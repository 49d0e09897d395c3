"""Where the rows of a step are, on a device that alone knows how many drafts were right."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pegboard.data.batch import Batch
from pegboard.worker.buffers import Buffer
from pegboard.worker.step_inputs import InputBuilder, StepInputs


class Mover:
    """Moves a step that was filled and sent as if all drafts were right. last_position: larger ones
    are not computed; None = there are none."""

    def __init__(self, builder: InputBuilder, last_position: int | None = None) -> None:
        self._builder = builder
        self._last_position = last_position
        self._sizes = [group.block_size for group in builder.plan.groups]
        self._owners: Buffer = builder.buffer(builder.max_tokens)
        self._owner = self._owners.on_device

    def move(self, counts: np.ndarray, exact: Tensor) -> None:
        """Let the rows [B], with counts [B] tokens, start at the positions `exact` [B]."""
        builder = self._builder
        num_rows = len(counts)
        num_tokens = int(counts.sum())
        owners = builder.one_each[:num_rows]
        self._owners.array[:num_tokens] = (
            owners if num_tokens == num_rows else np.repeat(owners, counts)
        )
        self._owner = self._owners.sent(num_tokens)
        shift = exact - self.starts(num_rows)
        builder.seq_lens.on_device[:num_rows].add_(shift)
        positions = builder.positions.on_device[:num_tokens]
        positions.add_(shift.index_select(0, self._owner))
        self._place(positions)

    def starts(self, num_rows: int) -> Tensor:
        """Return the first position [B] of each row, as it was sent."""
        builder = self._builder
        firsts = builder.query_start_loc.on_device[:num_rows]
        return builder.positions.on_device.index_select(0, firsts)

    def advance(self, num_rows: int) -> None:
        """Move a step of one token for each row to the next positions."""
        builder = self._builder
        builder.seq_lens.on_device[:num_rows].add_(1)
        positions = builder.positions.on_device[:num_rows]
        positions.add_(1)
        self._place(positions)

    def _place(self, positions: Tensor) -> None:
        """Fill the slots of all KV groups from the positions [T]."""
        builder = self._builder
        pairs = zip(builder.slots, builder.tables, self._sizes, strict=True)
        for slots, tables, size in pairs:
            blocks = positions // size
            inside = positions - blocks * size
            of_rows = tables.on_device[self._owner, blocks]
            torch.add(inside, of_rows, alpha=size, out=slots.on_device[: len(positions)])
        if self._last_position is not None:
            positions.clamp_(max=self._last_position)


class ExactRows:
    """The newest tokens of R rows, and their drafts, on the device.

    ends: [R], the position of the newest token of each row. drafts: [R, D]. The host knows neither
    before a step is done, so it takes what they can be at most."""

    def __init__(self, builder: InputBuilder, num_rows: int, max_drafts: int) -> None:
        self._builder = builder
        builder.is_ahead = True
        self._mover = Mover(builder)
        self._known = builder.buffer(num_rows)
        self._places, self._sources = (builder.buffer(builder.max_tokens) for _ in range(2))
        self._rows, self._row_places = (builder.buffer(num_rows) for _ in range(2))
        self.max_drafts = max_drafts
        device = builder.device
        self.ends = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(num_rows, max_drafts, dtype=torch.int64, device=device)

    def apply(self, batch: Batch, inputs: StepInputs) -> None:
        """Move a step to where its rows are, and put in the tokens that only the device knows."""
        builder = self._builder
        state = builder.state
        rows = batch.rows
        num_rows = len(rows)
        is_new = inputs.starts < state.num_tokens[rows]  # the host knows the tokens
        self._known.array[:num_rows] = np.where(is_new, -1, rows)
        known = self._known.sent(num_rows)
        ends = self.ends.index_select(0, known.clamp(min=0))
        inputs.exact = torch.where(known < 0, self._mover.starts(num_rows), ends)
        self._mover.move(batch.num_scheduled_tokens, inputs.exact)
        loc = builder.query_start_loc.array
        old = np.flatnonzero(~is_new)
        if len(old):
            self._put(self._row_places, loc[old], self._rows, rows[old], builder.last_tokens)
        num_drafts = batch.num_draft_tokens
        if num_drafts.any():
            has = np.flatnonzero(num_drafts)
            wanted = num_drafts[has].astype(np.int64)
            depths = np.arange(wanted.sum()) - np.repeat(np.cumsum(wanted) - wanted, wanted)
            places = depths + np.repeat(loc[1:][has] - wanted, wanted)
            sources = depths + np.repeat(rows[has] * np.int64(self.max_drafts), wanted)
            every = self.drafts.flatten()
            inputs.draft_token_ids = self._put(self._places, places, self._sources, sources, every)
            inputs.draft_probs = state.proposals.probs_of(rows, num_drafts)

    def _put(
        self,
        places: Buffer,
        at: np.ndarray,
        sources: Buffer,
        of: np.ndarray,
        values: Tensor,
    ) -> Tensor:
        """Put values[of[i]] among the ids of the step, at at[i]. Returns them."""
        count = len(at)
        places.array[:count] = at
        sources.array[:count] = of
        chosen = values.index_select(0, sources.sent(count))
        self._builder.input_ids.on_device.index_copy_(0, places.sent(count), chosen)
        return chosen
