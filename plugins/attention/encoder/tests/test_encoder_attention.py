"""The backend passes the contract of encoders and the generic contract."""

from __future__ import annotations

import pytest
from pegboard_attention_encoder.backend import EncoderAttention
from pegboard_attention_encoder.plugin import ENCODER

from pegboard.interfaces.attention import AttentionLayer, AttentionSetup
from pegboard_testing.contract_encoder import EncoderContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_limits import fake_limits


def test_contract() -> None:
    check_entry(installed_entry("attention", "cpu_encoder"))


class TestEncoderAttention(EncoderContract):
    spec = ENCODER

    def backend(self, setup: AttentionSetup) -> EncoderAttention:
        return EncoderAttention(None, setup)


def test_it_stores_nothing() -> None:
    layer = AttentionLayer(
        layer_index=0, num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0, encoder=True
    )
    assert EncoderAttention.kv_spec(layer, "float32").slot_bytes() == 0


@pytest.mark.parametrize("length", [3, 5, 6])
def test_a_mask_only_where_a_key_is_hidden(length: int) -> None:
    backend = EncoderAttention(None, AttentionSetup((), "float32", "cpu", fake_limits()))
    assert (backend._mask(length, 8) is None) == (length <= 5)
