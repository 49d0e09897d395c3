"""The template of Phi-4-mini writes what its parser reads."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from pegboard.interfaces.tokenizer import Chat
from pegboard_chat.chat_template import ChatTemplate
from pegboard_testing.parser_examples import TOOLS

OURS = files("pegboard_family_phi").joinpath("phi4_mini.jinja").read_text("utf-8")
OWN = (  # the layout of Phi-4-mini's own template
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Weather?"},
]


def render(source: str, messages: list[dict[str, Any]], **settings: Any) -> str:
    return ChatTemplate(source, {}).render(Chat(messages=messages, **settings))


def test_without_tools_the_prompt_is_the_one_of_the_models_template() -> None:
    for messages in (CHAT, CHAT[1:], CHAT[1:2]):
        for prompts in (True, False):
            assert render(OURS, messages, add_generation_prompt=prompts) == render(
                OWN, messages, add_generation_prompt=prompts
            )


def test_tools_calls_and_results_are_in_the_prompt() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "18"},
    ]
    written = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    for messages in (CHAT, CHAT[1:]):
        prompt = render(OURS, [*messages, *turns], tools=TOOLS)
        assert (
            f"<|assistant|>functools[{written}, "
            f"{written}]<|end|><|tool_response|>18<|end|><|assistant|>"
        ) in prompt
        head = prompt[: prompt.index("<|user|>")]
        assert head.startswith("<|system|>") and head.endswith("]<|/tool|><|end|>")
        declared = json.loads(
            head[head.index("<|tool|>") + len("<|tool|>") : head.index("<|/tool|>")]
        )
        assert declared == [tool["function"] for tool in TOOLS]
