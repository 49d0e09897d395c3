"""Kind `builtin_tool` (provisional): tools of the Responses API that the server runs itself. Runs
in A. Ambient.

A client lists such tools by type (`{"type": "mcp", "server_label": "files"}`) and sees only the
calls and their results. An API plugin shows their functions to the model, runs the calls that the
model makes, and gives the model the results within the same response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pegboard.interfaces.spec import Need, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinToolSpec(Spec):
    """supports: `type`, the set of tool types that the plugin serves ("web_search", "mcp", …), as a
    request's `tools` name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinToolNeed(Need):
    """type: the type of a tool, as a request names it."""

    type: str | None = None


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function that the model may call.

    name: the name that the model sees. It is unique among the functions of a request and has up to
    64 letters, digits, "_" and "-", because some chat templates accept no other characters.
    parameters: JSON schema of its arguments, which are an object. item: type of the output item
    that a call becomes; it decides which events are streamed. For a code interpreter, the code is
    the argument `code`, or the only argument. For a web search, `tool` says what it does: "search"
    (`query`), "open" (`url`, `id`) or "find" (`pattern`). server, tool: the server's label, and the
    function's name on that server.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    item: Literal["mcp_call", "code_interpreter_call", "web_search_call"] = "mcp_call"
    server: str = ""
    tool: str = ""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """text: what the model reads. is_error: the call failed, and the text says how. fields: more
    fields of the output item, such as {"container_id": …}."""

    text: str
    is_error: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


class ToolSession(Protocol):
    """One entry of one response's `tools`. Calls of the same response share its state."""

    def functions(self) -> Sequence[ToolFunction]:
        """Return the functions that the model may call. There is at least one."""

    async def run(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        """Call the function with this name. Only one call runs at a time. If the tool reports a
        failure, the output has `is_error`. The caller turns an exception into such an output, sets
        the time limit, and cancels the call when the client disconnects."""

    async def close(self) -> None:
        """Release everything. Called once, at the end of the response, from any task. It may never
        be called if nothing was run."""


class BuiltinTool(Protocol):
    """One instance per API process, built with its options and None, since this kind has no setup.
    All methods are called on the server's event loop."""

    async def start(self) -> None:
        """Find out which tools there are. Called before the server listens. Raises ConfigError if a
        tool server cannot be reached."""

    def session(self, tool: Mapping[str, Any], path: str, response_id: str) -> ToolSession | None:
        """Return a session for one entry of `tools` whose type is one of the spec's, or None if the
        entry belongs to another plugin. Cheap: the first call opens connections. Raises
        RequestError if a field cannot be served; its `parameter` begins with `path`
        ("tools[0]")."""
