"""A sample of the campaign over generated requests (generated_bodies.py), which `make nightly`
runs, and a check of its valid bodies, for every run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import generated_bodies as campaign
import pooled_routes
from generated_requests import LIMITS, VALID
from server_process import Server

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads the memory of processes in /proc"
)
SAMPLE = 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with campaign.served(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def pooling_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with campaign.served(tmp_path_factory.mktemp("pooling"), pools=True) as running:
        yield running


def test_every_route_that_reads_a_body_has_valid_ones(server: Server) -> None:
    """A new route needs a body here. Valid bodies are answered with 200. The engine generates text,
    so it makes no vectors, and the number of engines is fixed."""
    description = campaign.httpx.get(f"{server.url}/openapi.json").json()
    described = {
        path
        for path, methods in description["paths"].items()
        if "requestBody" in methods.get("post", {})
    }
    pooled = {*pooled_routes.VALID, pooled_routes.CLASSIFY}
    assert described <= set(VALID) | pooled | {"/probe/{action}", "/scale_elastic_ep"}
    check_valid(server, VALID)
    assert all(
        any(limit in body for body in VALID[path] for limit in LIMITS) for path in list(VALID)[:4]
    )


def check_valid(server: Server, valid: dict[str, list[dict[str, Any]]]) -> None:
    for path, bodies in valid.items():
        for body in bodies:
            asked = {**body, "model": campaign.MODEL} if "model" in body else body
            answer = campaign.httpx.post(server.url + path, json=asked, timeout=60)
            assert answer.status_code == 200, (path, body, answer.text)


@pytest.mark.slow
def test_a_model_that_pools(pooling_server: Server) -> None:
    """Its valid bodies, and the sample."""
    check_valid(pooling_server, pooled_routes.VALID)
    test_no_request_is_answered_wrongly(pooling_server)


@pytest.mark.slow
def test_no_request_is_answered_wrongly(server: Server) -> None:
    """No status 500, no connection closed without an answer, every answer within its time. The
    limits of `/health` and of memory need a machine that is not busy, and the whole campaign."""
    found = campaign.run(server, SAMPLE, seed=1)
    assert not found.result.bad, [(request.number, why) for request, why in found.result.bad]
    assert (
        sum(found.result.statuses.values()) == SAMPLE and found.result.statuses["200"] > SAMPLE / 10
    )
    assert set(found.health["statuses"]) == {"200"}
