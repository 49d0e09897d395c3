"""A fake of the kind `builtin_tool`: small functions for every item type, without a server.

mcp                calc_add {x, y}; calc_fail; calc_crash (raises); calc_wait (until cancelled); for
server_label "calc" only code_interpreter   python {code}: returns what it was given
web_search         browser_search {query}, browser_open {id}, browser_find {pattern}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.errors import RequestError
from pegboard.interfaces.builtin_tool import BuiltinToolSpec, ToolFunction, ToolOutput

TYPES = frozenset({"mcp", "code_interpreter", "web_search", "web_search_preview"})
FAKE = BuiltinToolSpec(
    api="1.0",
    implementation="pegboard_testing.fake_builtin_tool:FakeBuiltinTool",
    supports={"type": TYPES},
)


def _function(server: str, tool: str, item: Any, **properties: str) -> ToolFunction:
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
    }
    name = tool if server == tool else f"{server}_{tool}"
    return ToolFunction(name, f"Fake {tool}", schema, item=item, server=server, tool=tool)


CALC = [
    _function("calc", "add", "mcp_call", x="integer", y="integer"),
    *(_function("calc", name, "mcp_call") for name in ("fail", "crash", "wait")),
]
PYTHON = [_function("python", "python", "code_interpreter_call", code="string")]
BROWSER = [
    _function("browser", "search", "web_search_call", query="string"),
    _function("browser", "open", "web_search_call", id="string"),
    _function("browser", "find", "web_search_call", pattern="string"),
]


class FakeBuiltinTool:
    """The fake tool. It remembers its sessions."""

    def __init__(self, options: None = None, setup: None = None) -> None:
        self.sessions: list[FakeToolSession] = []
        self.is_started = False

    async def start(self) -> None:
        self.is_started = True

    def session(
        self, tool: Mapping[str, Any], path: str, response_id: str
    ) -> "FakeToolSession | None":
        unknown = next((name for name in tool if name not in ("type", "server_label")), None)
        if unknown is not None:
            raise RequestError(f"{path}.{unknown} is not supported", parameter=f"{path}.{unknown}")
        if tool["type"] == "mcp" and tool.get("server_label") != "calc":
            return None
        functions = {"mcp": CALC, "code_interpreter": PYTHON}.get(tool["type"], BROWSER)
        self.sessions.append(FakeToolSession(functions, response_id))
        return self.sessions[-1]


class FakeToolSession:
    """A session of the fake tool. calls: the calls that ran to their end. num_cancelled: number of
    calls that were cancelled. num_closed: how often the session was closed."""

    def __init__(self, functions: Sequence[ToolFunction], response_id: str) -> None:
        self.response_id = response_id
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.num_cancelled = self.num_closed = 0
        self._functions = functions

    def functions(self) -> Sequence[ToolFunction]:
        return self._functions

    async def run(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        if name == "calc_wait":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        self.calls.append((name, dict(arguments)))
        if name == "calc_crash":
            raise OSError("the tool broke")
        if name == "calc_fail":
            return ToolOutput("cannot", is_error=True)
        if name == "calc_add":
            return ToolOutput(str(arguments["x"] + arguments["y"]))
        return ToolOutput(f"{name} says {next(iter(arguments.values()), None)!r}")

    async def close(self) -> None:
        self.num_closed += 1
