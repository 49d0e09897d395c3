"""The route answers with a label, and refuses what it does not know."""

from __future__ import annotations

from typing import Any

import pytest
from pegboard_api_label.api import LabelApi
from pegboard_api_label.options import LabelOptions
from pegboard_api_label.plugin import LABEL
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard_testing.contract_api import ApiContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.served_app import make_app

BODY = {"text": "Cheap watches!", "labels": ["spam", "ham"]}


def test_contract() -> None:
    check_entry(installed_entry("api", "label"))


class TestLabel(ApiContract):
    path = "/label"
    plain = body = BODY
    streams = False

    def apis(self, setup: ApiSetup) -> Any:
        return [("label", LabelApi(LabelOptions(max_labels=3), setup), LABEL)]


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient("spam")


@pytest.fixture
def client(engine: FakeEngineClient) -> TestClient:
    def apis(setup: ApiSetup) -> Any:
        return [("label", LabelApi(LabelOptions(max_labels=3), setup), LABEL)]

    return TestClient(make_app(apis, engine), raise_server_exceptions=False)


def test_only_a_label_can_be_the_answer(client: TestClient, engine: FakeEngineClient) -> None:
    response = client.post("/label", json=BODY)
    assert response.status_code == 200 and response.json() == {"label": "spam"}
    [(prompt, params, _)] = engine.requests
    assert params.structured_outputs.choice == ["spam", "ham"] and params.temperature == 0
    assert prompt.text == "Choose one of these labels: spam, ham\nText: Cheap watches!\nLabel: "


def test_the_prompt_can_be_another(client: TestClient, engine: FakeEngineClient) -> None:
    assert client.post("/label", json={**BODY, "prompt": "{text} ="}).status_code == 200
    assert engine.requests[0][0].text == "Cheap watches! ="


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": ["one"]}, "labels: "),
        ({"labels": ["a", "b", "c", "d"]}, "labels has 4 items, and api.label.max_labels allows 3"),
        ({"labels": ["a", "a"]}, "an empty or a repeated item"),
        ({"labels": ["a", ""]}, "an empty or a repeated item"),
        ({"prompt": "Hi"}, "prompt has no {text}"),
        ({"text": ""}, "text: "),
        ({"color": "red"}, "color: "),
    ],
)
def test_a_wrong_body_is_refused(client: TestClient, change: dict[str, Any], message: str) -> None:
    response = client.post("/label", json={**BODY, **change})
    assert response.status_code == 400 and message in response.json()["error"]["message"], (
        response.text
    )
