"""A request and its results as the front and the engine exchange them. This file does not import numpy, because the API process
does not load it."""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.data.sampling_params import SamplingParams


class AdapterRef(msgspec.Struct, frozen=True):
    """A LoRA adapter on local disk. `lora_id` is unique in an engine. `digest`, a hash of the files, is part of the block
    hashes."""

    lora_id: int
    name: str
    path: str
    digest: str = ""


class EngineRequest(msgspec.Struct, kw_only=True):
    """A request, sent from A to E. The engine expands `params.n` > 1 into n completions with indices 0 … n-1. client:
    who asks; clients take turns where one could hold up the others."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    lora: AdapterRef | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    client: str = ""


class PositionLogprobs(msgspec.Struct):
    """Logprobs of one position, sent from E to A: the chosen token first, then the most likely tokens."""

    token_ids: list[int]
    values: list[float]
    rank: int


class RequestDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The tokens and other results of one completion in one step, sent from E to A.

    finish_reason: None, "stop", "length", "abort" or "error". num_cached_tokens is set in the first delta only. error:
    the reason when finish_reason is "error". error_parameter: the field that is wrong, if the request itself is wrong (a grammar
    that does not compile). ends_whole: finish_reason is "stop", but the last token is not a stop token and belongs to the text.
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
