"""Bodies made from the server's own /openapi.json, for every route of every api. No answer is a
5xx, none is missing, every refusal is an error object, and the engine is idle afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from server_process import MODEL, PATIENCE_S, Server

schemathesis = pytest.importorskip("schemathesis")

NUM_EXAMPLES = int(os.environ.get("PEGBOARD_TEST_FUZZ_EXAMPLES", "15"))
"""Number of bodies per operation."""

LIMITS = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 16}
"""Limits on the work that a body may request from a small CPU. The test is about the shape of the
body."""


PLAIN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "prompt": "Hello",
    "input": "Hello",
    "tools": None,
}
"""Random text is hardly ever a valid message. With these values, the other fields are checked
too."""


@pytest.fixture(scope="module")
def open_server(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory, probe: Path
) -> Iterator[Server]:
    """Enable all installed plugins."""
    flags = (
        "--plugins-enable",
        "api:admin",
        "api:tokenizer_info",
        "api:probe",
        "--max-num-queued-reqs",
        "256",
    )
    with Server(smollm2_gguf, tmp_path_factory.mktemp("fuzzed"), *flags, probe=probe) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


def check(case: Any, *, with_plain_parts: bool) -> None:
    body = case.body
    if isinstance(body, dict):
        body = case.body = {
            **body,
            **{name: PLAIN[name] for name in PLAIN if with_plain_parts and name in body},
        }
        body.setdefault("model", MODEL)
        for name, most in LIMITS.items():
            if name in body or (name == "max_tokens" and "messages" in body):
                value = body.get(name)
                body[name] = (
                    most if value is None or (isinstance(value, int) and value > most) else value
                )
    response = case.call(timeout=PATIENCE_S)
    assert response.status_code < 500 or response.status_code == 503, (
        response.status_code,
        response.text,
        body,
    )
    if response.status_code >= 400 and case.method != "HEAD":
        assert "error" in response.json(), response.text


@pytest.mark.slow
def test_no_body_breaks_the_server(open_server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{open_server.url}/openapi.json").exclude(
        path_regex="^/probe"
    )
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= {
        item.path for item in operations
    }
    for operation in operations:
        has_body = bool(list(operation.body))

        @settings(
            max_examples=NUM_EXAMPLES if has_body else 3,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(operation.as_strategy(), st.booleans())
        def run(case: Any, with_plain_parts: bool) -> None:
            check(case, with_plain_parts=with_plain_parts)

        run()
    open_server.wait_until_idle()
