"""The measurements, tested with sides and servers that compute nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from measure import QUICK_CLIENTS, measure_servers, measure_sides
from servers import MemoryWatch, Server, ServerFailed, measure_server
from side import Side, SideFailed
from workload import mixed

SERVER = '''
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Answers(BaseHTTPRequestHandler):
    """Streams as many pieces as are asked for, the usage after them."""

    def do_GET(self):
        self.send_response(503)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if body["prompt"] else 400)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices":[{"text":"a"}]}\\n\\n')
        self.wfile.write(b'data: {"choices":[],"usage":{}}\\n\\ndata: [DONE]\\n\\n')

    def log_message(self, *arguments):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
'''  # noqa: E501

SIDE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from serving import serve
def generate(prompts, max_tokens):
    if len(sys.argv) > 2:
        sys.exit("out of memory")
serve(generate, lambda prompt, max_tokens: [time.perf_counter() + index for index in range(max_tokens)])
"""  # noqa: E501


class Fakes:
    """A stand-in for `peers.Peers`."""

    def __init__(self, folder: Path) -> None:
        self.server = folder / "server.py"
        self.side = folder / "side.py"
        self.server.write_text(SERVER)
        self.side.write_text(SIDE)

    def start(self, name: str, format: str) -> Side:
        arguments = [str(Path(__file__).parent), *(["fails"] if name == "broken" else [])]
        return Side(f"{name} {format}", sys.executable, str(self.side), arguments)

    def serving(self) -> list[tuple[str, str]]:
        return [("pegboard", "q4_1"), ("llama-server", "q4_1")]

    def serve(self, name: str, format: str, concurrency: int) -> Server:
        ends_at_once = [sys.executable, "-c", "raise SystemExit('no such flag')"]
        return Server([sys.executable, str(self.server)] if name == "pegboard" else ends_at_once)


@pytest.fixture
def fakes(tmp_path: Path) -> Any:
    return Fakes(tmp_path)


def test_a_load_is_counted_and_its_memory_watched(fakes: Any) -> None:
    server = fakes.serve("pegboard", "q4_1", 8)
    try:
        assert 0 < server.health_s <= server.first_token_s
        numbers = measure_server(server, mixed(0, quick=True), 4)
    finally:
        server.stop()
    assert server.process.returncode is not None
    assert 0 <= numbers["itl_ms_p50"] <= numbers["itl_ms_p90"] <= numbers["itl_ms_p99"]
    assert 0 < numbers["ttft_ms_p50"] <= numbers["ttft_ms_p99"] and numbers["tokens_per_s"] > 0
    assert 0 < numbers["pss_mib"] <= numbers["rss_mib"]


def test_a_refused_request_is_no_number(fakes: Any) -> None:
    server = fakes.serve("pegboard", "q4_1", 8)
    try:
        refused = mixed(0, quick=True)
        refused.prompts[3].clear()
        with pytest.raises(ServerFailed, match="400"):
            server.load(refused, 2)
    finally:
        server.stop()


def test_memory_of_this_process_is_seen() -> None:
    with MemoryWatch(os.getpid()) as memory:
        pass
    assert memory.rss_mib > 10


def test_servers_that_fail_are_left_out_with_their_reason(fakes: Any) -> None:
    failed: dict[str, str] = {}
    numbers = measure_servers(fakes, 1, True, failed)
    assert list(numbers) == ["pegboard q4_1"] and list(failed) == ["llama-server q4_1"]
    assert "no such flag" in failed["llama-server q4_1"]
    assert list(numbers["pegboard q4_1"]["curve"]) == [str(clients) for clients in QUICK_CLIENTS]


def test_sides_that_fail_are_left_out_with_their_reason(fakes: Any) -> None:
    failed: dict[str, str] = {}
    numbers = measure_sides(
        fakes, [("pegboard", "q4_1"), ("broken", "q4_1"), ("pegboard", "q4_0")], 2, True, failed
    )
    assert (
        list(numbers) == ["pegboard q4_1", "pegboard q4_0"]
        and "out of memory" in failed["broken q4_1"]
    )
    assert numbers["pegboard q4_1"]["single"]["tokens_per_s"] == pytest.approx(1, abs=1e-3)
    assert len(numbers["pegboard q4_1"]["rounds"]) == 2
    with pytest.raises(SideFailed, match="can't open file"):
        Side("absent q4_1", sys.executable, str(fakes.side) + ".absent", [])
    assert "prefix" in numbers["pegboard q4_1"] and "prefix" not in numbers["pegboard q4_0"]
