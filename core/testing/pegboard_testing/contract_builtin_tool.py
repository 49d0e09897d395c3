"""Contract tests of the kind `builtin_tool`. A plugin's test file:

class TestMyTool(BuiltinToolContract):
    entry = {"type": "mcp", "server_label": "files"}    # of a request's tools
    call = ("files_read", {"path": "a.txt"})            # answered
    failing = ("files_read", {"path": "none"})          # the tool reports an error
    refused = [({"type": "mcp", "server_url": "http://…"}, "server_url")]

    def tool(self) -> BuiltinTool:
        return MyTool(MyOptions(), None)
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

import pytest

from pegboard.errors import RequestError
from pegboard.interfaces.builtin_tool import BuiltinTool, ToolFunction, ToolOutput, ToolSession

T = TypeVar("T")
Call = tuple[str, Mapping[str, Any]]
PATH = "tools[3]"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
ITEMS = get_args(get_type_hints(ToolFunction)["item"])


class BuiltinToolContract:
    """Every built-in tool passes these. Override `tool`, `entry` and `call`; override `failing` and
    `refused` if the tool has such cases."""

    entry: ClassVar[Mapping[str, Any]] = {}
    call: ClassVar[Call] = ("", {})
    failing: ClassVar[Call | None] = None
    refused: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = ()

    def tool(self) -> BuiltinTool:
        """Return a new tool that is not started."""
        raise AssertionError("override BuiltinToolContract.tool")

    def within(self, work: Callable[[ToolSession], Awaitable[T]]) -> T:
        """Return the result of `work` on a session. A different task closes the session
        afterwards."""

        async def run() -> T:
            tool = self.tool()
            await tool.start()
            session = tool.session(self.entry, PATH, "resp_1")
            assert session is not None, f"the tool does not recognize its own entry {self.entry}"
            try:
                return await asyncio.ensure_future(work(session))
            finally:
                await asyncio.ensure_future(session.close())

        return asyncio.run(run())

    def test_functions_can_be_shown_to_a_model(self) -> None:
        async def work(session: ToolSession) -> list[ToolFunction]:
            return list(session.functions())

        functions = self.within(work)
        names = [function.name for function in functions]
        assert names and len(set(names)) == len(names)
        assert all(NAME.fullmatch(name) for name in names), names
        assert self.call[0] in names
        for function in functions:
            assert function.parameters.get("type") == "object", function
            assert isinstance(function.description, str) and function.item in ITEMS, function

    def test_a_call_is_answered(self) -> None:
        async def work(session: ToolSession) -> list[ToolOutput]:
            return [await session.run(*self.call), await session.run(*self.call)]

        for output in self.within(work):
            assert isinstance(output.text, str) and not output.is_error, output

    def test_what_a_tool_finds_wrong_is_an_output(self) -> None:
        if self.failing is None:
            pytest.skip("`failing` is not set: the tool has no failing call")
        failing = self.failing

        async def work(session: ToolSession) -> list[ToolOutput]:
            return [await session.run(*failing), await session.run(*self.call)]

        wrong, good = self.within(work)
        assert wrong.is_error and wrong.text and not good.is_error

    def test_a_call_can_be_cancelled(self) -> None:
        async def work(session: ToolSession) -> None:
            for num_steps in range(4):
                task = asyncio.ensure_future(session.run(*self.call))
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        self.within(work)

    def test_a_session_that_ran_nothing_is_closed(self) -> None:
        async def work(session: ToolSession) -> None:
            pass

        self.within(work)

    def test_sessions_do_not_meet(self) -> None:
        async def run() -> None:
            tool = self.tool()
            await tool.start()
            first, second = (tool.session(self.entry, PATH, name) for name in ("resp_1", "resp_2"))
            assert first is not None and second is not None
            outputs = [*await asyncio.gather(first.run(*self.call), second.run(*self.call))]
            await first.close()
            outputs.append(await second.run(*self.call))
            await second.close()
            assert not any(output.is_error for output in outputs)

        asyncio.run(run())

    def test_refusals_name_the_field(self) -> None:
        async def run() -> None:
            tool = self.tool()
            await tool.start()
            for entry, field in self.refused:
                with pytest.raises(RequestError) as refusal:
                    tool.session(entry, PATH, "resp_1")
                assert refusal.value.parameter == f"{PATH}.{field}", entry

        asyncio.run(run())
