"""The attention plan of a step. It is made once and shared by all layers of a KV group.

Rows with one new token (decodes) are computed together, in groups of similar length to keep the
padding small. Every other row (a prompt, or a chunk of one) is computed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.attention import AttentionInputs, Retain, Window
from pegboard.interfaces.attention import Chunk as WithinChunk

MAX_PADDING = 1.3
FEW_BLOCKS = 4


@dataclass(slots=True)
class Bucket:
    """Decode rows of similar length. tokens: [n] indices of their tokens in the step; None = tokens
    0 … n−1. blocks: [n · m] block ids, where the longest row has m blocks. bias: for each rule [n,
    1, 1, m · block_size] float32, −inf for keys that are not visible. unseen: for each rule the
    indices of these keys among all n · m · block_size."""

    num_rows: int
    tokens: Tensor | None
    blocks: Tensor
    num_keys: int
    bias: dict[Retain, Tensor]
    unseen: dict[Retain, Tensor]


@dataclass(slots=True)
class Chunk:
    """The new tokens start … stop − 1 of one row. They are the last of num_keys tokens, which are
    in `blocks`. is_whole: all of these tokens are computed in this step. bias: for each rule [stop
    − start, num_keys] float32; None = plain causal. unseen: for each rule how many of the first
    keys no query sees."""

    start: int
    stop: int
    num_keys: int
    is_whole: bool
    blocks: Tensor
    bias: dict[Retain, Tensor | None]
    unseen: dict[Retain, int]


@dataclass(slots=True)
class Plan:
    slots: Tensor
    stored: Tensor | None  # indices of the tokens to store; None = all
    buckets: list[Bucket]
    chunks: list[Chunk]


def make_plan(inputs: AttentionInputs, block_size: int, rules: set[Retain]) -> Plan:
    """Make the plan of a step, with numpy on the host and a few small tensors. rules:
    `AttentionLayer.retain` of the layers."""
    starts = inputs.query_start_loc_cpu
    num_keys = inputs.num_keys_cpu
    seq_lens = inputs.seq_lens_cpu
    tables = inputs.block_table_cpu
    query_lens = np.diff(starts)
    slots = inputs.slot_mapping
    stored = None
    unstored = slots < 0
    if bool(unstored.any()):
        stored = torch.nonzero(~unstored).flatten()
        slots = slots[stored]
    decodes = np.flatnonzero(query_lens == 1)
    buckets = [
        _bucket(rows, starts, seq_lens, tables, block_size, rules)
        for rows in _split_by_length(decodes, seq_lens, block_size)
    ]
    chunks = [
        _chunk(
            int(starts[row]),
            int(starts[row + 1]),
            int(seq_lens[row]),
            tables[row],
            block_size,
            rules,
            None if num_keys is None else num_keys[starts[row] : starts[row + 1]],
        )
        for row in np.flatnonzero(query_lens > 1)
    ]
    return Plan(slots, stored, buckets, chunks)


def _split_by_length(rows: np.ndarray, seq_lens: np.ndarray, block_size: int) -> list[np.ndarray]:
    """Group rows so that the longest row of a group has at most MAX_PADDING times as many blocks as
    the shortest."""
    if len(rows) == 0:
        return []
    blocks = -(-seq_lens[rows] // block_size)
    order = np.argsort(blocks, kind="stable")
    rows = rows[order]
    blocks = blocks[order]
    groups = []
    first = 0
    for index in range(1, len(rows)):
        if blocks[index] > max(FEW_BLOCKS, MAX_PADDING * blocks[first]):
            groups.append(np.sort(rows[first:index]))
            first = index
    groups.append(np.sort(rows[first:]))
    return groups


def _first_keys(positions: np.ndarray, rule: Retain) -> np.ndarray:
    """Return the first position that the token at each position attends to."""
    if isinstance(rule, WithinChunk):
        return positions // rule.tokens * rule.tokens
    return (
        np.maximum(positions - rule.tokens + 1, 0)
        if isinstance(rule, Window)
        else np.zeros_like(positions)
    )


def _bucket(
    rows: np.ndarray,
    starts: np.ndarray,
    seq_lens: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    rules: set[Retain],
) -> Bucket:
    lengths = seq_lens[rows]
    num_blocks = max(1, int(-(-lengths.max() // block_size)))
    num_keys = num_blocks * block_size
    tokens = starts[rows]
    keys = np.arange(num_keys)
    bias = {}
    unseen = {}
    for rule in rules:
        hidden = (keys >= lengths[:, None]) | (keys < _first_keys(lengths - 1, rule)[:, None])
        values = np.where(hidden, np.float32("-inf"), np.float32(0))
        bias[rule] = torch.from_numpy(values)[:, None, None, :]
        unseen[rule] = torch.from_numpy(np.flatnonzero(hidden))
    in_order = bool((tokens == np.arange(len(rows))).all())
    return Bucket(
        num_rows=len(rows),
        tokens=None if in_order else torch.from_numpy(tokens.astype(np.int64)),
        blocks=torch.from_numpy(tables[rows, :num_blocks].reshape(-1).astype(np.int64)),
        num_keys=num_keys,
        bias=bias,
        unseen=unseen,
    )


def _chunk(
    start: int,
    stop: int,
    num_keys: int,
    table: np.ndarray,
    block_size: int,
    rules: set[Retain],
    visible: np.ndarray | None,
) -> Chunk:
    """visible: the keys that each token attends to; None = those up to itself."""
    is_whole = visible is None and num_keys == stop - start
    bias: dict[Retain, Tensor | None] = {}
    unseen: dict[Retain, int] = {}
    keys = np.arange(num_keys)
    queries = np.arange(num_keys - (stop - start), num_keys)[:, None]
    last = queries if visible is None else visible[:, None] - 1
    for rule in rules:
        first = _first_keys(queries, rule)
        unseen[rule] = int(first[0, 0])
        if is_whole and first[-1] == 0:
            bias[rule] = None
            continue
        hidden = torch.from_numpy((keys > last) | (keys < first))
        bias[rule] = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    blocks = torch.from_numpy(table[: -(-num_keys // block_size)].astype(np.int64))
    return Chunk(start, stop, num_keys, is_whole, blocks, bias, unseen)
