"""Contract tests of the kind `api`, for a route whose answer the engine generates. A plugin's test
file:

    class TestMyRoute(ApiContract):
        path = "/v1/mine"
        plain = {"input": "hello"}
        body = {"input": "hello", "temperature": 0.5, "tools": [{…}], …}

        def apis(self, setup: ApiSetup) -> Any:
            return [("mine", MyApi(None, setup), MINE)]

Whatever the body, the server never breaks; a client that disconnects ends its request in the
engine.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from pegboard.interfaces.api import Api, ApiSetup, ApiSpec
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser
from pegboard_testing.served_app import make_app, posted, serving, wait_for

TEXT = '<think>hm é</think>So: <call add>{"x": 1}</call><call add>{"x": 2}</call>'
NO_OBJECTS = [
    b"",
    b"{",
    b"[]",
    b"3",
    b'"x"',
    b"\xff\xfe",
    b'{"a": NaN}',
    b"[" * 100_000,
    b'{"n":' + b"9" * 5000 + b"}",
    b'{"\\ud800":1}',
]
WORDS = ["", "x", "auto", "function", "mcp", "message", "assistant", "user", "text"]
KEYS = ["type", "role", "content", "text", "name", "function", "1"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**31, 2**63, 2**70, *WORDS])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Values that may be put into a body."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside a value, and for each object the path of an unknown
    field."""
    steps = (
        [*value.items(), ("unknown", None)]
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path] * bool(path) + [
        place for key, inner in steps for place in places(inner, (*path, key))
    ]


def put(body: Any, place: tuple[Any, ...], value: Any) -> None:
    """Replace the value at `place`, which is a path from `places`."""
    for step in place[:-1]:
        body = body[step]
    body[place[-1]] = value


class ApiContract:
    """Every API passes these. Override `path`, `plain`, `body` and `apis`. plain: a body without
    limits, stop words and tools, so that the engine decides when the output ends. body: a body with
    as many fields as can be combined, with valid values. Neither has `stream`. streams: whether the
    API has the field `stream`. builtin_tools: see ApiSetup."""

    path: ClassVar[str]
    plain: ClassVar[Mapping[str, Any]]
    body: ClassVar[Mapping[str, Any]]
    streams: ClassVar[bool] = True
    builtin_tools: ClassVar[Mapping[str, Any]] = {}

    def apis(self, setup: ApiSetup) -> Sequence[tuple[str, Api, ApiSpec]]:
        """Return the APIs to mount: name, implementation, spec."""
        raise AssertionError("override ApiContract.apis")

    @pytest.fixture
    def client(self) -> TestClient:
        """Return the application with an engine that reasons and calls tools."""
        engine = FakeEngineClient(
            TEXT, tool_parser=FakeToolParser, reasoning_parser=FakeReasoningParser
        )
        return TestClient(
            make_app(self.apis, engine, self.builtin_tools), raise_server_exceptions=False
        )

    def check(self, client: TestClient, body: bytes) -> int:
        """Send the body and return the status of the answer. It must not be an error of the server,
        and a refusal must have the API's form."""
        response = client.post(
            self.path, content=body, headers={"Content-Type": "application/json"}
        )
        assert response.status_code < 500, (body, response.text)
        if response.status_code != 200:
            error = self.error_body(response.status_code)
            assert set(response.json()) == set(error) and set(response.json()["error"]) == set(
                error["error"]
            ), response.text
        return response.status_code

    def error_body(self, status: int) -> Mapping[str, Any]:
        (_, api, _), *_ = self.apis(ApiSetup(FakeEngineClient(), {}))
        return api.error_body(status, "wrong", None)

    def test_a_sound_body_is_answered(self, client: TestClient) -> None:
        for stream in (False, True) if self.streams else (False,):
            assert self.check(client, json.dumps(self.asked(self.body, stream)).encode()) == 200

    def asked(self, body: Mapping[str, Any], stream: bool) -> Mapping[str, Any]:
        """Return the body of a request for a whole answer or a stream."""
        return {**body, "stream": stream} if self.streams else body

    @pytest.mark.parametrize("body", NO_OBJECTS)
    def test_what_is_no_object_is_refused(self, client: TestClient, body: bytes) -> None:
        assert self.check(client, body) == 400

    @settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_no_body_breaks_the_server(self, client: TestClient, data: st.DataObject) -> None:
        """Some values of a valid body are replaced by arbitrary ones."""
        body: Any = copy.deepcopy(dict(self.asked(self.body, False)))
        for _ in range(data.draw(st.integers(1, 3))):
            put(body, data.draw(st.sampled_from(places(body))), data.draw(VALUES))
        self.check(client, json.dumps(body).encode())

    def test_no_bytes_break_the_server(self, client: TestClient) -> None:
        chance = random.Random(0)
        whole = json.dumps(self.body).encode()
        for _ in range(250):
            body = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                position = chance.randrange(len(body))
                body[position : position + chance.randint(0, 3)] = chance.choice(
                    [b"", b"[", b'"', b"}", b",", b"9", b"\x80", b"null"]
                )
            self.check(client, bytes(body))

    @pytest.mark.parametrize("whole", [True, False])
    @pytest.mark.parametrize("delay_s", [0.01, 30.0])
    def test_a_client_that_leaves_aborts(self, whole: bool, delay_s: float) -> None:
        """The client disconnects between tokens, or long before the first token."""
        stream = self.streams and not whole
        engine = FakeEngineClient("x" * 3000, delay_s=delay_s)
        with serving(self.apis, engine, self.builtin_tools) as address:
            with posted(address, self.path, self.asked(self.plain, stream)) as connection:
                wait_for(lambda: engine.running, "the request to run")
                if stream and delay_s < 1:
                    assert connection.recv(100).startswith(b"HTTP/1.1 200")
            wait_for(lambda: engine.aborted and not engine.running, "the abort")
        assert len(engine.aborted) == len(engine.requests)
