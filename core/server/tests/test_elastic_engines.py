"""Engines whose number changes while they serve."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.config.schema import EngineConfig, Settings
from pegboard.data.request import EngineRequest, RequestDelta
from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.engine.actions import ScaleElasticEP
from pegboard.engine.boundary.balance import Balance
from pegboard.engine.boundary.client import EngineProcess
from pegboard.errors import (
    ConfigError,
    EngineDeadError,
    ModelError,
    Overloaded,
    RequestError,
    TookTooLong,
)
from pegboard.front.async_llm import AsyncLLM
from pegboard_server.elastic import ElasticEngines
from pegboard_server.engines import start_engines
from pegboard_testing.echo_engine import BUILDER, echo_plan
from pegboard_testing.fake_client import ByteTokenizer

ENDLESS = SamplingParams(
    max_tokens=None, output_kind=RequestOutputKind.DELTA, ignore_eos=True, temperature=1.0
)
make = partial(EngineProcess, BUILDER)


def with_client(body: Callable, size: int = 1, **engine) -> None:
    """Run `body(client, engines)`. All processes that were ever started are gone afterwards."""
    started: list[EngineProcess] = []

    def remember(**more) -> EngineProcess:
        started.append(make(**more))
        return started[-1]

    async def main() -> None:
        engines = ElasticEngines(range(size), remember)
        engines.start(echo_plan(data_parallel_size=size, enable_elastic_ep=True, **engine))
        client = AsyncLLM.of_plan(engines._plan, None, engines, tokenizer=ByteTokenizer())
        async with client:
            await asyncio.wait_for(body(client, engines), 60)
        for part in started:
            assert part._process.exitcode is not None and not part.folder.exists()

    asyncio.run(main())


def test_engines_come_and_go_while_requests_run():
    async def body(client: AsyncLLM, engines: ElasticEngines) -> None:
        async with aclosing(client.generate("ab", ENDLESS)) as first:
            await anext(first)
            await client.scale_elastic_ep(3)
            assert client.plan.settings.engine.data_parallel_size == 3
            assert await client.collective_rpc("echo") == [{}] * 3
            streams = [client.generate("ab", ENDLESS) for _ in range(5)]
            for stream in streams:
                await anext(stream)
            assert engines._balance.loads == [2, 2, 2]

            # those that go end their requests, and get no others
            scaling = asyncio.create_task(client.scale_elastic_ep(1))
            while engines._balance.num_open == 3:
                await asyncio.sleep(0.01)
            assert await client.control("is_scaling_elastic_ep") is True
            streams.append(client.generate("ab", ENDLESS))
            await anext(streams[-1])
            assert engines._balance.loads == [3, 2, 2]
            with pytest.raises(RequestError, match="has gone"):
                await anext(client.generate("ab", ENDLESS, data_parallel_rank=1))
            with pytest.raises(Overloaded, match="currently scaling"):
                await client.scale_elastic_ep(2)
            assert await client.is_sleeping() is False
            for stream in streams:
                await stream.aclose()
            await scaling
            assert await client.control("is_scaling_elastic_ep") is False
            assert await client.collective_rpc("echo") == [{}]
            assert (await anext(first)).outputs[0].token_ids
            with pytest.raises(RequestError, match="engines are 0 to 0"):
                await anext(client.generate("ab", ENDLESS, data_parallel_rank=1))

    with_client(body)


def test_a_drain_that_takes_too_long_changes_nothing():
    async def body(client: AsyncLLM, engines: ElasticEngines) -> None:
        async with aclosing(client.generate("ab", ENDLESS, data_parallel_rank=1)) as stream:
            await anext(stream)
            with pytest.raises(TookTooLong, match="drain timeout after 0.1 seconds"):
                await client.scale_elastic_ep(1, drain_timeout=0.1)
            assert engines._balance.num_open == 2
            assert client.plan.settings.engine.data_parallel_size == 2
            await anext(stream)
        await client.scale_elastic_ep(2)

    with_client(body, 2)


def test_new_engines_get_new_weights():
    """Weights that were refused are not repeated."""

    async def body(client: AsyncLLM, engines: ElasticEngines) -> None:
        with pytest.raises(RequestError):
            await client.update_weights("wrong")
        await client.scale_elastic_ep(2)
        assert await client.collective_rpc("updates") == []
        await client.update_weights("right")
        with pytest.raises(RequestError):
            await client.update_weights("wrong")
        await client.scale_elastic_ep(3)
        assert await client.collective_rpc("updates") == ["right"] * 3

    with_client(body)


@pytest.mark.parametrize("shares", [False, True])
def test_engines_with_the_weights_of_a_trainer(shares):
    """New engines are refused, because nobody would send them these weights. That includes those
    that start again because they share out experts."""

    async def body(client: AsyncLLM, engines: ElasticEngines) -> None:
        await client.update_weights("right")
        await client.update_weights({"update_info": {"names": []}})
        pids = [part.pid for part in engines.parts]
        for size in (3, 1) if shares else (3,):
            with pytest.raises(RequestError, match="a trainer has sent the weights, .* the path"):
                await client.scale_elastic_ep(size)
        assert [part.pid for part in engines.parts] == pids
        assert client.plan.settings.engine.data_parallel_size == 2
        assert await client.control("is_scaling_elastic_ep") is False
        assert await client.collective_rpc("updates") == ["right", "sent"] * 2
        assert (await anext(client.generate("ab", ENDLESS))).outputs
        await client.scale_elastic_ep(2)
        if not shares:  # those that stay have the weights
            await client.scale_elastic_ep(1)
            assert await client.collective_rpc("updates") == ["right", "sent"]
        await client.update_weights("right")
        await client.scale_elastic_ep(3)
        assert await client.control("is_scaling_elastic_ep") is False
        assert (await client.collective_rpc("updates"))[-1] == "right"

    with_client(body, 2, enable_expert_parallel=shares)


def test_engines_that_share_out_experts_start_again():
    async def body(client: AsyncLLM, engines: ElasticEngines) -> None:
        before = [part.pid for part in engines.parts]
        stream = client.generate("ab", ENDLESS)
        await anext(stream)
        scaling = asyncio.create_task(client.scale_elastic_ep(3))
        while not engines._is_restarting:
            await asyncio.sleep(0.01)
        for call in (client.collective_rpc("echo"), anext(client.generate("ab", ENDLESS))):
            with pytest.raises(Overloaded, match="currently scaling"):
                await call
        assert await client.control("is_scaling_elastic_ep") is True
        await stream.aclose()
        await scaling
        pids = [part.pid for part in engines.parts]
        assert len(pids) == 3 and not set(pids) & set(before)
        assert await client.collective_rpc("echo") == [{}] * 3
        await anext(client.generate("ab", ENDLESS, data_parallel_rank=2))

    with_client(body, 2, enable_expert_parallel=True)


@pytest.mark.parametrize("shares", [False, True])
def test_new_engines_that_do_not_start(shares):
    """If the others still run, they go on."""

    async def body(client: AsyncLLM, engines: ElasticEngines) -> None:
        broken = echo_plan(
            data_parallel_size=1, served_model_name=["broken"], enable_expert_parallel=shares
        )
        engines._plan = broken
        with pytest.raises(EngineDeadError if shares else ModelError, match="broken on purpose"):
            await client.scale_elastic_ep(3)
        if not shares:
            assert await client.collective_rpc("echo") == [{}]
            assert (await anext(client.generate("ab", ENDLESS))).outputs

    with_client(body, 1)


def test_a_new_engine_that_dies_at_once():
    async def body(client: AsyncLLM, engines: ElasticEngines) -> None:
        scaling = asyncio.create_task(client.scale_elastic_ep(2))
        while not engines._new:
            await asyncio.sleep(0.001)
        os.kill(engines._new[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await scaling
        assert await client.collective_rpc("echo") == [{}]

    with_client(body)


def test_the_end_comes_while_an_engine_is_added():
    async def body(client: AsyncLLM, engines: ElasticEngines) -> None:
        task = asyncio.create_task(client.scale_elastic_ep(2))
        while not engines._new:
            await asyncio.sleep(0.001)
        client.shutdown()
        with pytest.raises(EngineDeadError):
            await task

    with_client(body)


@pytest.mark.parametrize("values", [{"new_data_parallel_size": 0}, {"drain_timeout": 0}])
def test_sizes_and_times_are_positive(values):
    with pytest.raises(RequestError, match="must be positive") as caught:
        ScaleElasticEP(**{"new_data_parallel_size": 1, **values})
    assert caught.value.parameter == [*values][0]


@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel_size": 2, "data_parallel_rank": 0},
        {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_address": "here"},
        {
            "data_parallel_size": 2,
            "data_parallel_size_local": 1,
            "data_parallel_hybrid_lb": True,
        },
    ],
)
def test_only_a_server_with_all_engines_can_scale(settings):
    with pytest.raises(ConfigError, match="enable_elastic_ep needs one server"):
        start_engines(Settings(EngineConfig(enable_elastic_ep=True, **settings)))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=12))
def test_the_balance_uses_the_engines_that_there_are(steps):
    """A prefix that a removed engine has seen counts no more."""
    balance = Balance(1)
    number = 0
    for size, length in steps:
        balance.resize(size)
        assert len(balance.loads) == size and not any(balance.loads)
        for _ in range(3):
            params = SamplingParams(temperature=1.0)
            name = f"r_{number}"
            request = EngineRequest(
                request_id=name, prompt_token_ids=[1] * (64 * length), params=params
            )
            assert balance.add(request) < size
            balance.feed([RequestDelta(request_id=name, index=0, finish_reason="stop")])
            number += 1
