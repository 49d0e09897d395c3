"""The chat template of MiniMax-M1 writes what its parser reads."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from pegboard_family_minimax import plugin
from pegboard_family_minimax.tool_parser import MiniMaxToolParser

from pegboard.interfaces.tokenizer import Chat
from pegboard_chat.chat_template import ChatTemplate
from pegboard_chat.parsing import fold
from pegboard_testing.contract_output_parser import run
from pegboard_testing.parser_examples import TOOLS


def render(messages: list[dict[str, Any]], **more: Any) -> str:
    package, _, name = (plugin.M1.chat_template or "").partition(":")
    template = ChatTemplate(files(package).joinpath(name).read_text("utf-8"), {})
    return template.render(Chat(messages=messages, tools=TOOLS, **more))


def test_calls_of_the_template_are_read_back() -> None:
    calls = [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'},
        },
        {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    text = render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "<think>Hm.</think>Looking.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "name": "get_weather", "content": "rain"},
        ]
    )
    assert "Be brief." in text and all(tool["function"]["name"] in text for tool in TOOLS)
    answer = text[text.index("Looking.") :]
    message = fold(run(MiniMaxToolParser(), answer[: answer.index("<end_of_sentence>")]))
    assert message.content.strip() == "Looking." and "Hm." not in text
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("get_weather", '{"city": "Zürich"}'),
        ("now", "{}"),
    ]
    assert text.index("tool name: get_weather\ntool result: rain") > text.index("Looking.")
    assert text.endswith("<beginning_of_sentence>ai name=MiniMax AI\n")
