"""Compares the tensors of a step with the same values computed row by row and token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pegboard.data.batch import CSR, Batch, BlockDelta, Logprobs, NewRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.attention import KVCacheSpec, KVGroup, KVPlan, KVTensor
from pegboard.layers.shards import Group
from pegboard.worker.context import Context
from pegboard.worker.prompt_logprobs import PromptScores
from pegboard.worker.step_inputs import InputBuilder, RowState, StepInputs

ROWS = 4
CAPACITY = 40
MAX_DRAFTS = 2
SPEC = KVCacheSpec(tensors=(KVTensor("k", (1,), "float32"),))
SHARED = replace(SPEC, ranks=3)
CONTEXT = Context(Group(1, 3), run=2)
"""The second of three ranks, which have two of six tokens each. It has them in the last group."""


@dataclass
class Row:
    """The expected state of one row, computed naively."""

    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    kinds: list[int] = field(default_factory=list)
    whole: tuple[tuple[int, int], ...] = ()
    tables: list[list[int]] = field(default_factory=lambda: [[], [], []])


class Twin:
    """Runs random steps through RowState and InputBuilder, and does the same with lists."""

    def __init__(self) -> None:
        self.sizes = (4, 2, 12)
        groups = tuple(
            KVGroup((i,), spec, size)
            for i, (spec, size) in enumerate(zip((SPEC, SPEC, SHARED), self.sizes, strict=True))
        )
        plan = KVPlan(groups, 999, 1, 4)
        self.plan = plan
        self.state = RowState(ROWS, CAPACITY, plan, ["kinds", "same", "shift"], sees_items=True)
        self.builder = InputBuilder(
            plan,
            max_tokens=200,
            max_rows=ROWS,
            state=self.state,
            device="cpu",
            context=CONTEXT,
            axes=["same", "shift"],
            item_groups={0, 2},
        )
        self.rows: dict[int, Row] = {}
        self.next_block = 1

    def blocks(self, row: Row, num_tokens: int) -> list[list[int]]:
        """Add blocks to the row so that `num_tokens` tokens fit. Return the new blocks per
        group."""
        new = []
        for table, size in zip(row.tables, self.sizes, strict=True):
            need = -(-num_tokens // size) - len(table)
            ids = list(range(self.next_block, self.next_block + max(0, need)))
            self.next_block += len(ids)
            table.extend(ids)
            new.append(ids)
        return new

    def step(
        self, draw: st.DrawFn
    ) -> tuple[Batch, StepInputs | None, list[tuple[int, int, list[int]]]]:
        """Make a random step: some rows are removed, some are new, the others continue. Also return
        (row, tokens, drafts) per batch row."""
        removed = [r for r in sorted(self.rows) if draw(st.booleans()) and draw(st.booleans())]
        for number in removed:
            del self.rows[number]
        new = []
        deltas = []
        order = []
        for number in range(ROWS):
            if number not in self.rows:
                if not draw(st.booleans()):
                    continue
                tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
                row = self.rows[number] = Row(
                    list(tokens), len(tokens), draw(st.integers(0, len(tokens) - 1))
                )
                row.kinds = [1 + token % 7 for token in tokens] if draw(st.booleans()) else []
                if draw(st.booleans()):
                    ends = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
                    row.whole = tuple(zip(ends[::2], ends[1::2], strict=False))
                self.blocks(row, row.num_computed)
                fresh = True
            else:
                row = self.rows[number]
                fresh = False
            room = len(row.tokens) - row.num_computed
            count = draw(st.integers(1, room))
            drafts = (
                draw(st.lists(st.integers(0, 99), max_size=MAX_DRAFTS))
                if count == room and not fresh
                else []
            )
            if len(row.tokens) + len(drafts) + 2 > CAPACITY:
                drafts = []
            added = self.blocks(row, row.num_computed + count + len(drafts))
            if fresh:
                tables = tuple(np.array(table, np.int32) for table in row.tables)
                params = SamplingParams()
                new.append(
                    NewRequest(
                        number,
                        str(number),
                        np.array(row.tokens, np.int32),
                        row.num_prompt,
                        row.num_computed,
                        params,
                        None,
                        tables,
                        token_inputs=inputs_of(row.kinds),
                        whole=row.whole,
                    )
                )
            else:
                deltas += [(number, g, ids) for g, ids in enumerate(added) if ids]
            order.append((number, count, drafts))
        order.sort(key=lambda item: item[1] + len(item[2]) > 1 + MAX_DRAFTS)
        batch = self.batch(order, new, deltas, removed)
        self.state.proposals.remove(batch.removed_rows)
        for request in batch.new:
            self.state.add(request)
        self.state.append_blocks(batch)
        # the worker has kept the proposals, possibly more than are verified
        if draw(st.booleans()):
            batch.draft_token_ids = None
            self.state.proposals.keep(
                np.array([number for number, _, _ in order]),
                [np.array([*drafts, 5], np.int32) for _, _, drafts in order],
            )
        num_tokens = int(batch.num_scheduled_tokens.sum())
        rows = st.integers(len(order), self.builder.max_rows)
        padded = draw(st.just((0, 0)) | st.tuples(rows, st.integers(num_tokens, num_tokens + 5)))
        sees_ahead = self.state.visible is not None and self.state.visible.matters(batch)
        inputs = self.builder.build(batch, padded, sees_ahead=sees_ahead) if order else None
        return batch, inputs, order

    def batch(
        self,
        order: list[tuple[int, int, list[int]]],
        new: list[NewRequest],
        deltas: list[tuple[int, int, list[int]]],
        removed: list[int],
    ) -> Batch:
        numbers = [number for number, _, _ in order]
        done = [self.rows[number].num_computed for number in numbers]
        known = [len(self.rows[number].tokens) for number in numbers]
        counts = [count for _, count, _ in order]
        return Batch(
            step=1,
            rows=np.array(numbers, np.int32),
            num_scheduled_tokens=np.array(
                [count + len(drafts) for _, count, drafts in order], np.int32
            ),
            num_computed_tokens=np.array(done, np.int32),
            num_draft_tokens=np.array([len(drafts) for _, _, drafts in order], np.int32),
            samples=np.array(
                [a + b == c for a, b, c in zip(done, counts, known, strict=True)], bool
            ),
            new=new,
            removed_rows=np.array(removed, np.int32),
            new_blocks=BlockDelta(
                np.array([d[0] for d in deltas], np.int32),
                np.array([d[1] for d in deltas], np.int32),
                CSR.of([d[2] for d in deltas]),
            ),
            copy_blocks=np.zeros((0, 3), np.int32),
            draft_token_ids=CSR.of([drafts for _, _, drafts in order]),
        )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_inputs_equal_the_same_made_by_hand(data: st.DataObject) -> None:
    """There are several steps, in which requests start, end, are computed in chunks, decode, and
    verify drafts and accept some of them."""
    twin = Twin()
    for _ in range(data.draw(st.integers(1, 6))):
        batch, inputs, order = twin.step(data.draw)
        if inputs is None:
            continue
        check(twin, inputs, order)
        sampled = [(i, item) for i, item in enumerate(order) if batch.samples[i]]
        width = 1 + MAX_DRAFTS
        tokens = np.full((len(sampled), width), -1)
        counts = np.zeros(len(sampled), np.int64)
        for place, (_, (number, count, drafts)) in enumerate(sampled):
            accepted = [
                *drafts[: data.draw(st.integers(0, len(drafts)))],
                data.draw(st.integers(0, 99)),
            ]
            row = twin.rows[number]
            row.num_computed += count + len(accepted) - 1
            row.tokens += accepted
            tokens[place, : len(accepted)] = accepted
            counts[place] = len(accepted)
        for i, (number, count, _) in enumerate(order):
            if not batch.samples[i]:
                twin.rows[number].num_computed += count
        twin.state.append_tokens(inputs.sample_rows, tokens, counts)
        for number in [n for n, row in twin.rows.items() if len(row.tokens) + width > CAPACITY]:
            del twin.rows[number]
        for number, row in twin.rows.items():
            assert (
                twin.state.token_ids[number, : twin.state.num_tokens[number]].tolist() == row.tokens
            )


def inputs_of(kinds: list[int]) -> dict[str, list[int]]:
    """Return the inputs of a request: the second axis is smaller by the kind of the token."""
    return {"kinds": kinds, "shift": [-kind for kind in kinds], "unknown": [9]} if kinds else {}


def stored_of(num_tokens: int) -> list[int]:
    """Return which of the first tokens the rank of CONTEXT has."""
    return [position for position in range(num_tokens) if position // 2 % 3 == 1]


def check(twin: Twin, inputs: StepInputs, order: list[tuple[int, int, list[int]]]) -> None:
    ids = []
    kinds = []
    positions = []
    index = []
    drafts = []
    offsets = [0]
    slots: list[list[int]] = [[], [], []]
    visible = []
    seen_keys = []
    for number, count, proposed in order:
        row = twin.rows[number]
        span = range(row.num_computed, row.num_computed + count + len(proposed))
        full = [*row.tokens[: row.num_computed + count], *proposed]
        ids += [full[p] for p in span]
        known = row.kinds or [0]
        kinds += [known[min(p, len(known) - 1)] for p in span]
        positions += span
        for g, size in enumerate(twin.sizes[:2]):
            slots[g] += [row.tables[g][p // size] * size + p % size for p in span]
        for p in span:
            stored = stored_of(p)
            is_here = p // 2 % 3 == 1
            slots[2].append(
                row.tables[2][len(stored) // 4] * 4 + len(stored) % 4 if is_here else -1
            )
            stops = [stop for first, stop in row.whole if first <= p < stop]
            seen_keys.append(stops[0] if stops else p + 1)
            visible.append(len(stored_of(seen_keys[-1])))
        if row.num_computed + count == len(row.tokens):
            index += range(len(ids) - len(proposed) - 1, len(ids))
            drafts += proposed
            offsets.append(offsets[-1] + 1 + len(proposed))
    num_rows = len(order)
    num_tokens = len(ids)
    input_ids, declared = inputs.to_embed
    more = input_ids[num_tokens:].numel()  # padding
    assert declared.tolist() == kinds + [0] * more
    assert input_ids.tolist() == ids + [0] * more
    shifted = [position - kind for position, kind in zip(positions, kinds, strict=True)]
    for axis, places in zip(inputs.positions, (positions, shifted), strict=True):
        assert axis.tolist() == places + [0] * more
    assert (
        list(range(num_tokens)) if inputs.logits_index is None else inputs.logits_index.tolist()
    ) == index
    assert inputs.offsets.tolist() == offsets
    assert (inputs.draft_token_ids.tolist() if inputs.draft_token_ids is not None else []) == drafts
    for g, seen in enumerate(inputs.groups):
        more_rows = seen.seq_lens[num_rows:].numel()
        assert seen.slot_mapping.tolist() == slots[g] + [-1] * more
        assert seen.num_tokens == num_tokens and seen.num_rows == num_rows
        assert seen.query_start_loc.tolist() == seen.query_start_loc_cpu.tolist()
        assert seen.seq_lens.tolist() == seen.seq_lens_cpu.tolist()
        assert seen.block_table.tolist() == seen.block_table_cpu.tolist()
        counts = [count + len(proposed) for _, count, proposed in order]
        assert np.diff(seen.query_start_loc_cpu).tolist() == counts + [0] * more_rows
        ends = [
            twin.rows[number].num_computed + count + len(proposed)
            for number, count, proposed in order
        ]
        lens = [len(stored_of(end)) for end in ends] if g == 2 else ends
        assert seen.seq_lens.tolist() == lens + [0] * more_rows
        if g == 2:
            assert seen.num_keys is not None and seen.num_keys_cpu is not None
            assert seen.num_keys.tolist() == visible + [0] * more
            assert seen.num_keys_cpu.tolist() == visible + [0] * more
        elif g == 0 and seen_keys != [position + 1 for position in positions]:
            assert seen.num_keys is not None and seen.num_keys_cpu is not None
            assert seen.num_keys[:num_tokens].tolist() == seen_keys
            assert seen.num_keys_cpu[:num_tokens].tolist() == seen_keys
        else:
            assert seen.num_keys is None and seen.num_keys_cpu is None
        assert not seen.block_table[num_rows:].any()
        for place, (number, _, _) in enumerate(order):
            table = twin.rows[number].tables[g]
            used = -(-ends[place] // twin.sizes[g])
            assert seen.block_table[place, :used].tolist() == table[:used]


def test_buffers_keep_their_addresses() -> None:
    """Recordings of the forward depend on fixed addresses."""
    twin = Twin()
    addresses = set()
    for length in (3, 9, 1):
        row = twin.rows[0] = Row(list(range(length)), length)
        twin.blocks(row, length)
        tables = tuple(np.array(table, np.int32) for table in row.tables)
        twin.state.add(
            NewRequest(
                0, "a", np.array(row.tokens, np.int32), length, 0, SamplingParams(), None, tables
            )
        )
        inputs = twin.builder.build(twin.batch([(0, length, [])], [], [], []))
        tensors = (
            *inputs.to_embed,
            inputs.positions[0],
            inputs.groups[0].slot_mapping,
            inputs.groups[0].block_table,
        )
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(addresses) == 1


# --- prompt logprobs ------------------------------------------------------------------------------


class EchoSampler:
    """Its `score` returns the logits' first column and the targets."""

    def score(self, logits: torch.Tensor, targets: torch.Tensor, k: int) -> Logprobs:
        ids = targets.numpy().astype(np.int32)[:, None].repeat(k + 1, 1)
        return Logprobs(ids, logits[:, :1].numpy().repeat(k + 1, 1), np.ones(len(ids), np.int32))


def chunks(draw: st.DrawFn, total: int) -> list[int]:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, total - 1)), max_size=4)))
    borders = [0, *[cut for cut in cuts if cut < total], total]
    return [b - a for a, b in zip(borders, borders[1:], strict=False)]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tokens=st.lists(st.integers(0, 99), min_size=2, max_size=20))
def test_prompt_logprobs_do_not_depend_on_the_chunks(
    data: st.DataObject, tokens: list[int]
) -> None:
    """Position i is scored once, with the hidden state before it. The row is delivered when its
    prompt ends."""
    twin = Twin()
    scores = PromptScores(
        EchoSampler(), lambda hidden: hidden * 10, twin.state, twin.builder.head_adapters
    )  # type: ignore[arg-type]
    row = twin.rows[2] = Row(tokens, len(tokens))
    twin.blocks(row, len(tokens))
    params = SamplingParams(prompt_logprobs=1)
    tables = tuple(np.array(table, np.int32) for table in row.tables)
    new = NewRequest(2, "a", np.array(tokens, np.int32), len(tokens), 0, params, None, tables)
    twin.state.add(new)
    scores.add(new)
    found = {}
    sizes = chunks(data.draw, len(tokens))
    for count in sizes:
        assert not found, "delivered before the end of the prompt"
        batch = twin.batch([(2, count, [])], [], [], [])
        inputs = twin.builder.build(batch)
        hidden = inputs.positions[0][:, None].float().expand(-1, 3).contiguous()
        found = scores.collect(batch, inputs, hidden) or found
        row.num_computed += count
    assert found[2].token_ids[:, 0].tolist() == tokens[1:]
    assert found[2].values[:, 0].tolist() == [
        10.0 * position for position in range(len(tokens) - 1)
    ]
    assert not scores.wanted
