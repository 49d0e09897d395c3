"""gpt-oss and built-in tools: the Responses API runs the calls that its parsers read, in all forms
in which the model writes them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from pegboard_api_responses.api import ResponsesApi
from pegboard_api_responses.options import ResponsesOptions
from pegboard_api_responses.plugin import RESPONSES
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard.plugins.registry import Registry
from pegboard_server.app import build_app
from pegboard_server.settings import ServerConfig
from pegboard_testing.fake_builtin_tool import TYPES, FakeBuiltinTool
from pegboard_testing.fake_client import FakeEngineClient

THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
ANSWER = (
    "<|channel|>analysis<|message|>Found.<|end|><|start|>assistant<|channel|>final<|message|>It "
    "is 42.<|return|>"
)
CALLS = {
    "code as text": (
        "<|channel|>analysis to=python code<|message|>print(6 * 7)",
        "python",
        {"code": "print(6 * 7)"},
    ),
    "code as JSON": (
        (
            '<|channel|>commentary to=functions.python <|constrain|>json<|message|>{"code": "6 * '
            '7"}<|call|>'
        ),
        "python",
        {"code": "6 * 7"},
    ),
    "its own browser": (
        '<|channel|>analysis to=browser.search code<|message|>{"query": "é"}<|call|>',
        "browser_search",
        {"query": "é"},
    ),
    "recipient first": (
        ' to=functions.calc_add<|channel|>commentary json<|message|>{"x": 40, "y": 2}<|call|>',
        "calc_add",
        {"x": 40, "y": 2},
    ),
    "behind a preamble": (
        "<|channel|>commentary<|message|>One "
        "moment.<|end|><|start|>assistant<|channel|>commentary to=functions.calc_add "
        '<|constrain|>json<|message|>{"x": 40, "y": 2}<|call|>',
        "calc_add",
        {"x": 40, "y": 2},
    ),
}
TOOLS = [
    {"type": "mcp", "server_label": "calc"},
    {"type": "code_interpreter"},
    {"type": "web_search"},
]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_way_of_gpt_oss(registry: Registry, case: str, stream: bool) -> None:
    text, name, arguments = CALLS[case]

    def maker(kind: str, chosen: str) -> Any:
        return lambda setup: registry.build(registry.find(kind, chosen), setup)

    engine = FakeEngineClient(
        lambda prompt, index: ANSWER if "tool: " in prompt else THOUGHT + text,
        tool_parser=maker("tool_parser", "openai"),
        reasoning_parser=maker("reasoning_parser", "openai_gptoss"),
    )
    tool = FakeBuiltinTool()
    config = ServerConfig()
    setup = ApiSetup(
        engine, msgspec.structs.asdict(config), builtin_tools={kind: [tool] for kind in TYPES}
    )
    app = build_app(
        [("responses", ResponsesApi(ResponsesOptions(), setup), RESPONSES)], engine, config
    )
    answer = TestClient(app).post(
        "/v1/responses", json={"input": "6 * 7?", "tools": TOOLS, "stream": stream}
    )
    assert answer.status_code == 200, answer.text
    events = (
        [json.loads(block.partition("data: ")[2]) for block in answer.text.split("\n\n") if block]
        if stream
        else []
    )
    response = events[-1]["response"] if stream else answer.json()
    assert [call for session in tool.sessions for call in session.calls] == [(name, arguments)]
    kinds = [item["type"] for item in response["output"]]
    preamble = ["message"] if "preamble" in case else []
    item = {
        "python": "code_interpreter_call",
        "browser_search": "web_search_call",
        "calc_add": "mcp_call",
    }[name]
    assert (
        kinds == ["reasoning", *preamble, item, "reasoning", "message"]
        and response["status"] == "completed"
    )
    assert response["output"][0]["content"][0]["text"] == "Let me see."
    assert response["output"][-1]["content"][0]["text"] == "It is 42."
