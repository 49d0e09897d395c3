"""The plugin is found and well-formed. Its contract tests come from examples.py."""

from __future__ import annotations

from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("tool_parser", "function_tag"))
