"""Rows of images with their grids over HTTP: answered as the images are; what is refused."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save
from server_process import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from test_qwen_vl_parity import write
from tiny_media import MediaReference

from pegboard_testing.contract_multimodal_processor import random_image

pytestmark = pytest.mark.slow

IMAGES = [random_image(40, 20, seed=1), random_image(13, 50, seed=2)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl", "older")


@pytest.fixture(scope="module")
def server(
    qwen: MediaReference, tmp_path_factory: pytest.TempPathFactory, probe: Path
) -> Iterator[Server]:
    settings = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "8M")
    place = tmp_path_factory.mktemp("server")
    more = ("--enable-mm-embeds",)
    with Server(qwen.directory, place, *settings, *more, probe=probe) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


def asked(server: Server, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "w4"}]
    messages = [{"role": "user", "content": content}]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def chosen(response: httpx.Response) -> list[tuple[str, float]]:
    """Return the tokens of an answer, and their logprobs in four digits."""
    assert response.status_code == 200, response.text
    content = response.json()["choices"][0]["logprobs"]["content"]
    return [(one["token"], round(one["logprob"], 4)) for one in content]


def image_part(image: Any) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def npy(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    np.save(file, tensor.numpy())
    return file.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def rows_part(rows: torch.Tensor, **form: Any) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": {"image_embeds": text(saved(rows)), **form}}


def made(qwen: MediaReference, image: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what transformers makes of an image: its rows, and its grid [1, 3]."""
    mark = "<|vision_start|> <|image_pad|> <|vision_end|>"
    given = qwen.inputs({"prompt": mark, "multi_modal_data": {"image": [image]}})
    grid = given["image_grid_thw"]
    with torch.no_grad():
        output = qwen.model.model.get_image_features(given["pixel_values"], grid)
    return torch.cat([*output.pooler_output]), grid


def test_rows_in_place_of_images(server: Server, qwen: MediaReference) -> None:
    """The grid is a tensor in each form, or a list. An image is beside the rows."""
    wide, tall = (image_part(image) for image in IMAGES)
    alone = chosen(asked(server, wide, logprobs=True))
    both = chosen(asked(server, tall, wide, logprobs=True))
    rows, grid = made(qwen, IMAGES[0])
    grids = [text(saved(grid)), text(saved(grid[0].int())), text(npy(grid)), *grid.tolist()]
    grids += [text(save({"grid": grid})), grid.tolist()]
    for each in grids:
        given = rows_part(rows, image_grid_thw=each)
        assert chosen(asked(server, given, logprobs=True)) == alone
    given = rows_part(rows, image_grid_thw=grid.tolist())
    assert chosen(asked(server, tall, given, logprobs=True)) == both


ROWS = torch.ones(8, 32)
GRID = text(saved(torch.tensor([1, 4, 8])))
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no grid": (rows_part(ROWS), "this model needs image_grid_thw, (1, height, width)"),
    "rows alone": (
        {"type": "image_embeds", "image_embeds": text(saved(ROWS))},
        "beside the rows of the image came nothing",
    ),
    "another grid": (rows_part(ROWS, image_grid_thw=[1, 4, 4]), "the image has 8 rows"),
    "a grid of floats": (
        rows_part(ROWS, image_grid_thw=text(saved(torch.ones(3)))),
        "content[0].image_embeds.image_grid_thw: the bytes cannot be read",
    ),
    "an empty grid": (
        rows_part(ROWS, image_grid_thw=text(saved(torch.zeros(0, 3).long()))),
        "whole numbers [items, numbers], at most 4096, got the shape [0, 3]",
    ),
    "no base64": (rows_part(ROWS, image_grid_thw="1,4,8"), "expected base64"),
    "no numbers": (rows_part(ROWS, image_grid_thw=None), "expected whole numbers"),
    "an object": (rows_part(ROWS, image_grid_thw={"t": 1}), "expected whole numbers"),
    "a name more": (rows_part(ROWS, image_grid_thw=GRID, more=[1]), "and nothing else"),
    "rows of integers": (rows_part(ROWS.long(), image_grid_thw=GRID), "got 'torch LongStorage'"),
    "no rows": (
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": GRID}},
        "an object that has it as image_embeds",
    ),
    "a list of rows": (
        {"type": "image_embeds", "image_embeds": {"image_embeds": [GRID], "image_grid_thw": GRID}},
        "an object that has it as image_embeds",
    ),
    "two items": (
        rows_part(torch.ones(16, 32), image_grid_thw=[[1, 4, 8], [1, 4, 8]]),
        "the rows of one item, got those of 2",
    ),
}


@pytest.mark.parametrize(("given", "told"), BAD.values(), ids=BAD.keys())
def test_refused(server: Server, given: dict[str, Any], told: str) -> None:
    response = asked(server, given)
    assert response.status_code == 400 and told in response.json()["error"]["message"]
    assert response.json()["error"]["param"].startswith("messages[0].content[0]")


def test_nothing_is_left(server: Server) -> None:
    server.wait_until_idle()
