"""Packed weights have the values that the `gguf` package gives for the stored bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from pegboard_pack_gguf.decode import CHUNK_ELEMENTS, FORMATS, decode, is_decodable
from pegboard_pack_gguf.float_codes import CODE_FORMATS, float_codes, is_codes
from pegboard_pack_gguf.ggml_types import BY_STORED, GGML_TYPES, PLAIN

from pegboard.ops.float_codes import ScaleCodes
from pegboard_weights.stored_weight import code_form

PACKED = [*FORMATS, *CODE_FORMATS]
SCALES = {
    "Q8_K": torch.float32,
    "Q2_K": torch.uint8,
    **dict.fromkeys(("Q3_K", "Q4_K", "Q5_K", "Q6_K"), torch.int8),
}
"""The types of scales that are not float16."""


@pytest.fixture
def check(
    random_blocks: Callable[..., np.ndarray], block_values: Callable[..., np.ndarray]
) -> Callable[..., Any]:
    """check(stored, rows, blocks per row, seed) decodes random blocks, compares the values bit by
    bit, and returns the form."""

    def decoded(stored: str, rows: int, per_row: int, seed: int) -> Any:
        blocks = random_blocks(stored, rows * per_row, seed)
        shape = (rows, per_row * BY_STORED[stored].block_size)
        form = (decode if is_decodable(stored) else float_codes)(
            memoryview(blocks.tobytes()), stored, shape
        )
        assert np.array_equal(
            form.dense().numpy(), block_values(blocks, stored).reshape(shape), equal_nan=True
        )
        return form

    return decoded


@pytest.mark.parametrize("stored", PACKED)
def test_values_equal_the_package_bit_by_bit(check: Callable[..., Any], stored: str) -> None:
    for seed, rows in enumerate((1, 2, 7, 40)):
        check(stored, rows, 1 + seed % 3, seed)


@pytest.mark.parametrize("stored", FORMATS)
def test_blocks_have_the_declared_form(check: Callable[..., Any], stored: str) -> None:
    blocks = check(stored, 7, 2, 0)
    columns = 2 * BY_STORED[stored].block_size
    assert blocks.codes.shape == (7, columns) and blocks.codes.is_contiguous()
    assert blocks.codes.dtype == (torch.int8 if blocks.bits == 8 else torch.uint8)
    assert int(blocks.codes.max()) < 2**blocks.bits
    for scales in (blocks.scale, blocks.minimum):
        if scales is not None:
            assert scales.shape == (7, columns // blocks.block_size) and scales.is_contiguous()
            assert scales.dtype == SCALES.get(stored, torch.float16)
    assert (blocks.outer is not None) == (blocks.scale.dtype in (torch.int8, torch.uint8))


@pytest.mark.parametrize("stored", CODE_FORMATS)
def test_codes_have_a_form_that_kernels_take(check: Callable[..., Any], stored: str) -> None:
    found = check(stored, 7, 2, 0)
    columns = 2 * BY_STORED[stored].block_size
    assert code_form(columns, found.block[1]) == "code_weight"
    assert (
        found.codes.shape == (7, columns)
        and found.codes.dtype == torch.uint8
        and int(found.codes.max()) < 16
    )
    assert found.values.shape == (16,) and found.values.dtype == torch.float32
    stored_scales = found.scale.codes if isinstance(found.scale, ScaleCodes) else found.scale
    assert stored_scales.shape == (7, columns // found.block[1])
    bits = 4 + 8 * stored_scales.element_size() / found.block[1]
    assert bits <= 4.5, "never more than a byte for 16 columns"


@pytest.mark.parametrize("stored", PACKED)
def test_long_tensors_are_decoded_in_runs(check: Callable[..., Any], stored: str) -> None:
    check(stored, CHUNK_ELEMENTS // BY_STORED[stored].block_size + 5, 1, 1)


def test_every_type_of_the_package_is_plain_or_packed() -> None:
    """Q8_1 is a type of activations. No type is expanded."""
    known = {known.name for known in GGML_TYPES.values()}
    assert {kind.name for kind in gguf.GGMLQuantizationType} - known == {"Q8_1"}
    assert {
        name for name in known - set(PLAIN) if not is_decodable(name) and not is_codes(name)
    } == set()
    sizes = {known.name: (known.block_size, known.block_bytes) for known in GGML_TYPES.values()}
    assert all(
        gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == size
        for name, size in sizes.items()
    )
