"""The proxies pass on each part of a stream at once."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

PROXIES = Path(__file__).parents[2] / "examples/deployment/proxies"
PATIENCE_S = 20


class Stream(BaseHTTPRequestHandler):
    """Sends the first part, and the second one only after the client has said that it has the
    first."""

    has_first = threading.Event()

    def do_GET(self) -> None:
        if self.path != "/stream":
            self.send_response(200)
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"data: one\n\n")
        self.wfile.flush()
        if self.has_first.wait(PATIENCE_S):
            self.wfile.write(b"data: two\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def upstream() -> Iterator[int]:
    """Yields the port of a server that streams."""
    Stream.has_first.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Stream) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def nginx(folder: Path, text: str) -> list[str]:
    (folder / "pegboard.conf").write_text(text, "utf-8")
    places = "".join(
        f"{name}_temp_path {folder}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {places} include {folder}/pegboard.conf; }}",
        "utf-8",
    )
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, text: str) -> list[str]:
    (folder / "Caddyfile").write_text("{\n\tadmin off\n}\n" + text, "utf-8")
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


@pytest.mark.parametrize(
    ("command", "file"), [(nginx, "nginx.conf"), (caddy, "Caddyfile")], ids=["nginx", "caddy"]
)
def test_a_stream_is_not_held_back(command: object, file: str, tmp_path: Path) -> None:
    assert callable(command)
    if shutil.which(command.__name__) is None:
        pytest.skip(f"{command.__name__} is not installed")
    port = free_port()
    with upstream() as server:
        text = (PROXIES / file).read_text("utf-8").replace("127.0.0.1:8000", f"127.0.0.1:{server}")
        text = re.sub(r"(listen |^:)8080", rf"\g<1>{port}", text, flags=re.M)
        with subprocess.Popen(command(tmp_path, text), cwd=tmp_path) as proxy:
            try:
                wait_for(port)
                with httpx.stream("GET", f"http://127.0.0.1:{port}/stream") as answer:
                    lines = (line for line in answer.iter_lines() if line)
                    assert next(lines) == "data: one"
                    Stream.has_first.set()
                    assert next(lines) == "data: two"
            finally:
                proxy.terminate()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the proxy did not listen")
