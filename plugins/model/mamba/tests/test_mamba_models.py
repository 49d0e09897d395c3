"""What the package adds to transformers' definition: entries, what is stored, and errors. Parity is
tested in tests/parity."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pegboard_model_mamba.hybrids import BambaModel, FalconH1Model, GraniteHybridModel
from pegboard_model_mamba.lfm import Lfm2Model
from pegboard_model_mamba.minimax import MiniMaxModel, decay_rates
from pegboard_model_mamba.nemotron import NemotronHModel
from pegboard_model_mamba.plamo import Plamo2Model
from pegboard_model_mamba.pure import Mamba2Model, MambaModel, step_limits
from pegboard_model_mamba.qwen_next import Qwen3NextModel
from pegboard_model_mamba.zamba import Zamba2Model

from pegboard.errors import ModelError
from pegboard.interfaces.attention import KVTensor
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_build import fake_build

COMMON: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 29,
}
PURE: dict[str, Any] = {**COMMON, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2}
HYBRID: dict[str, Any] = {
    **COMMON,
    "mamba_n_heads": 4,
    "mamba_d_state": 4,
    "layer_types": ["mamba", "attention"],
}
NEMOTRON: dict[str, Any] = {
    **COMMON,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 4,
    "n_groups": 2,
}
QWEN: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MINIMAX: dict[str, Any] = {
    **COMMON,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attn_type_list": [0, 1],
}
NAMES = (
    "Mamba",
    "Mamba2",
    "FalconMamba",
    "Bamba",
    "GraniteMoeHybrid",
    "Jamba",
    "Lfm2",
    "Lfm2Moe",
    "FalconH1",
    "NemotronH",
    "Qwen3Next",
    "Zamba2",
    "MiniMax",
    "MiniMaxText01",
    "MiniMaxM1",
    "Plamo2",
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*(f"{name}ForCausalLM" for name in NAMES), "Qwen3NextMTP"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("model", name))


def test_states_are_float32_and_inputs_of_convolutions_in_the_compute_type() -> None:
    build = replace(fake_build(), dtype="bfloat16")
    Mamba2Model(PURE, build)
    one = (
        KVTensor("state", (4, 8, 4), "float32"),
        KVTensor("conv", (32 + 2 * 2 * 4, 3), "bfloat16"),
    )
    assert build.declared.states == {0: one, 1: one} and not build.declared.attention


def test_attention_and_states_of_one_layer_have_different_caches() -> None:
    build = fake_build()
    FalconH1Model(HYBRID, build)
    assert sorted(build.declared.attention) == [0, 1] and sorted(build.declared.states) == [2, 3]


def test_half_of_bambas_channels_are_rotated() -> None:
    model = BambaModel({**HYBRID, "attn_layer_indices": [1]}, fake_build())
    assert model.rope is not None and len(model.rope.frequencies) == 2  # of 8 channels


def test_every_fourth_layer_of_qwen_next_has_attention_if_the_config_does_not_say_which() -> None:
    build = fake_build()
    model = Qwen3NextModel(QWEN, build)
    assert list(build.declared.attention) == [3] and list(build.declared.states) == [0, 1, 2]
    assert model.rope is not None and len(model.rope.frequencies) == 1  # a quarter of 8 channels


def test_nemotron_reads_both_ways_to_name_layers() -> None:
    for own in (
        {"hybrid_override_pattern": "M-*"},
        {"layers_block_type": ["mamba", "mlp", "attention"]},
    ):
        build = fake_build()
        NemotronHModel({**NEMOTRON, **own}, build)
        assert list(build.declared.states) == [0] and list(build.declared.attention) == [2]


def test_part_of_minimaxs_channels_are_rotated() -> None:
    build = fake_build()
    model = MiniMaxModel({**MINIMAX, "rotary_dim": 4}, build)
    assert model.rope is not None and len(model.rope.frequencies) == 2
    assert list(build.declared.states) == [0] and list(build.declared.attention) == [1]


def test_the_past_fades_more_slowly_in_later_layers_and_heads() -> None:
    """As published for 8 heads and 3 layers: 1/2, 1/4, … times 1, 1/2 and 0, plus 1e-5."""
    halves = 0.5 ** torch.arange(1, 9)
    for index, factor in enumerate((1.0, 0.5, 0.0)):
        torch.testing.assert_close(
            decay_rates(8, index, 3), halves * (factor + 1e-5), rtol=1e-4, atol=1e-5
        )


def test_step_limits() -> None:
    assert step_limits({}) == (0.0, math.inf)
    assert step_limits({"time_step_limit": [0.1, math.inf]}) == (0.1, math.inf)
    for wrong in ([0.1], 3, [0, "much"], [{"inf": 1}, 2]):
        with pytest.raises(ModelError, match="time_step_limit=.*expected two numbers"):
            step_limits({"time_step_limit": wrong})


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        (
            MambaModel,
            {**PURE, "hidden_act": "gelu"},
            "hidden_act='gelu'; this architecture is served with silu",
        ),
        (Mamba2Model, {**PURE, "n_groups": 3}, "heads must be a multiple of groups"),
        (Mamba2Model, {**PURE, "state_size": None}, "state_size=None"),
        (GraniteHybridModel, {**HYBRID, "layer_types": ["mamba"]}, "for each of num_hidden_layers"),
        (Lfm2Model, {**COMMON, "layer_types": ["conv", "linear"]}, "layer_types=.*expected one of"),
        (
            BambaModel,
            {
                **HYBRID,
                "num_attention_heads": 4,
                "num_key_value_heads": 3,
                "attn_layer_indices": [0],
            },
            "cannot share 3",
        ),
        (
            NemotronHModel,
            {**NEMOTRON, "hybrid_override_pattern": "MX"},
            "kinds .'X', .*served are linear_attention",
        ),
        (
            Qwen3NextModel,
            {**QWEN, "linear_num_value_heads": 3},
            "expected a multiple of linear_num_key_heads=2",
        ),
        (
            Plamo2Model,
            {**COMMON, "mamba_num_heads": 2, "mamba_d_state": 4, "mamba_step": 1},
            "mamba_step=1",
        ),
        (
            Plamo2Model,
            {**COMMON, "mamba_num_heads": 0, "mamba_d_state": 4},
            "mamba_num_heads=0, mamba_d_state=4",
        ),
        (
            Zamba2Model,
            {**COMMON, "layers_block_type": ["hybrid"]},
            "layers_block_type=.*expected one of mamba",
        ),
        (
            Zamba2Model,
            {**COMMON, "layers_block_type": ["hybrid", "mamba"], "hidden_act": "relu"},
            "served with gelu",
        ),
        (MiniMaxModel, {**MINIMAX, "postnorm": False}, "postnorm=False.*served are postnorm=true"),
        (
            MiniMaxModel,
            {**MINIMAX, "shared_intermediate_size": 8},
            "served are .* no shared experts",
        ),
        (MiniMaxModel, {**MINIMAX, "attn_type_list": [0, 2]}, "layer_types=.*'2'.*expected one of"),
        (
            NemotronHModel,
            {**NEMOTRON, "hybrid_override_pattern": "M-", "mlp_hidden_act": "silu"},
            "served with relu2",
        ),
    ],
)
def test_errors(model: Any, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model({key: value for key, value in config.items() if value is not None}, fake_build())


def test_layers_that_see_the_embedding_are_not_divided() -> None:
    config = {**COMMON, "layers_block_type": ["hybrid", "mamba"]}
    with pytest.raises(ModelError, match="cannot be divided"):
        Zamba2Model(config, replace(fake_build(), layers=range(1)))
