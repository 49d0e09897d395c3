"""Vectors of chats with images over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_process import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from test_media import messages, part, url_of
from tiny_media import MediaReference, prompt, write_llava

from pegboard_testing.contract_multimodal_processor import random_image

pytestmark = pytest.mark.slow

IMAGE = random_image(40, 20, seed=1)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def server(
    llava: MediaReference, tmp_path_factory: pytest.TempPathFactory, probe: Path
) -> Iterator[Server]:
    settings = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "8M")
    place = tmp_path_factory.mktemp("server")
    with Server(llava.directory, place, *settings, "--runner", "pooling", probe=probe) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


def posted(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)


def test_a_chat_with_an_image(llava: MediaReference, server: Server) -> None:
    answer = posted(server, messages=messages(part(url_of(IMAGE)), "w7 w8")).json()
    given = dict(llava.inputs(prompt(1, IMAGE, 7, 8, 3)))
    with torch.no_grad():
        states = llava.model.model(**given).last_hidden_state[0, -1]
    vector = torch.tensor(answer["data"][0]["embedding"])
    expected = torch.nn.functional.normalize(states, dim=0)
    torch.testing.assert_close(vector, expected, rtol=0, atol=1e-4)
    assert answer["usage"]["prompt_tokens"] == 1 + 16 + 3


@pytest.mark.parametrize(
    ("body", "parameter", "told"),
    [
        ({"input": "w1", "messages": messages("w1")}, "messages", "either input or messages"),
        ({"input": "w1", "continue_final_message": True}, "continue_final_message", "needs"),
        ({"messages": []}, "messages", "must not be empty"),
        (
            {"messages": messages({"type": "input_audio", "input_audio": {"data": "AA"}})},
            "messages[0].content[0]",
            "takes text, image only",
        ),
    ],
)
def test_what_is_refused(server: Server, body: Any, parameter: str, told: str) -> None:
    answer = posted(server, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and told in error["message"] and error["param"] == parameter
