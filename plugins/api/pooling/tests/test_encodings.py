"""Vectors as bytes: the values of all types are those of torch."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_api_pooling.api import PoolingApi
from pegboard_api_pooling.encodings import ITEM_BYTES, DType, Endianness, packed
from pegboard_api_pooling.plugin import POOLING
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard_testing.fake_client import BOS, FakeEngineClient
from pegboard_testing.served_app import make_app

TORCH: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
TEXTS = ["hi", "a"]
VECTORS = [[BOS + 209.0, 3.0, 0.5], [BOS + 97.0, 2.0, 0.5]]


def decoded(data: bytes, dtype: DType, endianness: Endianness = "native") -> torch.Tensor:
    """The numbers of bytes, as float32."""
    size = ITEM_BYTES[dtype]
    numbers = np.frombuffer(data, f"u{size}")
    if endianness not in ("native", sys.byteorder):
        numbers = numbers.byteswap()
    return torch.frombuffer(bytearray(numbers.tobytes()), dtype=TORCH[dtype]).float()


@pytest.mark.parametrize("dtype", TORCH)
def test_every_number_is_rounded_as_torch_rounds_it(dtype: DType) -> None:
    """All signs, exponents and seven bits of fraction, with endings below, at and above ties."""
    heads = np.arange(2**16, dtype=np.uint32) << 16
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (heads[:, None] | ends).ravel()
    expected = torch.from_numpy(bits.view(np.float32)).to(TORCH[dtype]).float()
    actual = decoded(packed(bits.tobytes(), dtype, "native"), dtype)
    assert torch.equal(actual.isnan(), expected.isnan())
    is_number = ~expected.isnan()
    assert torch.equal(actual[is_number], expected[is_number])
    assert torch.equal(actual[is_number].signbit(), expected[is_number].signbit())


def apis(setup: ApiSetup) -> Any:
    return [("pooling", PoolingApi(None, setup), POOLING)]


def post(**more: Any) -> Any:
    http = TestClient(make_app(apis, FakeEngineClient(pools=True)), raise_server_exceptions=False)
    answer = http.post("/v1/embeddings", json={"input": TEXTS, **more})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_bytes_and_what_describes_them(dtype: DType, endianness: Endianness) -> None:
    asked: dict[str, Any] = {"embed_dtype": dtype, "endianness": endianness, "request_id": "mine"}
    answer = post(**asked, encoding_format="bytes")
    about = json.loads(answer.headers["metadata"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert (about["id"], about["model"]) == ("embd-mine", "fake-model") and about["created"] > 0
    assert about["usage"]["prompt_tokens"] == about["usage"]["total_tokens"] == 5
    size = 3 * ITEM_BYTES[dtype]
    for index, item in enumerate(about["data"]):
        expected = torch.tensor(VECTORS[index]).to(TORCH[dtype]).float()
        part = answer.content[item["start"] : item["end"]]
        assert torch.equal(decoded(part, dtype, endianness), expected)
        assert item == {
            "index": index,
            "embed_dtype": dtype,
            "endianness": endianness,
            "start": index * size,
            "end": (index + 1) * size,
            "shape": [3],
        }
    only = post(**asked, encoding_format="bytes_only")
    assert only.content == answer.content and "metadata" not in only.headers
    texts = post(**asked, encoding_format="base64").json()["data"]
    assert b"".join(base64.b64decode(each["embedding"]) for each in texts) == answer.content


def test_numbers_have_no_type() -> None:
    """A type and an order of bytes change nothing in them, as in vLLM."""
    answer = post(embed_dtype="fp8_e5m2", endianness="big").json()
    assert [each["embedding"] for each in answer["data"]] == VECTORS
