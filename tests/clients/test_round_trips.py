"""What the server has answered is sent back unchanged as part of the next turn, by each client in
its own way. The server accepts it, and the model sees what it wrote.

The answers are generated: reasoning, text and calls in any combination, with arguments that may not
be JSON, and cut off after any number of tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pegboard_api_anthropic.api import AnthropicApi
from pegboard_api_anthropic.plugin import ANTHROPIC
from pegboard_api_openai.api import OpenAIApi
from pegboard_api_openai.plugin import OPENAI
from pegboard_api_responses.api import ResponsesApi
from pegboard_api_responses.options import ResponsesOptions
from pegboard_api_responses.plugin import RESPONSES

from pegboard.interfaces.api import ApiSetup
from pegboard.interfaces.tokenizer import Chat
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser
from pegboard_testing.served_app import serving

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
FUNCTIONS: Any = [{"name": "add", "parameters": SCHEMA}]
MESSAGE_TOOLS: Any = [{"name": "add", "input_schema": SCHEMA}]
RESPONSE_TOOLS: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
HELLO: Any = {"role": "user", "content": "hello"}
MORE: Any = {"role": "user", "content": "and then?"}
MODEL = "fake-model"

ARGUMENTS = ["{}", '{"x": 1}', '{"x": {"y": [null, "é"]}}', "{", '{"x": ', "", "3", "no JSON"]
texts = st.sampled_from(["", "So:", "é🌍", "\n"])
calls = st.sampled_from([f"<call add>{text}</call>" for text in ARGUMENTS])


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, int]:
    """Draw what the model writes, and the number of tokens after which it is cut off."""
    reasoning = draw(st.sampled_from(["", "<think></think>", "<think>hm é</think>"]))
    script = reasoning + draw(texts) + "".join(draw(st.lists(calls, max_size=3)))
    return script, draw(st.just(500) | st.integers(1, len(script.encode()) + 1))


@dataclass
class Served:
    """A server whose model writes `script`."""

    engine: FakeEngineClient
    address: str

    def write(self, script: str) -> None:
        self.engine.script = script

    def seen(self) -> list[dict[str, Any]]:
        """The assistant's messages in the last prompt, as the template gets them."""
        chat = self.engine.requests[-1][0].chat
        assert isinstance(chat, Chat)
        return [dict(message) for message in chat.messages if message["role"] == "assistant"]


def apis(setup: ApiSetup) -> Any:
    return [
        ("openai", OpenAIApi(None, setup), OPENAI),
        ("anthropic", AnthropicApi(None, setup), ANTHROPIC),
        ("responses", ResponsesApi(ResponsesOptions(), setup), RESPONSES),
    ]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = FakeEngineClient("", tool_parser=FakeToolParser, reasoning_parser=FakeReasoningParser)
    with serving(apis, engine) as address:
        yield Served(engine, address)


def each_answer(test: Any) -> Any:
    """Run the test for generated answers, and for those that were once refused."""
    cases = [
        ("<think>hm</think>", 500),  # only reasoning
        ("<think>hm", 9),
        ('<call add>{"x": ', 500),  # cut off inside the arguments
        ("<call add>no JSON</call>", 500),
        ("é", 1),  # cut off inside a character
        ("", 500),
    ]
    for case in cases:
        test = example(answer=case)(test)
    return settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))(
        given(answer=answers())(test)
    )


def check_calls(seen: list[dict[str, Any]], given: list[tuple[str, str]]) -> None:
    """The template gets the calls that the client got: names, and arguments as an object."""
    found = [call["function"] for message in seen for call in message.get("tool_calls", ())]
    assert [call["name"] for call in found] == [name for name, _ in given]
    for call, (_, text) in zip(found, given, strict=True):
        assert call["arguments"] == as_object(text)


def as_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


# --- chat completions -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("dumped", ["object", "model_dump", "exclude_none", "exclude_unset"])
@each_answer
def test_openai_chat(
    served: Served, chat: openai.OpenAI, dumped: str, answer: tuple[str, int]
) -> None:
    script, most = answer
    served.write(script)
    first = chat.chat.completions.create(
        model=MODEL, messages=[HELLO], tools=TOOLS, max_tokens=most
    )
    message: Any = first.choices[0].message
    forms: dict[str, Any] = {
        "object": message,
        "model_dump": message.model_dump(),
        "exclude_none": message.model_dump(exclude_none=True),
        "exclude_unset": message.model_dump(exclude_unset=True),
    }
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": "1"}
        for call in message.tool_calls or ()
    ]
    chat.chat.completions.create(
        model=MODEL, messages=[HELLO, forms[dumped], *results, MORE], tools=TOOLS
    )
    (seen,) = served.seen()
    assert seen["content"] == (message.content or "")
    assert seen.get("reasoning") == (message.reasoning or None)
    check_calls(
        [seen], [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    )


@each_answer
def test_openai_legacy_functions(
    served: Served, chat: openai.OpenAI, answer: tuple[str, int]
) -> None:
    script, most = answer
    served.write(script)
    first = chat.chat.completions.create(
        model=MODEL, messages=[HELLO], functions=FUNCTIONS, max_tokens=most
    )
    message: Any = first.choices[0].message
    call = message.function_call
    assert not message.tool_calls
    assert (first.choices[0].finish_reason == "function_call") is (
        call is not None and most > len(script.encode())
    )
    results: Any = [{"role": "function", "name": call.name, "content": "1"}] if call else []
    chat.chat.completions.create(
        model=MODEL, messages=[HELLO, message, *results, MORE], functions=FUNCTIONS
    )
    check_calls(served.seen(), [(call.name, call.arguments)] if call else [])
    if call is not None:
        result = served.engine.requests[-1][0].chat.messages[2]  # type: ignore[union-attr]
        assert (result["role"], result["content"]) == ("tool", "1")
        assert result["tool_call_id"] == served.seen()[0]["tool_calls"][0]["id"]


@each_answer
def test_openai_legacy_functions_streamed(
    served: Served, chat: openai.OpenAI, answer: tuple[str, int]
) -> None:
    script, most = answer
    served.write(script)
    fields: Any = {"model": MODEL, "messages": [HELLO], "functions": FUNCTIONS, "max_tokens": most}
    whole = chat.chat.completions.create(**fields).choices[0]
    name = ""
    arguments = ""
    reason = None
    for chunk in chat.chat.completions.create(**fields, stream=True):
        choice = chunk.choices[0]
        assert not choice.delta.tool_calls
        if choice.delta.function_call is not None:
            name += choice.delta.function_call.name or ""
            arguments += choice.delta.function_call.arguments or ""
        reason = choice.finish_reason or reason
    call = whole.message.function_call
    assert (name, arguments) == ((call.name, call.arguments) if call else ("", ""))
    assert reason == whole.finish_reason


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_whole", [False, True])
@each_answer
def test_anthropic(served: Served, is_whole: bool, answer: tuple[str, int]) -> None:
    """is_whole: the whole message is sent back, with its id and usage."""
    script, most = answer
    served.write(script)
    with anthropic.Anthropic(base_url=served.address, api_key="x", max_retries=0) as client:
        first = client.messages.create(
            model=MODEL, messages=[HELLO], tools=MESSAGE_TOOLS, max_tokens=most
        )
        message: Any = (
            first.model_dump() if is_whole else {"role": "assistant", "content": first.content}
        )
        uses = [block for block in first.content if block.type == "tool_use"]
        results: Any = [
            {"type": "tool_result", "tool_use_id": use.id, "content": "1"} for use in uses
        ]
        more: Any = {"role": "user", "content": [*results, {"type": "text", "text": "and then?"}]}
        client.messages.create(
            model=MODEL, messages=[HELLO, message, more], tools=MESSAGE_TOOLS, max_tokens=9
        )
    (seen,) = served.seen()
    assert seen["content"] == "".join(block.text for block in first.content if block.type == "text")
    check_calls([seen], [(use.name, json.dumps(use.input)) for use in uses])


# --- responses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dumped", [False, True])
@each_answer
def test_responses(
    served: Served, chat: openai.OpenAI, dumped: bool, answer: tuple[str, int]
) -> None:
    script, most = answer
    served.write(script)
    first = chat.responses.create(
        model=MODEL, input="hello", tools=RESPONSE_TOOLS, max_output_tokens=most
    )
    made = [item for item in first.output if item.type == "function_call"]
    items: Any = [item.model_dump() for item in first.output] if dumped else first.output
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in made
    ]
    history: Any = [HELLO, *items, *results, MORE]
    chat.responses.create(model=MODEL, input=history, tools=RESPONSE_TOOLS)
    check_calls(served.seen(), [(call.name, call.arguments) for call in made])
    counted = chat.responses.input_tokens.count(model=MODEL, input=history, tools=RESPONSE_TOOLS)
    assert counted.input_tokens == len(served.engine.requests[-1][0].token_ids or ())
    second = chat.responses.create(
        model=MODEL, input=[*results, MORE], previous_response_id=first.id, tools=RESPONSE_TOOLS
    )
    listed = list(chat.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in listed] == [
        "message",
        *(item.type for item in first.output),
        *["function_call_output"] * len(made),
        "message",
    ]
    assert [item.id for item in chat.responses.input_items.list(second.id)] == [
        item.id for item in reversed(listed)
    ]


# --- LiteLLM --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("provider", "dumped"), [("openai", False), ("hosted_vllm", True)])
@each_answer
def test_litellm(served: Served, provider: str, dumped: bool, answer: tuple[str, int]) -> None:
    """LiteLLM adds fields of its own to the messages, such as provider_specific_fields. It is
    large, so it is not in requirements-dev.txt."""
    # read when it is imported; without it, it asks the network
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    litellm = pytest.importorskip("litellm")
    script, most = answer
    served.write(script)
    fields: Any = {
        "model": f"{provider}/{MODEL}",
        "api_base": f"{served.address}/v1",
        "api_key": "x",
        "tools": TOOLS,
    }
    first = litellm.completion(messages=[HELLO], max_tokens=most, **fields)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "1"}
        for call in message.tool_calls or ()
    ]
    back = message.model_dump() if dumped else message
    litellm.completion(messages=[HELLO, back, *results, MORE], **fields)
    (seen,) = served.seen()
    assert seen["content"] == (message.content or "")
    check_calls(
        [seen], [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    )


NOTES: Any = {
    "provider_specific_fields": {"refusal": None},
    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
    "images": [],
    "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
    "annotations": [{"type": "url_citation", "url_citation": {}}],
    "id": "msg_1",
    "cache_control": {"type": "ephemeral"},
    "unknown": {"a": [1]},
}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "my-custom-role"])
def test_notes_in_messages_are_ignored_and_in_parameters_refused(
    served: Served, chat: openai.OpenAI, role: str
) -> None:
    part: Any = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "unknown": 1}
    call = {
        "id": "1",
        "type": "function",
        "index": 0,
        "function": {"name": "add", "arguments": "{}", "unknown": 1},
        "unknown": 1,
    }
    messages: Any = [{"role": role, "content": [part], "tool_calls": [call], **NOTES}, MORE]
    chat.chat.completions.create(model=MODEL, messages=messages)
    sent: Any = served.engine.requests[-1][0].chat
    function = {"name": "add", "arguments": {}}
    assert sent.messages[0] == {
        "role": role,
        "content": "hi",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    with pytest.raises(openai.BadRequestError, match="unknown field 'unknown'"):
        chat.chat.completions.create(model=MODEL, messages=[MORE], extra_body={"unknown": 1})
