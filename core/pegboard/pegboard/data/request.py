"""A request on its way between the front and the engine. This file does not import numpy, which the API process does not load."""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.data.sampling_params import PoolingParams, SamplingParams


class AdapterRef(msgspec.Struct, frozen=True):
    """A LoRA adapter on local disk. `lora_id` is unique per engine; `digest` of the files enters block hashes."""

    lora_id: int
    name: str
    path: str
    digest: str = ""


class EngineRequest(msgspec.Struct, kw_only=True):
    """A → E. `params.n` > 1 is expanded by the engine into n completions with indices 0 … n-1."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    arrival_s: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    lora: AdapterRef | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None


class PositionLogprobs(msgspec.Struct):
    """Logprobs of one position on their way to A: chosen token first, then the most likely ones."""

    token_ids: list[int]
    values: list[float]
    rank: int


class RequestDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """E → A: what one completion gained in a step. `finish_reason`: None, "stop", "length", "abort" or "error".

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
