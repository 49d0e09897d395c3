"""`pegboard serve --nnodes 2` on two hosts, which are two processes here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams

SOON_S = 60.0
PROMPTS = ["hello", "abc", "a paged KV cache"]


def free_ports() -> tuple[int, int]:
    """Return the port of a server, and another one whose successor is free too."""
    while True:
        with (
            socket.create_server(("127.0.0.1", 0)) as http,
            socket.create_server(("127.0.0.1", 0)) as master,
        ):
            port = int(master.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return int(http.getsockname()[1]), port


def start(*words: object, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pegboard", "serve", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end, and return the exit code and what the process has logged."""
    _, logged = process.communicate(timeout=SOON_S)
    return process.returncode, logged


@contextmanager
def two_hosts(checkpoint: Path, key: str = "k") -> Iterator[tuple[str, Any, Any]]:
    """Yield the URL of a server, its process, and that of the other host, whose key is `key`."""
    http, port = free_ports()
    url = f"http://127.0.0.1:{http}"
    shared = ["--nnodes", 2, "--master-port", port, "--tensor-parallel-size", 2]
    words = [checkpoint, *shared, "--kv-cache-memory-bytes", 1 << 20]
    server = start(*words, "--port", http, PEGBOARD_CLUSTER_KEY="k")
    other = start(*words, "--headless", "--node-rank", 1, PEGBOARD_CLUSTER_KEY=key)
    try:
        yield url, server, other
    finally:
        for process in (server, other):
            if process.poll() is None:
                process.kill()
            process.communicate()


def wait_for(url: str, server: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + SOON_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=SOON_S):
                return
        except OSError:
            assert server.poll() is None and time.monotonic() < limit
            time.sleep(0.05)


def completion(url: str, checkpoint: Path, prompt: str, **more: Any) -> Any:
    body = {"model": str(checkpoint), "prompt": prompt, "temperature": 0, "max_tokens": 20, **more}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SOON_S) as answer:
        return answer.read().decode()


def test_two_hosts_answer_as_one_rank(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm = LLM(str(checkpoint), kv_cache_memory_bytes=1 << 20)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    with two_hosts(checkpoint) as (url, server, other):
        wait_for(url, server)
        more = {"return_token_ids": True, "ignore_eos": True}
        answers = [json.loads(completion(url, checkpoint, each, **more)) for each in PROMPTS]
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        server.terminate()
        assert ended(server)[0] == 0 and ended(other)[0] == 0


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_clients_hear_of_a_host_that_ends(checkpoint: Path, number: signal.Signals) -> None:
    with two_hosts(checkpoint) as (url, server, other):
        wait_for(url, server)
        heard: list[str] = []

        def ask() -> None:
            while not heard:  # until a request is running at the end of the host
                try:
                    text = completion(url, checkpoint, "hello", ignore_eos=True, stream=True)
                    heard.extend(["error"] * ("error" in text))
                except OSError as error:
                    heard.append(str(error))

        client = threading.Thread(target=ask)
        client.start()
        os.kill(other.pid, number)
        client.join(SOON_S)
        assert heard
        code, logged = ended(server)
        assert code == 1 and "worker 1 died" in logged and "on host" in logged
        assert ended(other)[0] in (-signal.SIGKILL, 128 + signal.SIGTERM)


def test_a_host_ends_with_the_server(checkpoint: Path) -> None:
    with two_hosts(checkpoint) as (url, server, other):
        wait_for(url, server)
        server.kill()
        code, logged = ended(other)
        assert code == 1 and "the engine's process has ended" in logged


def test_a_host_with_another_key(checkpoint: Path) -> None:
    with two_hosts(checkpoint, key="another") as (_, server, other):
        code, logged = ended(other)
        assert code != 0 and "is not trusted" in logged and "PEGBOARD_CLUSTER_KEY" in logged
        server.terminate()
        assert "was refused: it does not know the key" in ended(server)[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--headless"], "headless runs engines or ranks of another host"),
        (["--headless", "--nnodes", "2", "-tp", "2"], "headless runs the ranks of another host"),
        (["--nnodes", "2", "--node-rank", "2", "-tp", "2"], "node_rank is 2, expected 0 to 1"),
        (["--nnodes", "2", "--node-rank", "1", "-tp", "2"], "the engine is on the host with node_"),
        (["--nnodes", "2", "-tp", "3"], "cannot be divided equally among 2 hosts"),
        (["--nnodes", "2", "-tp", "2", "--master-port", "65535"], "expected 1 to 65534"),
        (["--nnodes", "2", "-tp", "2", "-dp", "2"], "data_parallel_size and nnodes"),
        (["--nnodes", "2", "-tp", "2"], "PEGBOARD_CLUSTER_KEY to the same random text"),
        (
            ["--nnodes", "2", "-tp", "2", "--distributed-executor-backend", "uni"],
            "hosts=2 is not declared as supported",
        ),
    ],
)
def test_settings_that_do_not_fit(checkpoint: Path, words: list[str], reason: str) -> None:
    code, logged = ended(start(checkpoint, *words, "--port", free_ports()[0]))
    assert code != 0 and reason in logged
