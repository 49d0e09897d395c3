"""Every field that an API accepts changes something that can be observed, or is refused with an
error that names it. (The API `openai` has the same test in its own folder.)"""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import httpx
import pytest
from hostile_routes import COUNT, DETOKENIZE, HEADERS, MESSAGES, RESPONSES, TOKENIZE, USER
from pegboard_api_anthropic.fields import CountTokensRequest, MessagesRequest
from pegboard_api_openai.tokenize import DetokenizeRequest, TokenizeRequest
from pegboard_api_responses.fields import InputTokensRequest, ResponsesRequest
from pydantic import BaseModel

from pegboard.interfaces.output_parser import ChosenParser, Parsers
from pegboard_chat import ChatTemplate
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser

COUNT_INPUT = "/v1/responses/input_tokens"
TEMPLATE = (
    "{{ extra }}{{ enable_thinking }}{{ reasoning_effort }}{% for m in messages %}{{ m.role }}: "
    "{{ m.content }}\n{% endfor %}{{ tools | tojson if tools }}{{ documents | tojson if documents "
    "}}{{ 'go: ' if add_generation_prompt }}"
)
TEXT = "<think>hm</think>hi <call f> {} </call> <call f> {} </call>"
SCHEMA = {"type": "object"}
TOOLS = {"tools": [{"name": "f", "input_schema": SCHEMA}]}
FUNCTIONS = {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
TALK = [*USER, {"role": "assistant", "content": "x"}]

ANTHROPIC_PROMPT = {
    "messages": [{"role": "user", "content": "other"}],
    "system": "Be brief.",
    "tools": TOOLS["tools"],
    "tool_choice": ({"type": "any"}, TOOLS),
    "tool_choice.type": {"type": "never"},
    "tool_choice.name": (
        {"type": "tool", "name": "g"},
        {"tools": [*TOOLS["tools"], {"name": "g", "input_schema": SCHEMA}]},
    ),
    "tool_choice.disable_parallel_tool_use": (
        {"type": "auto", "disable_parallel_tool_use": True},
        TOOLS,
    ),
    "thinking": {"type": "enabled"},
    "thinking.type": {"type": "disabled"},
    "output_config": {"effort": "low"},
    "output_config.effort": {"effort": "high"},
    "output_config.format": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "chat_template_kwargs": {"extra": "x"},
    "model": "other",
}
SAMPLING = {
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.5,
    "seed": 3,
    "stop": ["i"],
    "stop_token_ids": [105],
    "include_stop_str_in_output": (True, {"stop": "i"}),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logit_bias": {"5": 1},
    "priority": 2,
    "request_id": "chosen",
    "structured_outputs": {"regex": "a"},
    "model": "other",
}
RESPONSES_PROMPT = {
    "input": "other",
    "instructions": "Be brief.",
    "previous_response_id": "none",
    "tools": FUNCTIONS["tools"],
    "tool_choice": ("required", FUNCTIONS),
    "parallel_tool_calls": (False, FUNCTIONS),
    "text": {"format": {"type": "json_object"}},
    "text.format": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "text.verbosity": {"verbosity": "low"},
    "reasoning": {"effort": "low"},
    "reasoning.effort": {"effort": "high"},
    "reasoning.summary": {"summary": "concise"},
    "reasoning.generate_summary": {"generate_summary": "concise"},
    "truncation": "auto",
    "chat_template_kwargs": {"extra": "x"},
    "model": "other",
}
CHAT = {
    "messages": [{"role": "user", "content": "other"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "documents": [{"text": "x"}],
    "add_generation_prompt": False,
    "continue_final_message": (True, {"messages": TALK, "add_generation_prompt": False}),
    "add_special_tokens": True,
    "chat_template": "x",
    "chat_template_kwargs": {"extra": "x"},
    "return_token_strs": True,
    "model": "other",
}
ROUTES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    (
        MESSAGES,
        MessagesRequest,
        {"model": "fake-model", "messages": USER, "max_tokens": 40},
        {
            **ANTHROPIC_PROMPT,
            "max_tokens": 2,
            "stream": True,
            "stop_sequences": ["i"],
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
            "cache_salt": "s",
            "priority": 2,
        },
    ),
    (COUNT, CountTokensRequest, {"model": "fake-model", "messages": USER}, ANTHROPIC_PROMPT),
    (
        RESPONSES,
        ResponsesRequest,
        {"input": "x"},
        {
            **SAMPLING,
            **RESPONSES_PROMPT,
            "store": False,
            "background": True,
            "stream_options": ({"include_obfuscation": False}, {}),
            "stream_options.include_obfuscation": ({"include_obfuscation": True}, {"stream": True}),
            "max_tool_calls": 2,
            "include_reasoning": False,
            "include": ["message.output_text.logprobs"],
            "max_output_tokens": 2,
            "top_logprobs": (2, {"include": ["message.output_text.logprobs"]}),
            "cache_salt": "s",
            "service_tier": "flex",
        },
    ),
    (COUNT_INPUT, InputTokensRequest, {"input": "x"}, RESPONSES_PROMPT),
    (TOKENIZE, TokenizeRequest, {"messages": USER}, {**CHAT, "prompt": "x"}),
    (DETOKENIZE, DetokenizeRequest, {"tokens": [104, 105]}, {"tokens": [106], "model": "other"}),
]
IGNORED = {
    MESSAGES: {
        "metadata",
        "service_tier",
        "cache_control",
        "thinking.budget_tokens",
        "thinking.display",
        "context_management",
    },
    RESPONSES: {"user", "metadata", "safety_identifier", "prompt_cache_key"},
}
"""Fields that clients always send, and that do not concern the answer: bookkeeping, hints for a
cache that needs none, and Anthropic's length and form of the thinking, which is shown whole."""
NEEDS_A_CHOICE = {
    (COUNT, "tool_choice"),
    (COUNT_INPUT, "tool_choice"),
    (COUNT_INPUT, "parallel_tool_calls"),
}
"""Fields of a count that only matter for the answer. The clients send the whole request."""


def without_ids(answer: Any) -> Any:
    """An answer without what differs each time."""
    text = re.sub(
        r'"(id|item_id|created_at|completed_at|call_id)": ?("[^"]*"|[\d.]+)', "", json.dumps(answer)
    )
    return re.sub(r"(msg|resp|rs|fc|call|toolu|chatcmpl)_?[-\w]*[0-9a-f]{16,}", "", text)


def observe(make_hostile: Any, path: str, body: dict[str, Any]) -> tuple[int, str, str, list[Any]]:
    """Return the status, the named parameter of an error, the answer, and what reached the
    engine."""
    hostile = make_hostile()
    hostile.tokenizer._template = ChatTemplate(TEMPLATE, {})
    client = hostile.client
    client.script = TEXT
    client._parsers = Parsers(
        tool=ChosenParser("fake", FakeToolParser),
        reasoning=ChosenParser("fake", FakeReasoningParser),
    )
    answers: list[httpx.Response] = []

    async def post(http: httpx.AsyncClient) -> None:
        answers.append(await http.post(path, content=json.dumps(body), headers=HEADERS))

    hostile.run(post)
    answer = answers[0]
    asked = [(prompt, params, options.priority) for prompt, params, options in client.requests]
    if answer.headers["content-type"] != "application/json":
        return answer.status_code, "", "a stream", asked
    error = answer.json().get("error") or {}
    named = (
        str(error.get("param") or "") + " " + error.get("message", "")
        if answer.status_code != 200
        else ""
    )
    return answer.status_code, named, without_ids(answer.json()), [*asked, "chosen" in answer.text]


def cases() -> Any:
    for path, model, base, examples in ROUTES:
        names = [*model.model_fields]
        for outer, field in model.model_fields.items():
            inner = [
                arm
                for arm in get_args(field.annotation)
                if isinstance(arm, type) and issubclass(arm, BaseModel)
            ]
            names += [f"{outer}.{name}" for arm in inner for name in arm.model_fields]
        for name in names:
            if name not in IGNORED.get(path, IGNORED[MESSAGES] if path == COUNT else set()):
                yield pytest.param(path, base, name, examples, id=f"{path}-{name}")


@pytest.mark.parametrize(("path", "base", "name", "examples"), list(cases()))
def test_a_field_acts_or_is_refused(
    make_hostile: Any, path: str, base: dict[str, Any], name: str, examples: Any
) -> None:
    assert name in examples, f"a new field {name}: add a value that changes something"
    value, more = examples[name] if isinstance(examples[name], tuple) else (examples[name], {})
    field, _, inner = name.partition(".")
    given = {**base, **more, field: value}
    if field == "prompt":
        given.pop("messages")
    status, named, *seen = observe(make_hostile, path, given)
    if status != 200:
        assert status in (400, 404) and field in named, named
        return
    rest = {key: item for key, item in value.items() if key != inner} if inner else {}
    plain = {**base, **more, **({field: rest} if rest else {})}
    if (path, field) not in NEEDS_A_CHOICE:
        assert seen != observe(make_hostile, path, plain)[2:], f"{name} changes nothing"
