"""The backend passes the contract of its kind and the generic contract."""

from __future__ import annotations

import pytest
import torch
from pegboard_attention_cpu.backend import CPUPagedAttention, rounded
from pegboard_attention_cpu.plugin import CPU_PAGED

from pegboard.interfaces.attention import AttentionSetup
from pegboard_testing.contract_attention import AttentionContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_latent import LatentContract


def test_contract() -> None:
    check_entry(installed_entry("attention", "cpu_paged"))


class TestCPUPagedAttention(AttentionContract):
    spec = CPU_PAGED

    def backend(self, setup: AttentionSetup) -> CPUPagedAttention:
        return CPUPagedAttention(None, setup)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_an_8_bit_float_cannot_hold_becomes_its_largest_number(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([[1e6, -1e6, 1.0], [2e6, -2e6, 6.0]])[None]
    scale = torch.tensor([1.0, 2.0])
    assert rounded(values, dtype, scale).float().tolist() == [
        [[largest, -largest, 1.0], [largest, -largest, 3.0]]
    ]


class TestLatentAttention(LatentContract):
    spec = CPU_PAGED
    block_sizes = (1, 4, 16, 48)

    def backend(self, setup: AttentionSetup) -> CPUPagedAttention:
        return CPUPagedAttention(None, setup)
