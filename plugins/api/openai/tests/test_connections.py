"""A real socket: the official client, many clients at once, and a server that stops."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, aclosing
from typing import Any

import openai
import pytest
from pegboard_api_openai.answer import merge

from pegboard.errors import RequestError
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.served_app import posted, wait_for

TEXT = "Hello, wörld 🌍!"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def test_official_client(serve):
    with serve(FakeEngineClient(TEXT), api_key=["secret"]) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)
        with client:
            assert [model.id for model in client.models.list()] == ["fake-model"]
            assert client.models.retrieve("fake-model").id == "fake-model"
            whole = client.chat.completions.create(
                model="fake-model", messages=MESSAGES, logprobs=True, top_logprobs=2
            )
            assert (
                whole.choices[0].message.content == TEXT
                and whole.usage.completion_tokens == len(TEXT.encode()) + 1
            )
            assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
            options: Any = {"include_usage": True}
            with client.chat.completions.create(
                model="fake-model", messages=MESSAGES, stream=True, stream_options=options
            ) as stream:
                chunks = list(stream)
            assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == TEXT
            assert chunks[-1].usage == whole.usage.model_copy(
                update={"prompt_tokens_details": None}
            )
            completion = client.completions.create(
                model="fake-model", prompt=["a", "b"], max_tokens=100, n=2
            )
            assert [choice.text for choice in completion.choices] == [TEXT] * 4
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                client.completions.create(model="nope", prompt="a")
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.completions.create(model="fake-model", prompt="a", temperature=-1)
        stranger = openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_many_clients_at_once(serve):
    engine = FakeEngineClient()

    async def main(address: str) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=60
        ) as client:

            async def one(number: int) -> None:
                prompt = f"request {number} " * 3
                if number % 2:
                    answer = await client.completions.create(
                        model="fake-model", prompt=prompt, max_tokens=100
                    )
                    assert answer.choices[0].text == prompt
                    return
                stream = await client.completions.create(
                    model="fake-model", prompt=prompt, max_tokens=100, stream=True
                )
                assert "".join([chunk.choices[0].text async for chunk in stream]) == prompt

            await asyncio.gather(*(one(number) for number in range(64)))

    with serve(engine) as address:
        asyncio.run(main(address))
    assert len(engine.requests) == 64 and not engine.aborted and not engine.running


def test_shutdown_aborts_what_does_not_finish_in_time(serve):
    engine = FakeEngineClient("x", delay_s=60)
    with ExitStack() as stack:
        with serve(engine) as address:
            stack.enter_context(posted(address, "/v1/completions", {"prompt": "x", "stream": True}))
            wait_for(lambda: engine.running, "the request to run")
        assert len(engine.aborted) == 1 and not engine.running


def test_one_failing_prompt_ends_all():
    engine = FakeEngineClient("x" * 100, delay_s=0.001)

    async def failing():
        await asyncio.sleep(0.01)
        raise RequestError("bad")
        yield

    async def main() -> None:
        from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
        from pegboard.interfaces.api import Prompt, RequestOptions

        params = SamplingParams(max_tokens=100, output_kind=RequestOutputKind.DELTA)
        good = engine.generate(Prompt(text="x"), params, RequestOptions(request_id="good"))
        with pytest.raises(RequestError, match="bad"):
            async with aclosing(merge([good, failing()])) as outputs:
                async for _ in outputs:
                    pass

    asyncio.run(main())
    assert engine.aborted == ["good"] and not engine.running
