"""Values of config.json that cannot be right are refused by name, before anything is allocated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedConfig

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import TensorEntry
from pegboard_models.rope import rope_parameters, scaled_rope
from pegboard_testing.fake_build import fake_build
from pegboard_weights.config_values import check_config
from pegboard_weights.hf_files import decoded, read_config

GOOD: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 4,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": False,
    "sliding_window": None,
    "eos_token_id": 1,
}
HOSTILE = (
    -1,
    True,
    "8",
    2**63,
    10**30,
    -(2**31),
    float("nan"),
    float("inf"),
    [],
    {"a": 1},
    "x" * 10_000,
)


def check(config: dict[str, Any]) -> None:
    check_config(
        Path("config.json"),
        config,
        [TensorEntry(f"t{i}", (8, 8), "float32", "f", 0, 4096) for i in range(4)],
    )


def test_a_good_config_passes() -> None:
    check(GOOD)
    check({"text_config": GOOD, "vision_config": {"hidden_size": "any"}})
    check(
        {**GOOD, "intermediate_size": [16, 32], "new_setting": {"a": [None, "b"]}, "num_labels": 2}
    )
    check(
        {**GOOD, "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}}
    )


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", -1),
        ("hidden_size", True),
        ("hidden_size", "8"),
        ("hidden_size", 0),
        ("hidden_size", [8]),
        ("rms_norm_eps", [1e-5]),
        ("max_position_embeddings", []),
        ("rope_theta", [10000.0, 10000.0]),
        ("rope_scaling", {"rope_type": "linear", "factor": [2.0]}),
        ("num_attention_heads", 2**31),
        ("num_hidden_layers", 2**63),
        ("vocab_size", 2**63),
        ("head_dim", 10**30),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0),
        ("rope_scaling", {"rope_type": "linear", "factor": -2.0}),
        ("rope_scaling", {"rope_type": 3, "factor": 2.0}),
        ("rope_scaling", {"rope_type": "longrope", "long_factor": [1.0, "2"]}),
        ("rope_scaling", "linear"),
        ("rope_parameters", {"sliding_attention": {"rope_theta": -5}}),
        ("tie_word_embeddings", "false"),
        ("num_experts", 2**31),
        ("kv_lora_rank", 2**40),
        ("num_hidden_layers", 5),  # more than tensors
        ("vocab_size", 2**22),  # more than bytes
        ("head_dim", 2**18),
    ],
)
def test_a_value_that_cannot_be_right_is_named(name: str, value: Any, nested: bool) -> None:
    config = {**GOOD, name: value}
    with pytest.raises(ModelError, match=name) as caught:
        check({"text_config": config} if nested else config)
    assert len(str(caught.value)) < 400


@given(name=st.sampled_from(sorted(GOOD)), value=st.sampled_from(HOSTILE))
def test_hostile_values_are_refused_or_harmless(name: str, value: Any) -> None:
    """Nothing but a ModelError is ever raised, and what passes is a size that can be allocated."""
    config = {**GOOD, name: value}
    try:
        check(config)
        base, scaling = rope_parameters(config)
        scaled_rope(fake_build(), 4, max_positions=64, base=base, scaling=scaling)
    except ModelError:
        return
    assert (
        name
        in (
            "eos_token_id",
            "sliding_window",
            "intermediate_size",
            "rope_scaling",
            "rope_theta",
            "tie_word_embeddings",
        )
        or value == []
    )


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    written = PreTrainedConfig(limits=[0.0, math.inf, -math.inf], text={"deep": [math.nan]})
    written.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    found = read_config(tmp_path)
    assert found["limits"] == [0.0, math.inf, -math.inf] and math.isnan(found["text"]["deep"][0])
    odd = {"a": {"__float__": "much"}, "b": {"__float__": "NaN", "c": 1}, "d": [None, "x", True]}
    assert decoded(odd) == odd
