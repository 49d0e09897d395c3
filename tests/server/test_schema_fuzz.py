"""Bodies made from the server's own /openapi.json, for every route of every api: no answer is a 5xx, none is missing, every
refusal has the error shape, and nothing is left in the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from server_process import MODEL, PATIENCE_S, Server

schemathesis = pytest.importorskip("schemathesis")

NUM_EXAMPLES = int(os.environ.get("PEGBOARD_TEST_FUZZ_EXAMPLES", "40"))
"""Per operation."""

LIMITS = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 16}
"""What a body may ask of a small CPU; it is the shape of the body that is tested."""


@pytest.fixture(scope="module")
def open_server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory, probe: Path) -> Iterator[Server]:
    """Everything that is installed, enabled."""
    flags = ("--plugins-enable", "api:admin", "api:tokenizer_info", "api:probe", "--max-num-queued-reqs", "256")
    with Server(smollm2_gguf, tmp_path_factory.mktemp("fuzzed"), *flags, probe=probe) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


@pytest.fixture(scope="module")
def api_schema(open_server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{open_server.url}/openapi.json").exclude(path_regex="^/probe")


schema = schemathesis.pytest.from_fixture("api_schema")


@schema.parametrize()
@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
def test_no_body_breaks_the_server(case: Any, open_server: Server) -> None:
    body = case.body
    if isinstance(body, dict):
        for name, most in LIMITS.items():
            if name in body and isinstance(body[name], int) and body[name] > most:
                body[name] = most
        body.setdefault("model", MODEL)
        if "messages" in body and "max_tokens" not in body:
            body["max_tokens"] = 2
    response = case.call(timeout=PATIENCE_S)
    assert response.status_code < 500 or response.status_code == 503, (response.status_code, response.text)
    if response.status_code >= 400 and case.method != "HEAD":
        assert "error" in response.json(), response.text


def test_nothing_is_left(open_server: Server) -> None:
    open_server.wait_until_idle()
