"""A server of the real app with a fake engine. Most tests use it in this process; tests of
connections use a socket."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pegboard_api_openai.api import OpenAIApi
from pegboard_api_openai.plugin import OPENAI, TOKENIZE, TOKENIZER_INFO
from pegboard_api_openai.tokenize import TokenizeApi, TokenizerInfoApi
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.served_app import make_app, serving


def apis(setup: ApiSetup) -> Any:
    return [
        ("openai", OpenAIApi(None, setup), OPENAI),
        ("tokenize", TokenizeApi(None, setup), TOKENIZE),
        ("tokenizer_info", TokenizerInfoApi(None, setup), TOKENIZER_INFO),
    ]


class Http:
    """A client of one app. `events` reads a stream to its end."""

    def __init__(self, client: FakeEngineClient, **settings: Any) -> None:
        self.engine = client
        self.client = TestClient(make_app(apis, client, **settings), raise_server_exceptions=False)

    def chat(self, content: Any = "hello", *, status: int = 200, **fields: Any) -> Any:
        return self.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": content}], **fields},
            status,
        )

    def complete(self, prompt: Any = "hello", *, status: int = 200, **fields: Any) -> Any:
        return self.post("/v1/completions", {"prompt": prompt, **fields}, status)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        response = self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return (
            read_events(response.text) if body.get("stream") and status == 200 else response.json()
        )


def read_events(text: str) -> list[Any]:
    """The JSON of every event. The stream must end with [DONE]."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.fixture
def http() -> Callable[..., Http]:
    """`http(script, engine={...}, **server settings)` makes a client."""

    def make(
        script: Any = "Hello, wörld 🌍!", engine: dict[str, Any] | None = None, **settings: Any
    ) -> Http:
        return Http(FakeEngineClient(script, **(engine or {})), **settings)

    return make


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`serve(client, **server settings)` starts a real server and returns its address."""
    return partial(serving, apis)
