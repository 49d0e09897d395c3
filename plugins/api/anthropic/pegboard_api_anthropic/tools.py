"""Tools, thinking and structure of a request, in the engine's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.errors import RequestError
from pegboard.interfaces.api import EngineClient, Parsing
from pegboard_api_anthropic.body import shown, wrong
from pegboard_api_anthropic.fields import PromptFields

CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
RESERVED_KWARGS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
)


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's shape. Raises RequestError naming `tools.0.field`."""
    found = []
    for index, tool in enumerate(tools or ()):
        path = f"tools.{index}"
        if tool.get("type", "custom") != "custom":
            message = f"{path}.type: {shown(tool['type'])} is not supported: the server runs no tools, clients do"
            raise RequestError(message, parameter=f"{path}.type")
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str):
            raise wrong(f"{path}.name", "a string", name)
        if not isinstance(schema, dict):
            raise wrong(f"{path}.input_schema", "a JSON schema (an object)", schema)
        function = {"name": name, "parameters": {"type": "object", **schema}}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found or None


def template_kwargs(request: PromptFields) -> dict[str, Any]:
    """The switches of the chat template."""
    given = request.chat_template_kwargs
    taken = next((name for name in RESERVED_KWARGS if name in given), None)
    if taken is not None:
        raise RequestError(f"chat_template_kwargs must not hold {taken!r}", parameter="chat_template_kwargs")
    switches: dict[str, Any] = {}
    if request.thinking is not None:
        switches["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        switches["reasoning_effort"] = request.output_config.effort
    return {**switches, **given}


def read_parsing(
    request: PromptFields,
    tools: Sequence[Mapping[str, Any]] | None,
    client: EngineClient,
    switches: Mapping[str, Any],
    *,
    auto: bool,
) -> Parsing:
    """How the answer is read. auto: calls are read where the choice is the model's."""
    given = request.tool_choice
    choice = CHOICES[given.type] if given is not None else None
    if choice not in (None, "none") and not tools:
        raise RequestError("tool_choice needs tools", parameter="tool_choice")
    if choice == "named" and (given is None or given.name is None):
        raise RequestError("tool_choice.name: a choice of type 'tool' names the tool", parameter="tool_choice.name")
    can_read = auto and client.parsers()["tool_parser"] is not None
    if choice == "auto" and not can_read:
        raise RequestError(
            "tool_choice 'auto' is not supported: no tool parser is known for this model, or automatic choice is switched off; "
            "leave tool_choice out to get text, or force a call with 'any'",
            parameter="tool_choice",
        )
    if choice is None:
        choice = "auto" if tools and can_read else "none"
    return Parsing(
        tools=tools or (),
        tool_choice=choice,  # type: ignore[arg-type]  # one of CHOICES
        function=given.name if given is not None else None,
        parallel_tool_calls=given is None or not given.disable_parallel_tool_use,
        template_kwargs=switches,
    )


def structure(request: PromptFields) -> StructuredOutputsParams | None:
    """What the answer must be."""
    form = request.output_config.format if request.output_config is not None else None
    if form is None:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise wrong("output_config.format", "{'type': 'json_schema', 'schema': {…}}", form)
    return StructuredOutputsParams(json=form["schema"], parameter="output_config.format")
