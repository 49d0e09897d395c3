"""The methods of `AsyncLLM` that call the workers and replace their weights. The names are
vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pegboard.errors import RequestError
from pegboard.front.pauses import POLL_S

if TYPE_CHECKING:
    from pegboard.engine.pauses import PauseMode


class AsyncWorkerCalls:
    """Functions are never sent to the engine process, only names of methods and plain values."""

    async def control(self, action: str, **arguments: object) -> object:
        raise NotImplementedError

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker extension (`worker_extension_cls`) between two steps, and
        return the results in rank order. Arguments and results are plain values: numbers, strings,
        bytes, lists, dicts. After `timeout` seconds, raises TimeoutError; the workers run on.
        Raises RequestError if there is no such method, and PegboardError if it fails."""
        if not isinstance(method, str):
            told = (
                "functions are not sent to the engine process; put a method into "
                "worker_extension_cls, and give its name"
            )
            raise RequestError(told, parameter="method")
        called = self.control(
            "collective_rpc", method=method, args=list(args), kwargs=dict(kwargs or {})
        )
        return cast("list[Any]", await asyncio.wait_for(called, timeout))

    async def update_weights(self, path: str | Path, mode: "PauseMode" = "abort") -> None:
        """Replace the weights by those in a folder or file on the engine's machine, a checkpoint of
        the same model. mode: what becomes of running requests, as in `pause_generation`. Nothing
        that was computed before is used any more. Raises RequestError if there is not such a
        checkpoint. The weights are then the same as before."""
        while not await self.control("update_weights", path=str(path), mode=mode):
            await asyncio.sleep(POLL_S)
