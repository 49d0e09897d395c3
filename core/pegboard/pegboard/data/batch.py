"""The input and output of one step as plain data: `Batch` from E to W, `StepOutput` from W to E.
numpy only, no torch.

A running request owns a *row* (0 ≤ row < max_num_seqs) from admission until it finishes or is
preempted. The worker keeps all per-request state in arrays indexed by row, so a step sends only
differences. Shape letters: B rows in the step, T tokens in the step, N logits rows. Arrays are
int32 unless a comment says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from pegboard.data.media import MediaItem
from pegboard.data.pooling_params import PoolingParams
from pegboard.data.prompt_embeds import PromptEmbeds
from pegboard.data.request import PositionLogprobs
from pegboard.data.sampling_params import SamplingParams

Array = np.ndarray


LEFT = -1
"""The number of messages of an engine that takes no more."""

BAD_LOGITS = -1
"""The token id of a row whose logits are NaN. It ends only that request."""


class CSR(msgspec.Struct):
    """Rows of different lengths: row i is `flat[offsets[i]:offsets[i + 1]]`."""

    flat: Array
    offsets: Array

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | Array]) -> "CSR":
        """Pack `rows` into one flat array."""
        lengths = np.fromiter((len(row) for row in rows), np.int32, len(rows))
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        flat = (
            np.concatenate([np.asarray(row, np.int32) for row in rows])
            if len(rows)
            else np.zeros(0, np.int32)
        )
        return cls(flat.astype(np.int32, copy=False), offsets)

    @classmethod
    @functools.cache
    def empty(cls) -> "CSR":
        """Return the value with no rows, always the same object."""
        return cls.of([])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> Array:
        """Return a view of row `index`."""
        return self.flat[self.offsets[index] : self.offsets[index + 1]]

    def lists(self) -> list[list[int]]:
        """Return all rows as lists of int."""
        flat = self.flat.tolist()
        offsets = self.offsets.tolist()
        return [flat[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]


class NewRequest(msgspec.Struct):
    """What the worker needs to fill the state of `row`. It is sent once when a request is admitted
    or resumed. prompt_embeds, token_inputs, media: see `EngineRequest`; the media have no
    arrays. whole: (first position, position after the last one) of tokens that all attend to each
    other."""

    row: int
    request_id: str
    token_ids: Array  # [n] prompt tokens and output tokens so far
    num_prompt_tokens: int
    num_computed_tokens: int
    params: SamplingParams
    seed: int | None
    block_ids: tuple[Array, ...]  # one per KV group: the whole block table so far
    prompt_embeds: tuple[PromptEmbeds, ...] = ()
    token_inputs: Mapping[str, Sequence[int]] = {}
    pooling: PoolingParams | None = None
    media: tuple[MediaItem, ...] = ()
    whole: tuple[tuple[int, int], ...] = ()


class BlockDelta(msgspec.Struct):
    """Blocks appended in this step: entry i appends `block_ids.row(i)` to the table of `rows[i]` in
    group `groups[i]`."""

    rows: Array
    groups: Array
    block_ids: CSR

    @classmethod
    @functools.cache
    def empty(cls) -> "BlockDelta":
        """Return the value for "nothing was appended", always the same object."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int32), CSR.empty())


class Batch(msgspec.Struct, kw_only=True):
    """The work of one step.

    rows: [B] in execution order: rows with query_len ≤ 1 + max drafts first, then prefills.
    num_scheduled_tokens: [B] tokens to compute, including drafts to verify. num_computed_tokens:
    [B] tokens whose KV exists when this step starts, if all drafts in flight are right. The worker
    knows how many are, so it knows the exact number. num_draft_tokens: [B] how many of the
    scheduled tokens are drafts, which come last. The worker uses the first of the proposals that it
    kept. draft_token_ids: the drafts, for pipeline stages that have not proposed them; None = all
    have. samples: bool[B], whether the step samples a new token for the row: its last scheduled
    token is its last known token. needs_masks: the engine sends token masks later, through
    `Executor.provide_masks`. Sampling waits for them; the forward does not. removed_rows: rows
    whose request finished, was aborted or was preempted since the last batch. The worker applies
    them before `new`. new_blocks: blocks of rows that are not in `new`. copy_blocks: [c, 3] group,
    source block, destination block; copied before the forward.
    lora_slots: [B], 0 = base model; None = LoRA is off. first_token_ids: [B], the first token that
    each row computes; None = no rank needs it, because all ranks sample.
    connector: KV connector name → its plan, which is opaque here. wave: what the engine says to
    others that share out experts with it: whether it has requests to compute, whether an action
    waits, and how many messages it has seen; None = it does not. encode: images, audio and videos
    whose rows this step or a later one needs; they are kept by their digest. forgotten: digests of
    rows that no request needs, dropped before.
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
    first_token_ids: Array | None = None
    connector: Mapping[str, bytes] = {}
    wave: tuple[bool, bool, int] | None = None
    encode: list[MediaItem] = []
    forgotten: list[str] = []

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


class TokenMasks(msgspec.Struct):
    """Grammar masks of one step: bit t of `bits[i]` allows token t for logits row `depths[i]` of
    `rows[i]`."""

    rows: Array  # [M]
    depths: Array  # [M] 0 = first sampled position, i = after i accepted drafts
    bits: Array  # uint32 [M, ceil(V / 32)]


class Logprobs(msgspec.Struct):
    """Logprobs of n positions. Column 0 is the chosen token, columns 1…k are the most likely
    tokens."""

    token_ids: Array  # int32 [n, k + 1]
    values: Array  # float32 [n, k + 1], natural log
    ranks: Array  # int32 [n], rank of the chosen token, 1 = most likely

    def positions(self) -> list[PositionLogprobs]:
        """Return one object for each position."""
        columns = (self.token_ids.tolist(), self.values.tolist(), self.ranks.tolist())
        return [PositionLogprobs(*column) for column in zip(*columns, strict=True)]

    @classmethod
    def concat(cls, parts: Sequence["Logprobs"]) -> "Logprobs":
        return cls(
            np.concatenate([p.token_ids for p in parts]),
            np.concatenate([p.values for p in parts]),
            np.concatenate([p.ranks for p in parts]),
        )


class StepTimes(msgspec.Struct):
    """Seconds that the worker spent in each part of a step. plan_s: the part of forward_s in which
    attention backends plan. transfer_s: the worker halves of the KV connectors, before and after
    the forward."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    draft_s: float = 0.0
    plan_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the whole step. plan_s is not added, because forward_s includes it."""
        return self.prepare_s + self.forward_s + self.sample_s + self.draft_s + self.transfer_s


class TransferReport(msgspec.Struct):
    """What the worker half of a KV connector did. saved, loaded: ids of the requests whose save or
    load has finished. failed: request id → the first token that could not be loaded."""

    saved: list[str] = []
    loaded: list[str] = []
    failed: dict[str, int] = {}


class StepOutput(msgspec.Struct, kw_only=True):
    """The result of one step.

    rows: [B'] rows that produced tokens. token_ids: accepted tokens per row, 1 … 1 + drafts.
    logprobs: one per row, in the same order; each covers the row's accepted tokens. None for a row
    that asked for none. prompt_logprobs: row → finished prompt logprobs ([num_prompt_tokens - 1]
    positions, for tokens 1 …). draft_token_ids: proposals for the next step, per row of `rows`
    (also kept in W). With `Limits.drafts_ahead`, they are set in steps with masks only. embeddings:
    of an engine that pools, one float32 vector or matrix per row of `rows`; `token_ids` is empty
    then.
    is_quiet: no engine that shares out experts has requests to compute. is_over: these engines need
    not take another step.
    """

    step: int
    rows: Array
    token_ids: CSR
    logprobs: list[Logprobs | None] | None = None
    prompt_logprobs: dict[int, Logprobs] = {}
    draft_token_ids: CSR | None = None
    embeddings: list[Array] | None = None
    transfers: dict[str, TransferReport] = {}
    times: StepTimes = msgspec.field(default_factory=StepTimes)
    is_quiet: bool = False
    is_over: bool = False
