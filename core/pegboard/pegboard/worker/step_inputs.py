"""Turns a batch into the tensors of one step, in buffers whose addresses stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pegboard.data.batch import Batch
from pegboard.interfaces.attention import AttentionInputs, KVPlan
from pegboard.worker.row_state import RowState


class Buffer:
    """A host array and its tensor on the device; on a CPU both are the same memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        self.host = torch.zeros(shape, dtype=dtype)
        self.array = self.host.numpy()
        self.on_device = self.host if device == "cpu" else self.host.to(device)
        self._extents: tuple[int, ...] = shape
        self._host_view, self._device_view = self.host, self.on_device

    def sent(self, *extents: int) -> Tensor:
        """The leading part of the buffer on the device, after copying it there if it is elsewhere. Most steps are as large as the
        one before, and take its view: making one costs microseconds, and lets another thread have the interpreter."""
        if extents != self._extents:
            index = tuple(slice(extent) for extent in extents)
            self._extents, self._host_view, self._device_view = extents, self.host[index], self.on_device[index]
        if self.on_device is not self.host:
            self._device_view.copy_(self._host_view, non_blocking=True)
        return self._device_view


@dataclass(slots=True)
class StepInputs:
    """One step. input_ids, positions: [T]. sample_rows: [S] rows to sample; logits_index: [N] token index of each logits row;
    offsets: [S + 1] logits rows of each sampled row; draft_token_ids: [N − S] or None. starts: [B] first position computed."""

    input_ids: Tensor
    positions: Tensor
    groups: list[AttentionInputs]
    starts: np.ndarray
    query_start_loc: np.ndarray
    sample_rows: np.ndarray
    logits_index: Tensor
    offsets: np.ndarray
    draft_token_ids: Tensor | None

    @property
    def samples_all(self) -> bool:
        """Logits are wanted of every token: the index lists them all, in order."""
        return len(self.logits_index) == len(self.input_ids)


class InputBuilder:
    """Persistent buffers and the arithmetic that fills them; no Python per token or row on the plain path."""

    def __init__(self, plan: KVPlan, *, max_tokens: int, max_rows: int, state: RowState, device: str) -> None:
        self.plan, self.state, self.device = plan, state, device
        self.input_ids = Buffer((max_tokens,), torch.int64, device)
        self.positions = Buffer((max_tokens,), torch.int64, device)
        self.query_start_loc = Buffer((max_rows + 1,), torch.int32, device)
        self.seq_lens = Buffer((max_rows,), torch.int32, device)
        self.slots = [Buffer((max_tokens,), torch.int64, device) for _ in plan.groups]
        self.tables = [Buffer((max_rows, table.shape[1]), torch.int32, device) for table in state.block_tables]
        self.one_each = Buffer((max_rows,), torch.int64, device)
        self.one_each.array[:] = np.arange(max_rows)
        self.one_each_cpu = np.arange(max_rows + 1, dtype=np.int32)

    def build(self, batch: Batch) -> StepInputs:
        """Fill the buffers for `batch`, whose changes of rows and blocks are applied already."""
        state, rows, counts = self.state, batch.rows, batch.num_scheduled_tokens
        drafts = batch.num_draft_tokens
        draft_token_ids = self._place_drafts(batch) if drafts.any() else None
        # The engine's number is an upper bound while a step is in flight; what is known here is the truth.
        starts = np.minimum(batch.num_computed_tokens, state.num_tokens[rows] - 1, dtype=np.int64)
        num_rows, num_tokens = len(rows), int(counts.sum())
        one_each = num_tokens == num_rows
        loc = self.query_start_loc.array[: num_rows + 1]
        positions = self.positions.array[:num_tokens]
        if one_each:
            loc[:], token_rows, positions[:] = self.one_each_cpu[: num_rows + 1], rows, starts
        else:
            loc[0] = 0
            np.cumsum(counts, out=loc[1:])
            token_rows = np.repeat(rows, counts)
            positions[:] = np.arange(num_tokens) + np.repeat(starts - loc[:-1], counts)
        np.maximum(state.token_ids[token_rows, positions], 0, out=self.input_ids.array[:num_tokens])
        np.add(starts, counts, out=self.seq_lens.array[:num_rows], casting="same_kind")
        longest, num_single = (1, num_rows) if one_each else (int(counts.max()), int((counts == 1).sum()))
        groups = [self._group(index, rows, token_rows, positions, num_single, longest) for index in range(len(self.plan.groups))]
        if one_each and batch.samples.all():
            sampled_rows, offsets, index = rows, self.one_each_cpu[: num_rows + 1], self.one_each.sent(num_rows)
        else:
            sampled = np.flatnonzero(batch.samples)
            wanted = 1 + drafts[sampled].astype(np.int64)
            offsets = np.zeros(len(sampled) + 1, np.int32)
            np.cumsum(wanted, out=offsets[1:])
            places = np.arange(offsets[-1]) + np.repeat(loc[1:][sampled] - wanted - offsets[:-1], wanted)
            sampled_rows, index = rows[sampled], torch.from_numpy(places).to(self.device)
        return StepInputs(
            input_ids=self.input_ids.sent(num_tokens),
            positions=self.positions.sent(num_tokens),
            groups=groups,
            starts=starts,
            query_start_loc=loc,
            sample_rows=sampled_rows,
            logits_index=index,
            offsets=offsets,
            draft_token_ids=draft_token_ids,
        )

    def _place_drafts(self, batch: Batch) -> Tensor:
        """Write this step's drafts behind each row's known tokens; returns them in row order."""
        state, placed = self.state, []
        for index in np.flatnonzero(batch.num_draft_tokens):
            row, count = int(batch.rows[index]), int(batch.num_draft_tokens[index])
            kept = batch.draft_token_ids.row(int(index)) if batch.draft_token_ids is not None else state.drafts[row]
            first = state.num_tokens[row]
            state.token_ids[row, first : first + count] = kept[:count]
            placed.append(kept[:count])
        return torch.from_numpy(np.concatenate(placed).astype(np.int64)).to(self.device)

    def _group(
        self,
        index: int,
        rows: np.ndarray,
        token_rows: np.ndarray,
        positions: np.ndarray,
        num_single: int,
        longest: int,
    ) -> AttentionInputs:
        """The step as KV group `index` sees it. num_single: rows with one token; longest: the most tokens of a row."""
        group, table = self.plan.groups[index], self.state.block_tables[index]
        num_rows, num_tokens = len(rows), len(positions)
        slots, seq_lens = self.slots[index], self.seq_lens.array[:num_rows]
        if group.spec.unit == "token":
            blocks, inside = np.divmod(positions, group.block_size)
            np.multiply(table[token_rows, blocks], group.block_size, out=slots.array[:num_tokens], dtype=np.int64)
            slots.array[:num_tokens] += inside
        else:
            slots.array[:num_tokens] = table[token_rows, 0]
        tables = self.tables[index]
        max_seq_len = int(seq_lens.max())
        width = min(-(-max_seq_len // group.block_size), table.shape[1]) if group.spec.unit == "token" else 1
        tables.array[:num_rows, :width] = table[rows, :width]
        return AttentionInputs(
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_decode_rows=num_single,
            query_start_loc=self.query_start_loc.sent(num_rows + 1),
            query_start_loc_cpu=self.query_start_loc.array[: num_rows + 1],
            seq_lens=self.seq_lens.sent(num_rows),
            seq_lens_cpu=seq_lens,
            block_table=tables.sent(num_rows, width),
            block_table_cpu=tables.array[:num_rows, :width],
            slot_mapping=slots.sent(num_tokens),
            positions=self.positions.sent(num_tokens),
            max_query_len=longest,
            max_seq_len=max_seq_len,
        )
