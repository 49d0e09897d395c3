"""Checks messages, tools and switches in OpenAI's form and converts them to the form that chat
templates read. Writes logprobs in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.data.media import PARTS
from pegboard.data.output import Logprob
from pegboard.errors import MalformedRequest, RequestError
from pegboard_chat.request_body import decode_json, wrong
from pegboard_chat.request_limits import check_counts, check_depth
from pegboard_chat.tensors import read_integers, read_tensor

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MEDIA_PARTS = {kind for kind in PARTS if kind != "image_pil"} | {"input_image"}
"""Parts that JSON can hold. input_image is the form of the Responses API."""
STRING_FIELDS = ("name", "tool_call_id", "reasoning", "reasoning_content", "refusal")
LEGACY_ID = "function_call"
"""The id of a call in the legacy form, which has none."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for the chat template. Content becomes text, with parts joined by a newline;
    if there are images, audio or video, it stays a list.
    Null fields are left out. Arguments of tool calls become objects. A legacy `function_call`
    becomes a tool call, and the message of the role `function` after it becomes its result. The
    template decides which roles there are. Fields that it does not read are ignored, because
    clients send whole answers back, with notes of their own. Raises MalformedRequest, which names
    `messages[i].field`."""
    if not messages:
        raise RequestError("messages must not be empty", parameter="messages")
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        read = _read_message(message, f"messages[{index}]")
        answers = [call.get("id") for call in result[-1].get("tool_calls", ())] if result else []
        if read["role"] == "function" and LEGACY_ID in answers:
            read |= {"role": "tool", "tool_call_id": LEGACY_ID}
        result.append(read)
    return result


def _read_message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise wrong(f"{path}.role", "a role, such as system, user, assistant or tool", role)
    result: dict[str, Any] = {"role": role}
    for name, value in message.items():
        if value is None:
            continue
        if name == "content":
            result["content"] = read_content(value, f"{path}.content", with_media=True)
        elif name in STRING_FIELDS:
            result[name] = _string(value, f"{path}.{name}")
        elif name == "tool_calls":
            calls = _list_of_objects(value, f"{path}.{name}")
            if calls:
                result[name] = [
                    _read_call(call, f"{path}.{name}[{index}]") for index, call in enumerate(calls)
                ]
        elif name == "function_call":
            call = {
                "id": LEGACY_ID,
                "type": "function",
                "function": _read_function(value, f"{path}.{name}"),
            }
            result.setdefault("tool_calls", [call])
        elif name == "audio" and value:
            raise MalformedRequest(
                f"{path}.audio is not supported: the model reads text only",
                parameter=f"{path}.audio",
            )
    if "content" not in result:
        if role != "assistant" and "tool_calls" not in result:
            raise MalformedRequest(f"{path}.content is required", parameter=f"{path}.content")
        # an answer may consist of reasoning that is not shown
        result["content"] = result.get("refusal", "")
    return result


def read_content(content: Any, path: str, *, with_media: bool = False) -> Any:
    """Return a message's content as text, or with_media as a list of parts if not all are text.
    Raises MalformedRequest, which names `path`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(path, "a string or a list of parts", content)
    if with_media and any(map(_is_media, content)):
        return [
            media_part(part, f"{path}[{index}]")
            if _is_media(part)
            else {"type": "text", "text": _read_part(part, f"{path}[{index}]")}
            for index, part in enumerate(content)
        ]
    return "\n".join(_read_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _is_media(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in MEDIA_PARTS


def media_part(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return an image, audio or video in the form of chats. path: of the field, for errors. Raises
    RequestError for rows that cannot be read."""
    kind = part["type"]
    if kind.endswith("_embeds"):
        part = {**part, kind: _read_rows(part.get(kind), kind, path)}
    if kind == "input_image":
        part = {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    return {"path": path, **part}


def _read_rows(value: Any, kind: str, path: str) -> Any:
    """Return the rows of an item, or them and what else the client says of it, by name."""
    if isinstance(value, str):
        return read_tensor(value, f"{path}.{kind}")
    if not isinstance(value, dict) or not isinstance(text := value.get(kind), str):
        expected = f"base64 of a tensor [rows, width], or an object that has it as {kind}"
        raise wrong(f"{path}.{kind}", expected, value)
    inner = f"{path}.{kind}"
    form = {
        name: read_integers(numbers, f"{inner}.{name[:40]}")
        if isinstance(numbers, str)
        else numbers
        for name, numbers in value.items()
        if name != kind
    }
    return {**form, kind: read_tensor(text, f"{inner}.{kind}")}


def _read_part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise wrong(path, "an object with type and text", part)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise wrong(f"{path}.type", "a string", kind)
    if kind not in TEXT_PARTS:
        raise RequestError(
            f"{path}: parts of type {kind!r} are not supported",
            parameter=path,
        )
    field = TEXT_PARTS[kind]
    return _string(part.get(field), f"{path}.{field}")


def _read_call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    if call.get("type") not in (None, "function"):
        raise wrong(f"{path}.type", "'function'", call["type"])
    result = {
        "type": "function",
        "function": _read_function(call.get("function"), f"{path}.function"),
    }
    if call.get("id") is not None:
        result["id"] = _string(call["id"], f"{path}.id")
    return result


def _read_function(function: Any, path: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, because templates iterate over them.
    Clients send JSON text. The model may have written text that is not JSON, or the answer was cut
    off; clients still send it back, so it is wrapped."""
    if not isinstance(function, dict):
        raise wrong(path, "an object with name and arguments", function)
    given = function.get("arguments") or {}
    arguments = given
    if isinstance(given, str):
        check_counts(given.encode(errors="replace"))
        try:
            arguments = decode_json(given)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"INVALID_JSON": given}
        check_depth(arguments, f"{path}.arguments")
    if not isinstance(arguments, dict):
        raise wrong(f"{path}.arguments", "a JSON object", arguments)
    return {"name": _string(function.get("name"), f"{path}.name"), "arguments": arguments}


def _list_of_objects(value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise wrong(path, "a list of objects", value)
    return value


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise wrong(path, "a string", value)
    return value


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Check function tools and return them. None: no tools were given. Raises MalformedRequest,
    which names `tools[i].field`."""
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
    """Raise MalformedRequest unless the function has a name and its schema, if it has one, is an
    object."""
    name = function.get("name")
    parameters = function.get("parameters")
    if not isinstance(name, str):
        raise wrong(f"{path}.name", "a string", name)
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"{path}.parameters", "a JSON schema (an object)", parameters)


def template_kwargs(given: Mapping[str, Any], reasoning_effort: str | None) -> dict[str, Any]:
    """Return the switches of the chat template. An effort also sets `enable_thinking`, for
    templates that know only this."""
    if reasoning_effort is None:
        return dict(given)
    return {
        "reasoning_effort": reasoning_effort,
        "enable_thinking": reasoning_effort != "none",
        **given,
    }


Step = Mapping[int, Logprob]

LOWEST = -9999.0


class TokenNames:
    """How tokens are named in a response: by their text, or as "token_id:7" (with `as_ids`, and for
    a token without text).

    token_bytes[i]: the bytes of token i, for `bytes` in chat logprobs. Clients need bytes to join
    the tokens of one character.
    """

    def __init__(self, *, as_ids: bool, token_bytes: Sequence[bytes] = ()) -> None:
        self._as_ids = as_ids
        self._token_bytes = token_bytes

    def name(self, token: int, text: str | None) -> str:
        return f"token_id:{token}" if self._as_ids or text is None else text

    def bytes_of(self, token: int, text: str | None) -> list[int]:
        known = self._token_bytes[token] if 0 <= token < len(self._token_bytes) else b""
        return list(known or (text or "").encode("utf-8", "replace"))


def chat_logprobs(
    token_ids: Sequence[int], steps: Sequence[Step] | None, num_top: int, names: TokenNames
) -> dict[str, Any]:
    """Return {"content": [one entry per token]}. num_top: number of alternatives to show, -1 =
    all."""
    steps = steps or [{}] * len(token_ids)
    return {
        "content": [
            _chat_entry(token, step, num_top, names)
            for token, step in zip(token_ids, steps, strict=True)
        ]
    }


def _chat_entry(token: int, step: Step, num_top: int, names: TokenNames) -> dict[str, Any]:
    best = sorted(step.items(), key=lambda item: -item[1].logprob)
    chosen = _named(token, step.get(token) or Logprob(LOWEST), names)
    chosen["top_logprobs"] = [
        _named(other, entry, names) for other, entry in (best if num_top < 0 else best[:num_top])
    ]
    return chosen


def _named(token: int, entry: Logprob, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token, entry.decoded_token),
        "logprob": max(entry.logprob, LOWEST),
        "bytes": names.bytes_of(token, entry.decoded_token),
    }
