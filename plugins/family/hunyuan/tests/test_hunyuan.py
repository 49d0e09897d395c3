"""The chat template of Hunyuan writes what its parser reads."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from pegboard_family_hunyuan import plugin
from pegboard_family_hunyuan.reasoning_parser import HunyuanReasoningParser
from pegboard_family_hunyuan.tool_parser import HunyuanToolParser

from pegboard.interfaces.tokenizer import Chat
from pegboard_chat.chat_template import ChatTemplate
from pegboard_chat.parsing import Pipeline, fold, merged
from pegboard_testing.parser_examples import TOOLS


def render(messages: list[dict[str, Any]], **more: Any) -> str:
    package, _, name = (plugin.A13B.chat_template or "").partition(":")
    template = ChatTemplate(files(package).joinpath(name).read_text("utf-8"), {})
    return template.render(Chat(messages=messages, tools=TOOLS, **more))


QUESTION = {"role": "user", "content": "Weather?"}


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
            QUESTION,
            {"role": "assistant", "content": "<think>Hm.</think>Looking.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ]
    )
    assert text.startswith("<|startoftext|>Be brief.") and all(
        tool["function"]["name"] in text for tool in TOOLS
    )
    answer = text.split("<|extra_0|>")[1].removesuffix("<|eos|>")
    pipeline = Pipeline(HunyuanReasoningParser(), HunyuanToolParser())
    message = fold(merged(pipeline.feed(answer.partition("<|eos|>")[0], ()) + pipeline.finish()))
    assert message.content.strip() == "Looking." and "Hm." not in text
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("get_weather", '{"city": "Zürich"}'),
        ("now", "{}"),
    ]
    assert text.endswith("<tool_response>rain</tool_response><|extra_0|>")


def test_thinking_is_switched_off_in_the_prompt() -> None:
    assert render([QUESTION]).endswith("Weather?<|extra_0|>")
    assert render([QUESTION], template_kwargs={"enable_thinking": False}).endswith(
        "<|extra_0|><think>\n\n</think>\n"
    )
