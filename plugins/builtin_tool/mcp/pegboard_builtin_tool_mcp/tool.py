"""The built-in tool `mcp`: servers of the Model Context Protocol (https://modelcontextprotocol.io)
run the calls of the model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp import MCPError
from mcp.types import (
    CONNECTION_CLOSED,
    CallToolResult,
    EmbeddedResource,
    PaginatedRequestParams,
    TextContent,
    TextResourceContents,
    Tool,
)

from pegboard.errors import ConfigError, PegboardError, RequestError
from pegboard.interfaces.builtin_tool import ToolFunction, ToolOutput
from pegboard.log import get_logger
from pegboard_builtin_tool_mcp.connection import Connection, NoAnswer, cause_of
from pegboard_builtin_tool_mcp.entries import SERVERS, Item, allowed_names, check_fields
from pegboard_builtin_tool_mcp.options import McpOptions

log = get_logger(__name__)

MAX_PAGES = 100
"""Timeout in seconds for the list of a server's tools."""
MAX_NAME = 64
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class ToolServer:
    """A server. address: as the operator wrote it. label: the server's own name."""

    address: str
    label: str
    tools: tuple[Tool, ...]

    def functions(self, item: Item, allowed: Sequence[str] | None) -> list[ToolFunction]:
        """Returns the tools for a request, only those that are `allowed`."""
        return [
            ToolFunction(
                name,
                tool.description or tool.title or tool.name,
                tool.input_schema,
                item,
                self.label,
                tool.name,
            )
            for name, tool in zip(self._names(), self.tools, strict=True)
            if allowed is None or tool.name in allowed
        ]

    def _names(self) -> list[str]:
        """Returns the names by which models call the tools. A tool with the same name as its server
        has only that name. The names of other tools are the server's name and their own, joined by
        `_`."""
        names: list[str] = []
        for tool in self.tools:
            whole = tool.name if tool.name == self.label else f"{self.label}_{tool.name}"
            name = NOT_IN_NAMES.sub("_", whole)[-MAX_NAME:]
            while name in names:
                name = f"{name[-MAX_NAME + 1 :]}_"
            names.append(name)
        return names


class McpTool:
    """Knows the servers and their tools once `start` has run."""

    def __init__(self, options: McpOptions, setup: None) -> None:
        self._options = options
        self._servers: dict[str, ToolServer] = {}

    async def start(self) -> None:
        servers = await asyncio.gather(
            *(self._look(address) for address in self._options.servers), return_exceptions=True
        )
        for server in servers:
            if isinstance(server, NoAnswer):
                raise ConfigError(
                    f"tool_server: {server}; start it, or remove it from the list"
                ) from server
            if isinstance(server, BaseException):
                raise server
            if known := self._servers.get(server.label):
                raise ConfigError(
                    f"tool_server: {known.address} and {server.address} are both called "
                    f"{server.label!r}"
                )
            self._servers[server.label] = server
            names = ", ".join(tool.name for tool in server.tools)
            log.info("tool server %s at %s: %s", server.label, server.address, names or "no tools")

    async def _look(self, address: str) -> ToolServer:
        connection = Connection(address, self._options.connect_timeout_s)
        try:
            session, about = await connection.session()
            async with asyncio.timeout(self._options.connect_timeout_s):
                tools: list[Tool] = []
                cursor: str | None = None
                for _ in range(MAX_PAGES):
                    page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
                    tools += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        break
            return ToolServer(address, about.server_info.name, tuple(tools))
        except PegboardError:
            raise
        except Exception as error:  # errors of the library and of the network
            raise NoAnswer(
                f"the MCP server at {address} does not list its tools: {cause_of(error)}"
            ) from error
        finally:
            await connection.close()

    def session(
        self, tool: Mapping[str, Any], path: str, response_id: str
    ) -> "McpToolSession | None":
        if tool["type"] == "mcp":
            check_fields(tool, path)
            server = self._labelled(tool.get("server_label"), path)
            item = "mcp_call"
        else:
            label, item = SERVERS[tool["type"]]
            if label not in self._servers:
                return None
            check_fields(tool, path)
            server = self._servers[label]
        allowed = allowed_names(tool, path)
        names = [known.name for known in server.tools]
        unknown = next((name for name in allowed or () if name not in names), None)
        if unknown is not None or not names:
            where = f"{path}.{'allowed_tools' if allowed else 'server_label'}"
            raise RequestError(
                f"{where}: {server.label} has {', '.join(names) or 'no tools'}, not {unknown!r}",
                parameter=where,
            )
        connection = Connection(server.address, self._options.connect_timeout_s, response_id)
        # one of `Item`
        return McpToolSession(server.functions(item, allowed), connection)  # type: ignore[arg-type]

    def _labelled(self, label: Any, path: str) -> ToolServer:
        server = self._servers.get(label) if isinstance(label, str) else None
        if server is None:
            known = ", ".join(map(repr, self._servers)) or "none"
            raise RequestError(
                (
                    f"{path}.server_label: expected one of the operator's tool servers ({known}), "
                    f"got {label!r:.80}"
                ),
                parameter=f"{path}.server_label",
            )
        return server


class McpToolSession:
    """The session of one response. The first call connects it. The next call replaces a broken
    connection."""

    def __init__(self, functions: Sequence[ToolFunction], connection: Connection) -> None:
        self._functions = {function.name: function for function in functions}
        self._connection = connection

    def functions(self) -> Sequence[ToolFunction]:
        return [*self._functions.values()]

    async def run(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        try:
            session, _ = await self._connection.session()
            result = await session.call_tool(self._functions[name].tool, dict(arguments))
        except Exception as error:  # noqa: BLE001
            # the library's and the network's: the model may try another way
            if not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED:
                await self._connection.close()
            return ToolOutput(f"{name} failed: {cause_of(error)}", is_error=True)
        return ToolOutput(text_of(result), is_error=bool(result.is_error))

    async def close(self) -> None:
        await self._connection.close()


def text_of(result: CallToolResult) -> str:
    """Returns the text of a result, for a model that reads only text."""
    parts: list[str] = []
    for block in result.content:
        if isinstance(block, TextContent):
            parts.append(block.text)
        elif isinstance(block, EmbeddedResource) and isinstance(
            block.resource, TextResourceContents
        ):
            parts.append(block.resource.text)
        else:
            parts.append(f"({block.type} that is not text)")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
