"""Turns the fields of a body into a conversation in OpenAI's shape: messages, tools, template
switches, and the schema of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.errors import RequestError, brief
from pegboard_api_anthropic.fields import PromptFields, ToolChoice, wrong
from pegboard_chat.openai_format import media_part

BILLING = "x-anthropic-billing-header"
"""The beginning of a text block that Anthropic's tools put into the system prompt. The block is
removed: it differs in every request, so it would defeat the prefix cache, and it means nothing to
the model."""


def read_messages(system: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in OpenAI's shape. Tool results become messages of the role tool; they are placed
    before the text that the user sent with them. Other fields than role and content are ignored,
    because clients send whole answers back. Raises RequestError naming `messages.0.content`."""
    result: list[dict[str, Any]] = []
    if system:
        text = _system_text(system, "system")
        result += [{"role": "system", "content": text}] if text else []
    if not messages:
        raise RequestError("messages: at least one message is needed", parameter="messages")
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        role = message.get("role")
        if role == "user":
            result += _user(message.get("content"), f"{path}.content")
        elif role == "assistant":
            result.append(_assistant(message.get("content"), f"{path}.content"))
        elif role == "system":
            result.append(
                {
                    "role": "system",
                    "content": _system_text(message.get("content"), f"{path}.content"),
                }
            )
        else:
            raise wrong(f"{path}.role", "user, assistant or system", role)
    return result


def _system_text(content: Any, path: str) -> str:
    blocks = _blocks(content, path)
    texts = [_text(block, f"{path}.{index}") for index, block in enumerate(blocks)]
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _user(content: Any, path: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(_blocks(content, path)):
        if block.get("type") == "tool_result":
            name = f"{path}.{index}"
            inner = _blocks(block.get("content") or "", f"{name}.content")
            text = "\n".join(
                _text(part, f"{name}.content.{place}") for place, part in enumerate(inner)
            )
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": _string(block, "tool_use_id", name),
                    "content": text,
                }
            )
        elif block.get("type") == "image":
            parts.append(_image(block, f"{path}.{index}"))
        else:
            parts.append({"type": "text", "text": _text(block, f"{path}.{index}")})
    if not parts and results:
        return results
    is_text = all(part["type"] == "text" for part in parts)
    message = "\n".join(part["text"] for part in parts) if is_text else parts
    return [*results, {"role": "user", "content": message}]


def _image(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return an image in OpenAI's form."""
    source: Any = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        url = _string(source, "url", f"{path}.source")
    elif kind == "base64":
        form, data = (_string(source, name, f"{path}.source") for name in ("media_type", "data"))
        url = f"data:{form};base64,{data}"
    else:
        raise wrong(f"{path}.source", "an object of type base64 or url", source)
    return media_part({"type": "image_url", "image_url": {"url": url}}, path)


def _assistant(content: Any, path: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(_blocks(content, path)):
        name = f"{path}.{index}"
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", name))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise wrong(f"{name}.input", "an object", arguments)
            function = {"name": _string(block, "name", name), "arguments": arguments}
            calls.append(
                {"id": _string(block, "id", name), "type": "function", "function": function}
            )
        elif kind == "redacted_thinking":
            raise RequestError(
                f"{name}: redacted thinking cannot be read here; leave it out", parameter=name
            )
        else:
            texts.append(_text(block, name))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any, path: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise wrong(path, "a string or a list of blocks", content)
    return content


def _text(block: Mapping[str, Any], path: str) -> str:
    if block.get("type") != "text":
        raise RequestError(
            f"{path}: blocks of type {brief(block.get('type'))} are not supported here",
            parameter=path,
        )
    return _string(block, "text", path)


def _string(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong(f"{path}.{name}", "a string", value)
    return value


CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's shape. Raises RequestError naming `tools.0.field`."""
    functions = []
    for index, tool in enumerate(tools or ()):
        path = f"tools.{index}"
        if tool.get("type", "custom") != "custom":
            message = (
                f"{path}.type: {brief(tool['type'])} is not supported: this API has no tools that "
                "the server runs"
            )
            raise RequestError(message, parameter=f"{path}.type")
        name = tool.get("name")
        schema = tool.get("input_schema")
        if not isinstance(name, str):
            raise wrong(f"{path}.name", "a string", name)
        if not isinstance(schema, dict):
            raise wrong(f"{path}.input_schema", "a JSON schema (an object)", schema)
        function = {"name": name, "parameters": {"type": "object", **schema}}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        functions.append({"type": "function", "function": function})
    return functions or None


def template_kwargs(request: PromptFields) -> dict[str, Any]:
    """The values that the body sets in the chat template."""
    switches: dict[str, Any] = {}
    if request.thinking is not None:
        switches["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        switches["reasoning_effort"] = request.output_config.effort
    return {**switches, **request.chat_template_kwargs}


def read_choice(given: ToolChoice | None) -> tuple[Any, str | None]:
    """Returns the choice in OpenAI's terms and the name of the chosen tool. Raises RequestError."""
    if given is None:
        return None, None
    if given.type == "tool" and given.name is None:
        raise RequestError(
            "tool_choice.name: a choice of type 'tool' names the tool", parameter="tool_choice.name"
        )
    return CHOICES[given.type], given.name


def structure(request: PromptFields) -> StructuredOutputsParams | None:
    """The JSON schema of the answer. Returns None when the body sets none."""
    form = request.output_config.format if request.output_config is not None else None
    if form is None:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise wrong("output_config.format", "{'type': 'json_schema', 'schema': {…}}", form)
    return StructuredOutputsParams(json=form["schema"], parameter="output_config.format")
