"""The template of InternLM writes what its parser reads."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from pegboard.interfaces.tokenizer import Chat
from pegboard_chat.chat_template import ChatTemplate
from pegboard_testing.parser_examples import TOOLS

OURS = files("pegboard_family_internlm").joinpath("internlm2.jinja").read_text("utf-8")
OWN = (  # the layout of InternLM's own templates
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Weather?"},
]


def render(source: str, messages: list[dict[str, Any]], **settings: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(Chat(messages=messages, **settings))


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
        {"role": "assistant", "content": "So: ", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "18"},
    ]
    written = (
        '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": '
        '"Paris"}}<|action_end|>'
    )
    for messages in (CHAT, CHAT[1:]):
        prompt = render(OURS, [*messages, *turns], tools=TOOLS)
        result = "<|im_start|>environment name=<|plugin|>\n18<|im_end|>\n<|im_start|>assistant\n"
        assert prompt.endswith(f"<|im_start|>assistant\nSo: {written}<|im_end|>\n{result}")
        head = prompt[: prompt.index("<|im_start|>user")]
        assert head.startswith("<s><|im_start|>system") and ("Be brief.<|im_end|>" in head) == (
            messages is CHAT
        )
        declared = head[head.index("name=<|plugin|>\n") + len("name=<|plugin|>\n") :].removesuffix(
            "<|im_end|>\n"
        )
        assert json.loads(declared) == [tool["function"] for tool in TOOLS]
