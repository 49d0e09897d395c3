"""While the model loads, every request gets the same answer, and the server that follows can use
the port."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from pegboard_server.listener import LoadingAnswer


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def test_every_request_is_told_that_the_model_loads(listener: socket.socket) -> None:
    loading = LoadingAnswer(listener)
    loading.open()
    for method, path, body in [
        ("GET", "/health", None),
        ("POST", "/v1/chat/completions", b"{}"),
        ("GET", "/nowhere", None),
    ]:
        connection = http.client.HTTPConnection(*listener.getsockname(), timeout=30)
        connection.request(method, path, body)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
        assert "loading" in json.loads(answer.read())["error"]["message"]
        connection.close()
    loading.close()


def test_clients_that_say_nothing_or_leave_hold_nobody_up(listener: socket.socket) -> None:
    loading = LoadingAnswer(listener)
    loading.open()
    address = listener.getsockname()
    socket.create_connection(address).close()
    silent = socket.create_connection(address)
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 503
    silent.close()
    loading.close()


def test_later_connections_wait_for_the_server(listener: socket.socket) -> None:
    loading = LoadingAnswer(listener)
    loading.open()
    loading.close()
    loading.close()
    with socket.create_connection(listener.getsockname(), timeout=30) as client:
        client.sendall(b"hello")
        served, _ = listener.accept()
        with served:
            assert served.recv(5) == b"hello"


def test_closing_what_was_never_opened(listener: socket.socket) -> None:
    LoadingAnswer(listener).close()
