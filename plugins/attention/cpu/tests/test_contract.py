"""The backend passes the contract of its kind and the generic contract."""

from __future__ import annotations

from pegboard_attention_cpu.backend import CPUPagedAttention
from pegboard_attention_cpu.plugin import CPU_PAGED

from pegboard.interfaces.attention import AttentionSetup
from pegboard_testing.contract_attention import AttentionContract
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("attention", "cpu_paged"))


class TestCPUPagedAttention(AttentionContract):
    spec = CPU_PAGED

    def backend(self, setup: AttentionSetup) -> CPUPagedAttention:
        return CPUPagedAttention(None, setup)
