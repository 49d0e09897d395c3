"""A request on its way: what the front sends to the engine, and the engine's own mutable record of it."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

import msgspec

from pegboard.data.pooling_params import PoolingParams
from pegboard.data.request_parts import AdapterRef, Blob, MediaRef
from pegboard.data.sampling_params import SamplingParams


class RequestStatus(Enum):
    """Where a request stands. WAITING includes waiting for a grammar, a KV load or a parent's prefill (see `waits_for`)."""

    WAITING = "waiting"
    LOADING = "loading"  # holds blocks while a KV connector fills them; never a victim
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class EngineRequest(msgspec.Struct, kw_only=True):
    """A → E. `params.n` > 1 is expanded by the engine into n completions with indices 0 … n-1."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    arrival_s: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    lora: AdapterRef | None = None
    prompt_embeds: Blob | None = None
    media: tuple[MediaRef, ...] = ()
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None


class RequestView(Protocol):
    """The read-only face of a request that policies and connectors see. `key` names it in transfer reports; `block_hashes` name
    its blocks across engines (see pegboard.engine.kv.hashes)."""

    request_id: str
    index: int
    status: RequestStatus
    priority: int
    arrival_s: float
    num_computed_tokens: int
    num_preemptions: int
    lora: AdapterRef | None
    key: str
    all_token_ids: list[int]
    block_hashes: list[bytes]
    kv_transfer_params: dict[str, Any] | None

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Prompt and confirmed outputs."""

    @property
    def num_confirmed_tokens(self) -> int:
        """Tokens whose KV no step in flight can change any more."""


class Request:
    """The engine's record of one completion of one request. Changed only by the scheduler and the KV cache.

    num_computed_tokens: tokens whose KV is written (or will be, once the steps in flight are done).
    num_in_flight_tokens: of those, scheduled but not yet confirmed, in num_in_flight_steps steps; num_loading_tokens: of those,
        the ones that a KV connector brings within the first of these steps.
    block_hashes: the chain of hashes, one per KVPlan.hash_block_size confirmed tokens.
    waits_for: of "grammar" and "parent" (whose prompt a completion of n > 1 will share; num_waiting_children counts them).
    num_external_tokens: of num_cached_tokens, those that KV connectors brought.
    uses_connectors: False once a KV load has failed: it is computed here instead.
    key: unique name inside the engine, "<request_id>" for n = 1 and "<index>_<request_id>" otherwise.
    """

    __slots__ = (
        "request_id", "index", "key", "params", "prompt_token_ids", "output_token_ids", "prompt_embeds", "media", "priority",
        "arrival_s", "cache_salt", "lora", "kv_transfer_params", "seed", "status", "row", "num_computed_tokens",
        "num_cached_tokens", "num_in_flight_tokens", "num_preemptions", "block_hashes", "draft_token_ids", "grammar",
        "parent", "finish_reason", "stop_reason", "all_token_ids", "stop_token_ids", "is_aborted", "first_scheduled_s",
        "first_token_s", "waits_for", "num_in_flight_steps", "num_waiting_children", "uses_connectors", "last_token_s",
        "num_external_tokens", "num_loading_tokens", "trace_headers",
    )  # fmt: skip

    def __init__(self, source: EngineRequest, *, index: int = 0, parent: "Request | None" = None) -> None:
        params = source.params
        self.request_id = source.request_id
        self.index = index
        n = params.n if isinstance(params, SamplingParams) else 1
        self.key = source.request_id if n == 1 else f"{index}_{source.request_id}"
        self.params = params
        self.prompt_token_ids = source.prompt_token_ids
        self.output_token_ids: list[int] = []
        self.all_token_ids: list[int] = list(source.prompt_token_ids)
        self.prompt_embeds = source.prompt_embeds
        self.media = source.media
        self.priority = source.priority
        self.arrival_s = source.arrival_s
        self.cache_salt = source.cache_salt
        self.lora = source.lora
        self.kv_transfer_params = source.kv_transfer_params
        self.trace_headers = source.trace_headers
        seed = params.seed if isinstance(params, SamplingParams) else None
        self.seed = None if seed is None else seed + index
        self.stop_token_ids = params.all_stop_token_ids if isinstance(params, SamplingParams) else set()
        self.status = RequestStatus.WAITING
        self.row: int | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_external_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []
        self.draft_token_ids: list[int] = []
        self.grammar: Any = None
        self.parent = parent
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.is_aborted = False
        self.first_scheduled_s = 0.0
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.waits_for: set[str] = set()
        self.num_in_flight_steps = 0
        self.num_loading_tokens = 0
        self.num_waiting_children = 0
        self.uses_connectors = True

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and confirmed outputs."""
        return len(self.all_token_ids)

    @property
    def num_confirmed_tokens(self) -> int:
        """Tokens whose KV no step in flight can change any more."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append_tokens(self, token_ids: list[int]) -> None:
        self.output_token_ids.extend(token_ids)
        self.all_token_ids.extend(token_ids)

    def __repr__(self) -> str:
        return f"Request({self.key!r}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"


class PositionLogprobs(msgspec.Struct):
    """Logprobs of one position on their way to A: chosen token first, then the most likely ones."""

    token_ids: list[int]
    values: list[float]
    rank: int


class RequestDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """E → A: what one completion gained in one step. `finish_reason`: None, "stop", "length", "abort" or "error".

    num_cached_tokens comes with the first delta. pooled: the result of a pooling request. `error` says why when finish_reason
    is "error"; error_parameter names the field at fault if the request itself is (a grammar that does not compile).
    ends_whole: finish_reason is "stop" without a stop token: the last token is text like the others.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None
    error_parameter: str | None = None
    ends_whole: bool = False
    pooled: Any = None
