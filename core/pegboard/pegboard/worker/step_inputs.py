"""The state of all running rows, and the tensors of one step that are made from it, in buffers that
keep their addresses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pegboard.data.batch import Batch, NewRequest
from pegboard.interfaces.attention import AttentionInputs, Encoder, KVPlan, State
from pegboard.interfaces.platform import Copies
from pegboard.worker.adapter_groups import AdapterGroups
from pegboard.worker.buffers import Buffer
from pegboard.worker.context import Context
from pegboard.worker.cross_inputs import CrossInputs
from pegboard.worker.proposals import Proposals
from pegboard.worker.visible_keys import VisibleKeys

NOT_PADDED = (0, 0)
"""The rows and tokens that a step is padded to, if it is not padded."""
ON_DEVICE = -2
"""Replaces a sampled token that so far only the device knows."""


class RowState:
    """The state of R rows. token_ids [R, capacity]: prompt and outputs, followed by room for
    drafts. declared: input that the model declares → [R, capacity]. num_tokens [R]: number of known
    tokens. block_tables[g] [R, max_blocks of group g] and
    num_blocks[g] [R]. num_cross_rows: [R], of the encoder's output. visible: None = no layer sees
    items. proposals: drafts for the next step."""

    def __init__(
        self,
        max_num_seqs: int,
        capacity: int,
        plan: KVPlan,
        inputs: Sequence[str] = (),
        sees_items: bool = False,
    ) -> None:
        self.token_ids = np.zeros((max_num_seqs, capacity), np.int32)
        self.declared = {name: np.zeros_like(self.token_ids) for name in inputs}
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_cross_rows = np.ones(max_num_seqs, np.int32)
        self.visible = VisibleKeys(max_num_seqs, capacity) if sees_items else None
        self.proposals = Proposals()
        self.block_tables = []
        self.num_blocks = []
        for group in plan.groups:
            retain = group.spec.retain
            num_tokens = retain.tokens if isinstance(retain, Encoder) else capacity
            width = (
                1 + retain.takes_drafts
                if isinstance(retain, State)
                else -(-num_tokens // group.block_size) + 1
            )
            self.block_tables.append(np.zeros((max_num_seqs, width), np.int32))
            self.num_blocks.append(np.zeros(max_num_seqs, np.int64))

    def add(self, new: NewRequest) -> None:
        """Fill a row."""
        row = new.row
        count = len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        for name, values in self.declared.items():
            known = new.token_inputs.get(name, ())
            values[row, : len(known)] = known
            values[row, len(known) :] = known[-1] if len(known) else 0
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_cross_rows[row] = max((item.num_cross_rows for item in new.media), default=1) or 1
        if self.visible is not None:
            self.visible.add(new)
        for group, block_ids in enumerate(new.block_ids):
            self.block_tables[group][row, : len(block_ids)] = block_ids
            self.block_tables[group][row, len(block_ids) :] = 0  # drafts may be stored there
            self.num_blocks[group][row] = len(block_ids)

    def append_blocks(self, batch: Batch) -> None:
        """Apply the batch's `new_blocks`."""
        delta = batch.new_blocks
        for index in range(len(delta.rows)):
            row = int(delta.rows[index])
            group = int(delta.groups[index])
            block_ids = delta.block_ids.row(index)
            first = self.num_blocks[group][row]
            self.block_tables[group][row, first : first + len(block_ids)] = block_ids
            self.num_blocks[group][row] = first + len(block_ids)

    def learn(self, rows: np.ndarray, computed: np.ndarray, token_ids: np.ndarray) -> None:
        """Note the tokens [B] of rows [B] at positions `computed` [B], which may have been sampled
        elsewhere."""
        self.token_ids[rows, computed] = token_ids
        self.num_tokens[rows] = np.maximum(self.num_tokens[rows], computed + 1)

    def append_unread(self, rows: np.ndarray) -> None:
        """Add to each of rows [B] a new token that so far only the device knows."""
        self.token_ids[rows, self.num_tokens[rows]] = ON_DEVICE
        self.num_tokens[rows] += 1

    def append_tokens(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Add tokens [B, m] to rows [B]. The first counts[i] of them belong to rows[i], at least
        one."""
        self.token_ids[rows, self.num_tokens[rows]] = tokens[:, 0]
        self.num_tokens[rows] += 1
        for column in range(1, tokens.shape[1]):
            has = counts > column
            taking = rows[has]
            self.token_ids[taking, self.num_tokens[taking]] = tokens[has, column]
            self.num_tokens[taking] += 1


@dataclass(slots=True)
class StepInputs:
    """One step of num_tokens tokens. All [T] are longer if the step is padded.
    to_embed: what `Model.embed` gets, the ids and the inputs that the model declares. positions:
    what `Model.forward` gets, [T] for each axis that the model declares, or one. sample_rows:
    [S], rows to sample. logits_index: [N], token index of each logits row; None = all tokens in
    order. offsets: [S + 1], logits rows of each sampled row. draft_token_ids: [N − S] or None.
    draft_probs: [N − S, V] or None, see `SampleStep`.
    starts: [B], first position that is computed. exact: the same on the device, where `starts` are
    the largest that they can be; None = they are exact."""

    num_tokens: int
    to_embed: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    groups: list[AttentionInputs]
    starts: np.ndarray
    query_start_loc: np.ndarray
    sample_rows: np.ndarray
    logits_index: Tensor | None
    offsets: np.ndarray
    draft_token_ids: Tensor | None
    draft_probs: Tensor | None = None
    exact: Tensor | None = None


class InputBuilder:
    """The persistent buffers and the arithmetic that fills them. In a plain step, no Python code
    runs per token or row.

    last_tokens: [R], the last sampled token of every row, on a device with separate memory. The
    next step reads it there, while the host still waits for its copy. has_adapters: some token of
    the step uses an adapter. Then `adapters` groups the tokens, and `head_adapters` the rows of the
    output head. part_lens [B], num_keys [T]: `seq_lens` and `num_keys` of groups whose tokens are
    shared out. item_groups: indices of the groups whose layers see items. visible: [T], their
    `num_keys`. has_visible: the step has such a token. is_ahead: the host does not know how many
    drafts were right (see `ExactRows`).
    """

    is_ahead = False

    def __init__(
        self,
        plan: KVPlan,
        *,
        max_tokens: int,
        max_rows: int,
        state: RowState,
        device: str,
        context: Context,
        copies: Copies | None = None,
        max_loras: int = 0,
        axes: Sequence[str] = (),
        item_groups: Collection[int] = (),
    ) -> None:
        self.plan = plan
        self.state = state
        self.context = context
        self.device = device
        self.copies = copies
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.buffers: list[Buffer] = []
        self.input_ids, self.positions = self.buffer(max_tokens), self.buffer(max_tokens)
        self.declared = {name: self.buffer(max_tokens) for name in state.declared}
        self.axes = {name: self.declared[name] for name in axes}
        self.to_place = [*self.axes.values()] or [self.positions]
        self.to_embed = [self.input_ids]
        self.to_embed += [each for name, each in self.declared.items() if name not in axes]
        self.query_start_loc = self.buffer(max_rows + 1, dtype=torch.int32)
        self.seq_lens = self.buffer(max_rows, dtype=torch.int32)
        self.has_parts = any(group.spec.ranks > 1 for group in plan.groups)
        self.part_lens = self.buffer(max_rows, dtype=torch.int32)
        self.num_keys = self.buffer(max_tokens, dtype=torch.int32)
        self.item_groups = item_groups
        self.visible = self.buffer(max_tokens if item_groups else 0, dtype=torch.int32)
        self.has_visible = False
        self.cross = {
            index: CrossInputs(
                group.block_size,
                state.block_tables[index],
                state.num_cross_rows,
                self.buffer,
                max_tokens,
            )
            for index, group in enumerate(plan.groups)
            if isinstance(group.spec.retain, Encoder)
        }
        self.slots = [
            self.buffer(0 if index in self.cross else max_tokens)
            for index in range(len(plan.groups))
        ]
        self.tables = [
            self.buffer(
                *(0 if index in self.cross else max_rows, table.shape[1]), dtype=torch.int32
            )
            for index, table in enumerate(state.block_tables)
        ]
        self.logits_index, self.draft_token_ids = self.buffer(max_tokens), self.buffer(max_tokens)
        self.has_adapters = False
        starts = [self.buffer(max_loras + 2, dtype=torch.int32) for _ in range(2)]
        self.adapters, self.head_adapters = (
            AdapterGroups(self.buffer(max_tokens, dtype=torch.int32), s) for s in starts
        )
        self.known_places, self.known_rows, self.sampled_rows = (
            self.buffer(max_rows) for _ in range(3)
        )
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.one_each = np.arange(max_rows + 1, dtype=np.int32)
        self.marks = [lambda: None, lambda: None]

    def buffer(self, *shape: int, dtype: torch.dtype = torch.int64) -> Buffer:
        """Return a buffer that takes turns with the others."""
        self.buffers.append(Buffer(shape, dtype, self.device, self.copies))
        return self.buffers[-1]

    def take_turns(self, copies: Copies) -> None:
        """Switch to the other half of each buffer, after the copies that were made from it two
        steps ago are done."""
        half = self.input_ids.half
        self.marks[half] = copies.mark()
        self.marks[1 - half]()
        for buffer in self.buffers:
            buffer.take(1 - half)

    def build(
        self, batch: Batch, padded: tuple[int, int] = NOT_PADDED, *, sees_ahead: bool = False
    ) -> StepInputs:
        """Fill the buffers for `batch`. Its changes of rows and blocks must already be applied.
        padded: the numbers of rows and of tokens that the step is padded to."""
        if self.copies is not None:
            self.take_turns(self.copies)
        state = self.state
        rows = batch.rows
        counts = batch.num_scheduled_tokens
        drafts = batch.num_draft_tokens
        draft_token_ids = None
        starts = batch.num_computed_tokens.astype(np.int64)
        if not self.is_ahead:
            if drafts.any():
                draft_token_ids = self._place_drafts(state.proposals.verified(batch))
            # While a step is in flight, the engine's number is only an upper bound. The row state
            # has the exact number.
            np.minimum(starts, state.num_tokens[rows] - 1, out=starts)
        num_rows = len(rows)
        token_rows, token_ids = self.fill(rows, counts, starts, sees_ahead=sees_ahead)
        num_tokens = len(token_rows)
        loc = self.query_start_loc.array[: num_rows + 1]
        if num_tokens == num_rows and batch.samples.all():
            sampled_rows = rows
            offsets = self.one_each[: num_rows + 1]
            index_tensor = None
        else:
            sampled = np.flatnonzero(batch.samples)
            wanted = 1 + drafts[sampled].astype(np.int64)
            offsets = np.zeros(len(sampled) + 1, np.int32)
            np.cumsum(wanted, out=offsets[1:])
            places = np.arange(offsets[-1]) + np.repeat(
                loc[1:][sampled] - wanted - offsets[:-1], wanted
            )
            self.logits_index.array[: len(places)] = places
            sampled_rows = rows[sampled]
            index_tensor = self.logits_index.sent(len(places))
        if self.has_adapters and batch.lora_slots is not None:
            token_slots = np.repeat(batch.lora_slots, counts)
            self.adapters.fill(token_slots)
            self.head_adapters.fill(token_slots if index_tensor is None else token_slots[places])
        inputs = self.send(num_rows, num_tokens, padded)
        if self.copies is not None:
            self._fetch_sampled(token_ids, token_rows)
        inputs.starts = starts
        inputs.query_start_loc = loc
        inputs.sample_rows = sampled_rows
        inputs.logits_index = index_tensor
        inputs.offsets = offsets
        inputs.draft_token_ids = draft_token_ids
        if draft_token_ids is not None:
            inputs.draft_probs = state.proposals.probs_of(rows, drafts)
        return inputs

    def fill(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
        *,
        ahead: int = 0,
        sees_ahead: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill the buffers of a step that computes counts [B] tokens of rows [B], from positions
        starts [B] on. ahead: the id at a position is that of the token so many positions later.
        Returns the row and the id of each token, [T]."""
        state = self.state
        num_rows = len(rows)
        num_tokens = int(counts.sum())
        loc = self.query_start_loc.array[: num_rows + 1]
        positions = self.positions.array[:num_tokens]
        if num_tokens == num_rows:
            loc[:] = self.one_each[: num_rows + 1]
            token_rows = rows
            positions[:] = starts
        else:
            loc[0] = 0
            np.cumsum(counts, out=loc[1:])
            token_rows = np.repeat(rows, counts)
            positions[:] = np.arange(num_tokens) + np.repeat(starts - loc[:-1], counts)
        token_ids = state.token_ids[token_rows, positions + ahead if ahead else positions]
        np.maximum(token_ids, 0, out=self.input_ids.array[:num_tokens])
        for name, buffer in self.declared.items():
            buffer.array[:num_tokens] = state.declared[name][token_rows, positions]
        for buffer in self.axes.values():
            buffer.array[:num_tokens] += positions
        visible = None
        if sees_ahead and state.visible is not None:
            visible = state.visible.of(token_rows, positions)
            if visible is not None:
                self.visible.array[:num_tokens] = visible
        self.has_visible = visible is not None
        stored = positions, positions
        np.add(starts, counts, out=self.seq_lens.array[:num_rows], casting="same_kind")
        if self.has_parts:
            self.part_lens.array[:num_rows] = self.context.stored(self.seq_lens.array[:num_rows])
            stored = self.context.stored(positions), self.context.stored(positions + 1)
            self.num_keys.array[:num_tokens] = (
                stored[1] if visible is None else self.context.stored(visible)
            )
        for index in range(len(self.plan.groups)):
            if index in self.cross:
                self.cross[index].fill(token_rows)
            else:
                self._place(index, rows, token_rows, positions, stored)
        return token_rows, token_ids

    def blank(self, num_rows: int, num_tokens: int) -> StepInputs:
        """Return a step that consists only of padding, to record with."""
        if self.copies is not None:
            self.take_turns(self.copies)
        self.has_visible = False
        return self.send(0, 0, (num_rows, num_tokens))

    def _place_drafts(self, drafts: Sequence[tuple[int, np.ndarray]]) -> Tensor:
        """Write drafts after the known tokens of their rows. Returns them in row order."""
        state = self.state
        for row, ids in drafts:
            first = state.num_tokens[row]
            state.token_ids[row, first : first + len(ids)] = ids
        flat = np.concatenate([ids for _, ids in drafts])
        self.draft_token_ids.array[: len(flat)] = flat
        return self.draft_token_ids.sent(len(flat))

    def _place(
        self,
        index: int,
        rows: np.ndarray,
        token_rows: np.ndarray,
        positions: np.ndarray,
        stored: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Fill the slots and block tables of KV group `index`. stored: how many tokens before each
        one this rank has, without and with it, for groups that ranks divide."""
        group = self.plan.groups[index]
        table = self.state.block_tables[index]
        slots = self.slots[index].array[: len(positions)]
        if group.spec.ranks > 1:
            blocks = positions // group.block_size
            before, after = stored
            inside = before - blocks * group.num_slots
            slots[:] = table[token_rows, blocks].astype(np.int64) * group.num_slots + inside
            slots[after == before] = -1
        elif group.spec.unit == "token":
            blocks, inside = np.divmod(positions, group.block_size)
            np.multiply(table[token_rows, blocks], group.block_size, out=slots, dtype=np.int64)
            slots += inside
        else:
            slots[:] = table[token_rows, 0]
        width = self._width(index, int(self.seq_lens.array[: len(rows)].max()))
        self.tables[index].array[: len(rows), :width] = table[rows, :width]

    def _width(self, index: int, max_seq_len: int) -> int:
        """Return the number of columns of a block table that rows of this length use."""
        group = self.plan.groups[index]
        if group.spec.unit == "request":
            return 1
        return min(-(-max_seq_len // group.block_size), self.tables[index].array.shape[1])

    def _pad(self, num_rows: int, num_tokens: int, rows: int, tokens: int) -> None:
        """Add rows without tokens, and tokens without a slot, up to the size of a padded step."""
        for buffer in (*self.to_embed, *self.to_place):
            buffer.array[num_tokens:tokens] = 0
        self.query_start_loc.array[num_rows + 1 : rows + 1] = num_tokens
        self.seq_lens.array[num_rows:rows] = 0
        if self.has_parts:
            self.part_lens.array[num_rows:rows] = 0
            self.num_keys.array[num_tokens:tokens] = 0
        for slots, table in zip(self.slots, self.tables, strict=True):
            slots.array[num_tokens:tokens] = -1
            table.array[num_rows:rows] = 0

    def send(self, num_rows: int, num_tokens: int, padded: tuple[int, int]) -> StepInputs:
        """Return the filled buffers on the device. A padded step gets whole block tables, because a
        recording keeps their shape."""
        is_padded = padded != NOT_PADDED
        rows = max(num_rows, padded[0])
        tokens = max(num_tokens, padded[1])
        if is_padded:
            self._pad(num_rows, num_tokens, rows, tokens)
        to_embed = tuple(buffer.sent(tokens) for buffer in self.to_embed)
        positions = tuple(buffer.sent(tokens) for buffer in self.to_place)
        query_start_loc = self.query_start_loc.sent(rows + 1)
        seq_lens = self.seq_lens.sent(rows)
        max_seq_len = int(self.seq_lens.array[:rows].max())
        groups = []
        part_lens = self.part_lens.sent(rows) if self.has_parts else seq_lens
        num_keys = self.num_keys.sent(tokens) if self.has_parts else None
        visible = self.visible.sent(tokens) if self.has_visible else None
        for index, (slots, tables) in enumerate(zip(self.slots, self.tables, strict=True)):
            if index in self.cross:
                groups.append(self.cross[index].send(num_tokens, tokens))
                continue
            is_part = self.plan.groups[index].spec.ranks > 1
            lens = self.part_lens if is_part else self.seq_lens
            keys = (num_keys, self.num_keys) if is_part else (None, self.num_keys)
            if not is_part and visible is not None and index in self.item_groups:
                keys = visible, self.visible
            width = tables.array.shape[1] if is_padded else self._width(index, max_seq_len)
            groups.append(
                AttentionInputs(
                    num_rows=num_rows,
                    num_tokens=num_tokens,
                    query_start_loc=query_start_loc,
                    query_start_loc_cpu=self.query_start_loc.array[: rows + 1],
                    seq_lens=part_lens if is_part else seq_lens,
                    seq_lens_cpu=lens.array[:rows],
                    block_table=tables.sent(rows, width),
                    block_table_cpu=tables.array[:rows, :width],
                    slot_mapping=slots.sent(tokens),
                    num_keys=keys[0],
                    num_keys_cpu=None if keys[0] is None else keys[1].array[:tokens],
                )
            )
        none = self.one_each[:0]
        return StepInputs(
            num_tokens, to_embed, positions, groups, none, none, none, None, none, None
        )

    def _fetch_sampled(self, token_ids: np.ndarray, token_rows: np.ndarray) -> None:
        """Fill in the tokens that so far only the device knows."""
        places = np.flatnonzero(token_ids == ON_DEVICE)
        count = len(places)
        if count:
            self.known_places.array[:count] = places
            self.known_rows.array[:count] = token_rows[places]
            sampled = self.last_tokens.index_select(0, self.known_rows.sent(count))
            self.input_ids.on_device.index_copy_(0, self.known_places.sent(count), sampled)

    def keep_sampled(self, rows: np.ndarray, token_ids: Tensor) -> Tensor:
        """Keep the rows' next tokens [S] on the device. The host does not know them yet. Returns
        the rows there."""
        self.sampled_rows.array[: len(rows)] = rows
        index = self.sampled_rows.sent(len(rows))
        self.last_tokens.index_copy_(0, index, token_ids)
        return index
