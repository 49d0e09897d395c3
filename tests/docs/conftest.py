"""Fixtures for the commands in the pages: installed example plugins, the real model, and a server.
The tests import `pages` and `page_server`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from page_server import PATIENCE_S, Server
from pages import ROOT


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the commands. The example plugins are installed by pip, without a
    network."""
    target = tmp_path_factory.mktemp("examples")
    projects = [str(path.parent) for path in sorted(ROOT.glob("examples/plugins/*/pyproject.toml"))]
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
        "--target",
        str(target),
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), *projects],
        check=True,
        timeout=PATIENCE_S,
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PEGBOARD") or name == "PEGBOARD_CACHE"
    }
    return {
        **kept,
        "PYTHONPATH": str(target),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
    }


@pytest.fixture(scope="session")
def server(
    smollm2_gguf: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server for all commands that need a running one."""
    running = Server(
        ("pegboard", "serve", str(smollm2_gguf)), environment, tmp_path_factory.mktemp("server")
    )
    yield running
    assert running.stop() == 0


@pytest.fixture
def tool_server() -> Iterator[str]:
    """The example of a tool server, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/tool_server.py"), str(port)],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    yield f"localhost:{port}"
    running.terminate()
    running.wait(PATIENCE_S)
