"""The built-in tool `mcp` with real MCP servers, and what it refuses."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.types import CallToolResult, ImageContent, TextContent, Tool
from pegboard_builtin_tool_mcp.entries import check_fields
from pegboard_builtin_tool_mcp.options import McpOptions, url_of
from pegboard_builtin_tool_mcp.plugin import MCP
from pegboard_builtin_tool_mcp.tool import McpTool, ToolServer, text_of
from pydantic import ValidationError

from pegboard.errors import ConfigError, RequestError
from pegboard_testing.contract_builtin_tool import NAME, BuiltinToolContract
from pegboard_testing.contract_generic import check_entry, installed_entry

Start = Callable[..., Any]
FILES = {"type": "mcp", "server_label": "files"}


def make(*servers: str, **more: Any) -> McpTool:
    return McpTool(McpOptions(servers=servers, **more), None)


def started(work: Callable[[McpTool], Awaitable[Any]], *servers: str, **more: Any) -> Any:
    async def run() -> Any:
        tool = make(*servers, **more)
        await tool.start()
        return await work(tool)

    return asyncio.run(run())


def test_contract() -> None:
    check_entry(installed_entry("builtin_tool", "mcp"))


class Contract(BuiltinToolContract):
    entry = FILES
    call = ("files_add", {"x": 1, "y": 2})
    failing = ("files_fail", {"why": "no"})
    refused = [
        ({**FILES, "server_url": "http://evil/sse"}, "server_url"),
        ({**FILES, "headers": {"a": "b"}}, "headers"),
        ({**FILES, "authorization": "x"}, "authorization"),
        ({**FILES, "require_approval": "always"}, "require_approval"),
        ({**FILES, "allowed_tools": ["none"]}, "allowed_tools"),
        ({**FILES, "allowed_tools": []}, "allowed_tools"),
        ({"type": "mcp", "server_label": "other"}, "server_label"),
        ({"type": "mcp"}, "server_label"),
    ]
    address: str

    def tool(self) -> McpTool:
        return make(self.address)


class TestSse(Contract):
    @pytest.fixture(autouse=True)
    def server(self, start: Start, request: pytest.FixtureRequest) -> None:
        self.address = request.getfixturevalue("files").address


class TestStreamableHttp(Contract):
    @pytest.fixture(autouse=True)
    def server(self, request: pytest.FixtureRequest) -> None:
        self.address = request.getfixturevalue("streamable").address


@pytest.fixture(scope="module")
def files(start: Start) -> Any:
    return start("files")


@pytest.fixture(scope="module")
def streamable(start: Start) -> Any:
    return start("files", streamable=True)


@pytest.fixture(scope="module")
def named(start: Start) -> list[str]:
    """One server for each name that serves a type."""
    return [start(name).address for name in ("browser", "python", "container", "My Server")]


def test_the_name_of_a_server_decides_what_it_serves(named: list[str]) -> None:
    async def work(tool: McpTool) -> dict[str, Any]:
        types = {
            "web_search": {},
            "web_search_preview": {"search_context_size": "medium"},
            "container": {},
            "code_interpreter": {"container": {"type": "auto"}},
            "mcp": {"server_label": "My Server", "require_approval": "never"},
        }
        assert set(types) < MCP.supports["type"]  # type: ignore[operator]
        sessions = {
            kind: tool.session({"type": kind, **more}, "tools[0]", "r")
            for kind, more in types.items()
        }
        return {
            kind: [(f.name, f.item, f.server) for f in session.functions()]
            for kind, session in sessions.items()
            if session
        }

    found = started(work, *named)
    assert found["web_search"] == found["web_search_preview"]
    assert found["web_search"][0] == ("browser_run", "web_search_call", "browser")
    assert found["code_interpreter"][:2] == [
        ("python", "code_interpreter_call", "python"),
        ("python_add", "code_interpreter_call", "python"),
    ]
    assert found["container"][0] == ("container_run", "mcp_call", "container")
    assert found["mcp"][0] == ("My_Server_run", "mcp_call", "My Server"), (
        "names of functions have no spaces"
    )


def test_types_without_their_server_are_somebody_elses(files: Any) -> None:
    async def work(tool: McpTool) -> list[Any]:
        return [
            tool.session({"type": kind}, "tools[0]", "r")
            for kind in ("web_search", "code_interpreter", "container")
        ]

    assert started(work, files.address) == [None] * 3


def test_functions_are_described_and_can_be_chosen(files: Any) -> None:
    async def work(tool: McpTool) -> None:
        session = tool.session({**FILES, "allowed_tools": {"tool_names": ["add"]}}, "tools[0]", "r")
        assert session is not None
        (add,) = session.functions()
        assert (add.name, add.description, add.tool) == ("files_add", "Adds two numbers", "add")
        assert (
            set(add.parameters["properties"]) == {"x", "y"} and add.parameters["type"] == "object"
        )
        with pytest.raises(RequestError) as refusal:
            tool.session({**FILES, "allowed_tools": ["add", "sub"]}, "tools[0]", "r")
        assert "'sub'" in str(refusal.value) and "add" in str(refusal.value)

    started(work, files.address)


def test_wrong_arguments_and_errors_are_outputs(files: Any) -> None:
    async def work(tool: McpTool) -> None:
        session = tool.session(FILES, "tools[0]", "r")
        assert session is not None
        failed = await session.run("files_fail", {"why": "because"})
        assert failed.is_error and "because" in failed.text
        assert (await session.run("files_add", {"x": "a"})).is_error
        good = await session.run("files_add", {"x": 20, "y": 22})
        assert (good.text, good.is_error) == ("42", False)
        await session.close()
        await session.close()

    started(work, files.address)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # from the library's streams, because the server is killed
def test_a_connection_that_breaks_is_replaced(start: Start) -> None:
    first = start("files")

    async def work(tool: McpTool) -> None:
        session = tool.session(FILES, "tools[0]", "r")
        assert session is not None
        assert not (await session.run("files_add", {"x": 1, "y": 1})).is_error
        await asyncio.to_thread(first.stop)
        for _ in range(2):
            assert (await session.run("files_add", {"x": 1, "y": 1})).is_error
        second = await asyncio.to_thread(lambda: start("files", port=first.port))
        assert (await session.run("files_add", {"x": 1, "y": 1})).text == "2", second
        await session.close()

    started(work, first.address)
    gc.collect()


def test_a_call_that_never_ends_can_be_left(files: Any) -> None:
    async def work(tool: McpTool) -> None:
        session = tool.session(FILES, "tools[0]", "r")
        assert session is not None
        await session.run("files_add", {"x": 1, "y": 1})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await session.run("files_wait", {})
        assert (await session.run("files_add", {"x": 1, "y": 1})).text == "2"
        await session.close()

    started(work, files.address)


def test_a_server_that_does_not_answer_is_named() -> None:
    async def work(tool: McpTool) -> None: ...

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"tool_server: no MCP server answers at {address}"):
            started(work, address)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{address}.*no answer in time"):
            started(work, address, connect_timeout_s=0.05)


def test_two_servers_of_one_name(start: Start, files: Any) -> None:
    async def work(tool: McpTool) -> None: ...

    other = start("files")
    with pytest.raises(
        ConfigError, match=f"{files.address} and {other.address} are both called 'files'"
    ):
        started(work, files.address, other.address)


@given(
    st.lists(st.text("ab._/ é", min_size=1, max_size=70), min_size=1, max_size=6, unique=True),
    st.sampled_from(["s", "a", "x" * 70]),
)
def test_names_are_such_that_every_template_takes_them(names: list[str], label: str) -> None:
    tools = tuple(Tool(name=name, input_schema={"type": "object"}) for name in names)
    functions = ToolServer("a:1", label, tools).functions("mcp_call", None)
    assert [function.tool for function in functions] == names and len(
        {function.name for function in functions}
    ) == len(names)
    assert all(NAME.fullmatch(function.name) for function in functions)


def test_addresses() -> None:
    options = McpOptions.model_validate({"servers": ["a:1,b:2", "http://c/mcp"]})
    assert options.servers == ("a:1", "b:2", "http://c/mcp")
    assert McpOptions.model_validate({"servers": "a:1, b:2"}).servers == ("a:1", "b:2")
    assert [url_of(server) for server in ("a:1", "[::1]:2", "https://c/x")] == [
        "http://a:1/sse",
        "http://[::1]:2/sse",
        "https://c/x",
    ]
    for wrong in ("demo", "a", "a:b", "file:///etc/passwd", "http://", "::1:2", "a:99999"):
        with pytest.raises(ValidationError, match="expected host:port"):
            McpOptions(servers=(wrong,))


def test_what_the_model_reads_of_a_result() -> None:
    image = ImageContent(type="image", data="aGk=", mime_type="image/png")
    assert (
        text_of(CallToolResult(content=[TextContent(type="text", text="a"), image]))
        == "a\n(image that is not text)"
    )
    assert text_of(CallToolResult(content=[], structured_content={"ä": 1})) == '{"ä": 1}'
    assert text_of(CallToolResult(content=[])) == ""


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from(["never", "auto", "files", "add"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "tool_names"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(
    st.sampled_from(sorted(MCP.supports["type"])),  # type: ignore[call-overload]
    st.dictionaries(
        st.sampled_from(
            [
                "server_label",
                "allowed_tools",
                "require_approval",
                "container",
                "search_context_size",
                "filters",
            ]
        ),
        VALUES,
    ),
)
def test_any_entry_is_accepted_or_refused(kind: str, fields: dict[str, Any]) -> None:
    tool = make()
    try:
        check_fields({"type": kind, **fields}, "tools[0]")
        tool.session({"type": kind, **fields}, "tools[0]", "r")
    except RequestError as error:
        assert error.parameter is not None and error.parameter.startswith("tools[0].")
