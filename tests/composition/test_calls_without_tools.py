"""A request without tools: what the model writes as a call is content, as written, for every
family."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from pegboard_api_openai.api import OpenAIApi
from pegboard_api_openai.plugin import OPENAI
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard.plugins.registry import Registry
from pegboard_server.app import build_app
from pegboard_server.settings import ServerConfig
from pegboard_testing.fake_client import FakeEngineClient

CALL = '{"name": "add", "arguments": {"a": 1}}'
FAMILIES = {
    "hermes": ("hermes", None, "", f"Sum: <tool_call>\n{CALL}\n</tool_call>"),
    "mistral": ("mistral", None, "", f"[TOOL_CALLS][{CALL}]"),
    "qwen3": ("hermes", "qwen3", "<think>Hm.</think>", f"<tool_call>\n{CALL}\n</tool_call>"),
    "deepseek": (
        "deepseek_v3",
        "deepseek_r1",
        "<think>Hm.</think>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "gpt-oss": (
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>Hm.<|end|>",
        (
            "<|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1}<|call|>'
        ),
    ),
}
"""Family → tool parser, reasoning parser, what is written as reasoning, and what is written as a
call."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"tools": []},
        {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "add"}}]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_content(family: str, choice: dict[str, Any], stream: bool) -> None:
    tool_parser, reasoning_parser, thought, call = FAMILIES[family]
    registry = Registry.discover()

    def maker(kind: str, name: str | None) -> Any:
        return name and (lambda setup: registry.build(registry.find(kind, name), setup))

    engine = FakeEngineClient(
        thought + call,
        tool_parser=maker("tool_parser", tool_parser),
        reasoning_parser=maker("reasoning_parser", reasoning_parser),
    )
    config = ServerConfig()
    app = build_app(
        [("openai", OpenAIApi(None, ApiSetup(engine, msgspec.structs.asdict(config))), OPENAI)],
        engine,
        config,
    )
    body = {"messages": [{"role": "user", "content": "1 + 1?"}], "stream": stream, **choice}
    answer = TestClient(app).post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        lines = [
            line.removeprefix("data: ")
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    else:
        deltas = [answer.json()["choices"][0]["message"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == call
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == (
        "Hm." if reasoning_parser else ""
    )
    assert not any(delta.get("tool_calls") for delta in deltas)
