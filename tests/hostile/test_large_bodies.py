"""Bodies of up to 8 MiB that take as much work as possible. Each is refused, and others get answers
meanwhile."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
from typing import Any

import httpx
import pooled_routes
import pytest
from generated_requests import VALID
from hostile_bodies import LONG, MIB, places
from hostile_routes import HEADERS, SMALL

BODIES = {**SMALL, **pooled_routes.SMALL}
LARGE = {**LONG, **pooled_routes.LONG}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_holds_up_nobody(make_hostile, name):
    path, fields = LARGE[name]
    hostile = make_hostile(pooled_routes.engine_of(path))
    body = json.dumps({**BODIES[path], **fields()}, separators=(",", ":")).encode()[: 8 * MIB]

    async def post(http: httpx.AsyncClient) -> None:
        await http.post(path, json=BODIES[path])  # what is imported and compiled once
        hostile.lag_s = 0.0
        hostile.tokenizer.num_chars = 0
        answer = await http.post(path, content=body, headers=HEADERS)
        assert answer.status_code in (200, 400), answer.text[:500]
        assert answer.status_code == 400 or name in (
            "many prompts",
            "allowed calls",
            "allowed_token_ids",
        ), answer.text[:500]
        assert len(answer.content) < 4096 or answer.status_code == 200

    hostile.run(post)
    assert hostile.tokenizer.num_chars < MIB, "text was tokenized that cannot fit"
    assert hostile.lag_s < 0.25


WIDE: dict[str, Any] = {
    "large numbers": [1e308] * 4000,
    "strings": ["ab"] * 10_000,
    "lists": [[[]]] * 8_000,
    "object": {str(number): 0.5 for number in range(10_000)},
}
"""Values that take long to show, or to say of each part what is wrong with it."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", [*VALID, *pooled_routes.VALID])
@pytest.mark.parametrize("name", WIDE)
def test_a_wide_value_holds_up_nobody(make_hostile, path, name):
    """Wherever it is in the body."""
    hostile = make_hostile(pooled_routes.engine_of(path))
    slow = []

    async def post(http: httpx.AsyncClient) -> None:
        for number, valid in enumerate({**VALID, **pooled_routes.VALID}[path]):
            body = {**valid, "model": "fake-model"}
            await http.post(path, json={**valid, "model": "fake-model"})
            for place in range(len(places(body))):
                changed = copy.deepcopy(body)
                container, key = places(changed)[place]
                container[key] = WIDE[name]
                content = json.dumps(changed, separators=(",", ":")).encode()
                await asyncio.sleep(0.002)
                lags = []
                # other work makes it slower, never faster
                while min(lags, default=1.0) > 0.25 and len(lags) < 3:
                    hostile.lag_s = 0.0
                    answer = await http.post(path, content=content, headers=HEADERS)
                    await asyncio.sleep(0.002)
                    assert answer.status_code in (200, 400), answer.text[:500]
                    lags.append(hostile.lag_s)
                if min(lags) > 0.25:
                    slow.append(f"{path} body {number} {key}: {min(lags):.2f} s")

    hostile.run(post)
    assert not slow


@pytest.mark.parametrize("path", BODIES)
def test_a_refused_body_is_freed_at_once(make_hostile, path):
    """It does not wait for the garbage collector, which comes rarely and, with large bodies, takes
    long."""
    hostile = make_hostile(pooled_routes.engine_of(path))

    async def post(http: httpx.AsyncClient) -> None:
        body = {**BODIES[path], "messages": [{"role": 3}], "temperatur": [{}] * 1000}
        for num_bad in (0, 1, 20):
            gc.collect()
            gc.disable()
            for _ in range(num_bad):
                assert (await http.post(path, json=body)).status_code == 400
            await asyncio.sleep(0.002)
            num_lost = gc.collect()
            gc.enable()
            assert num_lost <= 40 * num_bad + 10, "about 25 of them are the client's"

    hostile.run(post)
