"""Tool calls on the real model through the official clients: chats, responses and Anthropic's
messages, whole and streamed."""

from __future__ import annotations

import asyncio
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

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
COLD = {"temperature": 0}
"""An argument that Anthropic's client no longer has."""
ASK = [{"role": "user", "content": "Use a tool. Anna from Paris wants 3 of them at 10:30."}]


@pytest.fixture(scope="module")
def calling(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that reads calls in the format of Hermes. This model's template does not support
    tools, so no family recommends the format."""
    with Server(
        smollm2_gguf, tmp_path_factory.mktemp("calling"), "--tool-call-parser", "hermes"
    ) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


@pytest.fixture(scope="module")
def client(calling: Server) -> Iterator[openai.OpenAI]:
    with calling.client() as client:
        yield client


@pytest.fixture(scope="module")
def claude(calling: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=calling.url, api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), PARAMETERS[name])


async def forced_call(client: openai.AsyncOpenAI, name: str, choice: Any) -> None:
    """One tool is forced. The whole answer and the stream have the same valid arguments."""
    fields: dict[str, Any] = {
        **GREEDY,
        "messages": ASK,
        "tools": [tool(name)],
        "tool_choice": choice,
        "max_completion_tokens": 160,
    }
    fields["parallel_tool_calls"] = False  # this model would never stop
    whole = (await client.chat.completions.create(**fields)).choices[0]
    assert [call.function.name for call in whole.message.tool_calls or ()] == [name] * len(
        whole.message.tool_calls
    )
    assert whole.message.tool_calls and not whole.message.content
    for call in whole.message.tool_calls:
        check(name, call.function.arguments)
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    streamed: dict[int, list[str]] = {}
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        for call in chunk.choices[0].delta.tool_calls or ():
            streamed.setdefault(call.index, ["", ""])
            streamed[call.index][0] += call.function.name or ""
            streamed[call.index][1] += call.function.arguments or ""
    assert list(streamed.values()) == [
        [call.function.name, call.function.arguments] for call in whole.message.tool_calls
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_named", [False, True], ids=["required", "named"])
def test_forced_calls_have_valid_arguments(calling: Server, is_named: bool) -> None:
    assert len(PARAMETERS) == 20

    async def all_tools() -> None:
        async with calling.async_client() as client:
            choices = {
                name: {"type": "function", "function": {"name": name}} if is_named else "required"
                for name in PARAMETERS
            }
            await asyncio.gather(
                *(forced_call(client, name, choice) for name, choice in choices.items())
            )

    asyncio.run(all_tools())


def test_one_of_several_tools_in_one_call_only(client: openai.OpenAI) -> None:
    names = ["get_time", "add", "set_lamp"]
    answer = client.chat.completions.create(
        messages=ASK,
        tools=[tool(name) for name in names],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=80,
        **GREEDY,
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.name in names
    check(call.function.name, call.function.arguments)


def test_a_conversation_of_two_turns(client: openai.OpenAI) -> None:
    """The client's own stream helper assembles the call. The answer to its result is text."""
    messages: list[Any] = list(ASK)
    with client.chat.completions.stream(
        messages=messages,
        tools=[tool("get_weather")],
        tool_choice="required",
        parallel_tool_calls=False,
        **GREEDY,
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    (call, *_) = message.tool_calls or ()
    check("get_weather", call.function.arguments)
    messages.append(
        {
            "role": "assistant",
            "content": message.content,
            "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})],
        }
    )
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."})
    second = client.chat.completions.create(
        messages=messages, tools=[tool("get_weather")], max_completion_tokens=24, **GREEDY
    )
    assert second.choices[0].message.content and not second.choices[0].message.tool_calls


def test_calls_of_the_models_choice_are_read(client: openai.OpenAI) -> None:
    """The prompt shows the model how to call. The parser reads the text that the model repeats."""
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    messages: list[Any] = [
        {"role": "user", "content": f"Repeat exactly this and nothing else: {text}"}
    ]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
    fields: dict[str, Any] = {
        **GREEDY,
        "messages": messages,
        "tools": [tool("add")],
        "max_completion_tokens": 60,
    }
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.create(stream=True, **fields) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == (whole.message.content or "")
    streamed = "".join(
        call.function.arguments or "" for delta in deltas for call in delta.tool_calls or ()
    )
    assert streamed == "".join(call.function.arguments for call in whole.message.tool_calls or ())
    assert bool(whole.message.tool_calls) == (whole.finish_reason == "tool_calls")


@pytest.mark.parametrize("is_strict", [False, True])
def test_strict_tools_hold_calls_of_the_models_choice(
    client: openai.OpenAI, is_strict: bool
) -> None:
    """The call that the model repeats violates the tool's schema. With `strict`, the model cannot
    write it."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [7, 8]}, "note": {"type": "string", "maxLength": 8}},
        "required": ["a", "note"],
        "additionalProperties": False,
    }
    tools: Any = [
        {"type": "function", "function": {"name": "add", "parameters": schema, "strict": is_strict}}
    ]
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    messages: list[Any] = [
        {"role": "user", "content": f"Repeat exactly this and nothing else: {text}"}
    ]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}] * 3
    fields: dict[str, Any] = {
        **GREEDY,
        "messages": messages,
        "tools": tools,
        "max_completion_tokens": 60,
    }
    calls = client.chat.completions.create(**fields).choices[0].message.tool_calls or ()
    assert calls
    for call in calls:
        if is_strict:
            jsonschema.validate(json.loads(call.function.arguments), schema)
        else:
            assert json.loads(call.function.arguments) == {"a": 1, "b": 2}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
        ("olmo3", "<function_calls>\nadd(a=1, b=2)\n</function_calls>"),
    ],
)
def test_strict_tools_hold_calls_that_are_not_json(
    smollm2_gguf: Path, tmp_path: Path, parser: str, text: str
) -> None:
    """The call that the model repeats violates the tool's schema."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"enum": [7, 8]},
            "note": {"enum": ["x y", "z"]},
            "more": {"type": "integer", "maximum": 3},
        },
        "required": ["a", "note"],
        "additionalProperties": False,
    }
    messages: list[Any] = [
        {"role": "user", "content": f"Repeat exactly this and nothing else: {text}"}
    ]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}] * 3
    found = []
    with (
        Server(smollm2_gguf, tmp_path, "--tool-call-parser", parser) as running,
        running.wait_until_ready().client() as client,
    ):
        for is_strict in (False, True):
            tools: Any = [
                {
                    "type": "function",
                    "function": {"name": "add", "parameters": schema, "strict": is_strict},
                }
            ]
            fields: dict[str, Any] = {
                **GREEDY,
                "messages": messages,
                "tools": tools,
                "max_completion_tokens": 160,
            }
            fields["parallel_tool_calls"] = False  # this model would never stop
            calls = client.chat.completions.create(**fields).choices[0].message.tool_calls or ()
            found.append([json.loads(call.function.arguments) for call in calls])
    free, held = found
    assert free and not any(
        jsonschema.Draft202012Validator(schema).is_valid(arguments) for arguments in free
    )
    assert held and all(
        jsonschema.Draft202012Validator(schema).is_valid(arguments) for arguments in held
    )


def response_tool(name: str) -> Any:
    return {"type": "function", "strict": True, **tool(name)["function"]}


def test_a_loop_of_responses(client: openai.OpenAI) -> None:
    """Call, result, answer. Each turn sends only new items. Streams have the same content as whole
    responses."""
    fields: dict[str, Any] = {
        **GREEDY,
        "tools": [response_tool("get_weather")],
        "max_output_tokens": 60,
    }
    fields["parallel_tool_calls"] = False
    first = client.responses.create(
        input="What is the weather in Paris?", tool_choice="required", **fields
    )
    (call,) = [item for item in first.output if item.type == "function_call"][:1]
    check("get_weather", call.arguments)
    assert first.status == "completed" and first.usage and first.usage.total_tokens > 0
    with client.responses.stream(
        input="What is the weather in Paris?", tool_choice="required", **fields
    ) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert [item.arguments for item in streamed.output if item.type == "function_call"][
        0
    ] == call.arguments
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "Sunny, 21 degrees.",
    }
    second = client.responses.create(input=[result], previous_response_id=first.id, **fields)
    assert second.output_text and second.previous_response_id == first.id
    by_hand: Any = [
        {"role": "user", "content": "What is the weather in Paris?"},
        *first.output,
        result,
    ]
    assert client.responses.create(input=by_hand, **fields).output_text == second.output_text
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_responses_whole_streamed_and_in_the_background(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        **GREEDY,
        "input": "What is the capital of France?",
        "max_output_tokens": 24,
    }
    whole = client.responses.create(**fields)
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": fields["input"]}], max_completion_tokens=24, **GREEDY
    )
    assert whole.output_text == chat.choices[0].message.content != ""
    with client.responses.create(stream=True, **fields) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text and [event.sequence_number for event in events] == list(
        range(len(events))
    )
    last = events[-1]
    assert (
        last.type in ("response.completed", "response.incomplete")
        and last.response.output_text == text
    )
    form: Any = {
        "type": "json_schema",
        "name": "point",
        "schema": PARAMETERS["add"],
        "strict": True,
    }
    structured = client.responses.create(
        **{**fields, "max_output_tokens": 60}, text={"format": form}
    )
    jsonschema.validate(json.loads(structured.output_text), PARAMETERS["add"])
    later = client.responses.create(background=True, **{**fields, "max_output_tokens": 400})
    cancelled = client.responses.cancel(later.id)
    assert cancelled.status in ("cancelled", "completed", "incomplete")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(whole.id)
    client.responses.delete(whole.id)


def test_a_stream_in_the_background_is_taken_up_again(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        **GREEDY,
        "input": "What is the capital of France?",
        "max_output_tokens": 24,
    }
    whole = client.responses.create(**fields)
    with client.responses.create(background=True, stream=True, **fields) as stream:
        begun = [next(iter(stream)) for _ in range(5)]
    name = begun[0].response.id  # type: ignore[union-attr]  # response.created
    with client.responses.retrieve(
        name, stream=True, starting_after=begun[-1].sequence_number
    ) as stream:
        events = [*begun, *stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == client.responses.retrieve(name).output_text


def anthropic_tool(name: str) -> Any:
    return {"name": name, "input_schema": PARAMETERS[name]}


def test_messages_whole_and_streamed_are_one(claude: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 24,
        "extra_body": COLD,
        "messages": ASK[:1],
        "system": "Be brief.",
    }
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text" and whole.content[0].text == text != ""
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )
    count = claude.messages.count_tokens(
        model=MODEL, messages=fields["messages"], system="Be brief."
    )
    assert count.input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )
    stopped = claude.messages.create(**{**fields, "stop_sequences": [text[5]]})
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[5])


def test_a_tool_loop_of_messages(claude: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 80,
        "extra_body": COLD,
        "tools": [anthropic_tool("get_weather")],
    }
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "get_weather"},
    ):
        whole = claude.messages.create(messages=ASK, tool_choice=choice, **fields)
        with claude.messages.stream(messages=ASK, tool_choice=choice, **fields) as stream:
            final = stream.get_final_message()
        (block, *_) = whole.content
        assert block.type == "tool_use" and whole.stop_reason == "tool_use"
        jsonschema.validate(block.input, PARAMETERS["get_weather"])
        assert [(part.name, part.input) for part in final.content] == [
            (part.name, part.input) for part in whole.content
        ]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny, 21 degrees."}
    turns: list[Any] = [
        *ASK,
        {"role": "assistant", "content": whole.content[:1]},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(messages=turns, **fields)
    assert answer.content and answer.content[0].type == "text"


def test_errors_are_those_the_clients_know(claude: anthropic.Anthropic, calling: Server) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=1, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        claude.messages.create(model=MODEL, max_tokens=1, messages=ASK, tool_choice={"type": "any"})
    calling.wait_until_ready()
