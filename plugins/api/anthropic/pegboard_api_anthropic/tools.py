"""Tools, thinking and structure of a request, in the engine's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.errors import RequestError
from pegboard_api_anthropic.body import shown, wrong
from pegboard_api_anthropic.fields import PromptFields, ToolChoice

CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


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
    switches: dict[str, Any] = {}
    if request.thinking is not None:
        switches["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        switches["reasoning_effort"] = request.output_config.effort
    return {**switches, **request.chat_template_kwargs}


def read_choice(given: ToolChoice | None) -> tuple[Any, str | None]:
    """The choice in OpenAI's words, and the tool that it names. Raises RequestError."""
    if given is None:
        return None, None
    if given.type == "tool" and given.name is None:
        raise RequestError("tool_choice.name: a choice of type 'tool' names the tool", parameter="tool_choice.name")
    return CHOICES[given.type], given.name


def structure(request: PromptFields) -> StructuredOutputsParams | None:
    """What the answer must be."""
    form = request.output_config.format if request.output_config is not None else None
    if form is None:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise wrong("output_config.format", "{'type': 'json_schema', 'schema': {…}}", form)
    return StructuredOutputsParams(json=form["schema"], parameter="output_config.format")
