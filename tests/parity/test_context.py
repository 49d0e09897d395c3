"""Models whose tokens are shared out among ranks compute what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_ranks import LATENT, MODELS
from tiny_models import check_cached, check_parity, divide

Write = Callable[..., Any]
pytestmark = pytest.mark.one_rank  # they divide models themselves

ONE_KEY = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
TWO_KEYS = {**ONE_KEY, "num_key_value_heads": 2}
HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
WINDOWS = {
    **TWO_KEYS,
    "head_dim": 8,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CASES: dict[str, tuple[str, dict[str, Any], int, int, int]] = {
    "one KV head": ("llama", ONE_KEY, 2, 2, 1),
    "one KV head, four ranks": ("llama", ONE_KEY, 4, 4, 1),
    "two KV heads, four ranks": ("llama", TWO_KEYS, 4, 2, 1),
    "windows, capped scores": ("gemma2", {**TWO_KEYS, "head_dim": 8, "sliding_window": 9}, 4, 2, 1),
    "windows": ("gemma3_text", WINDOWS, 4, 2, 1),
    "latents": ("deepseek_v3", LATENT, 2, 2, 1),
    "rows": ("llama", HEADS, 1, 1, 2),
    "rows of three ranks": ("llama", HEADS, 1, 1, 3),
    "rows with windows": ("gemma3_text", WINDOWS, 1, 1, 2),
    "rows of experts": MODELS["experts"] + (1, 1, 2),
    "rows of latents": ("deepseek_v3", LATENT, 1, 1, 2),
    "rows and heads": ("llama", HEADS, 2, 1, 2),
    "rows and KV heads": ("llama", ONE_KEY, 2, 2, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_threads(write: Write, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, values, ranks, keys, rows = CASES[name]
    context = {"decode_context_parallel_size": keys, "prefill_context_parallel_size": rows}
    divide(monkeypatch, ranks, **context)
    reference = write(kind, **values)
    check_parity(reference, lengths=(6, 17, 1), max_model_len=64)
    check_cached(reference, (32, 20, 32), max_model_len=64)
