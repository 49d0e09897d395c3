"""RecurrentGemma compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import Reference

from pegboard.errors import ModelError

CONFIGS: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {"attention_window_size": 9, "num_hidden_layers": 4},
    "recurrent_gemma, one key": {
        "attention_window_size": 9,
        "num_key_value_heads": 1,
        "block_types": ["attention", "recurrent"],
        "lru_width": 48,
        "conv1d_width": 3,
        "logits_soft_cap": 3.0,
        "tie_word_embeddings": False,
    },
}


def in_float64(write: Any, name: str) -> Any:
    """transformers computes 1 - a² for a near 1, so its float32 is sixteen times as far from this
    as ours."""
    reference = write("recurrent_gemma", **CONFIGS[name])
    return Reference(reference.directory, reference.model.double())


@pytest.mark.parametrize("name", CONFIGS)
def test_recurrent_gemma(write: Any, check_parity: Any, name: str) -> None:
    check_parity(in_float64(write, name), mamba_block_size=8)


def test_preemption_and_whole_prompts(write: Any, check_parity: Any) -> None:
    reference = in_float64(write, "recurrent_gemma")
    few = {"num_gpu_blocks_override": 26}
    check_parity(reference, lengths=(3, 20, 40, 33), **few, max_model_len=56, mamba_block_size=8)
    check_parity(
        reference,
        lengths=(40, 40),
        max_num_batched_tokens=160,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )


def test_other_blocks_are_refused(write: Any, open_llm: Any) -> None:
    reference = write("recurrent_gemma", **CONFIGS["recurrent_gemma"])
    with pytest.raises(ModelError, match=r"block_types=\['odd'\].*expected recurrent or attention"):
        open_llm(reference.directory, hf_overrides={"block_types": ["odd"]})


def test_cached_prefixes_and_two_answers(write: Any, check_cached: Any) -> None:
    reference = write("recurrent_gemma", **CONFIGS["recurrent_gemma"])
    check_cached(reference, (56, 52, 48), mamba_block_size=8)
