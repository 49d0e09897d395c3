"""A sample of the campaign of adapters (adapter_cycles.py), with the server in this process: what
it holds is counted. `make nightly` runs it."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
import adapter_cycles
import damaged_checkpoints
from faulty_server import InProcess

from pegboard.config.schema import EngineConfig, PluginConfig, Settings
from pegboard.engine.build import build_engine
from pegboard.front.async_llm import AsyncLLM
from pegboard.plan.engine_plan import resolve
from pegboard_server.app import open_app
from pegboard_server.http_metrics import HTTP_METRICS

NUM_CYCLES = 20
"""In each of three rounds. The first one fills caches; what grows in both others would grow for
ever."""


def counted() -> Counter[str]:
    """Return how many objects there are of each type."""
    gc.collect()
    return Counter(type(each).__qualname__ for each in gc.get_objects())


@pytest.mark.slow
def test_cycles_leave_no_slots_blocks_or_objects(tmp_path: Path) -> None:
    damaged_checkpoints.write_healthy(tmp_path / "model")
    adapters = adapter_cycles.write_adapters(tmp_path / "adapters")
    config = EngineConfig(
        model=str(tmp_path / "model"),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 20,
        max_loras=2,
        max_cpu_loras=4,
        max_lora_rank=adapter_cycles.RANK,
    )
    plan, registry = resolve(Settings(config, plugins=PluginConfig(enable=["api:lora_admin"])))
    engine = build_engine(plan)
    link = InProcess(engine, tmp_path)

    async def run() -> list[Counter[str]]:
        client = AsyncLLM.of_plan(plan, registry, link, metrics=HTTP_METRICS)
        transport = httpx.ASGITransport(await open_app(client, publish=client.publish))
        async with (
            client,
            httpx.AsyncClient(transport=transport, base_url="http://x", timeout=None) as http,
        ):
            cycles = adapter_cycles.Cycles(http, adapters)
            rounds = []
            for _ in range(3):
                await cycles.run(NUM_CYCLES)
                rounds.append(counted())
            assert not cycles.wrong and len(set(cycles.texts.values())) == len(adapters)
            assert await client.list_loras() == set()
            return rounds

    try:
        first, second, third = asyncio.run(run())
    finally:
        link.stop()
    check_released(engine)
    steps = {name: (second[name] - first[name], third[name] - second[name]) for name in third}
    grown = {name: step for name, step in steps.items() if min(step) >= NUM_CYCLES / 2}
    assert not grown, f"{NUM_CYCLES} cycles left objects: {grown}"


def check_released(engine: Any) -> None:
    """Check that the engine and its worker hold no adapter, slot or block."""
    loras = engine._loras
    stats = engine.stats()
    assert sorted(loras._free) == [1, 2] and not loras._adapters and not loras._dropped
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1
