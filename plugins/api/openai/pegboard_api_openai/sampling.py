"""Turns request fields into SamplingParams, or into BeamSearchParams with `use_beam_search`. A
value comes from the request, else from the model's defaults, else from the defaults of
SamplingParams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pegboard.data.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from pegboard.errors import MalformedRequest, RequestError, brief
from pegboard_api_openai.fields import ChatRequest, CompletionRequest, GenerationFields
from pegboard_chat.sampling_fields import SAME, constraint, sampling_values

MAX_N = 1024
MAX_TOKENS = 2**31 - 1

# The fields of SamplingParams that BeamSearchParams also has. Beam search accepts only these, n and
# temperature.
SAME_WITH_BEAMS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def chat_params(
    request: ChatRequest, defaults: Mapping[str, Any]
) -> SamplingParams | BeamSearchParams:
    """The parameters of a chat completion. Without a limit, a chat runs to the end of the model's
    length. `top_logprobs` becomes `logprobs`. Raises RequestError."""
    top = request.top_logprobs
    if top is not None and top < -1:
        raise RequestError(
            f"top_logprobs must be at least 0, or -1 for all, got {top}", parameter="top_logprobs"
        )
    if top and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", parameter="top_logprobs")
    asked = (
        request.max_completion_tokens
        if request.max_completion_tokens is not None
        else request.max_tokens
    )
    if asked is not None and asked < 1:
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        raise RequestError(f"{name} must be at least 1, got {asked}", parameter=name)
    logprobs = (top or 0) if request.logprobs else None
    return _params(request, defaults, max_tokens=asked, logprobs=logprobs)


def completion_params(
    request: CompletionRequest, defaults: Mapping[str, Any]
) -> SamplingParams | BeamSearchParams:
    """The parameters of a text completion. An echo with 0 new tokens generates one token, which is
    not shown. An echoed prompt has logprobs if the output has them. Raises RequestError."""
    max_tokens = request.max_tokens
    if max_tokens == 0:
        if not request.echo:
            raise RequestError(
                "max_tokens must be at least 1, got 0 (0 is for echo: true)", parameter="max_tokens"
            )
        max_tokens = 1
    more = {}
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        if request.use_beam_search:
            raise RequestError(
                "echo with logprobs is not supported with use_beam_search", parameter="echo"
            )
        more["prompt_logprobs"] = request.logprobs
    return _params(request, defaults, max_tokens=max_tokens, logprobs=request.logprobs, **more)


def _params(
    request: GenerationFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    **more: Any,
) -> SamplingParams | BeamSearchParams:
    _check(request)
    values = sampling_values(request, defaults, max_tokens)
    if request.use_beam_search:
        return _beam_params(request, values)
    return SamplingParams(
        **{**values, **more},
        logprobs=logprobs,
        extra_args=_extra_args(request),
        structured_outputs=structure(request.response_format, request.structured_outputs),
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )


def _extra_args(request: GenerationFields) -> dict[str, Any] | None:
    """The arguments of logits processors, and what vLLM puts beside them."""
    connectors = (
        {"kv_transfer_params": request.kv_transfer_params} if request.kv_transfer_params else {}
    )
    return {**(request.vllm_xargs or {}), **connectors} or None


def _beam_params(request: GenerationFields, values: Mapping[str, Any]) -> BeamSearchParams:
    if request.stream:
        raise RequestError(
            (
                "stream: true is not supported with use_beam_search: the best beam is only known "
                "at the end"
            ),
            parameter="stream",
        )
    neutral = SamplingParams()
    other = [
        name
        for name in SAME
        if name in request.model_fields_set and name not in ("n", "temperature", *SAME_WITH_BEAMS)
    ]
    other = [name for name in other if getattr(request, name) not in (getattr(neutral, name), [])]
    other += [
        name
        for name in ("logit_bias", "vllm_xargs", "kv_transfer_params", "structured_outputs")
        if getattr(request, name)
    ]
    if structure(request.response_format, None) is not None:
        other.append("response_format")
    if other:
        raise RequestError(
            f"{other[0]} has no effect with use_beam_search; leave it out", parameter=other[0]
        )
    return BeamSearchParams(
        beam_width=values.get("n", 1),
        max_tokens=MAX_TOKENS if values["max_tokens"] is None else values["max_tokens"],
        temperature=values.get("temperature", 1.0),
        length_penalty=request.length_penalty,
        **{name: values[name] for name in SAME_WITH_BEAMS if name in values},
    )


def _check(request: GenerationFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", parameter="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs is not available with stream: true", parameter="prompt_logprobs"
        )
    if request.cache_salt == "":
        raise RequestError("cache_salt must not be empty", parameter="cache_salt")
    if request.n > MAX_N:
        raise RequestError(f"n must be at most {MAX_N}, got {request.n}", parameter="n")
    if request.length_penalty != 1.0 and not request.use_beam_search:
        raise RequestError("length_penalty needs use_beam_search: true", parameter="length_penalty")


FORMATS = ("text", "json_object", "json_schema", "structural_tag")

_KEYS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "format", "structures", "triggers"},
}


def structure(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """The constraint that the two fields ask for, if any. Raises RequestError naming the field."""
    return constraint(
        structured_outputs,
        _of_format({"type": "text"} if response_format is None else response_format),
        "response_format",
    )


def _of_format(form: Mapping[str, Any]) -> dict[str, Any]:
    kind = form.get("type")
    if kind not in FORMATS:
        expected = ", ".join(map(repr, FORMATS))
        raise MalformedRequest(
            f"response_format.type: expected one of {expected}, got {brief(kind)}",
            parameter="response_format",
        )
    unknown = sorted(set(form) - _KEYS[kind])
    if unknown:
        raise MalformedRequest(
            f"unknown field 'response_format.{unknown[0]}' for type {kind!r}",
            parameter="response_format",
        )
    if kind == "json_schema":
        return {"json": _schema(form.get("json_schema"))}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(form)}
    return {"json_object": True} if kind == "json_object" else {}


def _schema(given: Any) -> dict[str, Any]:
    """Returns the schema in {"name": …, "schema": …, "strict": …}. The answer always follows the
    schema, whatever strict says."""
    where = "response_format.json_schema"
    if not isinstance(given, dict):
        raise MalformedRequest(
            f"{where}: expected an object with name and schema, got {brief(given)}",
            parameter="response_format",
        )
    if not isinstance(given.get("name"), str):
        raise MalformedRequest(
            f"{where}.name is required and must be text", parameter="response_format"
        )
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise MalformedRequest(
            f"{where}.schema: expected a JSON schema (an object), got {brief(schema)}",
            parameter="response_format",
        )
    return schema
