"""Kind `builtin_tool` (provisional): tools of the Responses API that the server runs itself. Runs in A. Ambient.

A client lists them by type (`{"type": "mcp", "server_label": "files"}`) and sees only the calls and their results. An API plugin
shows their functions to the model, runs what the model calls, and gives the results back to it within the same response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pegboard.interfaces.spec import Need, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinToolSpec(Spec):
    """supports: `type`, the set of values of `type` in a request's `tools` that it serves ("web_search", "mcp", …).
    flags: `tool_servers` = a client of tool servers: the setting `tool_server` enables it and becomes its option `servers`."""

    FLAGS = frozenset({"tool_servers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinToolNeed(Need):
    """type: of a tool, as a request gives it."""

    type: str | None = None


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function that the model may call.

    name: as the model sees it, unique among the functions of a request: up to 64 letters, digits, "_" and "-", because some
    templates take no others. parameters: JSON schema of its arguments, an object.
    item: the type of the output item that a call becomes, which decides the events that a stream tells. Code is the argument
    `code`, or the only one; what a search does follows from `tool`: "search" (`query`), "open" (`url`, `id`), "find" (`pattern`).
    server, tool: the server's label and the function's own name there.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    item: Literal["mcp_call", "code_interpreter_call", "web_search_call"] = "mcp_call"
    server: str = ""
    tool: str = ""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """text: what the model reads. is_error: the call failed, and the text says how. fields: further fields of the output item,
    such as {"container_id": …}."""

    text: str
    is_error: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


class ToolSession(Protocol):
    """One entry of one response's `tools`. Calls of the same response share its state."""

    def functions(self) -> Sequence[ToolFunction]:
        """The functions that the model may call, at least one."""

    async def run(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        """Call the function called `name`; one call at a time. A failure that the tool reports is an output with `is_error`. The
        caller turns an exception into such an output, sets the time limit, and cancels when the client leaves."""

    async def close(self) -> None:
        """Release everything. Called once, at the end of the response, from any task; perhaps never if nothing was run."""


class BuiltinTool(Protocol):
    """One per API process, built with its options and None (there is no setup). All methods are called on the server's event
    loop."""

    async def start(self) -> None:
        """Called before the server listens: find out which tools there are. Raises ConfigError for a tool server that cannot be
        reached."""

    def session(self, tool: Mapping[str, Any], path: str, response_id: str) -> ToolSession | None:
        """A session for one entry of `tools`, whose type is one of the spec's; None = the entry is another plugin's. Cheap:
        connections are opened by the first call. Raises RequestError whose `parameter` begins with `path` ("tools[0]") for fields
        it cannot act on."""
