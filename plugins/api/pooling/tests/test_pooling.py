"""POST /v1/embeddings with a fake engine."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_api_pooling.api import PoolingApi
from pegboard_api_pooling.fields import EmbeddingRequest
from pegboard_api_pooling.plugin import POOLING
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard_testing.contract_api import VALUES
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_client import BOS, FakeEngineClient
from pegboard_testing.served_app import make_app

PATH = "/v1/embeddings"
HI = list(b"hi")


def apis(setup: ApiSetup) -> Any:
    return [("pooling", PoolingApi(None, setup), POOLING)]


def made(**engine: Any) -> tuple[FakeEngineClient, TestClient]:
    client = FakeEngineClient(**{"pools": True, **engine})
    return client, TestClient(make_app(apis, client), raise_server_exceptions=False)


def post(body: Any, status: int = 200, **engine: Any) -> Any:
    answer = made(**engine)[1].post(PATH, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def vector(ids: list[int]) -> list[float]:
    return [sum(ids), len(ids), 0.5]


def test_entry() -> None:
    check_entry(installed_entry("api", "pooling"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", [[BOS, *HI]]),
        (["hi", "ho"], [[BOS, *HI], [BOS, *b"ho"]]),
        ([104, 105], [[104, 105]]),
        ([[104, 105], [7]], [[104, 105], [7]]),
    ],
)
def test_every_form_of_input(given: Any, expected: list[list[int]]) -> None:
    answer = post({"input": given, "model": "fake-model", "user": "u"})
    assert answer["object"] == "list" and answer["model"] == "fake-model" and answer["id"].startswith("embd-")
    assert [each["index"] for each in answer["data"]] == list(range(len(expected)))
    assert [each["embedding"] for each in answer["data"]] == [vector(ids) for ids in expected]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, expected))


def test_every_field_reaches_the_engine() -> None:
    client, http = made()
    more = {"dimensions": 2, "truncate_prompt_tokens": 5, "use_activation": False, "add_special_tokens": False}
    answer = http.post(PATH, json={"input": "hi", "priority": 3, "cache_salt": "s", "request_id": "mine", **more}).json()
    ((prompt, params, options),) = client.requests
    assert (params.dimensions, params.truncate_prompt_tokens, params.use_activation) == (2, 5, False)
    assert (prompt.add_special_tokens, prompt.cache_salt, options.priority) == (False, "s", 3)
    assert answer["id"] == "embd-mine" and answer["data"][0]["embedding"] == vector(HI)[:2]


def test_the_client_of_openai() -> None:
    """It asks for base64 unless it is told otherwise."""
    _, http = made()
    client = openai.OpenAI(base_url="http://testserver/v1", api_key="any", http_client=http)
    for encoding in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="fake-model", input=["hi", "a"], **encoding)
        assert [each.embedding for each in answer.data] == [vector([BOS, *HI]), vector([BOS, 97])]
    text = post({"input": "hi", "encoding_format": "base64"})["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == vector([BOS, *HI])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": None}, "input is required"),
        ({"input": []}, "input must not be empty"),
        ({"input": ["a", 3]}, "input[1]: expected a string"),
        ({"input": [3, -1]}, "input[1]: expected a token id"),
        ({"input": ["a"] * 1025}, "1025 prompts in one request, at most 1024"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions must be an integer of at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"messages": []}, "unknown field 'messages'"),
        ({"cache_salt": ""}, "cache_salt must not be empty"),
    ],
)
def test_wrong_bodies_are_refused(change: dict[str, Any], words: str) -> None:
    assert words in post({"input": "hi", **change}, 400)["error"]["message"]


def test_an_engine_that_generates_text_says_so() -> None:
    assert "generates text" in post({"input": "hi"}, 400, pools=False)["error"]["message"]


def test_the_first_error_ends_all_inputs() -> None:
    client, http = made(fail_after=0)
    assert http.post(PATH, json={"input": ["a", "b", "c"]}).status_code >= 500
    assert not client.running


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from([*EmbeddingRequest.model_fields, "unknown"]), value=VALUES)
def test_no_value_breaks_the_server(name: str, value: Any) -> None:
    client, http = made()
    assert http.post(PATH, json={"input": "hi", name: value}).status_code in (200, 400, 404)
    assert not client.running
