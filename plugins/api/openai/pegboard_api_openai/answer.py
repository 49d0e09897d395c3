"""What both kinds of answer have in common: the head of the object, usage, and chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from pegboard.errors import UnknownModel
from pegboard.interfaces.api import EngineClient, RequestOptions
from pegboard.output import RequestOutput
from pegboard_api_openai.fields import GenerationFields

MAX_NAME = 200
"""Characters of a wrong model name that the error repeats."""

encode = msgspec.json.Encoder().encode


def served_model(client: EngineClient, name: str | None) -> str:
    """`name` if it is served; the first served model when there is none. Raises UnknownModel."""
    names = [model.name for model in client.models()]
    if name is None:
        return names[0]
    if name not in names:
        served = ", ".join(names)
        raise UnknownModel(f"The model `{name[:MAX_NAME]}` does not exist. This server has: {served}", parameter="model")
    return name


class AnswerIds:
    """The ids of one answer: X-Request-Id, else the body's request_id, else fresh. An id a client chose may come twice at
    the same time, so the engine gets it with a random end."""

    def __init__(self, prefix: str, http: Request, given: str | None) -> None:
        chosen = http.headers.get("x-request-id") or given
        self.response_id = f"{prefix}-{chosen or getattr(http.state, 'request_id', None) or uuid.uuid4().hex}"
        self._engine_id = f"{self.response_id}-{uuid.uuid4().hex[:8]}" if chosen else self.response_id

    def options(self, priority: int, prompt_index: int | None = None) -> RequestOptions:
        """For the prompt at `prompt_index`; None when there is only one."""
        suffix = "" if prompt_index is None else f"-{prompt_index}"
        return RequestOptions(request_id=self._engine_id + suffix, priority=priority)


def answer_head(response_id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": response_id, "object": kind, "created": int(time.time()), "model": model}


class Usage:
    """Counts tokens. with_details: report cached prompt tokens too."""

    def __init__(self, *, with_details: bool) -> None:
        self._with_details = with_details
        self._prompts: dict[int, tuple[int, int | None]] = {}
        self._num_completion_tokens = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count an output's new tokens, and its prompt once."""
        if prompt_index not in self._prompts:
            self._prompts[prompt_index] = (len(output.prompt_token_ids or ()), output.num_cached_tokens)
        for completion in output.outputs:
            self._num_completion_tokens += len(completion.token_ids)

    def num_prompt_tokens(self, prompt_index: int) -> int:
        return self._prompts[prompt_index][0]

    def total(self) -> dict[str, Any]:
        num_prompt_tokens = sum(num_tokens for num_tokens, _ in self._prompts.values())
        usage = usage_of(num_prompt_tokens, self._num_completion_tokens)
        cached = [num_cached for _, num_cached in self._prompts.values() if num_cached is not None]
        if self._with_details and cached:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
        return usage


def usage_of(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, Any]:
    total = num_prompt_tokens + num_completion_tokens
    return {"prompt_tokens": num_prompt_tokens, "total_tokens": total, "completion_tokens": num_completion_tokens}


class ChunkWriter:
    """Events of one stream. What is the same in every chunk is encoded once."""

    def __init__(self, request: GenerationFields, head: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        options = request.stream_options
        forced = bool(settings.get("enable_force_include_usage"))
        self.include_usage = forced or bool(options and options.include_usage)
        self.continuous = forced or bool(options and options.continuous_usage_stats)
        self._start = b"data: " + encode(head)[:-1] + b',"choices":['

    def chunk(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None = None, **more: Any) -> bytes:
        """One choice's news. more: further fields of the chunk."""
        if usage is not None:
            more["usage"] = usage
        end = b"]," + encode(more)[1:] if more else b"]}"
        return self._start + encode(choice) + end + b"\n\n"

    def usage_chunk(self, usage: Mapping[str, Any]) -> bytes:
        """The last chunk: no choices, the usage of the whole request."""
        return self._start + b'],"usage":' + encode(usage) + b"}\n\n"
