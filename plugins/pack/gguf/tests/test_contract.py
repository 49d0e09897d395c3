from __future__ import annotations

import pytest

from pegboard.testing.contract_generic import check_entry, installed_entry


@pytest.mark.parametrize("kind", ["weight_loader", "quantization", "tokenizer"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "gguf"))
