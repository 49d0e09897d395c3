"""`bench serve` finds the name under which the model is served."""

from __future__ import annotations

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from pegboard_command_bench.serve import _served

from pegboard.errors import PegboardError

MODELS = [{"id": "first", "root": "org/one"}, {"id": "second", "root": "org/two"}]


class Models(BaseHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        body = json.dumps({"data": MODELS}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    httpd = HTTPServer(("127.0.0.1", 0), Models)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def served(base: str, **given: str | None) -> str:
    arguments = Namespace(
        **{
            "model": None,
            "served_model_name": None,
            "insecure": False,
            "ready_check_timeout_sec": 0,
            **given,
        }
    )
    return str(asyncio.run(_served(base, {}, arguments))["id"])


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "first"),
        ({"model": "second"}, "second"),
        ({"model": "org/two"}, "second"),  # the reference that the server was started with
        ({"model": "org/any", "served_model_name": "second"}, "second"),
    ],
)
def test_the_name_is_found(base: str, given: dict[str, str], name: str) -> None:
    assert served(base, **given) == name


@pytest.mark.parametrize(
    "given", [{"model": "third"}, {"model": "org/two", "served_model_name": "third"}]
)
def test_an_unknown_name_is_refused(base: str, given: dict[str, str]) -> None:
    with pytest.raises(PegboardError, match="serves first, second, not 'third'"):
        served(base, **given)
