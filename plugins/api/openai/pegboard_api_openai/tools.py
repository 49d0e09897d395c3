"""Tools of a request: checked, and how the answer is read because of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.api import EngineClient, Parsing
from pegboard_api_openai.body import shown
from pegboard_api_openai.errors import InvalidBody
from pegboard_api_openai.fields import ChatRequest

NO_PARSER = (
    "tool_choice 'auto' is not supported: no tool parser is known for this model; name one with --tool-call-parser, leave "
    "tool_choice out to get the answer as text, or force a call with 'required'"
)
NOT_AUTO = "tool_choice 'auto' is not supported: the server runs with --no-enable-auto-tool-choice"


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Function tools, checked; None when there are none. Raises InvalidBody naming `tools[i].field`."""
    for index, tool in enumerate(tools or ()):
        path = f"tools[{index}]"
        if tool.get("type") != "function":
            raise wrong(f"{path}.type", "'function'", tool.get("type"))
        function = tool.get("function")
        if not isinstance(function, dict):
            raise wrong(f"{path}.function", "an object with a name", function)
        check_function(function, f"{path}.function")
    return [dict(tool) for tool in tools or ()] or None


def check_function(function: Mapping[str, Any], path: str) -> None:
    """Raise InvalidBody unless it has a name, and a schema if any that is an object."""
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str):
        raise wrong(f"{path}.name", "a string", name)
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"{path}.parameters", "a JSON schema (an object)", parameters)


def chat_parsing(request: ChatRequest, tools: Sequence[Mapping[str, Any]] | None, client: EngineClient, *, auto: bool) -> Parsing:
    """How the answer to a chat is read. auto: calls are read where the choice is the model's."""
    choice = request.tool_choice
    name: str | None = None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise wrong("tool_choice", "none, auto, required or {'type': 'function', 'function': {'name': …}}", choice)
        choice = "named"
    elif choice not in (None, "none", "auto", "required"):
        raise wrong("tool_choice", "none, auto, required or a named tool", choice)
    return parsing_of(
        choice,
        name,
        tools,
        client,
        auto=auto,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def parsing_of(
    choice: str | None,
    name: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    client: EngineClient,
    *,
    auto: bool,
    **more: Any,
) -> Parsing:
    """`Parsing` for a choice (None = not given, "named" with `name`). Raises InvalidBody naming `tool_choice`."""
    if choice not in (None, "none") and not tools:
        raise InvalidBody("tool_choice needs tools", parameter="tool_choice")
    has_parser = client.parsers()["tool_parser"] is not None
    if choice == "auto" and not (auto and has_parser):
        raise InvalidBody(NOT_AUTO if not auto else NO_PARSER, parameter="tool_choice")
    if choice is None:
        choice = "auto" if tools and auto and has_parser else "none"
    return Parsing(tools=tools or (), tool_choice=choice, function=name, **more)  # type: ignore[arg-type]  # checked above


def wrong(path: str, expected: str, got: Any) -> InvalidBody:
    return InvalidBody(f"{path}: expected {expected}, got {shown(got)}", parameter=path)
