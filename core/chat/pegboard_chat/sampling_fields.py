"""The sampling fields that the request bodies of several APIs share, with vLLM's additions, and
their way to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from pegboard.data.sampling_params import CONSTRAINT_KINDS, StructuredOutputsParams
from pegboard.errors import MalformedRequest, RequestError, brief

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True)]

SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
)
"""Fields whose name and meaning are SamplingParams'."""


class Fields(BaseModel):
    """A request body or a part of one. Types are strict: "5" is not an integer. Unknown fields are
    refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SamplingFields(Fields):
    """None = not given; the default then is the model's, else SamplingParams'. SamplingParams
    checks the ranges; the bounds here keep numbers inside the integers of the engine."""

    model: str | None = None
    stream: bool = False

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None

    priority: Int32 = 0
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None

    # The form of the answer, checked by `constraint`.
    structured_outputs: dict[str, Any] | None = None

    # OpenAI's bookkeeping: accepted and ignored, because it does not concern the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


def sampling_values(
    request: SamplingFields, defaults: Mapping[str, Any], max_tokens: int | None
) -> dict[str, Any]:
    """Arguments of SamplingParams: what the request gives, else the model's defaults. max_tokens:
    the request's limit; the lower one counts. Raises RequestError naming `logit_bias`."""
    values = dict(defaults)
    values.update(
        {name: getattr(request, name) for name in SAME if name in request.model_fields_set}
    )
    values["max_tokens"] = lower(max_tokens, values.get("max_tokens"))
    if request.logit_bias:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    return values


def lower(*limits: int | None) -> int | None:
    """Return the lowest limit. None = no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


FLAGS = ("disable_any_whitespace", "disable_additional_properties")


def constraint(
    structured_outputs: Mapping[str, Any] | None, form: Mapping[str, Any], form_field: str
) -> StructuredOutputsParams | None:
    """Return the constraint that a request asks for with `structured_outputs`, or with the API's
    own field, `form_field`. form: what the own field asks for, as arguments of
    StructuredOutputsParams; empty if it asks for nothing. Raises RequestError, which names the
    field."""
    if structured_outputs is None:
        return StructuredOutputsParams(**form, parameter=form_field) if form else None
    if form:
        raise RequestError(
            f"{form_field} and structured_outputs exclude each other: leave one of them out",
            parameter="structured_outputs",
        )
    return StructuredOutputsParams(**_checked(structured_outputs))


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in given.items() if value is not None}
    known = (*CONSTRAINT_KINDS, *FLAGS, "whitespace_pattern")
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        raise MalformedRequest(
            f"unknown field 'structured_outputs.{unknown}'; it has {', '.join(known)}",
            parameter="structured_outputs",
        )
    wrong = next((name for name in FLAGS if not isinstance(values.get(name, False), bool)), None)
    if wrong is not None:
        raise MalformedRequest(
            f"structured_outputs.{wrong}: expected true or false, got {brief(values[wrong])}",
            parameter="structured_outputs",
        )
    if not isinstance(values.get("whitespace_pattern", ""), str):
        raise MalformedRequest(
            "structured_outputs.whitespace_pattern: expected a string",
            parameter="structured_outputs",
        )
    return values


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """JSON keys are text; values beyond ±100 count as ±100 (OpenAI's range)."""
    result = {}
    for key, value in biases.items():
        if not key.isascii() or not key.isdigit() or len(key) > 18:
            raise RequestError(
                f"logit_bias: expected token ids as keys, got {key[:60]!r}", parameter="logit_bias"
            )
        result[int(key)] = max(-100.0, min(100.0, value))
    return result
