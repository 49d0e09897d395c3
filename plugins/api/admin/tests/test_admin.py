"""The operators' routes need the key, check their query strings, and show the state of the server."""

from __future__ import annotations

import pytest
from pegboard_api_admin.admin import AdminApi
from pegboard_api_admin.plugin import ADMIN
from starlette.testclient import TestClient

from pegboard.config.schema import ServerConfig
from pegboard.interfaces.api import ApiSetup
from pegboard_server.app import build_app
from pegboard_testing.fake_client import FakeEngineClient

SETTINGS = {"engine": {"model": "m", "seed": 0}, "server": {"port": 1}, "sources": {"model": "the command line"}}


@pytest.fixture
def engine():
    engine = FakeEngineClient()
    engine.control_results["settings"] = SETTINGS
    return engine


def make_client(engine, **settings):
    return TestClient(build_app([("admin", AdminApi(None, ApiSetup(engine)), ADMIN)], engine, ServerConfig(**settings)))


@pytest.fixture
def client(engine):
    return make_client(engine)


@pytest.mark.parametrize(("method", "path"), [(*r.methods - {"HEAD"}, r.path) for r in AdminApi(None, ApiSetup(None)).routes()])
def test_behind_the_key(engine, method, path):
    guarded = make_client(engine, api_key=["k"])
    assert guarded.request(method, path).status_code == 401
    assert engine.controls == []
    wrong = guarded.request(method, path, params={"nonsense": 1}, headers={"Authorization": "Bearer k"})
    assert wrong.status_code == 400
    assert wrong.json()["error"] == {
        "message": wrong.json()["error"]["message"], "type": "Bad Request", "param": "nonsense", "code": 400
    }  # fmt: skip


def test_server_info(client):
    as_json = client.get("/server_info", params={"config_format": "json"}).json()
    assert as_json["pegboard_config"] == SETTINGS and as_json["system_env"]["python"]
    as_text = client.get("/server_info").json()["pegboard_config"]
    assert "engine.model = 'm'" in as_text.splitlines() and "server.port = 1" in as_text.splitlines()
    assert client.get("/server_info", params={"config_format": "xml"}).status_code == 400


@pytest.mark.parametrize(("query", "arguments"), [("", {}), ("?reset_running_requests=true", {"reset_running_requests": True})])
@pytest.mark.parametrize("result", [True, False])
def test_reset_prefix_cache(client, engine, query, arguments, result):
    engine.control_results["reset_prefix_cache"] = result
    assert client.post("/reset_prefix_cache" + query).json() == {"success": result}
    assert engine.controls == [("reset_prefix_cache", arguments)]
    assert client.post("/reset_prefix_cache?reset_running_requests=maybe").status_code == 400
    assert client.get("/reset_prefix_cache").status_code == 405


def test_plugins_of_both_processes(client, engine):
    engine.control_results["plugins"] = {"installed": [{"name": "a"}], "decisions": [{"kind": "tokenizer"}]}
    engine.control_results["decisions"] = [{"kind": "attention"}]
    assert client.get("/v1/pegboard/plugins").json() == {
        "installed": [{"name": "a"}],
        "decisions": [{"process": "api", "kind": "tokenizer"}, {"process": "engine", "kind": "attention"}],
    }


def test_a_dead_engine_is_an_error_not_a_hang(client, engine):
    engine.die()
    assert client.post("/reset_prefix_cache").status_code == 500
