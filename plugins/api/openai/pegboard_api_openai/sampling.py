"""From request fields to SamplingParams: the request's value, else the model's default, else SamplingParams' own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import RequestError
from pegboard.sampling_params import RequestOutputKind, SamplingParams
from pegboard_api_openai.body import shown
from pegboard_api_openai.fields import ChatRequest, CompletionRequest, GenerationFields

# Fields whose name and meaning are SamplingParams'.
SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words",
    "prompt_logprobs", "skip_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip


def chat_params(request: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Without a limit a chat runs to the end of the context. `top_logprobs` is SamplingParams' `logprobs`."""
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", parameter="top_logprobs")
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, defaults, max_tokens=asked, logprobs=logprobs)


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Echo of 0 new tokens runs one token, which is not shown. An echoed prompt has logprobs when the output has."""
    max_tokens = request.max_tokens
    if max_tokens == 0:
        if not request.echo:
            raise RequestError("max_tokens must be at least 1, got 0 (0 is for echo: true)", parameter="max_tokens")
        max_tokens = 1
    more = {}
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        more["prompt_logprobs"] = request.logprobs
    return _params(request, defaults, max_tokens=max_tokens, logprobs=request.logprobs, **more)


def _params(
    request: GenerationFields, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None, **more: Any
) -> SamplingParams:
    _check(request)
    values = dict(defaults)
    limits = [limit for limit in (max_tokens, values.pop("max_tokens", None)) if limit is not None]
    values.update({name: getattr(request, name) for name in SAME if name in request.model_fields_set})
    if request.logit_bias:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    return SamplingParams(
        **{**values, **more},
        logprobs=logprobs,
        max_tokens=min(limits, default=None),
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )


def _check(request: GenerationFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", parameter="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not available with stream: true", parameter="prompt_logprobs")
    if not request.spaces_between_special_tokens and request.skip_special_tokens is False:
        raise RequestError(
            "spaces_between_special_tokens: false is not supported with skip_special_tokens: false",
            parameter="spaces_between_special_tokens",
        )
    form = getattr(request, "response_format", None)
    if form is not None and form != {"type": "text"}:
        raise RequestError(
            f"response_format {shown(form.get('type'))} is not supported: only {{'type': 'text'}} is available in this server",
            parameter="response_format",
        )


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """JSON keys are text; values beyond ±100 count as ±100 (OpenAI's range)."""
    result = {}
    for key, value in biases.items():
        if not key.isascii() or not key.isdigit() or len(key) > 18:
            raise RequestError(f"logit_bias: expected token ids as keys, got {key[:60]!r}", parameter="logit_bias")
        result[int(key)] = max(-100.0, min(100.0, value))
    return result
