"""Built-in tools end to end: the official client, the real model, and a real MCP server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer
from server_process import MODEL, Server

StartServer = Callable[..., Server]
QUESTION = "What is 20 + 22? Use the tool."
TOOL: dict[str, Any] = {"type": "mcp", "server_label": "calculator", "require_approval": "never"}
FORCED: dict[str, Any] = {
    "model": MODEL,
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_output_tokens": 120,
}


@pytest.fixture
def tool_server() -> Iterator[str]:
    """Yields host:port of a server with one tool."""
    server = MCPServer("calculator")

    @server.tool(description="Adds two numbers")
    def add(x: int, y: int) -> int:
        return x + y

    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(
            uvicorn.Config(server.sse_app(), log_level="critical", lifespan="off")
        )
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        running.should_exit = running.force_exit = True
        thread.join(20)


def test_the_official_client(start_server: StartServer, tool_server: str) -> None:
    server = start_server("--tool-server", tool_server)
    with server.client() as client:
        whole = client.responses.create(input=QUESTION, **FORCED)
        with client.responses.stream(input=QUESTION, **FORCED) as stream:
            events = list(stream)
        streamed = stream.get_final_response()
        later = client.responses.create(
            model=MODEL, input="And twice that?", previous_response_id=whole.id, max_output_tokens=8
        )
        by_hand: Any = [
            {"role": "user", "content": QUESTION},
            *whole.output,
            {"role": "user", "content": "And twice that?"},
        ]
        again = client.responses.create(
            model=MODEL, input=by_hand, max_output_tokens=8, tools=[TOOL], tool_choice="none"
        )  # type: ignore[list-item]
    call = whole.output[0]
    message = whole.output[-1]
    assert (
        call.type == "mcp_call"
        and call.status == "completed"
        and (call.server_label, call.name) == ("calculator", "add")
    )
    assert call.output == "42" and call.arguments == '{"x": 20, "y": 22}'
    assert message.type == "message" and "42" in whole.output_text
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]
    assert streamed.output_text == whole.output_text
    assert (
        "".join(
            event.delta for event in events if event.type == "response.mcp_call_arguments.delta"
        )
        == call.arguments
    )
    assert {later.status, again.status} <= {"completed", "incomplete"} and later.usage is not None
    assert later.usage.input_tokens > whole.usage.input_tokens / 2  # type: ignore[union-attr]
    server.wait_until_idle()
