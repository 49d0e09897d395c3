"""Reads an entry of a request's `tools`: the server that it asks for, and the tools of that server.
An entry cannot name an address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pegboard.errors import RequestError

Item = Literal["mcp_call", "code_interpreter_call", "web_search_call"]

SERVERS: dict[str, tuple[str, Item]] = {
    "web_search": ("browser", "web_search_call"),
    "web_search_2025_08_26": ("browser", "web_search_call"),
    "web_search_preview": ("browser", "web_search_call"),
    "web_search_preview_2025_03_11": ("browser", "web_search_call"),
    "code_interpreter": ("python", "code_interpreter_call"),
    "container": ("container", "mcp_call"),
}
"""Type of tool → the name of the server that serves it, as in vLLM, and the item type of its
calls."""

NOT_FROM_REQUESTS = (
    "the operator names the servers (--tool-server), and nothing in a request is passed on to them"
)
_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "mcp": {"server_label": (), "allowed_tools": (), "require_approval": (None, "never")},
    "code_interpreter": {"container": (None, "auto", {"type": "auto"})},
    "container": {"container": (None, "auto", {"type": "auto"})},
}
_SEARCH_FIELDS: dict[str, tuple[Any, ...]] = {"search_context_size": (None, "medium")}
"""Type of tool → its fields and the values that they may have; () = checked elsewhere."""


def check_fields(tool: Mapping[str, Any], path: str) -> None:
    """Raises RequestError for a field that would have no effect."""
    known = _FIELDS.get(str(tool["type"]), _SEARCH_FIELDS)
    for name, value in tool.items():
        if name == "type" or (value is None and name not in known):
            continue
        where = f"{path}.{name}"
        if name not in known:
            is_address = name in (
                "server_url",
                "headers",
                "authorization",
                "connector_id",
                "tunnel_id",
            )
            why = NOT_FROM_REQUESTS if is_address else f"expected {', '.join(known)}"
            raise RequestError(f"{where} is not supported: {why}", parameter=where)
        if known[name] and not any(
            type(value) is type(good) and value == good for good in known[name]
        ):
            raise RequestError(
                f"{where}: expected {' or '.join(map(repr, known[name]))}, got {value!r:.80}",
                parameter=where,
            )


def allowed_names(tool: Mapping[str, Any], path: str) -> list[str] | None:
    """Returns the tools that `allowed_tools` allows; None = all. Raises RequestError."""
    value = tool.get("allowed_tools")
    if isinstance(value, dict) and set(value) == {"tool_names"}:
        value = value["tool_names"]
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        where = f"{path}.allowed_tools"
        raise RequestError(
            f"{where}: expected a list of names or {{'tool_names': […]}}, got {value!r:.80}",
            parameter=where,
        )
    return value
