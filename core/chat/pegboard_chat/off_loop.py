"""Runs work that grows with a request outside the event loop.

The threads are few on purpose: most of this work holds Python's lock (decoding JSON, checking
fields), so more threads would only make the event loop wait longer for its turn, and each large
request takes memory while it is read.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SMALL_BYTES = 16 * 1024
"""Work for a request of fewer bytes takes about a millisecond, so it runs on the event loop."""

_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pegboard-request")


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Return what `work` returns. It runs in a thread if the request has many bytes."""
    if num_bytes < SMALL_BYTES:
        return work()
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, context.run, work)
