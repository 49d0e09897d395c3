"""Packed integers are read as they were written: one bit after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard_weights.packed_integers import unpack


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 4),
    groups=st.integers(1, 3),
    dim=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_a_stream_of_bits(bits: int, rows: int, groups: int, dim: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**bits, (rows, 32 * groups))
    words = []
    for row in values:
        stream = sum(int(value) << (bits * i) for i, value in enumerate(row))
        words.append([stream >> (32 * i) & 0xFFFFFFFF for i in range(bits * groups)])
    packed = torch.from_numpy(np.array(words, np.uint32).view(np.int32))
    found = unpack(packed if dim == 1 else packed.T, bits, dim)
    assert found.dtype == torch.uint8
    assert np.array_equal(found.numpy() if dim == 1 else found.T.numpy(), values)


@pytest.mark.parametrize("bits", [4, 8, 2])
def test_words_may_have_any_number_of_whole_integers(bits: int) -> None:
    found = unpack(torch.tensor([[-1], [0]], dtype=torch.int32), bits, 1)
    assert found.tolist() == [[2**bits - 1] * (32 // bits), [0] * (32 // bits)]
