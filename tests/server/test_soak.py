"""The short version of tests/soak: mixed load with aborts, and nothing is left afterwards. Only the
long version finds small leaks."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from server_process import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

from soak import SHORT, put_under_load

SECONDS = 8
SHORT_GROWTH = 1.6
"""Within seconds, memory still grows to its normal size: blocks of the KV cache become resident
when they are used first, so a faster machine grows faster. The server here takes about 600 MiB when
it starts, and about 1,050 MiB after a minute of load."""


def test_mixed_load_with_aborts_leaves_nothing(server: Server) -> None:
    soak = asyncio.run(put_under_load(server, SECONDS, concurrency=64, seed=1, sizes=SHORT))
    assert not soak.wrong, soak.wrong[:5]
    assert soak.counts["200"] and soak.counts["aborted"] and soak.counts["400"], soak.counts
    assert soak.growth() < SHORT_GROWTH, soak.memory
    assert server.status("/health") == 200
