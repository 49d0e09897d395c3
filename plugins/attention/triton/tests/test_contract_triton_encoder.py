"""The backend of encoders passes their contract under Triton's interpreter, and the generic
contract."""

from __future__ import annotations

import pytest
import torch
from pegboard_attention_triton import encoder
from pegboard_attention_triton.attention import Tiles
from pegboard_attention_triton.encoder import TritonEncoderAttention, encoder_attention
from pegboard_attention_triton.plugin import ENCODER

from pegboard.interfaces.attention import AttentionLayer, AttentionSetup
from pegboard_testing.contract_encoder import EncoderContract, bidirectional_attention
from pegboard_testing.contract_generic import check_entry, installed_entry

pytestmark = pytest.mark.usefixtures("interpreted_triton")


def test_contract() -> None:
    check_entry(installed_entry("attention", "triton_encoder"))


class TestTritonEncoder(EncoderContract):
    spec = ENCODER

    def backend(self, setup: AttentionSetup) -> TritonEncoderAttention:
        return TritonEncoderAttention(None, setup)

    # The interpreter takes some 20 ms for each program of a kernel, so there are fewer random
    # steps.
    @pytest.mark.parametrize(
        ("dtype", "seed"), [("float32", 0), ("float32", 5), ("float16", 1), ("bfloat16", 2)]
    )
    def test_whole_prompts_equal_the_reference(self, dtype: str, seed: int) -> None:
        super().test_whole_prompts_equal_the_reference(dtype, seed)


def test_it_stores_nothing() -> None:
    layer = AttentionLayer(
        layer_index=0, num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0, encoder=True
    )
    assert TritonEncoderAttention.kv_spec(layer, "float32").slot_bytes() == 0


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("window", [None, 0, 1, 6])
def test_tiles_of_rows_and_padding(
    tokens: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without tokens, rows of several tiles, values of another width, tensors that lie apart,
    and tokens of no row, which become zero."""
    tiles = Tiles(tokens=tokens, queries=16, keys=16, splits=1, warps=4)
    monkeypatch.setattr(encoder, "encoder_tiles", lambda *shapes: tiles)
    counts = [5, 0, 1, 23, 3, 0]
    padding = 4
    num_tokens = sum(counts) + padding
    both = torch.randn(num_tokens, 4 + 2, 24)
    q = both[:, :4]
    k = both[:, 4:]
    v = torch.randn(num_tokens, 2, 17)
    starts = torch.tensor([0, *counts, 0]).cumsum(0).to(torch.int32)
    bias = torch.randn(4, 2 * 4 + 1) if window else None
    out = encoder_attention(q, k, v, starts, 0.3, window, bias)
    rows = [each.split([*counts, padding]) for each in (q, k, v)]
    expected = [
        bidirectional_attention(*row, 0.3, window, bias)
        for row in zip(*rows, strict=True)
        if len(row[0])
    ][:-1]
    expected.append(torch.zeros(padding, 4 * 17))
    torch.testing.assert_close(out.flatten(1), torch.cat(expected).float(), rtol=3e-5, atol=3e-5)


def test_a_step_without_tokens() -> None:
    empty = torch.zeros(0, 2, 8)
    starts = torch.zeros(2, dtype=torch.int32)
    assert encoder_attention(empty, empty, empty, starts, 1.0).shape == (0, 2, 8)
