"""The description is made from the existing routes."""

from __future__ import annotations

from pegboard_api_admin.health import HealthApi
from pegboard_api_admin.openapi import OpenApi
from pegboard_api_admin.plugin import HEALTH, OPENAPI
from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup, ApiSpec
from pegboard_server.app import build_app
from pegboard_server.settings import ServerConfig
from pegboard_testing.fake_client import FakeEngineClient


class Inner(BaseModel):
    depth: int


class Body(BaseModel):
    inner: Inner
    name: str = "x"


class ThirdPartyApi:
    def routes(self):
        async def make(request):
            """Make a thing."""
            return Response()

        make.body_model = Body
        return [Route("/things/{name:path}", make, methods=["POST"])]

    def error_body(self, status, message, parameter):
        return {}


def test_the_path_prefix_is_named():
    """With --root-path, clients find the routes under the prefix."""
    engine = FakeEngineClient()
    apis = [("openapi", OpenApi(None, ApiSetup(engine)), OPENAPI)]
    client = TestClient(build_app(apis, engine, ServerConfig(root_path="/llm/")))
    for path in ("/openapi.json", "/llm/openapi.json"):
        assert client.get(path).json()["servers"] == [{"url": "/llm"}]
    assert (
        "servers"
        not in TestClient(build_app(apis, engine, ServerConfig())).get("/openapi.json").json()
    )


def test_routes_of_every_api_are_described():
    engine = FakeEngineClient()
    apis = [
        ("openapi", OpenApi(None, ApiSetup(engine)), OPENAPI),
        ("health", HealthApi(None, ApiSetup(engine)), HEALTH),
        ("third", ThirdPartyApi(), ApiSpec(api="1.0", implementation="x:y")),
    ]
    document = TestClient(build_app(apis, engine, ServerConfig())).get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/openapi.json",
        "/health",
        "/ping",
        "/version",
        "/load",
        "/things/{name}",
    }
    assert set(document["paths"]["/ping"]) == {"get", "post"}
    made = document["paths"]["/things/{name}"]["post"]
    assert made["summary"] == "Make a thing." and made["parameters"][0]["name"] == "name"
    schema = made["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert schema == "#/components/schemas/Body"
    assert document["components"]["schemas"]["Body"]["properties"]["inner"] == {
        "$ref": "#/components/schemas/Inner"
    }
    assert document["components"]["schemas"]["Inner"]["required"] == ["depth"]
