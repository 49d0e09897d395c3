"""The resolver passes the contract of its kind, and a changed table counts at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pegboard_lora_resolver_table.options import TableOptions
from pegboard_lora_resolver_table.resolver import TableResolver

from pegboard.errors import ModelError
from pegboard.interfaces.lora_resolver import LoRAResolverSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_lora_resolver import LoRAResolverContract


def test_contract() -> None:
    check_entry(installed_entry("lora_resolver", "table"))


class TestTable(LoRAResolverContract):
    @pytest.fixture(autouse=True)
    def table(self, tmp_path: Path) -> None:
        for version in ("v1", "v2"):
            (tmp_path / version).mkdir()
            (tmp_path / version / "adapter_config.json").write_text("{}")
        self.file = tmp_path / "table.json"
        self.file.write_text(json.dumps({"poet": "v1", "gone": "v0"}))

    def resolver(self) -> TableResolver:
        return TableResolver(TableOptions(file=self.file), LoRAResolverSetup(lambda *_: self.file))

    def present(self) -> str:
        return "poet"

    def missing(self) -> str:
        return "painter"

    def test_a_changed_line_counts_at_once(self) -> None:
        assert self.resolved("poet") == [self.file.parent / "v1"]
        self.file.write_text(json.dumps({"poet": "v2"}))
        assert self.resolved("poet") == [self.file.parent / "v2"]

    def test_mistakes_in_the_table_are_told(self) -> None:
        with pytest.raises(ModelError, match="names a folder that is not there"):
            self.resolved("gone")
        self.file.write_text("{")
        with pytest.raises(ModelError, match="cannot be read"):
            self.resolved("poet")
