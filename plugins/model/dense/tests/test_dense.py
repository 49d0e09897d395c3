"""Contracts of the dense decoders, and what they refuse. That they compute the right thing is
tested in tests/parity."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from pegboard_model_dense import (
    apertus,
    arcee,
    arctic,
    bloom,
    cohere,
    deci,
    ernie,
    exaone,
    gemma,
    glm,
    gpt,
    granite,
    grok,
    hunyuan,
    olmo,
    ouro,
    phi,
    plamo,
    relatives,
    solar,
    sparse,
    step,
)
from pegboard_model_dense.decoder import Decoder
from pegboard_model_dense.positions import alibi_slopes
from pegboard_model_dense.prediction import DensePredictor, ErnieMTP, Glm4MoeMTP, MiMoMTP
from pegboard_model_dense.relatives import NormalizedHead
from pegboard_model_dense.rows import ArrangedQKV
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.layers import Head
from pegboard.layers.build import LoRALimits
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_build import adapter_product, fake_build, load_layers

NAMES = sorted(
    entry.name
    for entry in entry_points(group="pegboard.model.v1")
    if "pegboard_model_dense" in entry.value
)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 29,
    "max_position_embeddings": 64,
}
GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
OLD_SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 4, "hidden_size": 16, "vocab_size": 29}
MODELS: dict[type[Decoder], dict[str, Any]] = {
    gemma.Gemma: {"head_dim": 4},
    gemma.Gemma2: {
        "head_dim": 4,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    gemma.Gemma3: {"head_dim": 4, "sliding_window_pattern": 2, "attn_logit_softcapping": None},
    phi.Phi3: {"sliding_window": 5},
    granite.Granite: {"residual_multiplier": 0.5, "attention_multiplier": 0.1},
    olmo.Olmo2: {"model_type": "olmo3"},
    glm.Glm: {"model_type": "glm4", "head_dim": 8},
    relatives.Cwm: {"sliding_window": 5},
    relatives.SeedOss: {"head_dim": 4},
    relatives.SmolLM3: {"no_rope_layers": [1, 0]},
    ernie.Ernie: {"use_bias": True, "head_dim": 4},
    exaone.Exaone4: {"sliding_window": 5, "sliding_window_pattern": "LG"},
    arcee.Arcee: {"mlp_bias": True},
    apertus.Apertus: {"attention_bias": True},
    ouro.Ouro: {"total_ut_steps": 2, "early_exit_threshold": 1.0},
    hunyuan.HunYuan: {"head_dim": 4, "use_qk_norm": True},
    arctic.Arctic: {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "parallel_attn_mlp_res": True,
    },
    grok.Grok: {"num_experts": 4, "num_experts_per_tok": 2, "attn_output_multiplier": 0.5},
    plamo.Plamo3: {"head_dim": 4, "window_size": 5, "sliding_window_pattern": 2},
    step.Step3: {
        "head_dim": 4,
        "share_q_dim": 8,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 8,
        "share_expert_dim": 8,
    },
    relatives.Biased: {"bias": True, "qkv_bias": False},
    relatives.Fairseq2: {},
    relatives.Baichuan: {"num_key_value_heads": 4},
    relatives.InternLM2: {"bias": True},
    relatives.QWen: {"num_key_value_heads": 4, "kv_channels": 4, "no_bias": True},
    relatives.TeleChat: {**OLD_SIZES, "ffn_hidden_size": 24},
    relatives.TeleFLM: {"use_mup": True, "input_mult": 2.0},
    relatives.MiniCPM: {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8},
    solar.Solar: {"bskcn_1": [0], "bskcn_3": [1], "bskcn_tv": [0.9, 0.8]},
    deci.Deci: {"num_key_value_heads_per_layer": [4, 2]},
    glm.ChatGLM: {
        "kv_channels": 4,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "padded_vocab_size": 29,
    },
    exaone.Exaone: {"activation_function": "silu"},
    granite.GraniteMoe: {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 8,
    },
    glm.Glm4Moe: {**GROUPS, "use_qk_norm": True, "head_dim": 8},
    sparse.MiniMaxM2: {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "rotary_dim": 4,
    },
    ernie.ErnieMoe: {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 8,
        "moe_layer_start_index": 1,
    },
    arcee.Afmoe: {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 4,
        "sliding_window": 5,
    },
    phi.PhiMoe: {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    olmo.FlexOlmo: {"num_experts": 4, "num_experts_per_tok": 2},
    hunyuan.HunYuanMoe: {
        "num_experts": 4,
        "moe_topk": [2, 1],
        "num_shared_expert": [1, 1],
        "moe_intermediate_size": [8, 8],
    },
    sparse.Bailing: {
        **GROUPS,
        "num_experts": 8,
        "score_function": "sigmoid",
        "num_shared_experts": 1,
    },
    sparse.DeepSeekMoe: {**GROUPS, "n_shared_experts": 1},
    sparse.Dbrx: {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {
            "ffn_hidden_size": 8,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_normalize_expert_weights": None,
        },
    },
    gpt.Orion: {},
    gpt.StableLM: {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
    bloom.Falcon: {**OLD_SIZES, "multi_query": False, "parallel_attn": True, "alibi": True},
    gpt.GPTJ: {**OLD_SIZES, "rotary_dim": 2, "activation_function": "gelu_new"},
    bloom.MPT: {"d_model": 16, "n_layers": 2, "n_heads": 4, "attn_config": {"alibi": True}},
    bloom.Bloom: OLD_SIZES,
    bloom.Jais: {**OLD_SIZES, "n_inner": 24},
    phi.Phi: {"qk_layernorm": True, "partial_rotary_factor": 0.5},
    gpt.Starcoder2: {"sliding_window": 5, "use_bias": True},
    gpt.Nemotron: {"norm_eps": 1e-5},
    cohere.Cohere: {"model_type": "cohere2", "logit_scale": 0.25},
    olmo.Olmo: {"clip_qkv": 8.0},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str) -> None:
    check_entry(installed_entry("model", name))


def wanted(
    model: type[Decoder], config: dict[str, Any], **more: Any
) -> tuple[Decoder, dict[str, tuple[int, ...]]]:
    """Build a model, and return the shapes of the tensors that it needs."""
    build = fake_build(**more)
    made = model(config, build)
    return made, {
        weight.name: weight.shape for layer in build.declared.layers for weight in layer.declare({})
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_tensor_has_a_shape_and_odd_values_are_model_errors(model: type[Decoder]) -> None:
    """A value of a wrong type is a ModelError, or makes no difference."""
    config = {**SIZES, **MODELS[model]}
    _, shapes = wanted(model, config)
    assert len(shapes) > 10 and all(shapes.values())
    for key in config:
        for value in ([1], ["a"], {}, "text", True, 0.5, -1.5, 7, None):
            with contextlib.suppress(ModelError):
                model({**config, key: value}, fake_build())


@pytest.mark.parametrize(
    ("model", "values", "words"),
    [
        (
            gemma.Gemma2,
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries for 2 layers",
        ),
        (gemma.Gemma3, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (phi.Phi3, {"num_key_value_heads": 3}, "cannot share 3"),
        (granite.Granite, {"residual_multiplier": -1.0}, "scales residuals by -1.0"),
        (phi.Phi3, {"hidden_act": "relu2"}, "unknown activation"),
        (
            apertus.Apertus,
            {"xielu": [[1.0, 2.0, 0.5]]},
            "three finite numbers for each of 2 layers",
        ),
        (ouro.Ouro, {"early_exit_threshold": 0.5}, "early_exit_threshold=0.5"),
        (ouro.Ouro, {"total_ut_steps": 0}, "expected 1 to 64"),
        (grok.Grok, {"residual_moe": True}, "residual_moe=True"),
        (plamo.Plamo3, {"sliding_window": [5, 7]}, "windows of one length"),
        (plamo.Plamo3, {"rope_scaling_factor": 4.0}, "without initial_context_length"),
        (step.Step3, {"moe_layers_enum": "1,a"}, "moe_layers_enum='1,a'"),
        (relatives.QWen, {"rotary_pct": 0.5}, "rotary_pct=0.5"),
        (relatives.MiniCPM, {"num_experts": 8}, "num_experts=8"),
        (solar.Solar, {"bskcn_3": [0], "bskcn_1": [1]}, "no earlier layer in bskcn_1"),
        (deci.Deci, {"num_key_value_heads_per_layer": [1]}, "neither block_configs"),
        (
            deci.Deci,
            {"block_configs": [{"attention": {"replace_with_linear": True}, "ffn": {}}] * 2},
            "replace_with_linear",
        ),
        (glm.ChatGLM, {"position_encoding_2d": True}, "the first ChatGLM"),
        (glm.Glm4Moe, {"topk_group": 5}, "2 of 8 experts cannot be chosen from 5 of 4 groups"),
        (
            glm.Glm4Moe,
            {"num_experts_per_tok": 7, "topk_group": 1},
            "7 of 8 experts cannot be chosen from 1 of 4 groups",
        ),
        (glm.Glm4Moe, {"n_routed_experts": None}, "n_routed_experts=None"),
        (sparse.MiniMaxM2, {"num_experts_per_tok": 9}, "does not fit 4 experts"),
        (arcee.Afmoe, {"score_func": "softmax"}, "score_func='softmax'"),
        (phi.PhiMoe, {"num_experts_per_tok": 3}, "num_experts_per_tok=3"),
        (phi.PhiMoe, {"rope_scaling": {"type": "longrope"}}, "without short_mscale"),
        (hunyuan.HunYuanMoe, {"moe_topk": [2]}, "layer 1 has no value"),
        (hunyuan.HunYuanMoe, {"use_cla": True}, "use_cla=True"),
        (sparse.Bailing, {"score_function": "tanh"}, "score_function='tanh'"),
        (sparse.Bailing, {"norm_head": True}, "norm_head=True"),
        (
            sparse.Dbrx,
            {"ffn_config": {"moe_normalize_expert_weights": 2}},
            "moe_normalize_expert_weights=2",
        ),
        (sparse.Dbrx, {"ffn_config": [1]}, "expected an object"),
        (gpt.StableLM, {"qk_layernorm": True}, "qk_layernorm=True"),
        (bloom.MPT, {"attn_config": {"qk_ln": True}}, "qk_ln=True"),
        (bloom.Bloom, {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        (bloom.Jais, {"position_embedding_type": "learned"}, "position_embedding_type='learned'"),
        (gpt.GPTJ, {"activation_function": "mish"}, "known without a gate: gelu"),
    ],
)
def test_what_is_not_supported_is_named(
    model: type[Decoder], values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        model({**SIZES, **MODELS[model], **values}, fake_build())


@pytest.mark.parametrize("model", [ouro.Ouro, solar.Solar])
def test_layers_that_depend_on_earlier_ones_are_not_divided(model: type[Decoder]) -> None:
    build = replace(fake_build(), layers=range(1))
    with pytest.raises(ModelError, match="cannot be divided"):
        model({**SIZES, **MODELS[model]}, build)


@pytest.mark.parametrize("model", [relatives.InternLM2, relatives.TeleChat, bloom.Jais])
def test_adapters_have_the_order_of_the_checkpoint(model: type[Decoder]) -> None:
    """The adapter alone, as the checkpoint would store its product, is what the layer adds."""
    build = fake_build(lora=LoRALimits(1, 4, "float32"), lora_rows=lambda: None)
    model({**SIZES, **MODELS[model]}, build)
    layer = next(each for each in build.declared.layers if isinstance(each, ArrangedQKV))
    rows = layer.modules_by_name
    a = torch.randn(4, layer.in_features)
    b = torch.randn(rows[layer.changed], 4)
    tensors = {f"{name}.weight": torch.zeros(count, a.shape[1]) for name, count in rows.items()}
    tensors[f"{layer.changed}.weight"] = 2 * b @ a
    if layer.rows.transposed:
        tensors = {name: each.T.contiguous() for name, each in tensors.items()}
    biases = {f"{name}.bias": torch.zeros(count) for name, count in rows.items()}
    load_layers([layer], tensors | biases)
    layer.adapters.load(1, layer.adapters.fitted({layer.changed: (a, b)}, 2.0))
    weight = layer.method.dequantize()
    assert weight.any()
    torch.testing.assert_close(adapter_product(layer.adapters, 1), weight)


def test_a_normalized_head_takes_no_adapters() -> None:
    build = fake_build(lora=LoRALimits(1, 4, "float32"), lora_rows=lambda: None)
    assert NormalizedHead(build.at("lm_head"), 5, 4).build.lora is None


def test_transposed_matrices_have_no_blocks() -> None:
    build = fake_build()
    bloom.Jais({**SIZES, **MODELS[bloom.Jais]}, build)
    layer = next(layer for layer in build.declared.layers if layer.build.path.endswith("0.attn"))
    layer.declare({})
    with pytest.raises(ModelError, match="is stored as Q4_0"):
        layer.accept(
            WeightPiece("transformer.h.0.attn.c_attn.weight", "Q4_0", (16, 48), memoryview(b""))
        )


def test_a_normalized_head_divides_rows_by_their_lengths() -> None:
    build = fake_build()
    head = NormalizedHead(build.at("lm_head"), 5, 4)
    weight = torch.randn(5, 4)
    load_layers([head], {"lm_head.weight": weight})
    x = torch.randn(2, 4)
    torch.testing.assert_close(head(x), x @ (weight / weight.norm(dim=1, keepdim=True)).T)
    sizes = {**SIZES, "num_key_value_heads": 4}
    for vocab_size, head_class in ((125696, NormalizedHead), (125695, Head)):
        config = {**sizes, "vocab_size": vocab_size}
        assert relatives.Baichuan.architecture(config).head is head_class


def test_a_scaled_residual_needs_no_product() -> None:
    """The stream is divided by the scale, so the norms' epsilon is divided by its square."""
    build = fake_build()
    granite.Granite({**SIZES, **MODELS[granite.Granite], "rms_norm_eps": 1e-4}, build)
    norms = {
        layer.build.path: layer.eps for layer in build.declared.layers if hasattr(layer, "eps")
    }
    assert norms["model.norm"] == norms["model.layers.0.input_layernorm"] == pytest.approx(4e-4)


@pytest.mark.parametrize("heads", [4, 6, 12])
def test_slopes_are_those_of_the_paper(heads: int) -> None:
    """Equal to the rule of its authors: powers of two as they are; others take every second slope
    of twice the number."""
    power = 2 ** (heads.bit_length() - 1)
    own = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    double = [2 ** (-8 * (i + 1) / (2 * power)) for i in range(2 * power)]
    assert alibi_slopes(heads) == pytest.approx([*own, *double[::2]][:heads])


def test_positions_above_the_first_part_of_a_key_are_exact() -> None:
    """Scores between distant positions in bfloat16 differ by slope · distance and not by what a
    rounded position would add."""
    build = fake_build()
    build = replace(build, dtype="bfloat16", max_positions=40002)
    bloom.Bloom({**SIZES, **MODELS[bloom.Bloom]}, build)
    layer, places = (
        next(layer for layer in build.declared.layers if type(layer).__name__ == name)
        for name in ("AlibiAttention", "Places")
    )
    held: dict[str, Tensor] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held.update(q=q, k=k)
        return torch.zeros(len(q), q.shape[1] * q.shape[2])

    build.attention[layer.spec.layer_index] = attend
    layer.bind()
    places.bind()
    zeros = torch.zeros(3, 4, layer.head_dim, dtype=torch.bfloat16)
    keys = zeros[:, : layer.spec.num_kv_heads]
    layer(zeros, keys, keys, places(torch.tensor([0, 257, 40001])))
    scores = (
        torch.einsum("hd,td->ht", held["q"][0].double(), held["k"][:, 0].double()) * layer.scale
    )
    slopes = torch.tensor(alibi_slopes(4)).double()
    torch.testing.assert_close(
        scores, slopes[:, None] * torch.tensor([0.0, 257.0, 40001.0]).double(), rtol=1e-6, atol=0
    )


class Target:
    """A model whose embedding and head are shared."""

    def embed(self, input_ids: Tensor) -> Tensor:
        return input_ids

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


PREDICTIONS: dict[type[DensePredictor], type[Decoder]] = {
    kind: kind.family for kind in (MiMoMTP, Glm4MoeMTP, ErnieMTP)
}


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_predictions_with_odd_values_are_model_errors(kind: type[DensePredictor]) -> None:
    config = {**SIZES, **MODELS[PREDICTIONS[kind]]}
    build = fake_build(target=Target())
    kind(config, build)
    assert list(build.declared.attention) == [0] and build.declared.given == 16
    for name in config:
        for value in (None, "x", [1], {}, True, 0.5):
            with contextlib.suppress(ModelError):
                kind({**config, name: value}, fake_build(target=Target()))


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_predictions_need_a_model(kind: type[DensePredictor]) -> None:
    with pytest.raises(ModelError, match="predicts tokens of another model"):
        kind({**SIZES, **MODELS[PREDICTIONS[kind]]}, fake_build())
    config = {**SIZES, **MODELS[PREDICTIONS[kind]], "num_hidden_layers": 0}
    with pytest.raises(ModelError, match="num_hidden_layers=0; expected a positive number"):
        kind(config, fake_build(target=Target()))
