"""What one step computes, as plain data: E → W `Batch`, W → E `StepOutput`. numpy only, no torch.

A running request owns a *row* (0 ≤ row < max_num_seqs) from admission until it finishes or is preempted. The worker keeps
all per-request state in arrays indexed by row, so a step sends only differences.

Shape letters: B rows in the step, T tokens in the step, N logits rows. int32 unless said otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pegboard.data.request import AdapterRef
from pegboard.data.sampling_params import PoolingParams, SamplingParams

Array = np.ndarray


class CSR(msgspec.Struct):
    """Ragged rows: row i is `flat[offsets[i]:offsets[i + 1]]`."""

    flat: Array
    offsets: Array

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | Array]) -> "CSR":
        """Pack `rows`."""
        lengths = np.fromiter((len(row) for row in rows), np.int32, len(rows))
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        flat = np.concatenate([np.asarray(row, np.int32) for row in rows]) if len(rows) else np.zeros(0, np.int32)
        return cls(flat.astype(np.int32, copy=False), offsets)

    @classmethod
    @functools.cache
    def empty(cls) -> "CSR":
        """No rows; the same object every time."""
        return cls.of([])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> Array:
        """A view of row `index`."""
        return self.flat[self.offsets[index] : self.offsets[index + 1]]

    def lists(self) -> list[list[int]]:
        """All rows as lists of int."""
        flat, offsets = self.flat.tolist(), self.offsets.tolist()
        return [flat[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]


class NewRequest(msgspec.Struct):
    """Sent to the worker once per admission or resumption; fills the state of `row`."""

    row: int
    request_id: str
    token_ids: Array  # [n] prompt and outputs so far
    num_prompt_tokens: int
    num_computed_tokens: int
    params: SamplingParams | PoolingParams
    seed: int | None
    block_ids: tuple[Array, ...]  # per KV group: the whole table so far


class BlockDelta(msgspec.Struct):
    """Blocks appended in this step: entry i appends `block_ids.row(i)` to the table of `rows[i]` in group `groups[i]`."""

    rows: Array
    groups: Array
    block_ids: CSR

    @classmethod
    @functools.cache
    def empty(cls) -> "BlockDelta":
        """Nothing was appended; the same object every time."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int32), CSR.empty())


class Batch(msgspec.Struct, kw_only=True):
    """One step's work.

    rows: [B] in execution order: rows with query_len ≤ 1 + max drafts first, then prefills.
    num_scheduled_tokens: [B] tokens to compute, drafts to verify included.
    num_computed_tokens: [B] tokens whose KV exists when this step starts; an upper bound while an earlier step is in flight
        (the worker, which holds the accepted counts, knows the truth).
    num_draft_tokens: [B] how many of the scheduled tokens are trailing drafts. The worker takes the first of the proposals
        it kept, or `draft_token_ids` where the engine sends them (proposed in E, or trimmed by a grammar).
    samples: bool[B], the row's last scheduled token ends its known tokens, so logits and a new token are wanted.
    needs_masks: token masks follow through `Executor.provide_masks`; sampling waits for them, the forward does not.
    removed_rows: rows whose request finished, was aborted or preempted since the last batch; applied before `new`.
    new_blocks: for rows that are not in `new`. copy_blocks: [c, 3] group, source, destination; done before the forward.
    lora_slots: [B], 0 = base model; None = LoRA is off.
    connector: opaque plan per KV connector name.
    """

    step: int
    rows: Array
    num_scheduled_tokens: Array
    num_computed_tokens: Array
    num_draft_tokens: Array
    samples: Array
    new: list[NewRequest]
    removed_rows: Array
    new_blocks: BlockDelta
    copy_blocks: Array
    draft_token_ids: CSR | None = None
    needs_masks: bool = False
    lora_slots: Array | None = None
    lora_loads: tuple[tuple[int, AdapterRef], ...] = ()
    connector: Mapping[str, bytes] = {}

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


class TokenMasks(msgspec.Struct):
    """Grammar masks of one step: bit t of `bits[i]` allows token t for logits row `depths[i]` of `rows[i]`."""

    rows: Array  # [M]
    depths: Array  # [M] 0 = first sampled position, i = after i accepted drafts
    bits: Array  # uint32 [M, ceil(V / 32)]


class Logprobs(msgspec.Struct):
    """Per position: column 0 is the chosen token, columns 1…k the most likely ones."""

    token_ids: Array  # int32 [n, k + 1]
    values: Array  # float32 [n, k + 1], natural log
    ranks: Array  # int32 [n], 1 = most likely; rank of the chosen token

    @classmethod
    def concat(cls, parts: Sequence["Logprobs"]) -> "Logprobs":
        return cls(
            np.concatenate([p.token_ids for p in parts]),
            np.concatenate([p.values for p in parts]),
            np.concatenate([p.ranks for p in parts]),
        )


class StepTimes(msgspec.Struct):
    """Seconds spent by the worker in each part of a step. plan_s: of the forward, the attention backends' planning.
    transfer_s: the KV connectors' worker halves, before and after the forward."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    draft_s: float = 0.0
    plan_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole step. plan_s is a part of forward_s."""
        return self.prepare_s + self.forward_s + self.sample_s + self.draft_s + self.transfer_s


class TransferReport(msgspec.Struct):
    """What a KV connector's worker half did: ids whose save or load finished, and the first bad token of failed loads."""

    saved: list[str] = []
    loaded: list[str] = []
    failed: dict[str, int] = {}


class StepOutput(msgspec.Struct, kw_only=True):
    """Result of one step, from the last pipeline stage, tensor-parallel rank 0.

    rows: [B'] rows that produced tokens. token_ids: accepted tokens per row, 1 … 1 + drafts.
    logprobs: per row (same order) or None for rows that did not ask; each covers the row's accepted tokens.
    prompt_logprobs: row → finished prompt logprobs ([num_prompt_tokens - 1] positions, for tokens 1 …).
    draft_token_ids: proposals for the next step, per row of `rows` (also kept in W).
    """

    step: int
    rows: Array
    token_ids: CSR
    logprobs: list[Logprobs | None] | None = None
    prompt_logprobs: dict[int, Logprobs] = {}
    draft_token_ids: CSR | None = None
    pooled: dict[int, Any] = {}
    transfers: dict[str, TransferReport] = {}
    times: StepTimes = msgspec.field(default_factory=StepTimes)
