"""What the package adds to transformers' definition: entries and errors. Parity is tested in
tests/parity."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from pegboard_model_deepseek.deepseek import DeepseekV2Model, DeepseekV3Model
from pegboard_model_deepseek.deepseek_v32 import DeepseekV32Model
from pegboard_model_deepseek.eagle import EagleDeepSeek
from pegboard_model_deepseek.kimi import KimiLinearModel
from pegboard_model_deepseek.longcat import LongcatFlashModel
from pegboard_model_deepseek.minicpm import MiniCPM3Model
from pegboard_model_deepseek.pangu import NAMES as PANGU_NAMES
from pegboard_model_deepseek.pangu import PanguUltraMoEModel
from pegboard_model_deepseek.prediction import DeepSeekMTP, LongCatFlashMTP, OpenPanguMTP

from pegboard.errors import ModelError
from pegboard.layers import Experts, Norm
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_build import fake_build

CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 29,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
LONGCAT = {
    **CONFIG,
    "num_layers": 2,
    "ffn_hidden_size": 24,
    "expert_ffn_hidden_size": 8,
    "moe_topk": 3,
    "zero_expert_num": 4,
    "q_lora_rank": 4,
}
KIMI = {
    **{
        name: value
        for name, value in CONFIG.items()
        if name not in ("n_routed_experts", "num_experts_per_tok")
    },
    "num_experts": 8,
    "num_experts_per_token": 2,
    "model_max_length": 64,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
}
INDEX = {"index_n_heads": 3, "index_head_dim": 6, "index_topk": 5}
NAMES = [
    "DeepSeekMTPModel",
    "EagleDeepSeekMTPModel",
    "LongCatFlashMTPModel",
    "OpenPanguMTPModel",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "KimiLinearForCausalLM",
    "LongcatFlashForCausalLM",
    "MiniCPM3ForCausalLM",
    "PanguUltraMoEForCausalLM",
]
MODELS = [
    DeepseekV3Model,
    DeepseekV32Model,
    KimiLinearModel,
    LongcatFlashModel,
    MiniCPM3Model,
    PanguUltraMoEModel,
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str) -> None:
    check_entry(installed_entry("model", name))


def test_only_a_latent_is_stored() -> None:
    build = fake_build()
    DeepseekV3Model(CONFIG, build)
    layers = build.declared.attention.values()
    assert [
        (layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.latent is not None)
        for layer in layers
    ] == [(1, 12, 8, True)] * 2


def test_the_scale_grows_with_yarns_mscale_of_all_channels() -> None:
    scales = []
    for more in ({}, {"mscale_all_dim": 0.5}):
        build = fake_build()
        rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16, **more}
        DeepseekV2Model({**CONFIG, "rope_scaling": rope}, build)
        scales.append(build.declared.attention[0].scale)
    assert scales == pytest.approx([10**-0.5, 10**-0.5 * 1.1844439727**2])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank=None"),
        ({"qk_rope_head_dim": 5}, "all must be positive"),
        ({"topk_method": "best"}, "topk_method='best'"),
        ({"scoring_func": "tanh"}, "scoring_func='tanh'"),
        ({"n_group": 3}, "do not form n_group=3"),
        ({"n_group": 8}, "groups of at least 2"),
        ({"hidden_act": "relu2"}, "unknown activation"),
    ],
)
def test_configs_that_do_not_fit_together_are_model_errors(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        DeepseekV3Model({**CONFIG, **values}, fake_build())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"q_lora_rank": None}, "no q_lora_rank"),
        ({"zero_expert_type": "copy"}, "zero_expert_type='copy'"),
        ({"router_bias": True}, "router_bias=True"),
        ({"moe_topk": 13}, "moe_topk=13, but only 12 experts"),
    ],
)
def test_longcat_configs_that_do_not_fit_are_model_errors(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        LongcatFlashModel({**LONGCAT, **values}, fake_build())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope=False"),
        ({"linear_attn_config": 3}, "linear_attn_config=3"),
        (
            {"linear_attn_config": {**KIMI["linear_attn_config"], "kda_layers": [2]}},
            "each of them once in kda_layers",
        ),
        (
            {"linear_attn_config": {**KIMI["linear_attn_config"], "short_conv_kernel_size": 1}},
            "short_conv_kernel_size=1",
        ),
        ({"linear_attn_config": None}, "layer_types=None"),
        (
            {"mlp_layer_types": ["dense", "wide"]},
            "expected 'dense' or 'sparse' for each of 2 layers",
        ),
        ({"num_expert_group": 3}, "do not form n_group=3"),
    ],
)
def test_kimi_configs_that_do_not_fit_are_model_errors(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        KimiLinearModel({**KIMI, **values}, fake_build())


def test_kimi_has_states_and_latents_and_no_rotary_table() -> None:
    build = fake_build()
    model = KimiLinearModel(KIMI, build)
    assert (
        list(build.declared.states) == [0]
        and list(build.declared.attention) == [1]
        and model.rope is None
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"q_lora_rank": None}, "q_lora_rank=None"),
        ({"index_topk": 0}, "index_topk=0"),
        ({"index_topk": None}, "index_topk=None"),
        ({"index_head_dim": 2}, "an index_head_dim of at least qk_rope_head_dim=4"),
    ],
)
def test_indexes_that_do_not_fit_are_model_errors(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        DeepseekV32Model({**LONGCAT, **INDEX, **values}, fake_build())


def test_a_layer_of_longcat_has_two_caches() -> None:
    build = fake_build()
    LongcatFlashModel(LONGCAT, build)
    assert list(build.declared.attention) == [0, 1, 2, 3]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "model",
    [
        DeepseekV3Model,
        MiniCPM3Model,
        LongcatFlashModel,
        KimiLinearModel,
        DeepseekV32Model,
        PanguUltraMoEModel,
    ],
)
@pytest.mark.parametrize("value", [[1], {}, {"a": 1}, "text", True, 0.5, -1.5, 7], ids=repr)
def test_an_odd_value_is_a_model_error_or_makes_no_difference(model: Any, value: Any) -> None:
    more = [
        "scale_depth",
        "scale_emb",
        "dim_model_base",
        "first_k_dense_replace",
        "moe_layer_freq",
        "layer_types",
        "sandwich_norm",
    ]
    for key in [*LONGCAT, *KIMI, *INDEX, *PANGU_NAMES.values(), "sandwich_norm", *more]:
        with contextlib.suppress(ModelError):
            model({**LONGCAT, **KIMI, **INDEX, key: value}, fake_build())


class Target:
    """A model whose embedding and head are shared."""

    def embed(self, input_ids: Any) -> Any:
        return input_ids

    def logits(self, hidden: Any) -> Any:
        return hidden


@pytest.mark.parametrize(
    ("values", "has_experts"),
    [
        ({}, True),
        ({"first_k_dense_replace": 2}, True),
        ({"first_k_dense_replace": 3}, False),
        ({"moe_layer_freq": 3}, False),
        ({"n_routed_experts": None}, False),
        ({"mlp_layer_types": ["sparse", "dense"]}, False),
        ({"mlp_layer_types": ["dense", "sparse"]}, True),
        ({"mlp_layer_types": ["dense", "sparse", "dense"]}, False),
    ],
)
def test_a_prediction_has_experts_as_the_layer_after_the_last_one(
    values: dict[str, Any], has_experts: bool
) -> None:
    build = fake_build(target=Target())
    DeepSeekMTP({**CONFIG, **values}, build)
    assert any(isinstance(layer, Experts) for layer in build.declared.layers) == has_experts
    assert list(build.declared.attention) == [0] and build.declared.given == 16
    norms = {layer.build.path for layer in build.declared.layers if isinstance(layer, Norm)}
    assert {"model.layers.2.enorm", "model.layers.2.shared_head.norm"} <= norms


@pytest.mark.parametrize("kind", [DeepSeekMTP, OpenPanguMTP, LongCatFlashMTP, EagleDeepSeek])
def test_predictions_are_no_models_of_their_own(kind: Any) -> None:
    with pytest.raises(ModelError, match="predicts tokens of another model"):
        kind(LONGCAT, fake_build())


@pytest.mark.parametrize("kind", [DeepSeekMTP, OpenPanguMTP, LongCatFlashMTP, EagleDeepSeek])
def test_predictions_with_odd_values_are_model_errors(kind: Any) -> None:
    for name in LONGCAT:
        for value in (None, -1, "x", [1], {}, True, 0.5):
            with contextlib.suppress(ModelError):
                kind({**LONGCAT, name: value}, fake_build(target=Target()))
