"""One server on the real model for the whole session, and servers for single tests. The tests
import `server_process`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from server_process import Server, install_probe


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here need the model. They also need /proc, to see which processes a server
    leaves."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real_model)
            item.add_marker(
                pytest.mark.skipif(
                    not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"
                )
            )


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a third-party api plugin that reports the engine's numbers."""
    return install_probe(tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="session")
def server(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory, probe: Path
) -> Iterator[Server]:
    """The session's server. Tests leave it idle. It computes with two threads also where the others
    have one."""
    with Server(
        smollm2_gguf, tmp_path_factory.mktemp("server"), "--num-threads", "2", probe=probe
    ) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """The official client of the session's server."""
    with server.client() as client:
        yield client


@pytest.fixture
def left_idle(server: Server) -> Iterator[None]:
    """The session's server has nothing to do after the test."""
    yield
    server.wait_until_idle()


@pytest.fixture
def start_server(
    smollm2_gguf: Path, tmp_path: Path, probe: Path
) -> Iterator[Callable[..., Server]]:
    """Start a server only for this test (once per test) and wait until it is ready."""
    started: list[Server] = []

    def start(*flags: str, **env: str) -> Server:
        started.append(Server(smollm2_gguf, tmp_path, *flags, probe=probe, **env))
        return started[0].wait_until_ready()

    yield start
    for running in started:
        running.stop()
