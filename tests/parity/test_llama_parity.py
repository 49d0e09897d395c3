"""The llama package against transformers: architectures, and every rule of rotary scaling."""

from __future__ import annotations

from typing import Any

import pytest

ARCHITECTURES = {
    "llama": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama, biases, odd head size": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen2, windows above layer 1": ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}

ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, betas": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.2,
    },
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(write: Any, check_parity: Any, name: str) -> None:
    model_type, config = ARCHITECTURES[name]
    check_parity(write(model_type, **config))


@pytest.mark.parametrize("name", ROPE)
def test_rope_scaling(write: Any, check_parity: Any, name: str) -> None:
    check_parity(write("llama", rope_parameters={"rope_theta": 500.0, **ROPE[name]}))
