"""gpt-oss: its contract, its tensors, and what it refuses. That it computes the right thing is
tested in tests/parity."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from pegboard_model_gpt_oss.gpt_oss import GptOssModel

from pegboard.errors import ModelError
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_build import fake_build

CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 29,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "experts_per_token": 2,
    "sliding_window": 5,
}


def test_contract() -> None:
    check_entry(installed_entry("model", "GptOssForCausalLM"))


def test_layers_alternate_and_have_sinks() -> None:
    build = fake_build()
    GptOssModel(CONFIG, build)
    assert [layer.window for layer in build.declared.attention.values()] == [5, None, 5]
    wanted = {
        each.name: each.shape for layer in build.declared.layers for each in layer.declare({})
    }
    assert wanted["model.layers.1.self_attn.sinks"] == (4,) and wanted[
        "model.layers.1.mlp.router.bias"
    ] == (4,)
    assert all(wanted.values())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* for 3 layers"),
        (
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "expected sliding_attention or full",
        ),
        ({"experts_per_token": None}, "experts_per_token=None"),
        ({"experts_per_token": 5}, "does not fit 4 experts"),
    ],
)
def test_what_is_not_supported_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        GptOssModel({**CONFIG, **values}, fake_build())


@pytest.mark.parametrize("key", CONFIG)
def test_odd_values_are_model_errors(key: str) -> None:
    """A value of a wrong type is a ModelError, or makes no difference."""
    for value in ([1], ["a"], {}, "text", True, 0.5, 7, None):
        with contextlib.suppress(ModelError):
            GptOssModel({**CONFIG, key: value}, fake_build())
