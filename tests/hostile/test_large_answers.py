"""Large answers: they are written outside the event loop, so others get answers meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from hostile_routes import COMPLETION
from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.output import Logprob
from pegboard_server.json_api import PIECE, in_pieces
from pegboard_testing import fake_client

MAX_LAG_S = 0.05
"""Writing the largest answer takes 0.5 s of processor time."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(lambda item, number: [item] * number, inner, st.sampled_from([PIECE, PIECE + 1, 3 * PIECE]))
    ),
    max_leaves=4,
)


@given(JSON)
def test_pieces_make_the_same_text(value: Any) -> None:
    assert in_pieces(value) == msgspec.json.encode(value)


def rows(number: int) -> list[dict[int, Logprob] | None]:
    return [None, *({(i * 7 + j) % 250: Logprob(-j / 8, j + 1, "ab") for j in range(21)} for i in range(1, number))]


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
    hostile, ids = make_hostile(), [97] * 4000
    known = rows(len(ids))
    monkeypatch.setattr(fake_client, "_prompt_logprobs", lambda prompt_ids, asked: known if asked is not None else None)

    async def body(http: httpx.AsyncClient) -> None:
        answer = await http.post(COMPLETION, json={"prompt": ids, "max_tokens": 1, **fields})
        assert answer.status_code == 200 and len(answer.content) > 100_000, answer.text[:200]
        await asyncio.sleep(0.01)  # the next beat

    hostile.run(body)
    assert hostile.lag_s < MAX_LAG_S
