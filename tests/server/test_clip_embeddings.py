"""Vectors of CLIP over HTTP: texts as input, images in messages."""

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

from test_clip_parity import expected, write
from test_media import messages, part, url_of

from pegboard_testing.contract_multimodal_processor import random_image

pytestmark = pytest.mark.slow

IMAGE = random_image(40, 20, seed=1)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clip")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return write(folder)


@pytest.fixture(scope="module")
def server(
    folder: Path, model: Any, tmp_path_factory: pytest.TempPathFactory, probe: Path
) -> Iterator[Server]:
    settings = ("--dtype", "float32", "--kv-cache-memory-bytes", "8M", "--max-model-len", "48")
    place = tmp_path_factory.mktemp("server")
    more = ("--runner", "pooling", "--chat-template", TEMPLATE)
    with Server(folder, place, *settings, *more, probe=probe) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


def posted(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)


def test_texts(folder: Path, model: Any, server: Server) -> None:
    answer = posted(server, input=["w1 w2", "w3"]).json()
    for text, row in zip(("w1 w2", "w3"), answer["data"], strict=True):
        vector = torch.tensor(row["embedding"])
        torch.testing.assert_close(vector, expected(model, folder, text), rtol=0, atol=1e-4)


def test_a_text_in_messages(folder: Path, model: Any, server: Server) -> None:
    answer = posted(server, messages=messages("w1 w2"), add_special_tokens=True).json()
    vector = torch.tensor(answer["data"][0]["embedding"])
    torch.testing.assert_close(vector, expected(model, folder, "w1 w2"), rtol=0, atol=1e-4)


def test_an_image(folder: Path, model: Any, server: Server) -> None:
    answer = posted(server, messages=messages(part(url_of(IMAGE)))).json()
    vector = torch.tensor(answer["data"][0]["embedding"])
    one = {"prompt": "", "multi_modal_data": {"image": IMAGE}}
    torch.testing.assert_close(vector, expected(model, folder, one), rtol=0, atol=1e-4)
    assert answer["usage"]["prompt_tokens"] == 1


def test_an_image_with_a_text_is_refused(server: Server) -> None:
    answer = posted(server, messages=messages(part(url_of(IMAGE)), "w7 w8"))
    assert answer.status_code == 400
    assert "a vector of one image, with an empty text" in answer.json()["error"]["message"]
