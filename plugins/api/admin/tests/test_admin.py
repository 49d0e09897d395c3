"""The operators' routes need the key, check their query strings, and show the state of the
server."""

from __future__ import annotations

from pathlib import Path

import pytest
from pegboard_api_admin.admin import AdminApi
from pegboard_api_admin.options import AdminOptions
from pegboard_api_admin.plugin import ADMIN
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard_server.app import build_app
from pegboard_server.settings import ServerConfig
from pegboard_testing.fake_client import FakeEngineClient

OPTIONS = AdminOptions(profile_directory=Path("/traces"))
SETTINGS = {
    "engine": {"model": "m", "seed": 0},
    "server": {"port": 1},
    "sources": {"model": "the command line"},
}


@pytest.fixture
def engine():
    engine = FakeEngineClient()
    engine.control_results["settings"] = SETTINGS
    return engine


def make_client(engine, **settings):
    api = AdminApi(OPTIONS, ApiSetup(engine))
    return TestClient(build_app([("admin", api, ADMIN)], engine, ServerConfig(**settings)))


@pytest.fixture
def client(engine):
    return make_client(engine)


@pytest.mark.parametrize(
    ("method", "path"),
    [(*r.methods - {"HEAD"}, r.path) for r in AdminApi(OPTIONS, ApiSetup(None)).routes()],
)
def test_behind_the_key(engine, method, path):
    guarded = make_client(engine, api_key=["k"])
    assert guarded.request(method, path).status_code == 401
    assert engine.controls == []
    wrong = guarded.request(
        method, path, params={"nonsense": 1}, headers={"Authorization": "Bearer k"}
    )
    assert wrong.status_code == 400
    assert wrong.json()["error"] == {
        "message": wrong.json()["error"]["message"],
        "type": "Bad Request",
        "param": "nonsense",
        "code": 400,
    }


def test_server_info(client):
    as_json = client.get("/server_info", params={"config_format": "json"}).json()
    assert as_json["pegboard_config"] == SETTINGS and as_json["system_env"]["python"]
    as_text = client.get("/server_info").json()["pegboard_config"]
    assert (
        "engine.model = 'm'" in as_text.splitlines() and "server.port = 1" in as_text.splitlines()
    )
    assert client.get("/server_info", params={"config_format": "xml"}).status_code == 400


@pytest.mark.parametrize(
    ("query", "arguments"),
    [("", {}), ("?reset_running_requests=true", {"reset_running_requests": True})],
)
@pytest.mark.parametrize("result", [True, False])
def test_reset_prefix_cache(client, engine, query, arguments, result):
    engine.control_results["reset_prefix_cache"] = result
    assert client.post("/reset_prefix_cache" + query).json() == {"success": result}
    assert engine.controls == [("reset_prefix_cache", arguments)]
    assert client.post("/reset_prefix_cache?reset_running_requests=maybe").status_code == 400
    assert client.get("/reset_prefix_cache").status_code == 405


def test_plugins_of_both_processes(client, engine):
    engine.control_results["plugins"] = {
        "installed": [{"name": "a"}],
        "decisions": [{"kind": "tokenizer"}],
    }
    engine.control_results["decisions"] = [{"kind": "attention"}]
    assert client.get("/v1/pegboard/plugins").json() == {
        "installed": [{"name": "a"}],
        "decisions": [
            {"process": "api", "kind": "tokenizer"},
            {"process": "engine", "kind": "attention"},
        ],
    }


@pytest.mark.parametrize(
    ("path", "action", "arguments"),
    [
        ("/pause", "pause", {"mode": "abort", "clear_cache": True}),
        ("/pause?mode=keep&clear_cache=false", "pause", {"mode": "keep", "clear_cache": False}),
        ("/resume", "resume", {}),
        ("/sleep", "sleep", {"level": 1, "mode": "abort"}),
        ("/sleep?level=2&mode=wait", "sleep", {"level": 2, "mode": "wait"}),
        ("/wake_up", "wake_up", {"tags": None}),
        ("/wake_up?tags=weights&tags=kv_cache", "wake_up", {"tags": ["weights", "kv_cache"]}),
        ("/start_profile", "start_profile", {"path": "/traces"}),
        ("/stop_profile", "stop_profile", {}),
    ],
)
def test_what_the_engine_is_told(client, engine, path, action, arguments):
    assert client.post(path).status_code == 200
    assert engine.controls == [(action, arguments)]
    assert client.get(path).status_code == 405


@pytest.mark.parametrize(
    "path", ["/sleep?level=3", "/sleep?mode=now", "/pause?clear_cache=maybe", "/wake_up?tags=kv"]
)
def test_wrong_values_name_their_parameter(client, engine, path):
    answer = client.post(path)
    assert (
        answer.status_code == 400
        and answer.json()["error"]["param"] == path.partition("?")[2].partition("=")[0]
    )
    assert engine.controls == []


@pytest.mark.parametrize("name", ["is_sleeping", "is_paused"])
def test_state(client, engine, name):
    for state in (True, False):
        engine.control_results[name] = state
        assert client.get(f"/{name}").json() == {name: state}


def test_requests_are_aborted_by_id(client, engine):
    assert client.post("/abort_requests", json={"request_ids": ["a", "b"]}).status_code == 200
    assert engine.controls == [("abort", {"request_ids": ["a", "b"]})]
    for body in ({}, {"request_ids": "a"}, {"request_ids": [1]}, {"request_ids": [], "more": 1}):
        assert client.post("/abort_requests", json=body).status_code == 400


def test_without_a_folder_nobody_starts_the_profiler(engine):
    api = AdminApi(AdminOptions(), ApiSetup(engine))
    assert not any("profile" in route.path for route in api.routes())


def test_a_dead_engine_is_an_error_not_a_hang(client, engine):
    engine.die()
    assert client.post("/reset_prefix_cache").status_code == 500
