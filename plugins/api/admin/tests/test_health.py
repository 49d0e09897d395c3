"""The health routes answer without a key, and report a dead engine. /load needs the key."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from pegboard_api_admin.health import HealthApi
from pegboard_api_admin.plugin import HEALTH
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard_server.app import build_app
from pegboard_server.settings import ServerConfig
from pegboard_testing.fake_client import FakeEngineClient


@pytest.fixture
def engine():
    return FakeEngineClient()


@pytest.fixture
def client(engine):
    return TestClient(
        build_app(
            [("health", HealthApi(None, ApiSetup(engine)), HEALTH)],
            engine,
            ServerConfig(api_key=["k"]),
        )
    )


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
)
def test_alive_and_dead(client, engine, method, path):
    alive = client.request(method, path)
    assert alive.status_code == 200 and alive.content == b""
    engine.die()
    assert client.request(method, path).status_code == 503


def test_version(client):
    assert client.get("/version").json() == {"version": version("pegboard")}


def test_load(client, engine):
    engine.control_results["load"] = 3
    assert client.get("/load").status_code == 401
    assert client.get("/load", headers={"Authorization": "Bearer k"}).json() == {"server_load": 3}


def test_everything_else_is_guarded(client):
    refused = client.get("/healthy")
    assert refused.status_code == 401 and "Unauthorized" in refused.json()["error"]["message"]


def test_spec_opens_all_routes_but_load(engine):
    assert {route.path for route in HealthApi(None, ApiSetup(engine)).routes()} == {
        *HEALTH.public_paths,
        "/load",
    }
