"""Spec of the built-in tool `mcp`."""

from __future__ import annotations

from pegboard.interfaces.builtin_tool import BuiltinToolSpec

MCP = BuiltinToolSpec(
    api="1.0",
    implementation="pegboard_builtin_tool_mcp.tool:McpTool",
    options="pegboard_builtin_tool_mcp.options:McpOptions",
    supports={
        "type": frozenset(
            {
                "mcp",
                "code_interpreter",
                "container",
                "web_search",
                "web_search_2025_08_26",
                "web_search_preview",
                "web_search_preview_2025_03_11",
            }
        )
    },
)
