"""Two engines that share out the experts of a tiny mixture, behind one server: they take steps
together, and only while one of them has requests."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import HTTP, MODEL, Server, wait_until
from test_data_parallel import by_engine, control
from test_lifecycle import events_of, running_stream
from transformers import AutoConfig, AutoModelForCausalLM

IDS = [[3 + (7 * i + 5 * j) % 120 for j in range(1 + 4 * i)] for i in range(12)]
LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": [5, 6, 7],
    "max_tokens": 30000,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}
START = ("--max-model-len", "32000", "--skip-tokenizer-init", "--num-threads", "1")
TWO = (*START, "-dp", "2", "--enable-expert-parallel")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        max_position_embeddings=32768,
        initializer_range=0.5,
    )
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture
def start(mixture: Path, tmp_path: Path, probe: Path) -> Iterator[Callable[..., Server]]:
    """Start a server for this test."""
    started: list[Server] = []

    def start(*flags: str) -> Server:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Server(mixture, folder, *flags, probe=probe))
        return started[-1].wait_until_ready()

    yield start
    for running in started:
        running.stop()


def tokens(server: Server, rank: int | None = None) -> list[list[int]]:
    """What the server answers to all prompts at the same time. rank: the engine that is asked."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}

    def answer(prompt: list[int]) -> list[int]:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answered = HTTP.post(f"{server.url}/v1/completions", json=body, headers=headers)
        return list(answered.raise_for_status().json()["choices"][0]["token_ids"])

    with ThreadPoolExecutor(len(IDS)) as pool:
        return list(pool.map(answer, IDS))


def ticks(pids: list[int]) -> list[int]:
    """The time that the processes have computed, in ticks of 10 ms."""
    texts = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return [int(fields[11]) + int(fields[12]) for fields in texts]


def wait_until_no_engine_computes(server: Server) -> None:
    def is_idle() -> bool:
        before = ticks(server.engine_pids())
        time.sleep(0.3)
        return sum(ticks(server.engine_pids())) - sum(before) <= 2

    wait_until(is_idle, "no engine computes")


@pytest.mark.slow
def test_two_engines_share_out_experts(start: Callable[..., Server]) -> None:
    one = start(*START)
    want = tokens(one)
    assert len({tuple(each) for each in want}) > 6
    one.stop()
    two = start(*TWO)
    assert tokens(two) == want
    assert all(by_engine(two, "generation_tokens_total").values())
    wait_until_no_engine_computes(two)

    # the other engine takes part in the steps of one, without tokens of its own
    for rank in (0, 1):
        before = by_engine(two, "generation_tokens_total")
        assert tokens(two, rank) == want
        after = by_engine(two, "generation_tokens_total")
        assert after[str(1 - rank)] == before[str(1 - rank)]
        assert after[str(rank)] == before[str(rank)] + 12 * len(IDS)

    # a client leaves, and engines pause, while others go on
    with running_stream(two, LONG), running_stream(two, LONG):
        wait_until(
            lambda: by_engine(two, "num_requests_running") == {"0": 1, "1": 1},
            "both engines have a request",
        )
    two.wait_until_idle()
    with running_stream(two, LONG) as lines:
        control(two, "pause")
        assert control(two, "is_paused") is True
        control(two, "resume")
        assert events_of(lines)[-1] == "[DONE]"  # the pause has aborted it
    assert tokens(two) == want
    two.wait_until_idle()
    wait_until_no_engine_computes(two)
    assert two.stop() == 0
    two.check_nothing_left()


@pytest.mark.slow
def test_a_server_stops_with_open_requests(start: Callable[..., Server]) -> None:
    server = start(*TWO, "--shutdown-timeout-s", "0")
    with running_stream(server, LONG), running_stream(server, LONG):
        assert server.stop() == 0
    server.check_nothing_left()


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_engine_is_killed(start: Callable[..., Server], killed: int) -> None:
    """The other one, which waits for it, is ended."""
    server = start(*TWO)
    pids = server.engine_pids()
    with running_stream(server, LONG) as lines:
        os.kill(pids[killed], signal.SIGKILL)
        error = json.loads(events_of(lines)[-2])["error"]
        assert error["code"] == 500 and f"engine {killed}: " in error["message"]
    assert server.wait() == 1
    server.check_nothing_left()
