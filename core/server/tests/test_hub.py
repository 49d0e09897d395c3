"""Several API processes on one engine process: every client gets its own answers, and all clients
learn that the engine has ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from pegboard.data.request import LoRARequest
from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.engine.boundary.client import EngineProcess
from pegboard.errors import EngineDeadError, ModelError, PegboardError, RequestError
from pegboard.front.async_llm import AsyncLLM
from pegboard.interfaces.api import Prompt, RequestOptions
from pegboard_server.hub import EngineHub, HubEngine
from pegboard_testing.echo_engine import BUILDER, REFUSED_PRIORITY, echo_plan
from pegboard_testing.fake_client import ByteTokenizer

COUNT = 3


class Clients:
    """Three clients of one engine in this process. Each has the same socket as an API process."""

    def __init__(self, **engine: object) -> None:
        self.plan = echo_plan(**engine)
        self.process = EngineProcess(BUILDER)
        self.process.start(self.plan)
        self.events: list[str] = []
        self.stopped: list[int] = []

    async def __aenter__(self) -> "Clients":
        self.hub = EngineHub(
            self.process,
            COUNT,
            lambda: self.events.append("serving"),
            lambda: self.events.append("end"),
        )
        self.hub.attach()
        self.engines = [
            HubEngine(
                self.hub.address,
                index,
                COUNT,
                [self.process.folder],
                lambda index=index: self.stopped.append(index),
            )
            for index in range(COUNT)
        ]
        self.all = [
            AsyncLLM.of_plan(self.plan, None, engine, tokenizer=ByteTokenizer())
            for engine in self.engines
        ]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for client in self.all:
            client.shutdown()
        self.hub.close()
        self.process.stop()


def run(body: Callable[[Clients], Awaitable[None]], **engine: object) -> None:
    async def main() -> None:
        async with Clients(**engine) as clients:
            await asyncio.wait_for(body(clients), 60)

    asyncio.run(main())


async def text(client: AsyncLLM, prompt: str, request_id: str, **more: object) -> list[str]:
    params = SamplingParams(
        max_tokens=len(prompt), temperature=1.0, output_kind=RequestOutputKind.FINAL_ONLY, **more
    )
    async for output in client.generate(
        Prompt(text=prompt, add_special_tokens=False), params, RequestOptions(request_id=request_id)
    ):
        if output.finished:
            assert output.request_id == request_id
            return [completion.text for completion in output.outputs]
    raise AssertionError("no last output")


def test_equal_request_ids_do_not_meet() -> None:
    async def body(clients: Clients) -> None:
        ids = ["same", "3_same", "odd@1", "@"]
        asked = [
            (client, f"client {number} {name}", name)
            for number, client in enumerate(clients.all)
            for name in ids
        ]
        answers = await asyncio.gather(*(text(*one, n=2) for one in asked))
        assert answers == [[prompt, prompt] for _, prompt, _ in asked]

    run(body)


def test_refusals_and_controls_come_back_to_who_asked() -> None:
    async def body(clients: Clients) -> None:
        await asyncio.gather(*(client.start() for client in clients.all))
        answers = await asyncio.gather(
            *(
                client.collective_rpc("echo", kwargs={"number": n})
                for n, client in enumerate(clients.all)
                for _ in range(3)
            )
        )
        assert [answer["number"] for (answer,) in answers] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        with pytest.raises(RequestError, match="unknown action"):
            await clients.all[1].control("nothing")
        params = SamplingParams(max_tokens=2)
        with pytest.raises(RequestError, match="refused on purpose"):
            options = RequestOptions(request_id="r", priority=REFUSED_PRIORITY)
            async for _ in clients.all[2].generate(Prompt(text="x"), params, options):
                pass

    run(body)


def test_what_one_process_tells_is_heard_by_all() -> None:
    async def body(clients: Clients) -> None:
        heard: list[list[tuple[str, LoRARequest | None]]] = [[] for _ in range(COUNT)]
        for list_, engine in zip(heard, clients.engines, strict=True):
            engine.turns.on_told = lambda *change, list_=list_: list_.append(change)
        await asyncio.gather(*(client.start() for client in clients.all[:2]))
        poet = LoRARequest("poet", 7, "/adapters/poet", "base")

        async def change(index: int, lora: LoRARequest | None) -> None:
            async with clients.engines[index].turns:
                await clients.engines[index].turns.tell("poet", lora)
                assert heard[1 - index][-1] == ("poet", lora)

        await change(0, poet)
        await change(1, None)
        await clients.all[2].start()
        assert heard == [[("poet", None)], [("poet", poet)], [("poet", None)]]
        async with clients.engines[2].turns:
            await clients.engines[2].turns.tell("poet", poet)
            assert [list_[-1] for list_ in heard[:2]] == [("poet", poet)] * 2
        assert await text(clients.all[1], "abc", "id") == ["abc"]

    run(body)


def test_closing_a_stream_aborts_only_that_client_s_request() -> None:
    async def body(clients: Clients) -> None:
        endless = SamplingParams(
            max_tokens=4000, output_kind=RequestOutputKind.DELTA, ignore_eos=True
        )
        options = RequestOptions(request_id="same")
        streams = [client.generate(Prompt(text="abc"), endless, options) for client in clients.all]
        async with aclosing(streams[0]), aclosing(streams[2]):
            for stream in streams:
                await anext(stream)
            await streams[1].aclose()
            while not await clients.all[1].collective_rpc("aborted"):
                await asyncio.sleep(0.01)
            assert await clients.all[0].collective_rpc("aborted") == ["same@1"]
            for stream in (streams[0], streams[2]):
                assert (await anext(stream)).outputs[0].text

    run(body)


def test_an_engine_that_still_sends_after_the_end_does_no_harm() -> None:
    """The hub closes when the server stops, and a killed API process cannot abort its requests."""

    async def body(clients: Clients) -> None:
        failed: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, told: failed.append(told))
        endless = SamplingParams(
            max_tokens=4000, output_kind=RequestOutputKind.DELTA, ignore_eos=True
        )
        async with aclosing(
            clients.all[0].generate(Prompt(text="abc"), endless, RequestOptions(request_id="r"))
        ) as stream:
            await anext(stream)
            clients.hub.close()
            for _ in range(20):
                await asyncio.sleep(0.005)
        assert failed == []

    run(body)


def test_all_hear_when_the_engine_dies() -> None:
    async def body(clients: Clients) -> None:
        await asyncio.gather(*(client.start() for client in clients.all))
        os.kill(clients.process.pid, signal.SIGKILL)
        while any(client.health().is_alive for client in clients.all):
            await asyncio.sleep(0.01)
        assert "SIGKILL" in clients.all[0].health().reason
        assert clients.events == ["end"] and isinstance(clients.hub.failure, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await text(clients.all[1], "x", "r")

    run(body)


def test_an_engine_that_does_not_start() -> None:
    async def body(clients: Clients) -> None:
        for client in clients.all:
            with pytest.raises(PegboardError, match="broken on purpose"):
                await client.start()
        assert (
            clients.events == ["end"]
            and isinstance(clients.hub.failure, ModelError)
            and not clients.hub.started
        )

    run(body, served_model_name=["broken"])


def test_serving_is_told_once_all_serve_and_stop_reaches_all() -> None:
    async def body(clients: Clients) -> None:
        await asyncio.gather(*(client.start() for client in clients.all))
        for engine in clients.engines[1:]:
            engine.tell_serving()
        await clients.all[0].collective_rpc("echo")
        assert clients.events == []
        clients.engines[0].tell_serving()
        while not clients.events:
            await asyncio.sleep(0.01)
        clients.hub.stop_apis()
        while len(clients.stopped) < COUNT:
            await asyncio.sleep(0.01)
        assert clients.events == ["serving"] and sorted(clients.stopped) == [0, 1, 2]

    run(body)
