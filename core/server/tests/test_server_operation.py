"""Operation of a server: draining, limits, health after the engine's death, HTTPS, CORS,
middleware, logs."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.errors import ConfigError
from pegboard.interfaces.api import ApiSpec, Health, Prompt, RequestOptions
from pegboard_server.app import build_app
from pegboard_server.gateway import Traffic
from pegboard_server.logs import access_log, apply_log_config, logged
from pegboard_server.server import run_server
from pegboard_server.settings import ServerConfig
from pegboard_server.tls import tls_arguments
from pegboard_testing.fake_client import FakeEngineClient

SPEC = ApiSpec(api="1.0", implementation="x:y", public_paths=("/health",))


class SlowApi:
    """An api for tests: /wait answers when `release` is set; /stream sends a part, then waits for
    `release`. more: more routes."""

    def __init__(self, client: FakeEngineClient) -> None:
        self.client = client
        self.release = asyncio.Event()
        self.entered = asyncio.Event()
        self.more: list[Route] = []

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/echo", self.echo, methods=["GET", "POST"]),
            Route("/wait", self.wait),
            Route("/stream", self.stream),
            *self.more,
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> dict[str, Any]:
        return {"status": status, "message": message}

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.client.health().is_alive else 503)

    async def echo(self, request: Request) -> Response:
        return JSONResponse({"scheme": request.url.scheme, "length": len(await request.body())})

    async def wait(self, request: Request) -> Response:
        self.entered.set()
        await self.release.wait()
        return Response("done")

    async def stream(self, request: Request) -> Response:
        async def parts():
            yield "begun "
            self.entered.set()
            await self.release.wait()
            yield "done"

        return StreamingResponse(parts())


@asynccontextmanager
async def running(api: SlowApi, *, health: Callable[[], Health] | None = None, **settings: Any):
    """Runs a server. Yields its port, its stop event and its task."""
    config = ServerConfig(
        **{"port": 0, "uvicorn_log_level": "critical", "shutdown_timeout_s": 30.0, **settings}
    )
    traffic = Traffic(config.max_running_requests)
    app = build_app([("slow", api, SPEC)], api.client, config, traffic)
    stop = asyncio.Event()
    addresses = asyncio.Queue()
    server = asyncio.create_task(
        run_server(
            app, config, health=health, on_ready=addresses.put_nowait, stop=stop, traffic=traffic
        )
    )
    address = asyncio.create_task(addresses.get())
    await asyncio.wait({server, address}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield int(address.result().rpartition(":")[2]), stop, server
    finally:
        stop.set()
        await asyncio.wait_for(asyncio.gather(server, return_exceptions=True), 60)


async def get(
    port: int, path: str, *, headers: str = "", tls: ssl.SSLContext | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send a GET on a new connection. Returns (status, headers, body)."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname="localhost" if tls else None
    )
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n".encode())
    data = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    if not data:
        raise ConnectionError("closed without an answer")
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = [line.partition(": ") for line in lines]
    return int(first.split()[1]), {name.lower(): value for name, _, value in pairs}, body


def run(body: Callable[[SlowApi], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(body(SlowApi(FakeEngineClient())), 90)

    asyncio.run(main())


# --- draining -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/wait", "/stream"])
def test_running_requests_finish_and_new_ones_get_503(path: str) -> None:
    async def body(api: SlowApi) -> None:
        async with running(api) as (port, stop, server):
            first = asyncio.create_task(get(port, path))
            await api.entered.wait()
            stop.set()
            while (answer := await get(port, "/echo"))[0] == 200:
                await asyncio.sleep(0.01)
            status, headers, told = answer
            assert (
                status == 503 and headers["retry-after"] == "1" and headers["connection"] == "close"
            )
            assert "stopping" in json.loads(told)["message"]
            assert (await get(port, "/health"))[0] == 503
            assert not server.done()
            api.release.set()
            status, _, answered = await first
            assert status == 200 and b"done" in answered
            assert await server == 0

    run(body)


def test_what_does_not_finish_in_time_is_cut_off() -> None:
    async def body(api: SlowApi) -> None:
        async with running(api, shutdown_timeout_s=0.3) as (port, stop, server):
            waiting = asyncio.create_task(get(port, "/wait"))
            await api.entered.wait()
            api.entered.clear()
            streaming = asyncio.create_task(get(port, "/stream"))
            await api.entered.wait()
            stop.set()
            assert await server == 0
            status, _, told = await waiting
            assert status == 503 and b"stopping" in told
            assert b"done" not in (await streaming)[2]

    run(body)


# --- health ---------------------------------------------------------------------------------------


def test_health_is_503_after_the_engine_died() -> None:
    """Over a real socket. The task that watches the engine is held back, so that the server still
    answers."""

    async def body(api: SlowApi) -> None:
        noticed = False
        async with running(api, health=lambda: Health(not noticed, "gone")) as (port, _, server):
            assert (await get(port, "/health"))[0] == 200
            api.client.die("out of memory")
            status, _, told = await get(port, "/health")
            assert (status, told) == (503, b"")
            status, _, told = await get(port, "/echo")
            assert status == 500 and b"out of memory" in told
            noticed = True
            assert await server == 1

    run(body)


# --- limits ---------------------------------------------------------------------------------------


def test_too_many_requests_at_once_are_refused_with_retry_after() -> None:
    async def body(api: SlowApi) -> None:
        async with running(api, max_running_requests=2) as (port, _, _):
            waiting = [asyncio.create_task(get(port, "/wait")) for _ in range(2)]
            while (
                len([1 for task in waiting if not task.done()])
                and (await get(port, "/echo"))[0] == 200
            ):
                await asyncio.sleep(0.01)
            status, headers, told = await get(port, "/echo")
            assert (
                status == 503 and headers["retry-after"] == "1" and b"max_running_requests" in told
            )
            assert (await get(port, "/health"))[0] == 200  # busy is not dead
            api.release.set()
            assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200, 200]
            assert (await get(port, "/echo"))[0] == 200

    run(body)


def test_headers_are_limited_in_number_and_size() -> None:
    async def body(api: SlowApi) -> None:
        async with running(api, h11_max_header_count=8, h11_max_incomplete_event_size=2000) as (
            port,
            _,
            _,
        ):
            assert (await get(port, "/echo", headers="".join(f"X-{n}: 1\r\n" for n in range(6))))[
                0
            ] == 200
            status, _, told = await get(
                port, "/echo", headers="".join(f"X-{n}: 1\r\n" for n in range(7))
            )
            assert status == 431 and b"9 headers" in told
            assert (await get(port, "/echo", headers=f"X: {'a' * 1000}\r\n"))[0] == 200
            assert (await get(port, "/echo", headers=f"X: {'a' * 100_000}\r\n"))[0] in (400, 431)

    run(body)


def test_slow_readers_stall_nobody_and_fill_no_memory() -> None:
    """Twenty clients ask for endless answers and never read. The server stops producing them, and
    still answers all other clients."""

    async def body(api: SlowApi) -> None:
        made = 0

        async def flood(request: Request) -> Response:
            async def parts():
                nonlocal made
                while True:
                    made += 1
                    await asyncio.sleep(0)  # like an engine
                    yield b"x" * 65536

            return StreamingResponse(parts())

        api.more.append(Route("/flood", flood))
        async with running(api, shutdown_timeout_s=0.1) as (port, _, _):
            clients = []
            for _ in range(20):
                client = socket.socket()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
                await asyncio.get_running_loop().sock_sendall(
                    client, b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n"
                )
                clients.append(client)
            before = -1
            while before != made:  # until the kernel's buffers are full
                before = made
                for _ in range(5):
                    assert (await get(port, "/echo"))[0] == 200
                await asyncio.sleep(0.05)
            # the kernel's buffers take at most a few megabytes per client
            assert 20 <= made < 20 * 200, made
            for client in clients:
                client.close()

    run(body)


# --- HTTPS ----------------------------------------------------------------------------------------


def make_certificate(folder: Path, name: str, authority: Path | None = None) -> tuple[str, str]:
    """Returns (key file, certificate file) for localhost, self-signed or signed by an authority
    that is created here."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make certificates")
    key = folder / f"{name}.key"
    certificate = folder / f"{name}.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
    ]
    words += [
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    if authority is not None:
        words += [
            "-CA",
            str(authority.with_suffix(".pem")),
            "-CAkey",
            str(authority.with_suffix(".key")),
        ]
    subprocess.run(words, check=True, capture_output=True)
    return str(key), str(certificate)


def test_https_and_client_certificates(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path, "server")
    client_key, client_certificate = make_certificate(tmp_path, "client")

    async def body(api: SlowApi) -> None:
        trusting = ssl.create_default_context(cafile=certificate)
        async with running(api, ssl_keyfile=key, ssl_certfile=certificate) as (port, _, _):
            status, _, told = await get(port, "/echo", tls=trusting)
            assert status == 200 and json.loads(told)["scheme"] == "https"
        required = {"ssl_ca_certs": client_certificate, "ssl_cert_reqs": 2}
        async with running(api, ssl_keyfile=key, ssl_certfile=certificate, **required) as (
            port,
            _,
            _,
        ):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                if not (await get(port, "/echo", tls=trusting))[2]:
                    raise ConnectionError
            trusting.load_cert_chain(client_certificate, client_key)
            assert (await get(port, "/echo", tls=trusting))[0] == 200

    run(body)


def test_new_certificates_are_loaded_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pegboard_server.tls.REFRESH_INTERVAL_S", 0.02)
    key, certificate = make_certificate(tmp_path, "server")
    new_key, new_certificate = make_certificate(tmp_path, "new")

    async def body(api: SlowApi) -> None:
        async with running(
            api, ssl_keyfile=key, ssl_certfile=certificate, enable_ssl_refresh=True
        ) as (port, _, _):
            assert (await get(port, "/echo", tls=ssl.create_default_context(cafile=certificate)))[
                0
            ] == 200
            trusting = ssl.create_default_context(cafile=new_certificate)
            with pytest.raises(ssl.SSLError):
                await get(port, "/echo", tls=trusting)
            # for a moment, key and certificate do not belong together
            Path(key).write_bytes(Path(new_key).read_bytes())
            await asyncio.sleep(0.1)
            Path(certificate).write_bytes(Path(new_certificate).read_bytes())
            while True:
                try:
                    assert (await get(port, "/echo", tls=trusting))[0] == 200
                    break
                except ssl.SSLError:
                    await asyncio.sleep(0.02)

    run(body)


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    assert tls_arguments(ServerConfig()) == {}
    with pytest.raises(ConfigError, match="there is no such file"):
        tls_arguments(ServerConfig(ssl_certfile=str(tmp_path / "none.pem")))
    (tmp_path / "bad.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"bad\.pem"):
        tls_arguments(ServerConfig(ssl_certfile=str(tmp_path / "bad.pem")))


# --- CORS, middleware -----------------------------------------------------------------------------


def client_of(**settings: Any) -> TestClient:
    engine = FakeEngineClient()
    return TestClient(
        build_app([("slow", SlowApi(engine), SPEC)], engine, ServerConfig(**settings))
    )


def test_cors() -> None:
    """CORS is off until origins are named. After that, a preflight needs no key, and the page can
    read refusals."""
    preflight = {"Origin": "https://page", "Access-Control-Request-Method": "POST"}
    assert (
        "access-control-allow-origin"
        not in client_of().get("/echo", headers={"Origin": "https://page"}).headers
    )
    client = client_of(
        allowed_origins=["https://page"],
        api_key=["k"],
        allow_credentials=True,
        allowed_methods=["POST"],
    )
    asked = client.options("/echo", headers=preflight)
    assert (
        asked.status_code == 200 and asked.headers["access-control-allow-origin"] == "https://page"
    )
    refused = client.get("/echo", headers={"Origin": "https://page"})
    assert (
        refused.status_code == 401
        and refused.headers["access-control-allow-origin"] == "https://page"
    )
    assert (
        client.options("/echo", headers={**preflight, "Origin": "https://other"}).status_code == 400
    )
    assert (
        client.options(
            "/echo", headers={**preflight, "Access-Control-Request-Method": "PUT"}
        ).status_code
        == 400
    )


def test_middleware_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_wrap.py").write_text(
        "class Mark:\n"
        "    def __init__(self, app):\n        self.app = app\n"
        "    async def __call__(self, scope, receive, send):\n"
        "        async def marked(message):\n"
        "            if message['type'] == 'http.response.start':\n"
        "                message['headers'] = [*message['headers'], (b'x-mark', b'1')]\n"
        "            await send(message)\n"
        "        await self.app(scope, receive, marked)\n"
        "async def also(request, call_next):\n"
        "    response = await call_next(request)\n    response.headers['x-also'] = '1'\n    "
        "return response\n"
        "NUMBER = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = client_of(middleware=["acme_wrap.Mark", "acme_wrap.also"]).get("/echo")
    assert (answer.headers["x-mark"], answer.headers["x-also"]) == ("1", "1")
    for name, told in [
        ("acme_wrap.Missing", "cannot be imported"),
        ("nowhere.Mark", "cannot be imported"),
        ("acme_wrap.NUMBER", "is a int"),
    ]:
        with pytest.raises(ConfigError, match=told):
            client_of(middleware=[name])


# --- logs -----------------------------------------------------------------------------------------


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """Everything that is logged under uvicorn and pegboard."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("uvicorn.access", "pegboard.server.logs")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield found
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_quiet_paths_leave_no_access_log(records: list[logging.LogRecord]) -> None:
    logger = logging.getLogger("uvicorn.access")

    def line(path: str) -> None:
        logger.info('%s - "%s %s HTTP/%s" %d', "client", "GET", path, "1.1", 200)

    with access_log(ServerConfig(disable_access_log_for_endpoints=["/health,/metrics", "/ping"])):
        for path in ("/health", "/metrics?x=1", "/ping", "/healthy", "/v1/models"):
            line(path)
    assert [record.args[2] for record in records] == ["/healthy", "/v1/models"]
    line("/health")
    assert len(records) == 3


def test_queries_stay_out_of_the_access_log(records: list[logging.LogRecord]) -> None:
    """Some clients send their key in the query."""
    with access_log(ServerConfig()):
        for path in (
            "/v1/models?api_key=secret",
            "/v1/responses/x?stream=true&api_key=secret",
            "/?",
            "/health",
        ):
            logging.getLogger("uvicorn.access").info(
                '%s - "%s %s HTTP/%s" %d', "client", "GET", path, "1.1", 200
            )
    assert [record.args[2] for record in records] == [
        "/v1/models",
        "/v1/responses/x",
        "/",
        "/health",
    ]
    assert not any("secret" in record.getMessage() for record in records)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_requests_and_outputs_are_logged_when_asked(
    records: list[logging.LogRecord], kind: RequestOutputKind
) -> None:
    """The prompt is the user's, so it is logged only at DEBUG. Outputs are logged whole, once per
    completion."""
    engine = FakeEngineClient("the answer")
    assert logged(engine, ServerConfig()) is engine
    client = logged(
        engine, ServerConfig(enable_log_requests=True, enable_log_outputs=True, max_log_len=5)
    )

    async def ask() -> None:
        params = SamplingParams(max_tokens=6, n=2, temperature=1.0, output_kind=kind)
        async for _ in client.generate(
            Prompt(text="a long secret"), params, RequestOptions(request_id="r-1")
        ):
            pass

    asyncio.run(ask())
    told = [(record.levelname, record.getMessage()) for record in records]
    assert (
        told[0][0] == "INFO"
        and told[0][1].startswith("Received request r-1: params: SamplingParams(")
        and "secret" not in told[0][1]
    )
    assert told[1] == ("DEBUG", "Request r-1: prompt: 'a lon', prompt_token_ids: None")
    answers = [text for _, text in told[2:]]
    assert answers == [
        f"Generated response r-1: index: {index}, output: 'the a', finish_reason: length"
        for index in (0, 1)
    ]
    assert client.models() == engine.models()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "log.json",
            (
                '{"version": 1, "incremental": true, "loggers": {"uvicorn.access": {"level": '
                '"ERROR"}}}'
            ),
        ),
        ("log.yaml", "version: 1\nincremental: true\nloggers: {uvicorn.access: {level: ERROR}}\n"),
    ],
)
def test_log_config_file(
    tmp_path: Path, records: list[logging.LogRecord], name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    apply_log_config(str(tmp_path / name))
    logging.getLogger("uvicorn.access").info("quiet")
    assert not records


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", "{"),
        ("a.json", "[]"),
        ("a.yaml", "a: ["),
        ("a.json", '{"version": 9}'),
        ("none.json", None),
    ],
)
def test_log_config_files_that_are_none(tmp_path: Path, name: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match="log_config_file"):
        apply_log_config(str(tmp_path / name))


def test_signals_are_left_alone_where_told() -> None:
    """One of several API processes leaves signals to its parent. Outside the main thread, signals
    cannot be caught."""
    done = []
    thread = threading.Thread(target=lambda: done.append(asyncio.run(_serve_shortly())))
    thread.start()
    thread.join(60)
    assert done == [0]


async def _serve_shortly() -> int:
    engine = FakeEngineClient()
    stop = asyncio.Event()
    config = ServerConfig(port=0, uvicorn_log_level="critical")
    app = build_app([("slow", SlowApi(engine), SPEC)], engine, config)
    return await run_server(
        app, config, on_ready=lambda _: stop.set(), stop=stop, catch_signals=False
    )
