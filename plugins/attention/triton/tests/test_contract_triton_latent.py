"""The backend of latent attention passes its contract under Triton's interpreter, and the generic
contract."""

from __future__ import annotations

import pytest
from pegboard_attention_triton.latent_backend import TritonLatentAttention
from pegboard_attention_triton.plugin import MLA

from pegboard.interfaces.attention import AttentionSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_latent import LatentContract

pytestmark = pytest.mark.usefixtures("interpreted_triton")


def test_contract() -> None:
    check_entry(installed_entry("attention", "triton_mla"))


class TestTritonLatentAttention(LatentContract):
    spec = MLA
    # The interpreter takes some 20 ms for each program of a kernel, so rows are short.
    heads = (1, 5, 16, 40)
    long_row = 150
    random_row = 20

    def backend(self, setup: AttentionSetup) -> TritonLatentAttention:
        return TritonLatentAttention(None, setup)
