"""The official openai client with the real server. The server understands the client's requests,
and the client can read the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from server_process import MODEL, Server

from pegboard import __version__

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
QUESTION = [{"role": "user", "content": "What is 2+2?"}]
PROMPT = "The three primary colors are"


pytestmark = pytest.mark.usefixtures("left_idle")


def chat_pieces(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_chat_whole_and_streamed_are_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=QUESTION, max_completion_tokens=24, **GREEDY)
    with client.chat.completions.create(
        messages=QUESTION,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    ) as stream:
        chunks = list(stream)
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and "4" in choice.message.content
    assert (
        whole.object == "chat.completion"
        and whole.model == MODEL
        and whole.id.startswith("chatcmpl-")
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chat_pieces(chunks) == choice.message.content
    assert [
        c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
    ] == [choice.finish_reason]
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {whole.id}
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_whole_and_streamed_are_one(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, max_tokens=20, **GREEDY)
    with client.completions.create(prompt=PROMPT, max_tokens=20, stream=True, **GREEDY) as stream:
        chunks = list(stream)
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 20
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20


def test_finish_reasons(client: openai.OpenAI) -> None:
    cut = client.chat.completions.create(messages=QUESTION, max_tokens=2, **GREEDY)
    assert (
        cut.choices[0].finish_reason == "length"
        and cut.usage is not None
        and cut.usage.completion_tokens == 2
    )
    ended = client.chat.completions.create(
        messages=[{"role": "user", "content": "Hello"}], max_tokens=64, **GREEDY
    )
    assert (
        ended.choices[0].finish_reason == "stop"
        and ended.usage is not None
        and ended.usage.completion_tokens < 64
    )


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, stream: bool) -> None:
    full = client.completions.create(prompt=PROMPT, max_tokens=20, **GREEDY).choices[0].text
    stop = full[7:12]  # often not at the beginning or end of a token
    answer = client.completions.create(
        prompt=PROMPT, max_tokens=20, stop=[stop, "never there"], stream=stream, **GREEDY
    )
    if stream:
        with answer:
            choices = [chunk.choices[0] for chunk in answer]
        text = "".join(choice.text for choice in choices)
        last = choices[-1]
    else:
        text = answer.choices[0].text
        last = answer.choices[0]
    assert text == full[: full.index(stop)]
    assert last.finish_reason == "stop" and last.stop_reason == stop


def test_chat_logprobs(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "messages": QUESTION,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
        **GREEDY,
    }
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert (
        bytes(byte for token in whole.logprobs.content for byte in token.bytes or ()).decode()
        == whole.message.content
    )
    for token in whole.logprobs.content:
        assert len(token.top_logprobs) == 3
        # greedy: the chosen token is the most likely
        assert token.top_logprobs[0].token == token.token and token.logprob <= 0
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)
    with client.chat.completions.create(stream=True, **fields) as stream:
        streamed = [
            t
            for c in stream
            if c.choices and c.choices[0].logprobs
            for t in c.choices[0].logprobs.content
        ]
    assert [token.token for token in streamed] == [token.token for token in whole.logprobs.content]
    assert [t.logprob for t in streamed] == pytest.approx(
        [t.logprob for t in whole.logprobs.content], abs=1e-3
    )


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        prompt=PROMPT, max_tokens=4, logprobs=2, echo=True, **GREEDY
    ).choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith(PROMPT) and logprobs is not None
    assert logprobs.tokens is not None and "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset == [
        len("".join(logprobs.tokens[:index])) for index in range(len(logprobs.tokens))
    ]


def test_several_answers_with_a_seed(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 12,
        "n": 4,
        "temperature": 1.0,
    }
    first = client.completions.create(seed=7, **fields)
    again = client.completions.create(seed=7, **fields)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3] and len(set(texts)) > 1
    assert [choice.text for choice in again.choices] == texts
    assert first.usage is not None and first.usage.completion_tokens <= 48
    assert [choice.text for choice in client.completions.create(seed=8, **fields).choices] != texts
    with client.completions.create(seed=7, stream=True, **fields) as stream:
        streamed = [""] * 4
        for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    assert streamed == texts


def test_many_prompts_in_one_request(client: openai.OpenAI) -> None:
    prompts = ["One plus one is", "The sun is", "A cat can"]
    alone = [
        client.completions.create(prompt=prompt, max_tokens=8, **GREEDY).choices[0].text
        for prompt in prompts
    ]
    together = client.completions.create(prompt=prompts, max_tokens=8, **GREEDY)
    assert [choice.text for choice in together.choices] == alone
    assert together.usage is not None and together.usage.completion_tokens == 24


def test_token_ids_as_prompt(client: openai.OpenAI) -> None:
    more = {"return_token_ids": True}
    spoken = client.completions.create(
        prompt=PROMPT, max_tokens=6, extra_body=more, **GREEDY
    ).choices[0]
    ids = spoken.prompt_token_ids
    given = client.completions.create(prompt=ids, max_tokens=6, extra_body=more, **GREEDY).choices[
        0
    ]
    assert (
        given.text == spoken.text
        and given.token_ids == spoken.token_ids
        and len(given.token_ids) == 6
    )


def test_request_ids(server: Server, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}, **GREEDY
    )
    assert answer.id == "cmpl-mine-1"
    answer = client.completions.create(
        prompt="x", max_tokens=1, extra_body={"request_id": "mine-2"}, **GREEDY
    )
    assert answer.id == "cmpl-mine-2"
    with pytest.raises(openai.BadRequestError, match="X-Request-Id"):
        client.completions.create(
            prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "a b"}, **GREEDY
        )


def test_models_and_health(server: Server, client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL and card.object == "model" and card.max_model_len == 1024
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.models.retrieve("nope")
    assert server.status("/health") == server.status("/ping") == 200
    assert httpx.post(server.url + "/ping").status_code == 200
    assert httpx.get(server.url + "/version").json() == {"version": __version__}


def test_errors_are_the_client_s_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="`nope` does not exist"):
        client.chat.completions.create(model="nope", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "BadRequestError"
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(prompt="word " * 2000, max_tokens=1, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="stop"):
        client.completions.create(prompt="x", stop=[""], stream=True, **GREEDY)


def test_api_keys(start_server: Callable[..., Server]) -> None:
    """Without a key only the health routes answer."""
    server = start_server("--api-key", "first", "second")
    for key in ("first", "second"):
        with server.client(key) as client:
            assert client.models.list().data[0].id == MODEL
            assert client.completions.create(prompt="x", max_tokens=1, **GREEDY).choices
    with server.client("wrong") as client:
        for ask in (
            client.models.list,
            lambda: client.completions.create(prompt="x", max_tokens=1, **GREEDY),
        ):
            with pytest.raises(openai.AuthenticationError, match="401"):
                ask()
    assert server.status("/v1/models") == 401
    assert server.status("/health") == server.status("/ping") == server.status("/version") == 200


def test_asynchronous_client(server: Server, client: openai.OpenAI) -> None:
    whole = (
        client.chat.completions.create(messages=QUESTION, max_tokens=16, **GREEDY)
        .choices[0]
        .message.content
    )

    async def main() -> tuple[str | None, str]:
        async with server.async_client() as fast:
            answer = await fast.chat.completions.create(messages=QUESTION, max_tokens=16, **GREEDY)
            async with await fast.chat.completions.create(
                messages=QUESTION, max_tokens=16, stream=True, **GREEDY
            ) as stream:
                chunks = [chunk async for chunk in stream]
        return answer.choices[0].message.content, chat_pieces(chunks)

    assert asyncio.run(main()) == (whole, whole)


def test_64_at_once_are_answered_as_each_alone(server: Server, client: openai.OpenAI) -> None:
    questions = [
        f"Name one thing that begins with the letter {chr(97 + n % 26)} and the number {n}."
        for n in range(64)
    ]

    def fields(number: int) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": questions[number]}],
            "max_tokens": 8 + number % 9,
            **GREEDY,
        }

    async def main() -> list[tuple[str, int]]:
        async with server.async_client() as fast:

            async def ask(number: int) -> tuple[str, int]:
                if number % 2:
                    answer = await fast.chat.completions.create(**fields(number))
                    assert answer.usage is not None
                    return answer.choices[0].message.content or "", answer.usage.completion_tokens
                options = {"include_usage": True}
                async with await fast.chat.completions.create(
                    stream=True, stream_options=options, **fields(number)
                ) as stream:
                    chunks = [chunk async for chunk in stream]
                return chat_pieces(chunks), chunks[-1].usage.completion_tokens

            return await asyncio.gather(*map(ask, range(64)))

    together = asyncio.run(main())
    assert all(
        text and 1 <= num_tokens <= 8 + number % 9
        for number, (text, num_tokens) in enumerate(together)
    )
    for number in range(0, 64, 8):
        alone = client.chat.completions.create(**fields(number)).choices[0].message.content
        assert together[number][0] == alone
