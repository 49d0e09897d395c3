"""The chat templates with tools write calls as the parsers read them, and keep the whole
conversation."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from pegboard_family_deepseek import plugin
from pegboard_family_deepseek.tool_parser import DeepSeekV3ToolParser, DeepSeekV31ToolParser

from pegboard.interfaces.tokenizer import Chat
from pegboard_chat.chat_template import ChatTemplate
from pegboard_chat.parsing import StreamParser, fold
from pegboard_testing.contract_output_parser import run
from pegboard_testing.parser_examples import TOOLS

CALLS = [
    {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'},
    },
    {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
]
QUESTION = {"role": "user", "content": "Weather?"}
TURN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    QUESTION,
    {"role": "assistant", "content": "Looking.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
]


def render(family: Any, messages: list[dict[str, Any]], **more: Any) -> str:
    package, _, name = family.chat_template.partition(":")
    template = ChatTemplate(
        files(package).joinpath(name).read_text("utf-8"), {"bos_token": "<｜begin▁of▁sentence｜>"}
    )
    return template.render(Chat(messages=messages, tools=TOOLS, **more))


@pytest.mark.parametrize(
    ("family", "parser"),
    [
        (plugin.V3, DeepSeekV3ToolParser),
        (plugin.R1, DeepSeekV3ToolParser),
        (plugin.V31, DeepSeekV31ToolParser),
    ],
)
def test_calls_are_read_back(family: Any, parser: type[StreamParser]) -> None:
    text = render(family, TURN)
    assert text.startswith("<｜begin▁of▁sentence｜>Be brief.") and all(
        tool["function"]["name"] in text for tool in TOOLS
    )
    answer = text[text.index("Looking.") : text.index("<｜end▁of▁sentence｜>")]
    message = fold(run(parser(), answer))
    assert message.content == "Looking."
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("get_weather", '{"city": "Zürich"}'),
        ("now", "{}"),
    ]
    assert text.index("rain") < text.index("noon")
    assert not text.endswith("<｜Assistant｜>"), (
        "after a tool's output the template must not open a new turn"
    )


def test_who_speaks_next() -> None:
    assert render(plugin.V3, [QUESTION]).endswith("<｜User｜>Weather?<｜Assistant｜>")
    assert render(plugin.V31, [QUESTION]).endswith("<｜User｜>Weather?<｜Assistant｜></think>")
    assert render(plugin.V31, [QUESTION], template_kwargs={"thinking": True}).endswith(
        "<｜Assistant｜><think>"
    )
    assert render(plugin.V3, [QUESTION], add_generation_prompt=False).endswith("Weather?")


def test_old_reasoning_is_left_out() -> None:
    messages = [QUESTION, {"role": "assistant", "content": "<think>Hm.</think>Rain."}, QUESTION]
    for family in (plugin.R1, plugin.V31):
        assert "Hm." not in render(family, messages) and "Rain." in render(family, messages)
