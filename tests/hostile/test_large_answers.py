"""Large answers: they are written outside the event loop, so others get answers meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import msgspec
import pytest
from hostile_routes import CHAT, COMPLETION, RESPONSES, USER
from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.output import CompletionOutput, Logprob, RequestOutput
from pegboard_chat.chats import read_outputs
from pegboard_chat.parsing import Pipeline
from pegboard_server.json_api import PIECE, in_pieces
from pegboard_testing import fake_client
from pegboard_testing.fake_parsers import FakeToolParser

MAX_LAG_S = 0.05
"""Writing the largest answer takes 0.5 s of processor time."""


def stays_under(limit_s: float, lag_s: Callable[[], float]) -> bool:
    """Whether one of ten runs is so fast. What else the machine does makes a run slower, never
    faster."""
    return any(lag_s() < limit_s for _ in range(10))


def lag_s(hostile: Any, body: Callable[[httpx.AsyncClient], Any]) -> float:
    hostile.lag_s = 0.0
    hostile.run(body)
    assert hostile.lag_s
    return float(hostile.lag_s)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(
            lambda item, number: [item] * number,
            inner,
            st.sampled_from([PIECE, PIECE + 1, 3 * PIECE]),
        )
    ),
    max_leaves=4,
)


@given(JSON)
def test_pieces_make_the_same_text(value: Any) -> None:
    assert in_pieces(value) == msgspec.json.encode(value)


def rows(number: int) -> list[dict[int, Logprob] | None]:
    return [
        None,
        *(
            {(i * 7 + j) % 250: Logprob(-j / 8, j + 1, "ab") for j in range(21)}
            for i in range(1, number)
        ),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 20},
        {"echo": True, "logprobs": 5},
        {"echo": True, "logprobs": 5, "stream": True},
    ],
    ids=json.dumps,
)
def test_the_loop_goes_on_while_a_large_answer_is_written(
    make_hostile: Callable[..., Any], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = make_hostile()
    ids = [97] * 4000
    known = rows(len(ids))
    monkeypatch.setattr(
        fake_client,
        "_prompt_logprobs",
        lambda prompt_ids, asked: known if asked is not None else None,
    )

    async def body(http: httpx.AsyncClient) -> None:
        answer = await http.post(COMPLETION, json={"prompt": ids, "max_tokens": 1, **fields})
        assert answer.status_code == 200 and len(answer.content) > 100_000, answer.text[:200]
        await asyncio.sleep(0.01)  # the next beat

    assert stays_under(1, lambda: lag_s(hostile, body) / min(MAX_LAG_S, hostile.work_s / 3))


@pytest.mark.parametrize(
    "fields",
    [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}],
    ids=json.dumps,
)
def test_the_loop_goes_on_while_a_large_response_is_written(
    make_hostile: Callable[..., Any], fields: dict[str, Any]
) -> None:
    """The text with its logprobs is in the last four events, in the response, and in what is
    stored."""
    hostile = make_hostile()
    hostile.client.script = "word " * 500
    asked = {
        "input": "x",
        "max_output_tokens": 2600,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 20,
        **fields,
    }

    async def body(http: httpx.AsyncClient) -> None:
        answer = await http.post(RESPONSES, json=asked)
        assert answer.status_code == 200, answer.text[:200]
        if fields.get("background"):
            name = answer.content.partition(b'"id":"')[2].partition(b'"')[0].decode()
            while (
                b'"status":"completed","output"'
                not in (answer := await http.get(f"{RESPONSES}/{name}")).content
            ):
                await asyncio.sleep(0.05)
        assert len(answer.content) > 2_000_000
        await asyncio.sleep(0.01)

    assert stays_under(MAX_LAG_S, lambda: lag_s(hostile, body))


@pytest.mark.parametrize("size", [200_000, 7_000_000], ids=["accepted", "refused"])
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "f0"}}],
    ids=["required", "named"],
)
def test_the_loop_goes_on_while_the_schema_of_a_forced_call_is_written(
    make_hostile: Callable[..., Any], choice: Any, size: int
) -> None:
    hostile = make_hostile()
    names = [f"property {number}" for number in range(size // 40)]
    function = {
        "name": "f0",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in names},
        },
    }
    content = json.dumps(
        {
            "messages": USER,
            "max_tokens": 2,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": choice,
        }
    ).encode()
    # does not show tools
    hostile.tokenizer._template = type(hostile.tokenizer._template)("{{ messages[0].content }}", {})

    async def body(http: httpx.AsyncClient) -> None:
        answer = await http.post(
            CHAT, content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == (200 if size < 256 * 1024 else 400), answer.text[:200]
        await asyncio.sleep(0.01)

    assert stays_under(0.1, lambda: lag_s(hostile, body))


def test_the_loop_goes_on_while_many_completions_are_parsed() -> None:
    text = '<call add>{"x": 1}</call> and so on' * 100
    outputs = [CompletionOutput(index, text, [1], None, None, "stop", None) for index in range(128)]

    async def given() -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput("r", None, [1], outputs, True)

    def pipeline(_: object) -> Pipeline:
        return Pipeline(None, FakeToolParser())

    async def run() -> float:
        lag_s = 0.0
        last = time.process_time()
        parsed = asyncio.ensure_future(anext(read_outputs(given(), pipeline)))
        while not parsed.done():
            await asyncio.sleep(0.001)
            lag_s = max(lag_s, time.process_time() - last)
            last = time.process_time()
        assert len(parsed.result().events) == 128 and len(parsed.result().events[127]) > 200
        return lag_s

    gc.freeze()  # as the server does when it is ready
    try:
        assert stays_under(MAX_LAG_S, lambda: asyncio.run(run()))
    finally:
        gc.unfreeze()
