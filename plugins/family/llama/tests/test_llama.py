"""The templates of Llama write what its parsers read."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from pegboard_family_llama.plugin import LLAMA_3, LLAMA_3_1

from pegboard.interfaces.model_family import ModelFamilyNeed
from pegboard.interfaces.tokenizer import Chat
from pegboard.plan.families import matches
from pegboard_chat.chat_template import ChatTemplate
from pegboard_testing.parser_examples import TOOLS

META = (  # the turn and header layout of Llama 3.0's own template
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 "
    "%}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def render(source: str, messages: list[dict[str, Any]], **settings: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<|begin_of_text|>"}).render(
        Chat(messages=messages, **settings)
    )


OURS = files("pegboard_family_llama").joinpath("llama3_json.jinja").read_text("utf-8")
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Weather?"},
]


def test_without_tools_the_prompt_is_the_one_of_metas_template() -> None:
    for messages in (CHAT, CHAT[1:], CHAT[1:2]):
        for prompts in (True, False):
            assert render(OURS, messages, add_generation_prompt=prompts) == render(
                META, messages, add_generation_prompt=prompts
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
    prompt = render(OURS, [*CHAT, *turns], tools=TOOLS)
    written = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    assert f"assistant<|end_header_id|>\n\n{written}; {written}<|eot_id|>" in prompt
    assert "<|start_header_id|>ipython<|end_header_id|>\n\n18<|eot_id|>" in prompt
    assert prompt.count('"name": "now"') == 1 and prompt.index("Be brief.") < prompt.index(
        '"name": "now"'
    ) < prompt.index("Hi")
    assert prompt.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


def test_llama_3_is_known_by_its_template() -> None:
    need = ModelFamilyNeed(
        model_type="llama", architectures=frozenset({"LlamaForCausalLM"}), template=META
    )
    assert matches(LLAMA_3, need)[0] == 4
    assert matches(LLAMA_3_1, need)[0] == 0
