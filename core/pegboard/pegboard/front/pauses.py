"""The methods of `AsyncLLM` that pause the engine and let it sleep. The names are vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.engine.pauses import PauseMode

POLL_S = 0.005
"""Seconds between two questions whether the engine has done what takes longer than a step."""


class AsyncPauses:
    """Requests that arrive during a pause wait until it ends."""

    async def control(self, action: str, **arguments: object) -> object:
        raise NotImplementedError

    async def pause_generation(
        self, *, mode: "PauseMode" = "abort", clear_cache: bool = True
    ) -> None:
        """Stop computing. mode "abort": running requests end with finish reason "abort"; "wait":
        they run to their end; "keep": they go on after the pause. clear_cache: also forget the
        prefix cache; kept requests compute their tokens again."""
        while not await self.control("pause", mode=mode, clear_cache=clear_cache):
            await asyncio.sleep(POLL_S)

    async def resume_generation(self) -> None:
        """End a pause. Raises RequestError while the engine sleeps."""
        await self.control("resume")

    async def is_paused(self) -> bool:
        return bool(await self.control("is_paused"))

    async def sleep(self, level: int = 1, mode: "PauseMode" = "abort") -> None:
        """Pause, and release memory. level 0: none; 1: the KV cache, and the weights after they
        were saved outside of it; 2: both, and the weights are read from the checkpoint again.
        Levels 1 and 2 need `enable_sleep_mode`, else RequestError. Raises ConfigError if the
        platform cannot release memory or there is no room to save the weights."""
        while not await self.control("sleep", level=level, mode=mode):
            await asyncio.sleep(POLL_S)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Take the memory with these tags again, "weights" or "kv_cache"; None = all of it. The
        engine serves again when it has all its memory. Return whether it does."""
        return bool(await self.control("wake_up", tags=tags))

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps, also if only a part of its memory is missing."""
        return bool(await self.control("is_sleeping"))
