"""Blocks have the values that the `gguf` package gives for the stored bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_pack_gguf.decode import CHUNK_ELEMENTS, FORMATS, decode, is_decodable
from pegboard_pack_gguf.ggml_types import BY_STORED, GGML_TYPES


def oracle(data: bytes, stored: str, shape: tuple[int, int]) -> np.ndarray:
    blocks = np.frombuffer(data, np.uint8).reshape(-1, BY_STORED[stored].block_bytes)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[stored]).astype(np.float32).reshape(shape)


def random_data(stored: str, rows: int, per_row: int, seed: int) -> tuple[bytes, tuple[int, int]]:
    """Random bytes: any bit pattern is a block, with all possible scales, including infinite ones and NaN."""
    known = BY_STORED[stored]
    return np.random.default_rng(seed).bytes(rows * per_row * known.block_bytes), (rows, per_row * known.block_size)


@pytest.mark.parametrize("stored", FORMATS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 40), per_row=st.integers(1, 3))
def test_values_equal_the_package_bit_by_bit(stored: str, seed: int, rows: int, per_row: int) -> None:
    data, shape = random_data(stored, rows, per_row, seed)
    blocks = decode(memoryview(data), stored, shape)
    assert np.array_equal(blocks.dense().numpy(), oracle(data, stored, shape), equal_nan=True)


@pytest.mark.parametrize("stored", FORMATS)
def test_the_form_is_the_declared_one(stored: str) -> None:
    data, (rows, columns) = random_data(stored, 7, 2, 0)
    blocks = decode(memoryview(data), stored, (rows, columns))
    assert blocks.codes.shape == (rows, columns) and blocks.codes.is_contiguous()
    assert blocks.codes.dtype == (torch.uint8 if blocks.bits == 4 else torch.int8)
    if blocks.bits == 4:
        assert int(blocks.codes.max()) < 16
    else:
        assert blocks.zero == 0
    for scales in (blocks.scale, blocks.minimum):
        if scales is not None:
            assert scales.shape == (rows, columns // blocks.block_size) and scales.is_contiguous()
            assert scales.dtype == (torch.float32 if stored.endswith("K") else torch.float16)


@pytest.mark.parametrize("stored", FORMATS)
def test_long_tensors_are_decoded_in_runs(stored: str) -> None:
    rows = 2 * CHUNK_ELEMENTS // BY_STORED[stored].block_size + 5
    data, shape = random_data(stored, rows, 1, 1)
    assert np.array_equal(decode(memoryview(data), stored, shape).dense().numpy(), oracle(data, stored, shape), equal_nan=True)


def test_only_known_types_are_decodable() -> None:
    assert {known.stored for known in GGML_TYPES.values() if is_decodable(known.stored)} == set(FORMATS)
