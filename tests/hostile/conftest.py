"""All APIs that read bodies, with a fake engine, called on the event loop of the test."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pegboard_api_admin.admin import AdminApi
from pegboard_api_admin.options import AdminOptions
from pegboard_api_admin.plugin import ADMIN
from pegboard_api_anthropic.api import AnthropicApi
from pegboard_api_anthropic.plugin import ANTHROPIC
from pegboard_api_openai.api import OpenAIApi
from pegboard_api_openai.plugin import OPENAI, TOKENIZE
from pegboard_api_openai.tokenize import TokenizeApi
from pegboard_api_pooling.api import PoolingApi
from pegboard_api_pooling.plugin import POOLING
from pegboard_api_responses.api import ResponsesApi
from pegboard_api_responses.options import ResponsesOptions
from pegboard_api_responses.plugin import RESPONSES

from pegboard.interfaces.api import ApiSetup
from pegboard.interfaces.tokenizer import Chat, Rendered
from pegboard_chat import ChatTemplate
from pegboard_testing.fake_client import ByteTokenizer, FakeEngineClient
from pegboard_testing.served_app import make_app

sys.path.insert(0, str(Path(__file__).parent))

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools | tojson if tools "
    "}}{{ extra | tojson if extra }}"
)


class CountingTokenizer(ByteTokenizer):
    """Renders a real template, and counts the characters that it encodes and the calls of
    `decode`."""

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_decoded = 0
        self._template = ChatTemplate(TEMPLATE, {})

    def render(self, chat: Chat) -> Rendered:
        text = self._template.render(chat)
        return Rendered(self.encode(text, add_special_tokens=False), text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def apis(setup: ApiSetup) -> Any:
    return [
        ("openai", OpenAIApi(None, setup), OPENAI),
        ("tokenize", TokenizeApi(None, setup), TOKENIZE),
        ("responses", ResponsesApi(ResponsesOptions(), setup), RESPONSES),
        ("anthropic", AnthropicApi(None, setup), ANTHROPIC),
        ("pooling", PoolingApi(None, setup), POOLING),
        ("admin", AdminApi(AdminOptions(), setup), ADMIN),
    ]


@dataclass
class Hostile:
    """The application. `lag_s`: the longest time for which the event loop could do nothing else
    during `run`, in seconds of this process's work, so that other programs on the machine do not
    count. `work_s`: all work of this process during `run`."""

    client: FakeEngineClient
    tokenizer: CountingTokenizer
    app: Any
    lag_s: float = 0.0
    work_s: float = 0.0

    def run(self, body: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        """Call `body` with a client of the application."""
        asyncio.run(self._run(body))

    async def _run(self, body: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        gc.freeze()  # as the server does when it is ready
        beats = asyncio.create_task(self._beat())
        start = time.process_time()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://server", timeout=60
        ) as http:
            await body(http)
        beats.cancel()
        self.work_s = time.process_time() - start
        gc.unfreeze()

    async def _beat(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            self.lag_s = max(self.lag_s, now - last)
            last = now


@pytest.fixture
def make_hostile() -> Callable[..., Hostile]:
    """`make_hostile(**server settings)` makes an application. engine: more about the fake
    engine."""

    def make(engine: Any = None, **settings: Any) -> Hostile:
        client = FakeEngineClient("Hello", max_model_len=4096, **engine or {})
        tokenizer = CountingTokenizer()
        client._tokenizer = tokenizer
        return Hostile(client, tokenizer, make_app(apis, client, **settings))

    return make


@pytest.fixture
def hostile(make_hostile: Callable[..., Hostile]) -> Hostile:
    return make_hostile()
