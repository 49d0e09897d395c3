"""The proxy before servers that answer, refuse, break and are gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
from pegboard_command_proxy.app import Proxied, build_app
from pegboard_command_proxy.choice import Choice, policy
from pegboard_command_proxy.command import Proxy, make_parser, read_servers, read_sources
from pegboard_command_proxy.disaggregated import Disaggregated
from pegboard_command_proxy.forward import Forwarder
from pegboard_command_proxy.prefixes import Engine, Prefixes, Prompt
from pegboard_command_proxy.servers import Server, check

from pegboard.errors import UsageError
from pegboard.interfaces.command import Command, CommandSetup
from pegboard_server.gateway import Traffic
from pegboard_testing.contract_command import CommandContract, command_setup
from pegboard_testing.contract_generic import check_entry, installed_entry

Behave = Callable[[httpx.Request], httpx.Response]


def test_contract() -> None:
    check_entry(installed_entry("command", "proxy"))


class TestProxy(CommandContract):
    word = "proxy"

    def command(self, setup: CommandSetup) -> Command:
        return Proxy(None, setup)


class Parts(httpx.AsyncByteStream):
    """A stream of parts. An exception among them breaks it."""

    def __init__(self, *parts: bytes | Exception) -> None:
        self.parts = parts
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            yield part

    async def aclose(self) -> None:
        self.is_closed = True


def events(*parts: bytes | Exception) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Parts(*parts))


class World:
    """Servers whose behaviour a test gives, and the proxy before them. asked: (host, path, body,
    headers) of what they got."""

    def __init__(self, name: str = "round_robin", **behaviour: Behave) -> None:
        self.behaviour = behaviour
        self.asked: list[tuple[str, str, Any, httpx.Headers]] = []
        self.prefixes = Prefixes()
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.servers = [
            Server(f"http://{host}", host.rstrip("0123456789"), is_healthy=True)
            for host in behaviour
        ]
        groups = [
            Forwarder(members, policy(name, self.prefixes), self.client, 3)
            for role in ("prefill", "decode", "server")
            if (members := [server for server in self.servers if server.role == role])
        ]
        split = Disaggregated(*groups) if len(groups) == 2 else None
        proxied = Proxied(groups[-1], split, finds_prefixes=name == "prefix_aware", limit=10_000)
        self.traffic = Traffic(100)
        self.app = build_app(proxied, groups, self.traffic, shows_servers=True)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content[:1] == b"{" else request.content
        self.asked.append((request.url.host, request.url.path, body, request.headers))
        return self.behaviour[request.url.host](request)

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
                return await client.request(method, path, **request)

        answer = asyncio.run(run())
        assert self.traffic.num_running == 0
        assert [server.running for server in self.servers] == [0] * len(self.servers)
        return answer

    def complete(self, **body: Any) -> httpx.Response:
        return self.send("POST", "/v1/completions", json={"model": "m", "prompt": "a", **body})

    @property
    def hosts(self) -> list[str]:
        return [host for host, *_ in self.asked]


def always(answer: httpx.Response, request: httpx.Request) -> httpx.Response:
    return answer


def good(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"from": request.url.host})


def gone(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def loading(request: httpx.Request) -> httpx.Response:
    return httpx.Response(503, json={"error": {"message": "loading"}}, headers={"retry-after": "7"})


def cut(request: httpx.Request) -> httpx.Response:
    """The body ends before its first byte."""
    return httpx.Response(
        200, headers={"content-type": "application/json"}, stream=Parts(httpx.ReadError("cut"))
    )


def cut_stream(request: httpx.Request) -> httpx.Response:
    return events(httpx.RemoteProtocolError("cut"))


# --- one of equal servers -------------------------------------------------------------------------


def test_servers_take_turns_and_get_what_the_client_sent() -> None:
    world = World(server1=good, server2=good)
    headers = {"authorization": "Bearer key", "x-request-id": "7", "cookie": "secret"}
    for _ in range(4):
        answer = world.send("POST", "/v1/completions?a=1", json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 200
    assert world.hosts == ["server1", "server2"] * 2
    _, path, body, sent = world.asked[0]
    assert (path, body) == ("/v1/completions", {"prompt": "x"})
    assert sent["authorization"] == "Bearer key" and sent["x-request-id"] == "7"
    assert "cookie" not in sent


@pytest.mark.parametrize("bad", [gone, loading, cut, cut_stream])
def test_another_server_answers_before_the_first_byte(bad: Behave) -> None:
    world = World(server1=bad, server2=good)
    assert world.complete(stream=True).json() == {"from": "server2"}
    assert world.hosts == ["server1", "server2"]
    assert world.servers[0].is_healthy == (bad is loading)
    world.complete()
    assert world.hosts[2:] == (["server1", "server2"] if bad is loading else ["server2"])


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
def test_other_errors_are_passed_on(status: int) -> None:
    """A request that breaks a server is not sent to the next one."""
    world = World(server1=lambda _: httpx.Response(status, json={"error": "no"}), server2=good)
    answer = world.complete()
    assert (answer.status_code, answer.json()) == (status, {"error": "no"})
    assert world.hosts == ["server1"]


def test_no_server() -> None:
    world = World(server1=gone, server2=gone)
    answer = world.complete()
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["message"].startswith("no server can be reached")
    assert world.send("GET", "/health").status_code == 503
    world = World(server1=loading, server2=loading)
    answer = world.complete()
    assert answer.status_code == 503 and answer.headers["retry-after"] == "7"


def test_streams_pass_and_a_broken_one_says_so() -> None:
    world = World(
        server1=lambda _: events(b"data: 1\n\n", b"data: [DONE]\n\n"),
        server2=lambda _: events(b"data: 1\n\ndata: {", httpx.ReadError("cut")),
    )
    assert world.complete(stream=True).text == "data: 1\n\ndata: [DONE]\n\n"
    shown = world.complete(stream=True).text
    first, _, event, end, rest = shown.split("\n\n")
    assert (first, end, rest) == ("data: 1", "data: [DONE]", "")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert error["code"] == 502 and "too early" in error["message"]
    assert not world.servers[1].is_healthy


def test_a_client_that_leaves_ends_the_request() -> None:
    """Its server's connection is closed, before and after the first part of the answer."""

    async def leave(world: World, *, after_first: bool) -> None:
        sent = asyncio.Event()
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await (sent.wait() if after_first else asyncio.sleep(0.01))
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [],
        }
        await world.app(scope, receive, send)

    class Endless(Parts):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for part in self.parts:
                assert isinstance(part, bytes)
                yield part
            await asyncio.sleep(60)

    for parts in ((), (b"data: 1\n\n",)):
        stream = Endless(*parts)
        answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=stream)
        world = World(server1=partial(always, answer))
        asyncio.run(leave(world, after_first=bool(parts)))
        assert stream.is_closed and world.servers[0].running == 0
        assert world.traffic.num_running == 0 and world.servers[0].is_healthy


def test_a_body_may_come_in_parts() -> None:
    """Nothing else reads what the client sends meanwhile."""
    content = json.dumps({"prompt": "long" * 500}).encode()
    parts = [content[start : start + 300] for start in range(0, len(content), 300)]
    statuses = []

    async def run(world: World) -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.001)
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [],
        }
        await asyncio.wait_for(world.app(scope, receive, send), 10)

    world = World(server1=good)
    asyncio.run(run(world))
    assert statuses[0] == 200 and world.asked[0][2] == json.loads(content)


def test_only_routes_of_the_model_are_passed_on() -> None:
    world = World(server1=good)
    for path in ("/sleep", "/collective_rpc", "/metrics", "/v1x"):
        answer = world.send("POST", path, json={})
        assert answer.status_code == 404 and path in answer.json()["error"]["message"]
    assert world.send("GET", "/v1/models").json() == {"from": "server1"}
    shown = world.send("GET", "/servers").json()["servers"]
    assert [(s["url"], s["requests"], s["is_healthy"]) for s in shown] == [
        ("http://server1", 1, True)
    ]
    answer = world.send("POST", "/v1/completions", content=b"x" * 10_001)
    assert answer.status_code == 413 and "--max-body-bytes" in answer.json()["error"]["message"]
    assert world.hosts == ["server1"]


def test_a_stopping_proxy_takes_no_requests() -> None:
    world = World(server1=good)
    world.traffic.stop()
    assert world.complete().status_code == 503 and not world.asked


def test_health_checks() -> None:
    world = World(server1=good, server2=gone, server3=loading)
    for server in world.servers:
        server.is_healthy = not server.is_healthy
        asyncio.run(check(server, world.client))
    assert [server.is_healthy for server in world.servers] == [True, False, False]
    assert world.servers[2].reason == "/health answers 503"


def test_the_server_with_least_work() -> None:
    world = World("least_loaded", server1=good, server2=good)
    with world.servers[0].working():
        choose = policy("least_loaded", world.prefixes)
        chosen = [choose(world.servers, None) for _ in range(2)]
        assert chosen == [Choice(world.servers[1])] * 2


# --- prefill and decode ---------------------------------------------------------------------------


def prefill(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"kv_transfer_params": {"at": request.url.host}})


def test_the_decode_server_gets_what_the_prefill_server_answers() -> None:
    world = World(prefill1=prefill, decode1=good)
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 50,
        "min_tokens": 9,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    key = {"authorization": "Bearer key"}
    answer = world.send("POST", "/v1/chat/completions", json=body, headers=key)
    assert answer.json() == {"from": "decode1"}
    (_, first_path, first, headers), (_, second_path, second, _) = world.asked
    assert first_path == second_path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer key"
    assert first == {
        "model": "m",
        "messages": body["messages"],
        "max_completion_tokens": 1,
        "stream": False,
        "temperature": 0,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    assert second == {**body, "kv_transfer_params": {"at": "prefill1"}}
    world.send("POST", "/v1/embeddings", json={"input": "a"})
    assert world.hosts[2:] == ["decode1"]


@pytest.mark.parametrize("bad", [gone, loading, cut, good])
def test_prompts_without_a_prefill_server(bad: Behave) -> None:
    """The decode server computes them: it gets the body of the client."""
    world = World(prefill1=bad, decode1=good)
    assert world.complete(max_tokens=3).json() == {"from": "decode1"}
    assert world.asked[-1][2] == {"model": "m", "prompt": "a", "max_tokens": 3}
    assert world.send("GET", "/health").status_code == 200


def test_errors_of_the_request_come_from_the_prefill_server() -> None:
    world = World(prefill1=lambda _: httpx.Response(400, json={"error": "bad"}), decode1=good)
    answer = world.complete(temperature=-1)
    assert (answer.status_code, answer.json()) == (400, {"error": "bad"})
    assert world.hosts == ["prefill1"]


def test_a_second_prefill_server_and_a_second_decode_server() -> None:
    world = World(prefill1=gone, prefill2=prefill, decode1=cut_stream, decode2=good)
    assert world.complete(stream=True).json() == {"from": "decode2"}
    assert world.hosts == ["prefill1", "prefill2", "decode1", "decode2"]
    assert world.asked[2][2] == world.asked[3][2]


# --- prefixes -------------------------------------------------------------------------------------


def tokenizing(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/tokenize":
        return httpx.Response(200, json={"tokens": [1, 2, 3, 4, 5]})
    return good(request)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/completions", {"prompt": [1, 2, 3, 4, 5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_the_server_that_has_the_prefix(path: str, body: dict[str, Any]) -> None:
    world = World("prefix_aware", server1=tokenizing, server2=tokenizing, server3=tokenizing)
    stored = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None]
    world.prefixes.follow(Engine("http://server2", "tcp://a:1"), [stored])
    answers = [world.send("POST", path, json={**body, "model": "m"}).json() for _ in range(3)]
    assert answers == [{"from": "server2"}] * 3
    world.prefixes.follow(Engine("http://server2", "tcp://a:1"), [["BlockRemoved", [11], "GPU"]])
    answers = [world.send("POST", path, json={**body, "model": "m"}).json() for _ in range(3)]
    assert answers != [{"from": "server2"}] * 3


def test_a_busy_server_does_not_get_all_requests_of_a_prefix() -> None:
    world = World("prefix_aware", server1=good, server2=good)
    stored = ["BlockStored", [11], None, [1, 2], 2, None, "GPU", None]
    world.prefixes.follow(Engine("http://server2", "tcp://a:1"), [stored])
    choose = policy("prefix_aware", world.prefixes)
    prompt = Prompt([1, 2, 3])
    chosen = []
    for running in (8, 9):
        world.servers[1].running = running
        chosen.append(choose(world.servers, prompt).server.url)
    assert chosen == ["http://server2", "http://server1"]


RANK = "x-data-parallel-rank"


def two_engines(behaviour: Behave) -> World:
    """One server. Its engine 1 has a prefix of the prompt, and engine 0 has another one."""
    world = World("prefix_aware", server1=behaviour)
    for rank, tokens in enumerate(([9, 9], [1, 2])):
        stored = ["BlockStored", [rank], None, tokens, 2, None, "GPU", None]
        world.prefixes.follow(Engine("http://server1", f"tcp://a:{rank}"), [stored], rank)
    return world


def test_the_engine_that_has_the_prefix() -> None:
    """The server decides if no engine has one, and a client may name an engine itself."""
    world = two_engines(good)
    for tokens, headers in (
        ([1, 2, 3], {}),
        ([9, 9, 3], {}),
        ([5, 5, 5], {}),
        ([1, 2, 3], {RANK: "0"}),
    ):
        body = {"prompt": tokens}
        assert world.send("POST", "/v1/completions", json=body, headers=headers).status_code == 200
    assert [headers.get(RANK) for *_, headers in world.asked] == ["1", "0", None, "0"]


def test_the_only_known_engine_is_not_named() -> None:
    world = World("prefix_aware", server1=good)
    stored = ["BlockStored", [11], None, [1, 2], 2, None, "GPU", None]
    world.prefixes.follow(Engine("http://server1", "tcp://a:1"), [stored], 0)
    assert world.complete(prompt=[1, 2, 3]).status_code == 200
    assert RANK not in world.asked[0][3]


def test_an_engine_that_has_gone() -> None:
    """The server refuses its number, and is asked without it. A refusal of the request itself is
    the answer."""

    def one_engine(request: httpx.Request) -> httpx.Response:
        is_wrong = RANK in request.headers or b"odd" in request.content
        return httpx.Response(400, json={"error": {}}) if is_wrong else good(request)

    world = two_engines(one_engine)
    assert world.complete(prompt=[1, 2, 3]).status_code == 200
    assert world.complete(prompt=[1, 2, 3], odd=1).status_code == 400
    assert [headers.get(RANK) for *_, headers in world.asked] == ["1", None] * 2


def test_a_busy_engine_does_not_get_all_requests_of_a_prefix() -> None:
    world = two_engines(good)
    (server,) = world.servers
    choose = policy("prefix_aware", world.prefixes)
    ranks = []
    with ExitStack() as work:
        for _ in range(10):
            chosen, rank = choose(world.servers, Prompt([1, 2, 3]))
            assert chosen is server
            work.enter_context(server.working(rank))
            ranks.append(rank)
    assert ranks == [1] * 9 + [None]
    assert choose(world.servers, Prompt([1, 2, 3])) == Choice(server, 1)


def test_prompts_that_cannot_be_counted_out_go_to_any_server() -> None:
    world = World("prefix_aware", server1=good)
    for prompt in ("text", ["a", "b"], None):
        assert world.complete(prompt=prompt).json() == {"from": "server1"}


# --- stored responses ---------------------------------------------------------------------------


def storing(request: httpx.Request) -> httpx.Response:
    """Has the response resp_ and the server's name."""
    _, _, _, *wanted = request.url.path.split("/")
    if wanted and wanted[0] != f"resp_{request.url.host}":
        return httpx.Response(404, json={"error": {"message": "no such response"}})
    return good(request)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_server2"),
        ("GET", "/v1/responses/resp_server2/input_items?limit=2"),
        ("DELETE", "/v1/responses/resp_server2"),
        ("POST", "/v1/responses/resp_server2/cancel"),
    ],
)
def test_a_stored_response_is_at_the_server_that_has_it(method: str, path: str) -> None:
    world = World(server1=storing, server2=storing, server3=storing)
    for _ in range(3):
        answer = world.send(method, path, headers={"authorization": "Bearer key"})
        assert answer.json() == {"from": "server2"}
    assert all(headers["authorization"] == "Bearer key" for *_, headers in world.asked)


def test_a_response_goes_on_where_the_previous_one_is() -> None:
    world = World(server1=storing, server2=storing)
    body = {"model": "m", "input": "a", "previous_response_id": "resp_server2"}
    for _ in range(3):
        assert world.send("POST", "/v1/responses", json=body).json() == {"from": "server2"}
    got = [asked for asked in world.asked if asked[1] == "/v1/responses"]
    assert [(host, sent) for host, _, sent, _ in got] == [("server2", body)] * 3


@pytest.mark.parametrize("response_id", ["resp_unknown", "../models", "a" * 300, "é?x=1"])
def test_a_response_that_no_server_has(response_id: str) -> None:
    """The servers say that it is not there. What a client sends as an id stays one part of the
    path."""
    world = World(server1=storing, server2=gone)
    body = {"input": "a", "previous_response_id": response_id}
    assert world.send("POST", "/v1/responses", json=body).json() == {"from": "server1"}
    paths = {path for _, path, *_ in world.asked}
    assert all(path.startswith("/v1/responses") and path.count("/") <= 3 for path in paths)
    assert world.send("GET", "/v1/responses/resp_unknown").status_code == 404


@pytest.mark.parametrize("previous", [None, 5, "", ["resp_server2"]])
def test_new_responses_go_to_any_server(previous: Any) -> None:
    world = World(server1=storing, server2=storing)
    for _ in range(2):
        world.send("POST", "/v1/responses", json={"previous_response_id": previous})
    assert world.hosts == ["server1", "server2"]


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --server"),
        (["--prefill", "http://a"], "given together"),
        (["--server", "http://a", "--prefill", "http://b", "--decode", "http://c"], "either"),
        (["--server", "a:8000"], "expected something like http://localhost:8001"),
        (["--server", "http://a", "--server", "http://a/v1/"], "given twice"),
        (["--server", "http://a", "--attempts", "0"], "--attempts must be at least 1"),
        (["--server", "http://a", "--health-interval", "0"], "must be more than 0"),
        (["--server", "http://a", "--policy", "prefix_aware"], "needs --kv-events"),
        (["--server", "http://a", "--kv-events", "tcp://x:1"], "expected something like"),
        (["--server", "http://a", "--kv-events", "http://b=tcp://x:1"], "no server has"),
        (["--server", "http://a", "--kv-events", "http://a=tcp://x"], "tcp://x cannot be used"),
        (["--server", "http://a", "--kv-events", "http://a=tcp://x:1,xy"], "xy cannot be used"),
        (["--server", "http://a", *["--kv-events", "http://a=tcp://x:1"] * 2], "given twice"),
    ],
)
def test_wrong_flags(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Proxy(None, command_setup("proxy")).run(words)


def test_flags() -> None:
    parser = make_parser(command_setup("proxy"))
    words = ["--prefill", "http://a:1/v1", "--decode", "https://b/", "--kv-events"]
    arguments = parser.parse([*words, "http://a:1=tcp://a:5557,tcp://a:5558"])
    servers = read_servers(arguments)
    assert [(server.url, server.role) for server in servers] == [
        ("http://a:1", "prefill"),
        ("https://b", "decode"),
    ]
    (source,) = read_sources(arguments.kv_events, [server.url for server in servers])
    assert (source.endpoint, source.replay) == ("tcp://a:5557", "tcp://a:5558")
