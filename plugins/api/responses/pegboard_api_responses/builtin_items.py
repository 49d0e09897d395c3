"""Calls of built-in tools, which the server runs: as output items with OpenAI's events, and as
messages of a conversation.

The model writes a call. When its arguments are complete, the server runs it (`asked`). Then the
call is answered (`answer`), or it is given up (`give_up`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pegboard.interfaces.builtin_tool import ToolFunction, ToolOutput
from pegboard_api_responses.open_items import CALL_ID, OWN_ID, OpenItem, StreamEvent, fresh_name


class BuiltinCall(OpenItem):
    """One call. taken: the ids of the response's other items."""

    prefix = ""
    running = "in_progress"

    def __init__(
        self,
        index: int,
        call_id: str,
        function: ToolFunction,
        taken: Sequence[str] = (),
        **fields: Any,
    ) -> None:
        suffix = call_id.removeprefix(CALL_ID)
        item_id = f"{self.prefix}_{suffix}"
        if not OWN_ID.fullmatch(suffix) or item_id in taken:
            item_id = fresh_name(self.prefix)
        super().__init__(index, item_id, function.item, **fields)
        self.call_id = call_id
        self.function = function
        self.output: ToolOutput | None = None

    @property
    def text(self) -> str:
        """The arguments as the model wrote them. They are JSON if they are valid."""
        return "".join(self._parts)

    def arguments(self) -> dict[str, Any] | None:
        """The arguments, or None if the model did not write a JSON object."""
        return read_arguments(self.text)

    def end(self, status: str) -> list[StreamEvent]:
        """The model has ended the call. A call that was cut off is given up at once."""
        news = self.asked()
        if status != "completed":
            return [*news, *self.give_up()]
        self.item["status"] = self.running
        return news

    def asked(self) -> list[StreamEvent]:
        raise AssertionError(f"{type(self).__name__} overrides asked")

    def answer(self, output: ToolOutput) -> list[StreamEvent]:
        """The call has run. Fill in the item and end it."""
        self.output = output
        self.item.update(output.fields)
        return [
            self.event(f"{self.item['type']}.completed"),
            *super().end("failed" if output.is_error else "completed"),
        ]

    def give_up(self) -> list[StreamEvent]:
        """End the item of a call that is not run, because the answer was cut off or cancelled."""
        return super().end("incomplete")


class McpCall(BuiltinCall):
    prefix = "mcp"
    running = "calling"

    def __init__(
        self, index: int, call_id: str, function: ToolFunction, taken: Sequence[str] = ()
    ) -> None:
        more = {"arguments": "", "output": None, "error": None, "approval_request_id": None}
        name = function.tool or function.name
        super().__init__(
            index, call_id, function, taken, server_label=function.server, name=name, **more
        )

    def begin(self) -> list[StreamEvent]:
        return [*super().begin(), self.event("mcp_call.in_progress")]

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[StreamEvent]:
        super().grow(text, logprobs)
        return [self.event("mcp_call_arguments.delta", delta=text)]

    def asked(self) -> list[StreamEvent]:
        self.item["arguments"] = self.text
        return [self.event("mcp_call_arguments.done", arguments=self.text)]

    def answer(self, output: ToolOutput) -> list[StreamEvent]:
        if not output.is_error:
            self.item["output"] = output.text
            return super().answer(output)
        self.item["error"] = {"type": "mcp_tool_execution_error", "content": output.text}
        _, done = super().answer(output)
        return [self.event("mcp_call.failed"), done]


class CodeInterpreterCall(BuiltinCall):
    """A call of the code interpreter. Its code is sent as one delta, when the arguments are
    complete."""

    prefix = "ci"
    running = "interpreting"

    def __init__(
        self, index: int, call_id: str, function: ToolFunction, taken: Sequence[str] = ()
    ) -> None:
        super().__init__(
            index, call_id, function, taken, code="", container_id="auto", outputs=None
        )

    def begin(self) -> list[StreamEvent]:
        return [*super().begin(), self.event("code_interpreter_call.in_progress")]

    def asked(self) -> list[StreamEvent]:
        code = self.item["code"] = self._code()
        return [
            self.event("code_interpreter_call_code.delta", delta=code),
            self.event("code_interpreter_call_code.done", code=code),
            self.event("code_interpreter_call.interpreting"),
        ]

    def answer(self, output: ToolOutput) -> list[StreamEvent]:
        self.item["outputs"] = [{"type": "logs", "logs": output.text}]
        return super().answer(output)

    def _code(self) -> str:
        arguments = self.arguments() or {}
        values = [arguments["code"]] if "code" in arguments else [*arguments.values()]
        return values[0] if len(values) == 1 and isinstance(values[0], str) else self.text


class WebSearchCall(BuiltinCall):
    """A web search. Its item is sent when the arguments are complete, because only then its action
    is known."""

    prefix = "ws"
    running = "searching"

    def __init__(
        self, index: int, call_id: str, function: ToolFunction, taken: Sequence[str] = ()
    ) -> None:
        super().__init__(index, call_id, function, taken, action={"type": "search", "query": ""})

    def begin(self) -> list[StreamEvent]:
        return []

    def asked(self) -> list[StreamEvent]:
        self.item["action"] = self._action()
        return [
            *super().begin(),
            self.event("web_search_call.in_progress"),
            self.event("web_search_call.searching"),
        ]

    def _action(self) -> dict[str, Any]:
        arguments = self.arguments() or {}
        url = str(
            arguments.get("url") or arguments.get("id") or f"cursor:{arguments.get('cursor', '')}"
        )
        if self.function.tool == "open":
            return {"type": "open_page", "url": url}
        if self.function.tool == "find":
            return {
                "type": "find_in_page",
                "url": url,
                "pattern": str(arguments.get("pattern", "")),
            }
        return {"type": "search", "query": str(arguments.get("query", self.text))}


class IgnoredCall(BuiltinCall):
    """A call that is not run. It has no item and no events, but it stays in the conversation."""

    def asked(self) -> list[StreamEvent]:
        return []

    def begin(self) -> list[StreamEvent]:
        return []

    def end(self, status: str) -> list[StreamEvent]:
        self.output = ToolOutput(
            "This was not run: no more tools may be called in this response.", is_error=True
        )
        return []


FORMS: dict[str, Any] = {
    "mcp_call": McpCall,
    "code_interpreter_call": CodeInterpreterCall,
    "web_search_call": WebSearchCall,
}
"""The class for each item type."""


def read_arguments(text: str) -> dict[str, Any] | None:
    """Parse a JSON object. Returns None when the text is not a JSON object. Empty text means no
    arguments."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# --- back to messages -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call and its result, as the model saw them. arguments is JSON text."""

    call_id: str
    name: str
    arguments: str
    output: str


NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
NO_RESULT = "(the result was not sent back)"


def exchange_of(call: BuiltinCall) -> Exchange | None:
    """Returns the call and its result, or None for a call that was never answered."""
    if call.output is None:
        return None
    arguments = (
        call.text
        if call.arguments() is not None
        else msgspec.json.encode({"invalid": call.text}).decode()
    )
    return Exchange(call.call_id, call.function.name, arguments or "{}", call.output.text)


def read_exchange(item: Mapping[str, Any], functions: Sequence[ToolFunction]) -> Exchange | None:
    """Returns the call and the result of an item that a client sent back, or None if the call was
    not answered. A function is named after this request's tools. If they do not have it, it is
    named as a tool server names it. The item of a web search does not hold its results. Raises
    ValueError naming the field."""
    if item.get("status") in ("in_progress", "incomplete", "calling", "interpreting", "searching"):
        return None
    kind = item["type"]
    call_id = _text(item, "id").partition("_")[2] or _text(item, "id")
    if kind == "mcp_call":
        server = _text(item, "server_label")
        tool = _text(item, "name")
        error = item.get("error")
        failed = error.get("content") or error.get("message") if isinstance(error, dict) else error
        output = item.get("output") if item.get("output") is not None else failed
        name = _name(functions, kind, server, tool)
        return Exchange(
            call_id, name, _text(item, "arguments"), "" if output is None else str(output)
        )
    if kind == "code_interpreter_call":
        outputs = item.get("outputs") or []
        if not isinstance(outputs, list):
            raise ValueError("outputs")
        logs = [
            part["logs"]
            for part in outputs
            if isinstance(part, dict) and isinstance(part.get("logs"), str)
        ]
        known = next((function for function in functions if function.item == kind), None)
        return _exchange(
            call_id,
            known.name if known else "python",
            {"code": _text(item, "code")},
            "\n".join(logs),
        )
    action = item.get("action")
    if not isinstance(action, dict):
        raise ValueError("action")
    if action.get("type") == "open_page":
        return _exchange(
            call_id, _name(functions, kind, "browser", "open"), {"id": action.get("url")}, NO_RESULT
        )
    if action.get("type") == "find_in_page":
        return _exchange(
            call_id,
            _name(functions, kind, "browser", "find"),
            {"pattern": action.get("pattern")},
            NO_RESULT,
        )
    return _exchange(
        call_id,
        _name(functions, kind, "browser", "search"),
        {"query": action.get("query")},
        NO_RESULT,
    )


def _exchange(call_id: str, name: str, arguments: Mapping[str, Any], output: str) -> Exchange:
    return Exchange(call_id, name, msgspec.json.encode(arguments).decode(), output)


def _name(functions: Sequence[ToolFunction], item: str, server: str, tool: str) -> str:
    names = [
        f.name
        for f in functions
        if f.item == item and f.tool == tool and (item != "mcp_call" or f.server == server)
    ]
    return (
        names[0]
        if names
        else tool
        if server == tool
        else NOT_IN_NAMES.sub("_", f"{server}_{tool}")[-64:]
    )


def _text(item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise ValueError(field)
    return value
