"""A server of the real app around a fake engine: in this process for most tests, behind a socket where connections matter."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from pegboard_api_openai.api import OpenAIApi
from pegboard_api_openai.plugin import OPENAI, RESPONSES, TOKENIZE, TOKENIZER_INFO
from pegboard_api_openai.responses.api import ResponsesApi
from pegboard_api_openai.responses.options import ResponsesOptions
from pegboard_api_openai.tokenize import TokenizeApi, TokenizerInfoApi
from starlette.applications import Starlette
from starlette.testclient import TestClient

from pegboard.config.schema import ServerConfig
from pegboard.interfaces.api import ApiSetup
from pegboard_server.app import build_app
from pegboard_server.server import run_server
from pegboard_testing.fake_client import FakeEngineClient


def make_app(client: FakeEngineClient, builtin_tools: Any = None, **settings: Any) -> Starlette:
    config = ServerConfig(**settings)
    setup = ApiSetup(client, msgspec.structs.asdict(config), builtin_tools=builtin_tools or {})
    apis = [
        ("responses", ResponsesApi(ResponsesOptions(), setup), RESPONSES),
        ("openai", OpenAIApi(None, setup), OPENAI),
        ("tokenize", TokenizeApi(None, setup), TOKENIZE),
        ("tokenizer_info", TokenizerInfoApi(None, setup), TOKENIZER_INFO),
    ]
    return build_app(apis, client, config)


class Http:
    """Calls of one app; `events` reads a stream to its end."""

    def __init__(self, client: FakeEngineClient, **settings: Any) -> None:
        self.engine = client
        self.client = TestClient(make_app(client, **settings), raise_server_exceptions=False)

    def chat(self, content: Any = "hello", *, status: int = 200, **fields: Any) -> Any:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields}, status)

    def complete(self, prompt: Any = "hello", *, status: int = 200, **fields: Any) -> Any:
        return self.post("/v1/completions", {"prompt": prompt, **fields}, status)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        response = self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return read_events(response.text) if body.get("stream") and status == 200 else response.json()


def read_events(text: str) -> list[Any]:
    """The JSON of every event; the stream must end with [DONE]."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.fixture
def http() -> Callable[..., Http]:
    """`http(script, engine={...}, **server settings)`."""

    def make(script: Any = "Hello, wörld 🌍!", engine: dict[str, Any] | None = None, **settings: Any) -> Http:
        return Http(FakeEngineClient(script, **(engine or {})), **settings)

    return make


@contextmanager
def serving(engine: FakeEngineClient, builtin_tools: Any = None, **settings: Any) -> Iterator[str]:
    """A real server on a free port, in a thread; gives its address."""
    config = ServerConfig(port=0, disable_access_log=True, uvicorn_log_level="error", shutdown_timeout_s=1, **settings)
    ready: list[Any] = []
    is_ready = threading.Event()

    async def main() -> None:
        stop = asyncio.Event()

        def on_ready(address: str) -> None:
            ready.extend([address, asyncio.get_running_loop(), stop])
            is_ready.set()

        await run_server(make_app(engine, builtin_tools, **settings), config, on_ready=on_ready, stop=stop)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert is_ready.wait(20)
    try:
        yield ready[0]
    finally:
        ready[1].call_soon_threadsafe(ready[2].set)
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def serve() -> Callable[..., Any]:
    return serving
