"""The routes that call the workers check their bodies, and show results and failures."""

from __future__ import annotations

import asyncio

import pytest
from pegboard_api_admin.options import WorkerOptions
from pegboard_api_admin.plugin import WORKERS
from pegboard_api_admin.workers import WorkersApi
from starlette.testclient import TestClient

from pegboard.errors import RequestError
from pegboard.interfaces.api import ApiSetup
from pegboard_server.app import build_app
from pegboard_server.settings import ServerConfig
from pegboard_testing.fake_client import FakeEngineClient


@pytest.fixture
def engine():
    return FakeEngineClient()


def make_client(engine, directories=None, **settings):
    apis = [
        (
            "worker_admin",
            WorkersApi(WorkerOptions(directories=directories), ApiSetup(engine)),
            WORKERS,
        )
    ]
    return TestClient(build_app(apis, engine, ServerConfig(**settings)))


@pytest.fixture
def client(engine):
    return make_client(engine)


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/init_weight_transfer_engine", "/update_weights"]
)
def test_behind_the_key(engine, path):
    assert make_client(engine, api_key=["k"]).post(path, json={}).status_code == 401
    assert engine.controls == []


def test_a_method_is_called_and_its_results_are_shown(client, engine):
    engine.control_results["collective_rpc"] = [None, {"a": 1}, [2], 3, "text"]
    answer = client.post(
        "/collective_rpc",
        json={"method": "m", "args": ["x", 1], "kwargs": {"y": [2]}, "timeout": 5},
    )
    assert answer.json() == {"results": [None, {"a": 1}, [2], "3", "text"]}
    assert engine.controls == [
        ("collective_rpc", {"method": "m", "args": ["x", 1], "kwargs": {"y": [2]}})
    ]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "method"),
        ({"method": 1}, "method"),
        ({"method": "m", "args": "x"}, "args"),
        ({"method": "m", "kwargs": []}, "kwargs"),
        ({"method": "m", "timeout": 0}, "timeout"),
        ({"method": "m", "more": 1}, "more"),
        ([], None),
    ],
)
def test_wrong_bodies_name_their_field(client, engine, body, field):
    answer = client.post("/collective_rpc", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert engine.controls == []


def test_failures_are_shown(client, engine, monkeypatch):
    async def refuse(action, **arguments):
        raise RequestError("workers have no method 'm'", parameter="method")

    async def hang(action, **arguments):
        await asyncio.sleep(60)

    monkeypatch.setattr(engine, "control", refuse)
    answer = client.post("/collective_rpc", json={"method": "m"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "method"
    monkeypatch.setattr(engine, "control", hang)
    answer = client.post("/collective_rpc", json={"method": "m", "timeout": 0.01})
    assert answer.status_code == 504 and "runs on" in answer.json()["error"]["message"]


def test_new_weights(client, engine, tmp_path):
    answer = client.post(
        "/update_weights", json={"update_info": {"path": str(tmp_path)}, "mode": "wait"}
    )
    assert answer.json() == {"message": "Weights updated"}
    assert engine.controls == [
        ("update_weights", {"path": str(tmp_path.resolve()), "mode": "wait"})
    ]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "update_info"),
        ({"update_info": {}}, "update_info"),
        ({"update_info": {"path": 3}}, "update_info"),
        ({"update_info": {"path": "/", "names": ["a"]}}, "update_info"),
        ({"update_info": {"path": "/"}, "mode": "now"}, "mode"),
        ({"update_info": {"path": "/no/such/folder"}}, "path"),
        ({"update_info": {"path": "a\0b"}}, "path"),
    ],
)
def test_wrong_updates_name_their_field(client, engine, body, field):
    answer = client.post("/update_weights", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert engine.controls == []


def test_a_trainer_sends_weights(client, engine):
    place = {"master_address": "10.0.0.1", "master_port": 29600, "world_size": 2}
    answer = client.post("/init_weight_transfer_engine", json={"init_info": place})
    assert answer.json() == {"message": "Weight transfer initialized"}
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}
    answer = client.post("/update_weights", json={"update_info": info})
    assert answer.json() == {"message": "Weights updated"}
    assert engine.controls == [
        ("init_weight_transfer_engine", {"init_info": place}),
        ("update_weights", {"update_info": info, "mode": "abort"}),
    ]


@pytest.mark.parametrize("body", [{}, {"init_info": 3}, {"init_info": {}, "more": 1}])
def test_wrong_places_of_a_trainer(client, engine, body):
    assert client.post("/init_weight_transfer_engine", json=body).status_code == 400
    assert engine.controls == []


def test_only_the_named_folders_are_read(engine, tmp_path):
    for name in ("weights/step 1", "secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "weights/link").symlink_to(tmp_path / "secret")
    client = make_client(engine, directories=str(tmp_path / "weights"))
    for path in (
        tmp_path / "secret",
        tmp_path / "weights/link",
        tmp_path / "weights/../secret",
        tmp_path / "missing",
    ):
        answer = client.post("/update_weights", json={"update_info": {"path": str(path)}})
        assert answer.status_code == 400 and "may name" in answer.json()["error"]["message"]
    assert engine.controls == []
    assert (
        client.post(
            "/update_weights", json={"update_info": {"path": str(tmp_path / "weights/step 1")}}
        ).status_code
        == 200
    )
