"""Calls of worker methods between two steps, which users ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pegboard.errors import RequestError
from pegboard.interfaces.executor import SERVING_CALLS


class WorkerCalls:
    """finish_steps: ends the steps in flight. call: `Executor.call`."""

    def __init__(
        self, *, finish_steps: Callable[[], None], call: Callable[..., list[object]]
    ) -> None:
        self._finish_steps = finish_steps
        self._call = call

    def call(self, method: str, args: Sequence[Any] = ()) -> list[object]:
        """Call a worker method on all ranks and return the results in rank order. Only methods that
        do not disturb serving are allowed."""
        if method not in SERVING_CALLS:
            allowed = ", ".join(sorted(SERVING_CALLS))
            raise RequestError(
                f"workers cannot run {method!r} while they serve; they can run {allowed}",
                parameter="method",
            )
        self._finish_steps()
        return self._call(method, *args)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[object]:
        """Call a method of the worker extension, or a function that takes the worker, on all ranks.
        Return the results in rank order."""
        self._finish_steps()
        return self._call("collective_rpc", method, tuple(args), dict(kwargs or {}))
