"""The contract of the kind compares everything that the spec declares with a reference. An engine
gives the same tokens with this backend and with the default one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_attention_gather.backend import GatherAttention
from pegboard_attention_gather.plugin import GATHER
from pegboard_attention_gather.rows import first_visible

from pegboard.interfaces.attention import AttentionLayer, AttentionSetup
from pegboard_testing.contract_attention import AttentionContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.tiny_engine import tokens


def test_contract() -> None:
    check_entry(installed_entry("attention", "gather"))


class TestGather(AttentionContract):
    spec = GATHER

    def backend(self, setup: AttentionSetup) -> GatherAttention:
        return GatherAttention(None, setup)


@given(st.integers(0, 99), st.none() | st.integers(1, 20), st.none() | st.integers(1, 20))
def test_the_first_key_that_a_token_sees(
    position: int, window: int | None, chunk: int | None
) -> None:
    layer = AttentionLayer(
        layer_index=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        scale=1.0,
        window=window,
        chunk=None if window else chunk,
    )
    (first,) = first_visible(np.array([position]), layer)
    seen = [
        key
        for key in range(position + 1)
        if (window is None or key > position - window)
        and (layer.chunk is None or key // layer.chunk == position // layer.chunk)
    ]
    assert list(range(first, position + 1)) == seen


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 9}], ids=["whole", "chunks"])
def test_an_engine_gives_the_tokens_of_the_default_backend(
    tmp_path: Path, settings: dict[str, int]
) -> None:
    plain = tokens(tmp_path, **settings)
    assert tokens(tmp_path, **settings, attention_backend="gather") == plain
