"""What Llama 4 reads from its config, and what it refuses. That it computes the right thing is
tested in tests/parity."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from pegboard_model_llama.llama4 import Llama4Model

from pegboard.errors import ModelError
from pegboard_models.lateness import Lateness
from pegboard_testing.fake_build import fake_build

CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 29,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 10,
    "interleave_moe_layer_step": 2,
}


def test_layers_differ() -> None:
    build = fake_build()
    Llama4Model(CONFIG, build)
    assert [layer.chunk for layer in build.declared.attention.values()] == [10, 10, 10, None]
    wanted = {
        each.name: each.shape for layer in build.declared.layers for each in layer.declare({})
    }
    assert wanted["model.layers.0.feed_forward.gate_proj.weight"] == (32, 16)
    assert wanted["model.layers.1.feed_forward.shared_expert.gate_proj.weight"] == (
        24,
        16,
    )
    assert not any("layers.0.feed_forward.router" in name for name in wanted) and all(
        wanted.values()
    )


def test_queries_are_scaled_from_a_position_on() -> None:
    """The factor is 1 before the first step. An engine whose requests all end before it computes no
    factors."""
    late = Lateness(fake_build(), (8, 0.5), 40, shift=1)
    late.bind()
    factors = late(torch.tensor([0, 6, 7, 14, 15])).flatten()
    torch.testing.assert_close(factors, torch.tensor([1, 1, 1.34657359, 1.34657359, 1.54930614]))
    for last, is_needed in ((7, False), (8, True)):
        late = Lateness(replace(fake_build(), max_positions=last), (8, 0.5), 40, shift=1)
        late.bind()
        assert (late(torch.arange(last)) is not None) == is_needed


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4 layers"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "expected chunked_attention or full_attention",
        ),
        ({"intermediate_size_mlp": None}, "intermediate_size_mlp=None"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "which its rotary scaling makes longer",
        ),
    ],
)
def test_what_is_not_supported_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Llama4Model({**CONFIG, **values}, fake_build())


@pytest.mark.parametrize(
    "key", [*CONFIG, "no_rope_layers", "moe_layers", "floor_scale", "attn_scale", "use_qk_norm"]
)
def test_odd_values_are_model_errors(key: str) -> None:
    """A value of a wrong type is a ModelError, or makes no difference."""
    for value in ([1], ["a"], {}, "text", True, 0.5, 7, None):
        with contextlib.suppress(ModelError):
            Llama4Model({**CONFIG, key: value}, fake_build())
