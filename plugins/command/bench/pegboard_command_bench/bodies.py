"""The routes that can be measured, and the body that each request has for its route."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pegboard_command_bench.datasets import BenchRequest
from pegboard_command_bench.media import form

POOLING = {
    "openai-embeddings": "/v1/embeddings",
    "openai-embeddings-chat": "/v1/embeddings",
    "vllm-pooling": "/pooling",
    "vllm-rerank": "/v1/rerank",
}
"""Maps the backends of models that pool, which answer without tokens, to their routes."""

ENDPOINTS = {
    "vllm": "/v1/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-audio": "/v1/audio/transcriptions",
    **POOLING,
}
"""Maps a backend (vLLM's names) to its route."""

TAKES_IMAGES = ("openai-chat", "openai-embeddings-chat")
"""The backends whose requests are messages."""


@dataclass(frozen=True)
class Target:
    """The server that is measured. backend: one of ENDPOINTS. extra: fields of every body."""

    url: str
    model: str
    headers: Mapping[str, str]
    backend: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False
    verify: bool = True

    @property
    def pools(self) -> bool:
        return self.backend in POOLING


def content_of(target: Target, asked: BenchRequest) -> tuple[str, bytes]:
    """Return the type and the bytes of a request's body."""
    if asked.recording is not None:
        return form(recording_fields(target, asked), asked.recording)
    body = pooling_body(target, asked) if target.pools else text_body(target, asked)
    return "application/json", json.dumps(body).encode()


def pooling_body(target: Target, asked: BenchRequest) -> dict[str, Any]:
    """Return the body for a model that pools. Texts that are too long for it are cut, because many
    of these models have short contexts; vLLM does so too."""
    body: dict[str, Any] = {"model": target.model, "truncate_prompt_tokens": -1}
    if target.backend == "vllm-rerank":
        body |= {"query": asked.prompt, "documents": list(asked.others)}
    elif target.backend == "openai-embeddings-chat":
        body["messages"] = [{"role": "user", "content": asked.content}]
    else:
        body["input"] = [asked.prompt, *asked.others] if asked.others else asked.prompt
    return {**body, **target.extra}


def text_body(target: Target, asked: BenchRequest) -> dict[str, Any]:
    """Return the body for a model that generates text."""
    body: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        **target.extra,
    }
    if target.backend == "openai-chat":
        body |= {
            "messages": [{"role": "user", "content": asked.content}],
            "max_completion_tokens": asked.output_len,
        }
    else:
        body |= {"prompt": asked.prompt, "max_tokens": asked.output_len}
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body


def recording_fields(target: Target, asked: BenchRequest) -> dict[str, Any]:
    """Return the fields of a form with a recording."""
    return {
        "model": target.model,
        "prompt": asked.prompt,
        "stream": "true",
        "stream_include_usage": "true",
        "max_completion_tokens": asked.output_len,
        **target.extra,
    }
