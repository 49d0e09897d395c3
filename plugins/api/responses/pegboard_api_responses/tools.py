"""The tools of a request: functions that the client runs, and built-in tools that the server
runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pegboard.errors import MalformedRequest, PegboardError, PluginFailure, blame, expect
from pegboard.interfaces.builtin_tool import BuiltinTool, ToolFunction, ToolOutput, ToolSession
from pegboard.log import get_logger
from pegboard_api_responses.builtin_items import BuiltinCall
from pegboard_api_responses.options import ResponsesOptions
from pegboard_chat.openai_format import check_function
from pegboard_chat.request_body import shown

log = get_logger(__name__)

Served = Mapping[str, Sequence[BuiltinTool]]
"""Maps a type of tool to the plugins that serve it, in the order in which they are asked."""

Modules = Callable[[], Mapping[str, str]]


class Tools:
    """All tools of one request. shapes: the functions in the form for the chat template and the
    parsers. builtin: the functions that the server runs, by name. entries: for each of these names,
    the entry of the request's `tools` that it came from. modules: module → plugin, to name the
    plugin whose call failed."""

    def __init__(self, options: ResponsesOptions, modules: Modules = dict) -> None:
        self.shapes: list[dict[str, Any]] = []
        self.builtin: dict[str, ToolFunction] = {}
        self.entries: dict[str, Mapping[str, Any]] = {}
        self._options = options
        self._modules = modules
        self._names: set[str] = set()
        self._sessions: list[ToolSession] = []
        self._session_of: dict[str, ToolSession] = {}

    def add_function(self, tool: Mapping[str, Any], path: str) -> None:
        """Add a function that the client runs."""
        check_function(tool, path)
        self._take_name(tool["name"], f"{path}.name")
        self.shapes.append(
            {
                "type": "function",
                "function": {name: value for name, value in tool.items() if name != "type"},
            }
        )

    def add_session(self, entry: Mapping[str, Any], session: ToolSession, path: str) -> None:
        """Add all functions of a built-in tool."""
        self._sessions.append(session)
        for function in session.functions():
            self._take_name(function.name, path)
            self.builtin[function.name] = function
            self.entries[function.name] = entry
            self._session_of[function.name] = session
            shape = {
                "name": function.name,
                "description": function.description,
                "parameters": dict(function.parameters),
            }
            self.shapes.append({"type": "function", "function": shape})

    def _take_name(self, name: str, path: str) -> None:
        if name in self._names:
            raise MalformedRequest(
                f"{path}: there is a function called {name!r} already", parameter=path
            )
        self._names.add(name)

    def callable_names(self) -> dict[str, ToolFunction]:
        """Returns the built-in functions by every name that the model may use. gpt-oss knows some
        of them and writes `browser.search`."""
        dotted = {
            f"{function.server}.{function.tool}": function for function in self.builtin.values()
        }
        return {
            **{name: function for name, function in dotted.items() if name not in self._names},
            **self.builtin,
        }

    def of_client(self) -> list[dict[str, Any]]:
        """The functions that the client runs."""
        return [shape for shape in self.shapes if shape["function"]["name"] not in self.builtin]

    def chosen(self, choice: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the functions that the model may choose from when tool_choice selects a built-in
        tool, such as {"type": "mcp", "server_label": …}."""
        name = choice.get("name")
        entries = [
            entry for entry in self.entries.values() if entry.get("type") == choice.get("type")
        ]
        if choice.get("server_label") is not None:
            entries = [
                entry for entry in entries if entry.get("server_label") == choice["server_label"]
            ]
        return [
            shape
            for shape in self.shapes
            if (function := self.builtin.get(shape["function"]["name"])) is not None
            and any(self.entries[function.name] is entry for entry in entries)
            and name in (None, function.tool, function.name)
        ]

    async def run(self, call: BuiltinCall) -> ToolOutput:
        """Run a call. Never raises: errors are reported to the model, with the name of the plugin
        that failed."""
        name = call.function.name
        arguments = call.arguments()
        if arguments is None:
            return ToolOutput(
                f"{name} was not run: its arguments are not a JSON object", is_error=True
            )
        timeout_s = self._options.tool_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                with blame(None, self._modules):
                    session = self._session_of[name]
                    output: ToolOutput = expect(
                        await session.run(name, arguments), ToolOutput, session, "run"
                    )
        except TimeoutError:
            return ToolOutput(f"{name} gave no answer within {timeout_s:g} s", is_error=True)
        except Exception as error:  # a plugin's bug in one call must not end the response
            if isinstance(error, PluginFailure) or not isinstance(error, PegboardError):
                log.warning("built-in tool %s failed: %s", name, error, exc_info=error)
            message = (
                f": {error}"
                if isinstance(error, PegboardError)
                else f" with {type(error).__name__}"
            )
            return ToolOutput(f"{name} failed{message}", is_error=True)
        limit = self._options.max_tool_output_chars
        if len(output.text) <= limit:
            return output
        cut = f"{output.text[:limit]}\n({len(output.text) - limit} characters more)"
        return ToolOutput(cut, output.is_error, output.fields)

    async def close(self) -> None:
        """End all sessions. A second call does nothing."""
        sessions = self._sessions
        self._sessions = []
        for session in sessions:
            try:
                await session.close()
            except Exception as error:
                log.warning("a built-in tool could not be closed: %s", error, exc_info=error)


def read_tools(
    given: Sequence[Mapping[str, Any]] | None,
    served: Served,
    options: ResponsesOptions,
    response_id: str,
    modules: Modules = dict,
) -> Tools:
    """Reads the tools of a request. modules: see Tools. Raises MalformedRequest or RequestError
    naming `tools[i].field`."""
    tools = Tools(options, modules)
    for index, tool in enumerate(given or ()):
        path = f"tools[{index}]"
        kind = tool.get("type")
        if kind == "function":
            tools.add_function(tool, path)
            continue
        session = _session(
            tool, path, served.get(kind, ()) if isinstance(kind, str) else (), response_id
        )
        if session is None:
            raise MalformedRequest(
                f"{path}.type: {shown(kind)} is not supported here: the server would run it, and "
                "no enabled plugin of kind 'builtin_tool' serves it; operators install one and "
                "enable it, or name its server with --tool-server",
                parameter=f"{path}.type",
            )
        tools.add_session(tool, session, path)
    return tools


def _session(
    tool: Mapping[str, Any], path: str, plugins: Sequence[BuiltinTool], response_id: str
) -> ToolSession | None:
    for plugin in plugins:
        session = plugin.session(tool, path, response_id)
        if session is not None:
            checked: ToolSession = expect(session, ToolSession, plugin, "session")
            return checked
    return None
