"""Reasoning on the real model: a template opens it, the prompt shows the model how to close it, and
structured output waits for that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from server_process import MODEL, PATIENCE_S, Server
from tool_schemas import PARAMETERS, tool

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is not defined or "
    "enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ASK: dict[str, Any] = {"role": "user", "content": "Think, then answer."}
TURNS: list[Any] = [
    *[ASK, {"role": "assistant", "content": "<think>\nFine.\n</think>\nYes."}] * 4,
    ASK,
]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def thinking(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--reasoning-parser", "deepseek_r1", "--chat-template", TEMPLATE)
    with Server(smollm2_gguf, tmp_path_factory.mktemp("thinking"), *flags) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


@pytest.fixture(scope="module")
def client(thinking: Server) -> Iterator[openai.OpenAI]:
    with thinking.client() as client:
        yield client


def joined(chunks: Any, field: str) -> str:
    return "".join(
        getattr(chunk.choices[0].delta, field, None) or "" for chunk in chunks if chunk.choices
    )


def test_reasoning_comes_apart_from_the_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {**GREEDY, "messages": TURNS, "max_completion_tokens": 40}
    message: Any = client.chat.completions.create(**fields).choices[0].message
    assert (
        message.reasoning == message.reasoning_content
        and "Fine" in message.reasoning
        and "think>" not in message.content
    )
    with client.chat.completions.create(stream=True, **fields) as stream:
        chunks = list(stream)
    assert (joined(chunks, "reasoning"), joined(chunks, "content")) == (
        message.reasoning,
        message.content,
    )
    hidden: Any = (
        client.chat.completions.create(**fields, extra_body={"include_reasoning": False})
        .choices[0]
        .message
    )
    assert hidden.reasoning is None and hidden.content == message.content
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    plain: Any = client.chat.completions.create(**fields, extra_body=off).choices[0].message
    assert plain.reasoning is None and plain.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_come_behind_the_reasoning(
    client: openai.OpenAI, choice: Any, stream: bool
) -> None:
    fields: dict[str, Any] = {
        **GREEDY,
        "messages": TURNS,
        "tools": [tool("add")],
        "tool_choice": choice,
        "max_completion_tokens": 80,
    }
    fields["parallel_tool_calls"] = False
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **fields))
        reasoning = joined(chunks, "reasoning")
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        arguments = "".join(call.function.arguments or "" for call in calls)
    else:
        message: Any = client.chat.completions.create(**fields).choices[0].message
        reasoning = message.reasoning
        arguments = message.tool_calls[0].function.arguments
    assert "Fine" in reasoning
    jsonschema.validate(json.loads(arguments), PARAMETERS["add"])


def test_structured_answers_come_behind_the_reasoning(
    client: openai.OpenAI, thinking: Server
) -> None:
    """Every API returns reasoning and answer under its own names."""
    schema = PARAMETERS["add"]
    form: Any = {"type": "json_schema", "name": "sum", "schema": schema}
    response = client.responses.create(
        **GREEDY, input=TURNS, max_output_tokens=80, text={"format": form}
    )
    first, second = response.output
    assert first.type == "reasoning" and first.content and "Fine" in first.content[0].text
    assert (
        second.type == "message"
        and response.usage
        and response.usage.output_tokens_details.reasoning_tokens > 0
    )
    jsonschema.validate(json.loads(response.output_text), schema)
    with anthropic.Anthropic(
        base_url=thinking.url, api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as claude:
        body = {
            "temperature": 0,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        }
        whole = claude.messages.create(model=MODEL, max_tokens=80, messages=TURNS, extra_body=body)
        with claude.messages.stream(
            model=MODEL, max_tokens=80, messages=TURNS, extra_body=body
        ) as stream:
            streamed = stream.get_final_message()
    assert (
        [block.type for block in whole.content]
        == [block.type for block in streamed.content]
        == ["thinking", "text"]
    )
    assert (
        whole.content[0].thinking == streamed.content[0].thinking
        and "Fine" in whole.content[0].thinking
    )
    jsonschema.validate(json.loads(whole.content[1].text), schema)
