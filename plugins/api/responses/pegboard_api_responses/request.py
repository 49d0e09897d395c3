"""Turns the fields of a body into the conversation, the sampling parameters and the structure of
the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.errors import MalformedRequest
from pegboard.interfaces.tokenizer import Chat
from pegboard_api_responses.fields import LOGPROBS, PromptFields, ResponsesRequest
from pegboard_api_responses.tools import Tools
from pegboard_chat.chats import ChatRequest, Chats
from pegboard_chat.request_body import wrong
from pegboard_chat.sampling_fields import constraint, sampling_values

NO_CALLS = (
    "built-in tools need calls that can be read, and no tool parser is known for this model, or "
    "--no-enable-auto-tool-choice turns it off: name one with --tool-call-parser, or force a call "
    "with tool_choice 'required'"
)
CHOICES = "none, auto, required or {'type': 'function', 'name': …}"


def chat_request(
    request: PromptFields, chat: Chat, tools: Tools, chats: Chats, cache_salt: str | None = None
) -> ChatRequest:
    """Reads the conversation of the first turn. Raises RequestError naming `tool_choice` or
    `tools`."""
    choice: Any = request.tool_choice
    name = None
    shapes = tools.shapes
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = choice.get("name")
        if not isinstance(name, str):
            raise wrong("tool_choice", CHOICES, choice)
        choice = "named"
    elif isinstance(choice, dict):
        shapes = tools.chosen(choice)
        if not shapes:
            raise wrong(
                "tool_choice", f"{CHOICES}, or the type of one of the built-in tools", choice
            )
        choice = "required"
    elif choice not in (None, "none", "auto", "required"):
        raise wrong("tool_choice", CHOICES, choice)
    if choice == "auto" and not tools.shapes:  # some clients always send it
        choice = None
    if choice is None and tools.builtin and not chats.can_read_calls:
        raise MalformedRequest(NO_CALLS, parameter="tools")
    return ChatRequest(
        chat=chat,
        tool_choice=choice,
        function=name,
        tools=shapes,
        parallel_tool_calls=request.parallel_tool_calls,
        cache_salt=cache_salt,
    )


def response_params(request: ResponsesRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters. The output is always read in pieces (DELTA), so that a whole answer
    is the sum of its stream."""
    if request.top_logprobs is not None and LOGPROBS not in request.include:
        raise MalformedRequest(
            f"top_logprobs needs include: ['{LOGPROBS}']", parameter="top_logprobs"
        )
    form = request.text.format if request.text else None
    return SamplingParams(
        **sampling_values(request, defaults, request.max_output_tokens),
        logprobs=(request.top_logprobs or 0) if LOGPROBS in request.include else None,
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        structured_outputs=constraint(
            request.structured_outputs, _of_format(form or {}), "text.format"
        ),
        output_kind=RequestOutputKind.DELTA,
    )


def _of_format(form: Mapping[str, Any]) -> dict[str, Any]:
    """What `text.format` asks for, as fields of StructuredOutputsParams."""
    kind = form.get("type")
    if kind in (None, "text"):
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise wrong("text.format.type", "text, json_object or json_schema", kind)
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise wrong("text.format.schema", "a JSON schema (an object)", schema)
    return {"json": schema}
