"""Gemma 3n: its contract, what its layers share, and what it refuses. That it computes the right
thing is tested in tests/parity."""

from __future__ import annotations

from typing import Any

import pytest
from pegboard_model_gemma3n.gemma3n import Gemma3nModel

from pegboard.errors import ModelError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_build import fake_build

CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 29,
    "max_position_embeddings": 64,
    "num_kv_shared_layers": 2,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 8,
}


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("model", name))


def test_the_last_layers_read_the_keys_of_the_last_own_layer_of_their_type() -> None:
    build = fake_build()
    Gemma3nModel(CONFIG, build)
    layers = build.declared.attention.values()
    assert [layer.shares_kv_with for layer in layers] == [None, None, None, None, 2, 3]
    assert [layer.window for layer in layers] == [5, None] * 3
    wanted = {each.name for layer in build.declared.layers for each in layer.declare({})}
    assert (
        "model.layers.4.self_attn.q_proj.weight" in wanted
        and "model.layers.4.self_attn.k_proj.weight" not in wanted
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"layer_types": ["full_attention"]}, "for each of 6 layers"),
        (
            {"layer_types": ["chunked_attention"] * 6},
            "expected full_attention or sliding_attention",
        ),
        (
            {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]},
            "layer 5 shares .* but no layer has its own",
        ),
        ({"num_kv_shared_layers": 6}, "leaves no layer of 6"),
        ({"num_kv_shared_layers": -1}, "leaves no layer of 6"),
        ({"intermediate_size": [24] * 5}, "intermediate_size has 5 entries for 6"),
        ({"intermediate_size": None}, "intermediate_size=None"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "below 1"),
        ({"altup_active_idx": 4}, "not one of altup_num_inputs=4"),
    ],
)
def test_wrong_configs_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Gemma3nModel({**CONFIG, **values}, fake_build())
