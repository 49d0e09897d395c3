"""Responses and chats with every reasoning parser: reasoning items and fields, whole and streamed,
from the parsers' own examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pegboard_api_openai.api import OpenAIApi
from pegboard_api_openai.plugin import OPENAI
from pegboard_api_responses.api import ResponsesApi
from pegboard_api_responses.options import ResponsesOptions
from pegboard_api_responses.plugin import RESPONSES
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard.plugins.registry import Registry
from pegboard_server.app import build_app
from pegboard_server.settings import ServerConfig
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.parser_examples import Example, load_examples

ROOT = Path(__file__).parents[2]
TOOL_PARSER = {"openai_gptoss": "openai"}
"""Parsers that leave calls to a tool parser for the same format."""
NUM_EXAMPLES = 4


def examples() -> list[Any]:
    found = []
    for file in sorted(ROOT.glob("plugins/family/*/tests/examples.py")):
        for (kind, name), all_examples in load_examples(file).items():
            if kind != "reasoning_parser":
                continue
            reasoned = [
                example for example in all_examples if example.reasoning and not example.prompt_end
            ]
            if name in TOOL_PARSER:  # the tool parser reads calls, even where no tools are offered
                reasoned = [example for example in reasoned if "<|call|>" not in example.text]
            step = max(1, len(reasoned) // NUM_EXAMPLES)
            found += [
                pytest.param(name, e, id=f"{name}:{e.name}")
                for e in reasoned[::step][:NUM_EXAMPLES]
            ]
    return found


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


def app(registry: Registry, name: str, example: Example) -> TestClient:
    def maker(kind: str, chosen: str | None) -> Any:
        return chosen and (lambda setup: registry.build(registry.find(kind, chosen), setup))

    engine = FakeEngineClient(
        example.text,
        reasoning_parser=maker("reasoning_parser", name),
        tool_parser=maker("tool_parser", TOOL_PARSER.get(name)),
    )
    settings = msgspec.structs.asdict(config := ServerConfig())
    apis = [
        ("openai", OpenAIApi(None, ApiSetup(engine, settings)), OPENAI),
        ("responses", ResponsesApi(ResponsesOptions(), ApiSetup(engine, settings)), RESPONSES),
    ]
    return TestClient(build_app(apis, engine, config), raise_server_exceptions=False)


def texts(items: list[Any]) -> tuple[str, str]:
    """Returns (reasoning, answer) of a response."""
    parts = {"reasoning": "", "message": ""}
    for item in items:
        if item["type"] in parts:
            parts[item["type"]] += "".join(part["text"] for part in item["content"])
    return parts["reasoning"].strip(), parts["message"].strip()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "example"), examples())
def test_reasoning_comes_as_items_and_fields(
    registry: Registry, name: str, example: Example
) -> None:
    client = app(registry, name, example)
    expected = (example.reasoning.strip(), example.content.strip())
    fields = {
        "input": "hello",
        "chat_template_kwargs": dict(example.template_kwargs),
        "max_output_tokens": 4000,
    }
    whole = client.post("/v1/responses", json=fields).json()
    assert texts(whole["output"]) == expected
    assert whole["output"][0]["type"] == "reasoning" and whole["output"][0]["status"] == "completed"
    streamed = client.post("/v1/responses", json={**fields, "stream": True}).text
    events = [json.loads(block.split("data: ", 1)[1]) for block in streamed.strip().split("\n\n")]
    assert texts(events[-1]["response"]["output"]) == expected
    deltas = "".join(
        event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"
    )
    assert deltas.strip() == expected[0]
    chat = {
        "messages": [{"role": "user", "content": "hello"}],
        "chat_template_kwargs": dict(example.template_kwargs),
        "max_tokens": 4000,
    }
    message = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]
    assert ((message["reasoning"] or "").strip(), (message["content"] or "").strip()) == expected
