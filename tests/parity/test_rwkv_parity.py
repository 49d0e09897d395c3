"""RWKV-4 compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest

CONFIGS: dict[str, dict[str, Any]] = {
    "rwkv": {"num_hidden_layers": 3, "context_length": 64},
    "rwkv, wide": {
        "num_hidden_layers": 2,
        "attention_hidden_size": 96,
        "use_cache": False,  # with its cache, transformers' model computes one width only
        "intermediate_size": 80,
        "rescale_every": 0,
        "tie_word_embeddings": True,
        "context_length": 64,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_rwkv(write: Any, check_parity: Any, name: str) -> None:
    check_parity(write("rwkv", **CONFIGS[name]), mamba_block_size=8)


def test_preemption_and_whole_prompts(write: Any, check_parity: Any) -> None:
    reference = write("rwkv", **CONFIGS["rwkv"])
    few = {"num_gpu_blocks_override": 12}
    check_parity(reference, lengths=(3, 20, 40, 33), **few, max_model_len=56, mamba_block_size=8)
    check_parity(
        reference,
        lengths=(40, 40),
        max_num_batched_tokens=160,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )


def test_cached_prefixes_and_two_answers(write: Any, check_cached: Any) -> None:
    check_cached(write("rwkv", **CONFIGS["rwkv"]), (56, 52, 48), mamba_block_size=8)
