"""The backend `flex`, which computes attention with torch's flex_attention: the tokens of
transformers."""

from __future__ import annotations

from typing import Any

import pytest

ARCHITECTURES = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_architecture(write: Any, check_parity: Any, name: str) -> None:
    model_type, config = ARCHITECTURES[name]
    check_parity(write(model_type, **config), attention_backend="FLEX_ATTENTION", block_size=16)
