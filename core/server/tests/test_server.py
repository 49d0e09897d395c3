"""The gateway in front of the apis, and the server: ports, shutdown, exit when the engine dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.testclient import TestClient

from pegboard.errors import (
    ConfigError,
    EngineDeadError,
    MalformedRequest,
    Overloaded,
    PegboardError,
    PluginFailure,
    RequestError,
    UnknownModel,
)
from pegboard.interfaces.api import CLIENT, ApiSpec
from pegboard_server.app import build_app
from pegboard_server.gateway import error_response
from pegboard_server.json_api import endpoint, error_body, error_event
from pegboard_server.listener import bind_socket
from pegboard_server.memory import LARGE_BYTES, FreedMemory
from pegboard_server.server import run_server
from pegboard_server.settings import ServerConfig
from pegboard_server.streaming import EventStream
from pegboard_testing.fake_client import FakeEngineClient

ERRORS: dict[str, tuple[Exception, int]] = {
    "request": (RequestError("bad top_p", parameter="top_p"), 400),
    "model": (UnknownModel("no such model"), 404),
    "overloaded": (Overloaded("full", retry_after_s=0.2), 503),
    "dead": (EngineDeadError("gone"), 500),
    "plugin": (PluginFailure("plugin draft:x failed", plugin="draft:x"), 500),
    "config": (ConfigError("wrong setting"), 500),
    "unexpected": (KeyError("oops"), 500),
}


class EchoApi:
    """Echoes bodies, and raises errors on demand."""

    def __init__(self, name: str, prefix: str = "") -> None:
        self.name = name
        self.prefix = prefix

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route(self.prefix + "/echo", self.echo, methods=["POST"]),
            Route(self.prefix + "/open", self.open, methods=["GET"]),
            Route(self.prefix + "/id", self.show_id, methods=["GET"]),
            Route(self.prefix + "/client", self.show_client, methods=["GET"]),
            Route(self.prefix + "/raise/{what}", self.fail, methods=["GET"]),
            Route(self.prefix + "/broken", self.broken, methods=["GET"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> dict[str, Any]:
        return {"api": self.name, "status": status, "message": message, "parameter": parameter}

    async def echo(self, request: Request) -> Response:
        return JSONResponse({"length": len(await request.body())})

    async def open(self, request: Request) -> Response:
        return Response("open")

    async def show_id(self, request: Request) -> Response:
        return JSONResponse(request.state.request_id)

    async def show_client(self, request: Request) -> Response:
        return JSONResponse(CLIENT.get())

    async def fail(self, request: Request) -> Response:
        raise ERRORS[request.path_params["what"]][0]

    async def broken(self, request: Request) -> Response:
        async def parts():
            yield b"begun"
            raise KeyError("too late")

        return StreamingResponse(parts())


def make_client(engine: FakeEngineClient | None = None, **settings: Any) -> TestClient:
    first = EchoApi("first")
    second = EchoApi("second", "/second")
    spec = ApiSpec(api="1.0", implementation="x:y", public_paths=("/open",))
    other = ApiSpec(api="1.0", implementation="x:y", content_types=("text/plain",))
    app = build_app(
        [("first", first, spec), ("second", second, other)],
        engine or FakeEngineClient(),
        ServerConfig(**settings),
    )
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("what", ERRORS)
def test_exceptions_become_error_bodies(what):
    error, status = ERRORS[what]
    response = make_client().get(f"/raise/{what}")
    body = response.json()
    assert (response.status_code, body["status"], body["api"]) == (status, status, "first")
    assert body["parameter"] == getattr(error, "parameter", None)
    if what == "unexpected":
        assert "api:first" in body["message"] and "oops" not in body["message"]
    else:
        assert body["message"] == str(error)
    assert response.headers.get("retry-after") == ("1" if what == "overloaded" else None)


def test_errors_have_the_shape_of_the_api_they_belong_to():
    client = make_client()
    assert client.get("/second/raise/request").json()["api"] == "second"
    assert client.get("/second/echo").json()["api"] == "second"
    assert client.get("/nowhere").json() == {
        "api": "first",
        "status": 404,
        "message": "Not Found: there is no route GET /nowhere",
        "parameter": None,
    }


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Basic one", 401),
        ("one", 401),
        ("Bearer onetwo", 401),
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Bearer  two ", 200),
        ("Bearer schlüssel", 401),
    ],
)
def test_api_keys(header, status):
    client = make_client(api_key=["one", "two"])
    headers = {} if header is None else {"Authorization": header.encode()}
    response = client.post("/echo", json={}, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert (
            response.json()["message"].startswith("Unauthorized")
            and response.headers["www-authenticate"] == "Bearer"
        )


def test_what_needs_no_key(monkeypatch):
    client = make_client(api_key=["one"])
    assert client.get("/open").status_code == 200
    assert client.options("/echo").status_code == 405
    for path in ("/nowhere", "/open/", "//open", "/open/../echo", "/second/open"):
        assert client.get(path, follow_redirects=False).status_code == 401
    monkeypatch.setenv("PEGBOARD_API_KEY", "from-env")
    assert make_client().get("/id").status_code == 401
    assert make_client().get("/id", headers={"Authorization": "Bearer from-env"}).status_code == 200


def test_body_limit_by_length_and_by_counting():
    client = make_client(max_body_bytes=100)
    headers = {"Content-Type": "application/json"}
    assert client.post("/echo", content=b"x" * 100, headers=headers).json() == {"length": 100}
    by_length = client.post("/echo", content=b"x" * 101, headers=headers)
    assert by_length.status_code == 413 and "101 bytes" in by_length.json()["message"]
    by_count = client.post("/echo", content=iter([b"x" * 60, b"x" * 60]), headers=headers)
    assert by_count.status_code == 413 and by_count.json()["status"] == 413


def test_content_types_are_the_api_s_own():
    client = make_client()
    assert (
        client.post(
            "/echo", content=b"x", headers={"Content-Type": "Application/JSON; charset=utf-8"}
        ).status_code
        == 200
    )
    assert client.post("/echo", content=b"").status_code == 200
    wrong = client.post("/echo", content=b"x", headers={"Content-Type": "text/plain"})
    assert (
        wrong.status_code == 400
        and "Only 'application/json' is allowed, got 'text/plain'" in wrong.json()["message"]
    )
    assert (
        client.post(
            "/second/echo", content=b"x", headers={"Content-Type": "text/plain"}
        ).status_code
        == 200
    )
    assert client.post("/second/echo", json={}).status_code == 400


def test_request_ids():
    quiet = make_client()
    loud = make_client(enable_request_id_headers=True)
    given = quiet.get("/id", headers={"X-Request-Id": "abc"})
    assert given.json() == "abc" and "x-request-id" not in given.headers
    fresh = loud.get("/id")
    assert fresh.json() == fresh.headers["x-request-id"] != loud.get("/id").json()
    assert (
        loud.get("/raise/request", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    )
    assert loud.get("/id", headers={"X-Request-Id": "a b"}).status_code == 400
    assert loud.get("/id", headers={"X-Request-Id": "a" * 257}).status_code == 400


def test_dead_engine_refuses_all_but_public_paths():
    engine = FakeEngineClient()
    engine.die("out of memory")
    client = make_client(engine)
    response = client.post("/echo", json={})
    assert response.status_code == 500 and "out of memory" in response.json()["message"]
    assert client.get("/open").status_code == 200


def test_who_asks_is_the_address_and_the_key():
    client = make_client(api_key=["one", "two"])
    given = (
        {"Authorization": "Bearer one"},
        {"x-api-key": "one"},
        {"Authorization": "Bearer x", "x-api-key": "one"},
        {"x-api-key": "two"},
    )
    first, *same, other = (client.get("/client", headers=headers).json() for headers in given)
    assert same == [first, first] != [other, other] and "one" not in first
    client = make_client()
    assert client.get("/client").json() == client.get("/client", headers=given[0]).json(), (
        "a header that nobody checks"
    )


def test_root_path_is_no_part_of_the_route():
    engine = FakeEngineClient()
    spec = ApiSpec(api="1.0", implementation="x:y", public_paths=("/open",))
    app = build_app([("first", EchoApi("first"), spec)], engine, ServerConfig(api_key=["k"]))
    client = TestClient(app, root_path="/proxy")
    assert client.get("/proxy/open").status_code == 200
    assert client.get("/proxy/id").status_code == 401


@pytest.mark.parametrize("root_path", ["/llm", "llm/"])
def test_paths_with_and_without_the_prefix_are_served(root_path):
    """A proxy may remove the prefix or leave it. Keys are checked either way."""
    spec = ApiSpec(api="1.0", implementation="x:y", public_paths=("/open",))
    app = build_app(
        [("first", EchoApi("first"), spec)],
        FakeEngineClient(),
        ServerConfig(api_key=["k"], root_path=root_path),
    )
    client = TestClient(app)
    for prefix in ("", "/llm"):
        assert client.get(prefix + "/open").status_code == 200
        assert client.get(prefix + "/id").status_code == 401
        assert client.get(prefix + "/id", headers={"Authorization": "Bearer k"}).status_code == 200
    assert client.get("/llm/llm/open").status_code in (401, 404)
    assert client.get("/llmopen").status_code in (401, 404)


class RefusingApi(EchoApi):
    """Refuses in the three places where a refusal becomes an answer."""

    def routes(self) -> Sequence[BaseRoute]:
        return [
            *super().routes(),
            Route("/malformed", endpoint(self.malformed), methods=["GET"]),
            Route("/stream", self.stream, methods=["GET"]),
        ]

    async def malformed(self, request: Request) -> Response:
        raise MalformedRequest("bad body")

    async def stream(self, request: Request) -> Response:
        async def events():
            yield b"data: 1\n\n"
            raise RequestError("bad end")

        return EventStream(events(), None, error_event)


@pytest.mark.parametrize("is_on", [False, True])
def test_every_error_answer_has_its_traceback_in_the_log_if_asked_for(is_on, caplog):
    spec = ApiSpec(api="1.0", implementation="x:y")
    config = ServerConfig(log_error_stack=is_on)
    client = TestClient(
        build_app([("first", RefusingApi("first"), spec)], FakeEngineClient(), config)
    )
    for path, words in [
        ("/raise/request", "bad top_p"),
        ("/malformed", "bad body"),
        ("/stream", "bad end"),
    ]:
        caplog.clear()
        caplog.set_level("INFO")
        assert words in client.get(path).text
        assert (
            is_on or [f"was refused: {words}" in line for line in caplog.messages].count(True) == 1
        )
        assert (
            f"RequestError: {words}" in caplog.text or f"MalformedRequest: {words}" in caplog.text
        ) == is_on
    caplog.clear()
    assert client.get("/raise/config").status_code == 500
    # without the flag, a named error of ours is one line
    assert ("Traceback" in caplog.text) == is_on


def app_and_engine() -> tuple[Any, FakeEngineClient]:
    engine = FakeEngineClient()
    spec = ApiSpec(api="1.0", implementation="x:y")
    return build_app([("first", EchoApi("first"), spec)], engine, ServerConfig()), engine


def config(**settings: Any) -> ServerConfig:
    return ServerConfig(
        **{"port": 0, "uvicorn_log_level": "critical", "shutdown_timeout_s": 0.5, **settings}
    )


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as response:
        return json.loads(response.read())


def test_serves_on_a_free_port_until_told_to_stop():
    app, engine = app_and_engine()
    answers = []

    async def main() -> int:
        stop = asyncio.Event()
        addresses: list[str] = []
        server = asyncio.create_task(
            run_server(app, config(), health=engine.health, on_ready=addresses.append, stop=stop)
        )
        while not addresses:
            await asyncio.sleep(0.001)
        answers.append(await asyncio.to_thread(fetch, addresses[0] + "/id"))
        stop.set()
        return await server

    assert asyncio.run(main()) == 0 and len(answers[0]) == 32


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_in_order(number):
    assert threading.current_thread() is threading.main_thread()
    app, engine = app_and_engine()
    before = signal.getsignal(signal.SIGTERM)
    run = run_server(
        app, config(), health=engine.health, on_ready=lambda _: os.kill(os.getpid(), number)
    )
    assert asyncio.run(run) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_exit_code_tells_that_the_engine_died():
    app, engine = app_and_engine()
    assert (
        asyncio.run(
            run_server(app, config(), health=engine.health, on_ready=lambda _: engine.die())
        )
        == 1
    )


def test_error_in_on_ready_stops_the_server():
    app, _ = app_and_engine()

    def fail(address: str) -> None:
        raise ConfigError("told to fail")

    with pytest.raises(ConfigError, match="told to fail"):
        asyncio.run(run_server(app, config(), on_ready=fail))


def test_taken_port_and_other_bad_addresses():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PegboardError, match=f"port {port} on 127.0.0.1 is already in use"):
            bind_socket(config(port=port))
    with pytest.raises(ConfigError, match="port must be in"):
        bind_socket(config(port=70000))
    with pytest.raises(ConfigError, match="256.1.1.1"):
        bind_socket(config(host="256.1.1.1"))


def test_two_servers_that_bound_before_either_listened():
    """Both may bind (SO_REUSEADDR). The second one to listen gets the same error as a server that
    starts later."""
    app, engine = app_and_engine()
    first = bind_socket(config())
    port = first.getsockname()[1]
    second = bind_socket(config(port=port))
    first.listen()
    with first, pytest.raises(PegboardError, match="already in use"):
        asyncio.run(
            run_server(app, config(port=port), listener=second, on_ready=lambda _: engine.die())
        )


def test_unix_socket(tmp_path):
    path = str(tmp_path / "s")
    bind_socket(config(uds=path)).close()  # does not remove its file, like a killed server
    app, engine = app_and_engine()
    answers: list[bytes] = []

    def ask(address: str) -> None:
        assert address == f"unix:{path}"
        with pytest.raises(PegboardError, match="already in use"):
            bind_socket(config(uds=path))
        threading.Thread(target=talk).start()

    def talk() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(b"GET /id HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answers.append(client.recv(100))
        engine.die()

    assert asyncio.run(run_server(app, config(uds=path), health=engine.health, on_ready=ask)) == 1
    assert answers[0].startswith(b"HTTP/1.1 200") and not os.path.exists(path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        bind_socket(config(uds=str(tmp_path / "file")))


def test_answer_that_breaks_after_it_began_breaks_the_connection():
    app, engine = app_and_engine()
    seen: list[bytes] = []

    def talk(address: str) -> None:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n")
            while part := client.recv(1000):
                seen.append(part)
        engine.die()

    def on_ready(address: str) -> None:
        threading.Thread(target=talk, args=(address,)).start()

    asyncio.run(run_server(app, config(), health=engine.health, on_ready=on_ready))
    text = b"".join(seen)
    assert b"begun" in text and not text.endswith(b"0\r\n\r\n")


def test_errors_are_cut_to_a_length_that_clients_can_take() -> None:
    body = error_response(None, 400, "x" * 10**6).body
    assert len(body) < 2100
    told = error_body(400, "x" * 10**6, "y" * 10**6)["error"]
    assert (
        len(told["message"]) == 2000 and told["message"].endswith("…") and len(told["param"]) == 200
    )


def test_memory_is_given_back_after_large_bodies() -> None:
    """Once after a series of them, and not after small ones."""
    given: list[int] = []

    async def main() -> None:
        freed = FreedMemory(lambda pad: given.append(pad) or 1, delay_s=0)
        freed.add(LARGE_BYTES - 1)
        await asyncio.sleep(0.01)
        assert not given
        for _ in range(3):
            freed.add(LARGE_BYTES)
        while not given:
            await asyncio.sleep(0.001)
        freed.add(1)
        await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert given == [0]


FREEING = """
import threading
from pathlib import Path
from pegboard_server.memory import _library, keep_little

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

keep_little()
def work():
    for size in (8 << 20, 1 << 20, 100_000, 5000):
        blocks = [bytearray(size) for _ in range((16 << 20) // size)]
threads = [threading.Thread(target=work) for _ in range(12)]
before = resident()
for thread in threads: thread.start()
for thread in threads: thread.join()
_library("malloc_trim")(0)
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_memory_of_threads_goes_back() -> None:
    """12 threads allocate and free 16 MiB in blocks of different sizes, then `malloc_trim` is
    called. Without `keep_little`, about 60 MiB stay. How much stays also depends on which threads
    ran at the same time, so the best of a few runs counts."""
    command = [sys.executable, "-c", FREEING]
    runs = (
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        for _ in range(8)
    )
    assert any(int(run.stdout) < 40 for run in runs)


def test_the_gateway_counts_the_bytes_of_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(FreedMemory, "add", lambda self, num_bytes: counted.append(num_bytes))
    client = make_client()
    client.post("/echo", content=b"x" * 1000, headers={"Content-Type": "application/json"})
    client.get("/open")
    assert counted == [1000, 0]
