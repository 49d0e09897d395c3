"""Data parallel: which engines a server runs, which engine gets a request, and several engine
processes that look like one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard import LLM
from pegboard.config.data_parallel import (
    engine_number,
    engine_numbers,
    local_engine,
    local_engines,
)
from pegboard.config.schema import EngineConfig, check_engine
from pegboard.data.request import EngineRequest, LoRARequest, RequestDelta
from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.engine.actions import (
    Action,
    CollectiveRpc,
    IsPaused,
    ListLoRAs,
    ResetPrefixCache,
    Stats,
)
from pegboard.engine.boundary.balance import MAX_PLACES, TOKENS_PER_PLACE, Balance
from pegboard.engine.boundary.client import EngineProcess
from pegboard.engine.boundary.engines import Engines, merged
from pegboard.errors import ConfigError, EngineDeadError, ModelError, RequestError
from pegboard.front.async_llm import AsyncLLM
from pegboard_testing.echo_engine import BUILDER, REFUSED_PRIORITY, echo_plan
from pegboard_testing.fake_client import ByteTokenizer

COUNT = 3
ENDLESS = SamplingParams(
    max_tokens=None, output_kind=RequestOutputKind.DELTA, ignore_eos=True, temperature=1.0
)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({}, [0]),
        ({"data_parallel_size": 3}, [0, 1, 2]),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2}, [0, 1]),
        ({"data_parallel_size": 4, "data_parallel_rank": 3}, [3]),
        (
            {"data_parallel_size": 4, "data_parallel_rank": 0, "data_parallel_external_lb": True},
            [0],
        ),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_hybrid_lb": True,
            },
            [0, 1],
        ),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_start_rank": 2,
            },
            [2, 3],
        ),
    ],
)
def test_the_engines_of_a_server(settings, numbers):
    config = EngineConfig(**settings)
    check_engine(config)
    assert list(engine_numbers(config)) == numbers
    assert local_engines(config) == len(numbers)
    assert engine_number(config) == numbers[0] and local_engine(config) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_parallel_external_lb": True}, "needs data_parallel_rank"),
        ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True}, "needs data_parallel_size_lo"),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, "data_parallel_address"),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_hybrid_lb": True},
            "leave out",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_size_local": 2},
            "leave out",
        ),
    ],
)
def test_settings_that_do_not_fit_together(settings, words):
    with pytest.raises(ConfigError, match=words):
        engine_numbers(EngineConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel_rank": 1},
        {"data_parallel_size": 2, "data_parallel_start_rank": 2},
        {"data_parallel_size": 2, "data_parallel_size_local": 3},
        {"data_parallel_size": 3, "data_parallel_start_rank": 2, "data_parallel_size_local": 2},
    ],
)
def test_engines_that_do_not_exist(settings):
    with pytest.raises(ConfigError, match="there is no engine"):
        check_engine(EngineConfig(**settings))


def test_llm_has_one_engine():
    with pytest.raises(ConfigError, match="AsyncLLM"):
        LLM("m", data_parallel_size=2)


# --- balance --------------------------------------------------------------------------------------


def request(name: str, ids: list[int], n: int = 1, **more) -> EngineRequest:
    params = SamplingParams(n=n, temperature=1.0)
    return EngineRequest(request_id=name, prompt_token_ids=ids, params=params, **more)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.integers(0, 2),
            st.integers(1, 5 * TOKENS_PER_PLACE),
            st.booleans(),
        ),
        max_size=30,
    ),
    st.integers(1, 4),
)
def test_no_engine_has_many_more_completions(requests, count):
    """Whatever ends in whichever order: an engine gets a request only if it has at most MAX_PLACES
    completions more than another. When all have ended, nothing is left."""
    balance = Balance(count)
    running = []
    for number, (n, prompt, length, ends) in enumerate(requests):
        before = list(balance.loads)
        name = f"r_{number}"
        engine = balance.add(request(name, [prompt] * length, n))
        assert before[engine] - min(before) <= MAX_PLACES
        assert balance.engine_of(name) == balance.engine_of(f"0_{name}") == engine
        running.append((name, n))
        if ends:
            finish(balance, *running.pop(len(running) // 2))
    assert sum(balance.loads) == sum(n for _, n in running)
    for name, n in running:
        finish(balance, name, n)
        finish(balance, name, n)  # what is not known changes nothing
        assert balance.engine_of(name) is None
    assert balance.loads == [0] * count


def finish(balance: Balance, name: str, n: int) -> None:
    balance.feed([RequestDelta(request_id=name, index=0, token_ids=[1])])
    balance.feed([RequestDelta(request_id=name, index=i, finish_reason="stop") for i in range(n)])


def test_long_prefixes_stay_where_they_were_computed():
    """An idle engine counts more than a short prefix. Other adapters and salts share nothing."""
    balance = Balance(2)
    short = [1] * 100
    long = [2] * 2100
    assert balance.add(request("a", short)) == 0
    assert balance.add(request("b", long)) == 1
    finish(balance, "a", 1)
    assert balance.add(request("c", [*long, 5])) == 1
    assert balance.add(request("d", long, cache_salt="s")) == 0
    lora = LoRARequest("x", 1, "/x")
    assert balance.add(request("e", long, lora=lora)) == 0
    balance.remove("b")
    balance.remove("c")
    finish(balance, "d", 1)
    finish(balance, "e", 1)
    assert balance.loads == [0, 0]
    assert balance.add(request("f", long)) == 1
    assert balance.add(request("g", [1] * 200)) == 0
    assert balance.add(request("h", [1] * 300, n=8)) == 0
    assert balance.add(request("i", [1] * 300)) == 1


def test_a_prefix_that_many_share_is_soon_everywhere():
    balance = Balance(2)
    for number in range(16):
        balance.add(request(str(number), [*([3] * 1024), number]))
    assert balance.loads == [8, 8]


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "answers", "answer"),
    [
        (CollectiveRpc("m"), [[1], [1]], [1, 1]),
        (CollectiveRpc("m"), [[1, 2], [3]], [1, 2, 3]),
        (ResetPrefixCache(), [True, False], False),
        (ResetPrefixCache(), [True, True], True),
        (IsPaused(), [True, False], True),
        (ListLoRAs(), [[2, 1], [2]], [1, 2]),
        (
            Stats(),
            [
                {"n": 1, "kv_cache_usage_perc": 0.5, "blocks_of": {"a": [1]}},
                {"n": 2, "kv_cache_usage_perc": 0.0, "blocks_of": {"b": [2]}, "m": 3},
            ],
            {"n": 3, "kv_cache_usage_perc": 0.25, "blocks_of": {"a": [1], "b": [2]}, "m": 3},
        ),
    ],
)
def test_answers_become_one(action: Action, answers, answer):
    assert merged(action, answers) == answer


# --- processes ------------------------------------------------------------------------------------


def open_client(**engine) -> AsyncLLM:
    plan = echo_plan(data_parallel_size=COUNT, **engine)
    engines = Engines(range(COUNT), partial(EngineProcess, BUILDER))
    engines.start(plan)
    return AsyncLLM.of_plan(plan, None, engines, tokenizer=ByteTokenizer())


def engines_of(client: AsyncLLM) -> Engines:
    return client._connection._engine


def with_client(body: Callable, **engine) -> None:
    """Run `body(client)`. All engine processes and their folders are gone afterwards."""

    async def main() -> None:
        client = open_client(**engine)
        parts = engines_of(client).parts
        async with client:
            await asyncio.wait_for(body(client), 60)
        for part in parts:
            assert part._process.exitcode is not None and not part.folder.exists()

    asyncio.run(main())


def test_requests_reach_all_engines():
    async def body(client: AsyncLLM) -> None:
        streams = [client.generate("ab", ENDLESS) for _ in range(2 * COUNT)]
        for stream in streams:
            await anext(stream)
        assert engines_of(client)._balance.loads == [2] * COUNT
        await client.abort([f"request-{i}" for i in range(COUNT)])
        for stream in streams[:COUNT]:
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == "abort"
        assert engines_of(client)._balance.loads == [1] * COUNT
        for stream in streams:
            await stream.aclose()
        while any(engines_of(client)._balance.loads):
            await asyncio.sleep(0.01)
        calls = await client.collective_rpc("echo", kwargs={"x": 1})
        assert calls == [{"x": 1}] * COUNT
        assert await client.reset_prefix_cache() is True
        assert await client.control("load") == 0

    with_client(body)


def test_a_request_may_name_its_engine():
    async def body(client: AsyncLLM) -> None:
        async with aclosing(client.generate("a", ENDLESS, data_parallel_rank=2)) as stream:
            await anext(stream)
            assert engines_of(client)._balance.loads == [0, 0, 1]
        with pytest.raises(RequestError, match="this server's engines are 0 to 2"):
            await anext(client.generate("a", ENDLESS, data_parallel_rank=COUNT))

    with_client(body)


def test_n_stays_on_one_engine():
    params = SamplingParams(n=4, max_tokens=3, temperature=1.0, ignore_eos=True)

    async def body(client: AsyncLLM) -> None:
        *_, last = [output async for output in client.generate("abc", params)]
        assert [each.text for each in last.outputs] == [last.outputs[0].text] * 4
        assert engines_of(client)._balance.loads == [0] * COUNT

    with_client(body)


def test_refused_requests_and_actions():
    """Refused requests do not count. An action that all engines refuse is refused as by one."""

    async def body(client: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="refused on purpose"):
            await anext(client.generate("a", ENDLESS, priority=REFUSED_PRIORITY))
        assert engines_of(client)._balance.loads == [0] * COUNT
        with pytest.raises(RequestError, match="^cannot do"):
            await client.control("decisions")

    with_client(body)


def test_one_death_ends_all():
    async def body(client: AsyncLLM) -> None:
        streams = [client.generate("a", ENDLESS) for _ in range(COUNT)]
        for stream in streams:
            await anext(stream)
        os.kill(engines_of(client).parts[1].pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"engine 1: .*SIGKILL"):
                async for _ in stream:
                    pass
        assert "engine 1" in client.health().reason

    with_client(body)


def test_an_engine_that_does_not_answer():
    async def body(client: AsyncLLM) -> None:
        engines_of(client).parts[2].stalled = "it sleeps"
        assert client.health().is_stalled
        assert client.health().reason == "engine 2: it sleeps"

    with_client(body)


def test_errors_at_start_name_an_engine():
    async def body() -> None:
        client = open_client(served_model_name=["broken"])
        with pytest.raises(ModelError, match=r"engine \d: .*broken on purpose"):
            async with client:
                pass
        assert all(part._process.exitcode is not None for part in engines_of(client).parts)

    asyncio.run(body())


def test_a_process_that_cannot_start_ends_the_others():
    made: list[EngineProcess] = []

    def make(**more) -> EngineProcess:
        if made:
            raise ConfigError("no room")
        made.append(EngineProcess(BUILDER, **more))
        return made[0]

    with pytest.raises(ConfigError, match="no room"):
        Engines(range(2), make)
    assert made[0]._process.exitcode is not None


def test_engines_know_their_places(monkeypatch):
    """Each has its number, its place on the host, and a seed of its own."""
    started = []

    class Fake:
        def __init__(self, role: str) -> None:
            self.role = role
            self.folder = Path("/")

        def start(self, plan, *, wants_samples: bool) -> None:
            started.append((self.role, plan.settings.engine, wants_samples))

    engines = Engines(range(2, 4), Fake)
    engines.start(
        echo_plan(data_parallel_size=4, data_parallel_hybrid_lb=True, data_parallel_size_local=2),
        wants_samples=True,
    )
    assert [role for role, _, _ in started] == ["engine 2", "engine 3"]
    configs = [config for _, config, _ in started]
    assert [engine_number(each) for each in configs] == [2, 3]
    assert [local_engine(each) for each in configs] == [0, 1]
    assert [local_engines(each) for each in configs] == [2, 2]
    assert len({each.seed for each in configs}) == 2
    for config in configs:
        check_engine(config)
