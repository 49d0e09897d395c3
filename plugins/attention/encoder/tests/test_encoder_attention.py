"""The backend computes what the formula says, for prompts of any length in one step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_attention_encoder.backend import EncoderAttention
from torch import Tensor

from pegboard.config.limits import Limits
from pegboard.interfaces.attention import AttentionInputs, AttentionLayer, AttentionSetup
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("attention", "cpu_encoder"))


def reference(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    """Attention of one prompt in float64, with loops over heads."""
    places, out = torch.arange(len(q)), []
    for head in range(layer.num_heads):
        shared = head * layer.num_kv_heads // layer.num_heads
        scores = q[:, head].double() @ k[:, shared].double().T * layer.scale
        if layer.window is not None:
            scores[(places[:, None] - places).abs() > layer.window // 2] = -torch.inf
        out.append(scores.softmax(-1) @ v[:, shared].double())
    return torch.stack(out, 1).flatten(1)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2)]),
    window=st.sampled_from([None, 2, 7, 16]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_as_the_formula(lengths: list[int], heads: tuple[int, int], window: int | None, dtype: str, seed: int) -> None:
    limits = Limits(max_model_len=64, vocab_size=9, max_num_seqs=8, max_num_batched_tokens=512, block_size=16)
    layer = AttentionLayer(
        layer_index=0, num_heads=heads[0], num_kv_heads=heads[1], head_dim=8, scale=0.3, window=window, encoder=True
    )
    backend = EncoderAttention(None, AttentionSetup((layer,), dtype, "cpu", limits))
    assert backend.kv_spec(layer, dtype).slot_bytes() == 0
    backend.attach({0: {}}, 64)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    none = torch.zeros(0, dtype=torch.int32)
    total, seq_lens = int(starts[-1]), np.array(lengths, np.int32)
    backend.plan(
        AttentionInputs(
            len(lengths), total, torch.from_numpy(starts), starts, torch.from_numpy(seq_lens), seq_lens, none, none.numpy(), none
        )
    )
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(total, n, 8, generator=random).to(getattr(torch, dtype)) for n in (heads[0], heads[1], heads[1]))
    out = backend.bind(layer)(q, k, v)
    expected = torch.cat([reference(q[a:b], k[a:b], v[a:b], layer) for a, b in zip(starts, starts[1:], strict=False)])
    torch.testing.assert_close(
        out.double(), expected, **({"atol": 1e-5, "rtol": 1e-5} if dtype == "float32" else {"atol": 0.03, "rtol": 0.03})
    )


@pytest.mark.parametrize("length", [3, 5, 6])
def test_a_mask_only_where_a_key_is_hidden(length: int) -> None:
    limits = Limits(max_model_len=64, vocab_size=9, max_num_seqs=8, max_num_batched_tokens=512, block_size=16)
    backend = EncoderAttention(None, AttentionSetup((), "float32", "cpu", limits))
    mask = backend._mask(length, 8)
    assert (mask is None) == (length <= 5)
