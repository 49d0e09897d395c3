"""The routes of engines that pool, with a fake engine."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_api_pooling.api import PoolingApi
from pegboard_api_pooling.fields import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from pegboard_api_pooling.plugin import POOLING
from starlette.testclient import TestClient

from pegboard.data.pooling_params import Pooling, PoolingParams
from pegboard.errors import RequestError
from pegboard.interfaces.api import ApiSetup, Prompt
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


def post(body: Any, status: int = 200, path: str = PATH, **engine: Any) -> Any:
    answer = made(**engine)[1].post(path, json=body)
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
    assert (
        answer["object"] == "list"
        and answer["model"] == "fake-model"
        and answer["id"].startswith("embd-")
    )
    assert [each["index"] for each in answer["data"]] == list(range(len(expected)))
    assert [each["embedding"] for each in answer["data"]] == [vector(ids) for ids in expected]
    assert (
        answer["usage"]["prompt_tokens"]
        == answer["usage"]["total_tokens"]
        == sum(map(len, expected))
    )


def test_every_field_reaches_the_engine() -> None:
    client, http = made()
    more = {
        "dimensions": 2,
        "truncate_prompt_tokens": 5,
        "use_activation": False,
        "add_special_tokens": False,
    }
    answer = http.post(
        PATH, json={"input": "hi", "priority": 3, "cache_salt": "s", "request_id": "mine", **more}
    ).json()
    ((prompt, params, options),) = client.requests
    assert (params.dimensions, params.truncate_prompt_tokens, params.use_activation) == (
        2,
        5,
        False,
    )
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
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"embed_dtype": "int8"}, "embed_dtype"),
        ({"endianness": "middle"}, "endianness"),
        ({"dimensions": 0}, "dimensions must be an integer of at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"messages": []}, "give either input or messages"),
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


def class_value(*texts: str, place: int = 0) -> float:
    """What the fake engine says: BOS stands once, before the first text."""
    return float(
        np.float32((BOS + sum(map(sum, (text.encode() for text in texts))) + place) % 7 / 10)
    )


def test_classes() -> None:
    labels = ("bad", "so so", "good")
    answer = post(
        {"input": ["hi", "a"], "model": "fake-model", "request_id": "mine"},
        path="/classify",
        labels=labels,
    )
    assert (answer["id"], answer["object"], answer["model"]) == (
        "classify-mine",
        "list",
        "fake-model",
    )
    for index, text in enumerate(("hi", "a")):
        probs = [class_value(text, place=place) for place in range(3)]
        expected = {
            "index": index,
            "label": labels[probs.index(max(probs))],
            "probs": probs,
            "num_classes": 3,
        }
        assert answer["data"][index] == expected
    assert answer["usage"]["total_tokens"] == 5


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("data_1", "data_2")])
def test_scores(path: str, names: tuple[str, str]) -> None:
    """A cross-encoder has one class. With any other model the score is a cosine."""
    for first, second, pairs in (
        ("hi", "ho", [("hi", "ho")]),
        ("hi", ["ho", "a"], [("hi", "ho"), ("hi", "a")]),
        (["hi", "b"], ["ho", "a"], [("hi", "ho"), ("b", "a")]),
    ):
        body = dict(zip(names, (first, second), strict=True))
        answer = post(body, path=path, labels=("fits",))
        expected = [
            {"index": i, "object": "score", "score": class_value(*pair)}
            for i, pair in enumerate(pairs)
        ]
        assert (
            answer["data"] == expected
            and answer["object"] == "list"
            and answer["id"].startswith("score-")
        )
        answer = post(body, path=path)
        for each, pair in zip(answer["data"], pairs, strict=True):
            one, other = (np.array(vector([BOS, *text.encode()])) for text in pair)
            assert each["score"] == pytest.approx(
                one @ other / np.linalg.norm(one) / np.linalg.norm(other), abs=1e-6
            )


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks(path: str) -> None:
    documents: list[Any] = ["ho", {"text": "a"}, "hum", "ho"]
    body = {"query": "hi", "documents": documents, "model": "fake-model", "top_n": 3}
    answer = post(body, path=path, labels=("fits",))
    texts = ["ho", "a", "hum", "ho"]
    scores = [class_value("hi", text) for text in texts]
    order = sorted(range(4), key=lambda index: -scores[index])[:3]
    assert answer["results"] == [
        {"index": index, "document": {"text": texts[index]}, "relevance_score": scores[index]}
        for index in order
    ]
    assert answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] == 4 * 3 + 8
    assert len(post({**body, "top_n": 0}, path=path)["results"]) == 4
    answer = post({**body, "return_documents": False}, path=path, labels=("fits",))
    assert answer["results"] == [
        {"index": index, "relevance_score": scores[index]} for index in order
    ]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/classify", {"input": []}, "input must not be empty"),
        ("/classify", {"input": "a", "dimensions": 3}, "unknown field 'dimensions'"),
        ("/score", {"text_1": "a"}, "give one of text_2 and data_2"),
        ("/score", {"text_1": "a", "data_1": "a", "text_2": "b"}, "give one of text_1 and data_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "2 texts are scored with 1"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2 must not be empty"),
        (
            "/score",
            {"text_1": "a", "text_2": ["b"] * 1025},
            "1025 texts in one request, at most 1024",
        ),
        ("/rerank", {"query": "", "documents": ["b"]}, "query must not be empty"),
        ("/rerank", {"query": "a", "documents": []}, "documents must not be empty"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents"),
    ],
)
def test_wrong_bodies_of_scores_are_refused(path: str, body: dict[str, Any], words: str) -> None:
    assert words in post(body, 400, path=path, labels=("fits",))["error"]["message"]


def test_a_model_says_what_it_cannot_do() -> None:
    assert "cannot embed" in post({"input": "a"}, 400, labels=("x",))["error"]["message"]
    assert "cannot classify" in post({"input": "a"}, 400, path="/classify")["error"]["message"]
    message = post({"text_1": "a", "text_2": "b"}, 400, path="/score", labels=("x", "y"))["error"][
        "message"
    ]
    assert "a model with one class, and this model has 2; use /classify" in message


BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    PATH: (EmbeddingRequest, {"input": "hi"}),
    "/classify": (ClassifyRequest, {"input": "hi"}),
    "/score": (ScoreRequest, {"text_1": "hi", "text_2": "ho"}),
    "/rerank": (RerankRequest, {"query": "hi", "documents": ["ho"]}),
}


@settings(max_examples=160, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    path=st.sampled_from(list(BODIES)),
    value=VALUES,
    labels=st.sampled_from([(), ("fits",)]),
)
def test_no_value_breaks_the_server(
    data: st.DataObject, path: str, value: Any, labels: tuple[str, ...]
) -> None:
    model, body = BODIES[path]
    name = data.draw(st.sampled_from([*model.model_fields, "unknown"]))
    client, http = made(labels=labels)
    assert http.post(path, json={**body, name: value}).status_code in (200, 400, 404)
    assert not client.running


def test_pooling_returns_whatever_the_model_makes() -> None:
    """Without a task, a row for each token."""
    answer = post({"input": ["hi", "a"]}, path="/pooling")
    assert answer["object"] == "list" and answer["id"].startswith("pool-")
    rows = [vector([BOS, *HI])] * 3, [vector([BOS, 97])] * 2
    for each, expected in zip(answer["data"], rows, strict=True):
        assert each["object"] == "pooling" and each["data"] == expected
    assert answer["usage"]["prompt_tokens"] == 5
    (one,) = post({"input": "hi", "task": "embed", "dimensions": 2}, path="/pooling")["data"]
    assert one["data"] == vector([BOS, *HI])[:2]
    (one,) = post({"input": "hi", "encoding_format": "base64"}, path="/pooling")["data"]
    values = np.frombuffer(base64.b64decode(one["data"]), np.float32).reshape(3, 3)
    assert values.tolist() == rows[0]
    (one,) = post({"input": "hi", "task": "classify"}, path="/pooling", labels=("a", "b"))["data"]
    assert len(one["data"]) == 2


def test_pooling_as_bytes() -> None:
    _, http = made()
    body = {"input": ["hi", "a"], "encoding_format": "bytes", "embed_dtype": "float16"}
    answer = http.post("/pooling", json=body)
    items = json.loads(answer.headers["metadata"])["data"]
    assert [item["shape"] for item in items] == [[3, 3], [2, 3]]
    for item, size in zip(items, (3, 2), strict=True):
        part = answer.content[item["start"] : item["end"]]
        assert np.frombuffer(part, np.float16).reshape(item["shape"]).shape == (size, 3)


class Lengths:
    """An IO processor: how many tokens texts have."""

    def prompts(self, data: Any) -> Any:
        if not isinstance(data, list):
            raise RequestError("data: expected a list", parameter="data")
        return [(Prompt(text=text), PoolingParams(task="embed")) for text in data]

    def answer(self, data: Any, outputs: Any) -> Any:
        assert len(data) == len(outputs)
        return {"lengths": [int(output.pooled()[1]) for output in outputs]}


def test_data_is_for_the_io_processor() -> None:
    client, http = made()

    def ask(status: int, **body: Any) -> Any:
        answer = http.post("/pooling", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    assert "no IO processor" in ask(400, data=["a"])["error"]["message"]
    client.processor = Lengths()
    answer = ask(200, data=["hi", "a"], task="plugin", model="fake-model", request_id="mine")
    assert answer["data"] == {"lengths": [3, 2]} and answer["request_id"] == "pool-mine"
    for parameter, body in {
        "data": {"data": 3},
        "task": {"data": ["a"], "task": "embed"},
        "dimensions": {"data": ["a"], "dimensions": 2},
        "input": {"data": ["a"], "input": "a"},
    }.items():
        assert ask(400, **body)["error"]["param"] == parameter
    assert ask(400, task="plugin")["error"]["param"] == "data"
    assert ask(404, data=["a"], model="another")


def test_scores_of_a_model_that_makes_a_vector_of_each_token() -> None:
    client, http = made()
    client._models = [replace(client._models[0], pooling=Pooling(task="token_embed"))]
    answer = http.post("/score", json={"text_1": "hi", "text_2": "a"}).json()
    first, second = (np.array(vector(ids)) for ids in ([BOS, *HI], [BOS, 97]))
    assert answer["data"][0]["score"] == pytest.approx(3 * float(first @ second))


def long_inputs(**pooling: Any) -> tuple[FakeEngineClient, TestClient]:
    client, http = made(max_model_len=7)  # the fake keeps room for a token
    plan = Pooling(max_embed_len=12, **pooling)
    client._models = [replace(client._models[0], max_model_len=6, pooling=plan)]
    return client, http


def test_long_inputs_are_computed_in_chunks() -> None:
    """Each chunk has the special tokens of a text. The fake engine's vectors are sum, number, ½."""
    client, http = long_inputs(use_activation=False)
    body = {"input": ["abcdefgh", "ab"]}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    chunks = [[BOS, *b"abcde"], [BOS, *b"fgh"]]
    assert [prompt.token_ids for prompt, *_ in client.requests[:2]] == chunks
    assert all(params.use_activation is False for _, params, _ in client.requests)
    first, second = (np.array(vector(ids)) for ids in chunks)
    found = [each["embedding"] for each in answer.json()["data"]]
    np.testing.assert_allclose(found[0], (5 * first + 3 * second) / 8, rtol=1e-6)
    assert found[1] == vector([BOS, *b"ab"])
    assert answer.json()["usage"]["prompt_tokens"] == 6 + 4 + 3
    for long in ([[*range(1, 13)]], ["a" * 11]):
        answer = http.post(PATH, json={"input": long, "use_activation": True})
        (one,) = answer.json()["data"]
        assert np.linalg.norm(one["embedding"]) == pytest.approx(1)
    answer = http.post(PATH, json={"input": "a" * 12})
    assert answer.status_code == 400
    assert "13 tokens, but max_embed_len is 12" in answer.json()["error"]["message"]
    answer = http.post(PATH, json={"input": "a" * 12, "truncate_prompt_tokens": 3})
    assert answer.status_code == 200 and client.requests[-1][0].text == "a" * 12


def test_chunks_begin_with_the_prompt_that_is_named() -> None:
    """It is a part of the first chunk, and nothing is put before the others."""
    client, http = long_inputs(prompts={"q": "xy"}, prompt_name=None)
    assert http.post(PATH, json={"input": ["abcde", "z"], "prompt_name": "q"}).status_code == 200
    (first, one, _), (second, _, _), (short, other, _) = client.requests
    assert [first.token_ids, second.token_ids] == [[BOS, *b"xyabc"], [BOS, *b"de"]]
    assert one.prompt_name == "" and (short.text, other.prompt_name) == ("z", "q")


def test_a_text_of_few_characters_may_have_many_tokens() -> None:
    client, http = long_inputs()
    assert http.post(PATH, json={"input": "\U0001f30a\U0001f30a"}).status_code == 200
    assert [len(prompt.token_ids or ()) for prompt, *_ in client.requests] == [6, 4]


def test_names_of_prompts_reach_the_engine() -> None:
    client, http = made()
    http.post(PATH, json={"input": "hi", "prompt_name": "query"})
    http.post("/pooling", json={"input": "hi", "prompt_name": ""})
    assert [params.prompt_name for _, params, _ in client.requests] == ["query", ""]
