"""The generic contract."""

from __future__ import annotations

from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("model", "*", "pegboard-model-transformers"))
