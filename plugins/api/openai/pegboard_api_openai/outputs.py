"""The engine's outputs for all prompts of one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from pegboard.data.output import RequestOutput
from pegboard.errors import PegboardError

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Outputs of several prompts of one HTTP request, each with the index of its prompt."""


async def merge(streams: Sequence[AsyncIterator[RequestOutput]]) -> Outputs:
    """All streams as they come. The first exception ends all; closing the result closes every stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:  # type: ignore[type-var]
            async for output in only:
                yield 0, output
        return
    news: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pump(index, stream, news)) for index, stream in enumerate(streams)]
    num_running = len(tasks)
    try:
        while num_running:
            index, item = await news.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: AsyncIterator[RequestOutput], news: "asyncio.Queue[Any]") -> None:
    try:
        async with aclosing(stream) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                await news.put((index, output))
        await news.put((index, None))
    except Exception as error:  # noqa: BLE001  carried to the consumer, who raises it
        await news.put((index, error))


async def last_outputs(outputs: Outputs, num_prompts: int) -> list[RequestOutput]:
    """The final output of every prompt."""
    found: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for index, output in outputs:
            found[index] = output
    if len(found) < num_prompts:
        raise PegboardError(f"the engine answered {len(found)} of {num_prompts} prompts")
    return [found[index] for index in range(num_prompts)]
