"""The number of engines changes behind a server that goes on to serve."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from server_process import HTTP, MODEL, Server, wait_until
from test_data_parallel import answers, by_engine, complete, control
from test_expert_servers import START, mixture, tokens
from test_expert_servers import start as start_mixture
from test_lifecycle import LONG, running_stream

StartServer = Callable[..., Server]

__all__ = ["mixture", "start_mixture"]  # fixtures

ELASTIC = ("--enable-elastic-ep", "--plugins-enable", "api:admin")


def scale(server: Server, **body: Any) -> tuple[int, Any]:
    answer = HTTP.post(f"{server.url}/scale_elastic_ep", json=body)
    return answer.status_code, answer.json()


def is_scaling(server: Server) -> bool:
    answer = HTTP.post(f"{server.url}/is_scaling_elastic_ep").raise_for_status().json()
    assert [*answer] == ["is_scaling_elastic_ep"]
    return bool(answer["is_scaling_elastic_ep"])


def test_a_server_grows_and_shrinks(server: Server, start_server: StartServer) -> None:
    elastic = start_server(*ELASTIC, "--num-threads", "1")
    expected = answers(server)
    assert answers(elastic) == expected and is_scaling(elastic) is False
    with running_stream(elastic) as lines:
        grown = {"message": "Scaled to 2 data parallel engines"}
        assert scale(elastic, new_data_parallel_size=2) == (200, grown)
        assert json.loads(next(line for line in lines if line)[6:])["choices"]
        assert answers(elastic) == expected
        assert by_engine(elastic, "generation_tokens_total")["1"] > 0
        with running_stream(elastic, rank=1) as others:
            status, body = scale(elastic, new_data_parallel_size=1, drain_timeout=0.5)
            assert status == 408 and "drain timeout after 0.5 seconds" in body["error"]["message"]
            assert json.loads(next(line for line in others if line)[6:])["choices"]
        pids = elastic.engine_pids()
        assert scale(elastic, new_data_parallel_size=1)[0] == 200
        assert elastic.engine_pids() == pids[:1]
        assert complete(elastic, "x", rank=1)["error"]["code"] == 400
    elastic.wait_until_idle()
    assert answers(elastic) == expected
    for body in ({}, {"new_data_parallel_size": 0}, {"new_data_parallel_size": "2"}):
        assert scale(elastic, **body)[0] in (400, 422)
    control(elastic, "pause")
    status, body = scale(elastic, new_data_parallel_size=2)
    assert status == 400 and "paused" in body["error"]["message"]
    control(elastic, "resume")
    assert elastic.stop() == 0
    elastic.check_nothing_left()


@pytest.mark.slow
def test_several_api_processes_know_the_new_engines(start_server: StartServer) -> None:
    elastic = start_server(
        *ELASTIC, "--num-threads", "1", "--api-server-count", "2", "--engine-stall-s", "2"
    )
    assert scale(elastic, new_data_parallel_size=2)[0] == 200
    for _ in range(6):  # of both processes
        assert complete(elastic, "One", rank=1)["choices"]
    engine = elastic.engine_pids()[1]
    os.kill(engine, signal.SIGSTOP)
    for status in (503, 200):
        wait_until(
            lambda status=status: all(
                HTTP.get(f"{elastic.url}/health").status_code == status for _ in range(6)
            ),
            "all processes see whether the new engine answers",
        )
        os.kill(engine, signal.SIGCONT)
    os.kill(engine, signal.SIGKILL)
    assert elastic.wait() == 1
    elastic.check_nothing_left()


@pytest.mark.slow
def test_engines_with_shared_out_experts(start_mixture: StartServer) -> None:
    """They start again with other experts. Who asks meanwhile gets a 503."""
    flags = (*START, "--enable-expert-parallel", *ELASTIC)
    elastic = start_mixture(*flags)
    expected = tokens(elastic)
    for size in (2, 3, 1):
        answers: list[tuple[int, Any]] = []
        with running_stream(elastic, {**LONG, "prompt": [5, 6], "return_token_ids": True}) as lines:
            thread = threading.Thread(
                target=lambda size=size, answers=answers: answers.append(
                    scale(elastic, new_data_parallel_size=size)
                )
            )
            thread.start()
            wait_until(lambda: is_scaling(elastic), "the engines are being changed")
            body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1}
            wait_until(
                lambda body=body: (
                    HTTP.post(f"{elastic.url}/v1/completions", json=body).status_code == 503
                ),
                "new requests are refused",
            )
            refused = HTTP.post(f"{elastic.url}/v1/completions", json=body)
            assert "currently scaling" in refused.text and "Retry-After" in refused.headers
            assert json.loads(next(line for line in lines if line)[6:])["choices"]
        thread.join()
        assert answers[0][0] == 200, answers
        assert tokens(elastic) == expected
        assert len(elastic.engine_pids()) == size
        if size > 1:
            assert tokens(elastic, rank=size - 1) == expected
    assert elastic.stop() == 0
    elastic.check_nothing_left()


@pytest.mark.slow
def test_a_server_that_cannot_scale(start_server: StartServer) -> None:
    fixed = start_server("--plugins-enable", "api:admin")
    status, body = scale(fixed, new_data_parallel_size=2)
    assert status == 400 and "--enable-elastic-ep" in body["error"]["message"]
    assert is_scaling(fixed) is False
