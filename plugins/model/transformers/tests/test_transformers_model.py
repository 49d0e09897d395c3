"""What the wildcard model detects before any weight is loaded. The tests in tests/parity compare
its numbers with transformers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from pegboard_model_transformers.model import TransformersModel, make_model
from pegboard_model_transformers.modules import ModuleExperts, expert_activation
from pegboard_model_transformers.names import Names
from pegboard_model_transformers.probe import _sinks_name, run_probe

from pegboard.errors import ModelError
from pegboard.layers import Build

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def build(**values: Any) -> Build:
    nothing: Any = None
    return Build(
        dtype="float32", device="cpu", quantization=nothing, plain=nothing, kernels={}, **values
    )


def attention_of(model_type: str, **values: Any) -> list[Any]:
    model = make_model({**SMALL, "model_type": model_type, **values}, torch.float32)
    return run_probe(model, model.base_model, torch.float32).calls


def test_attention_is_read_off_a_trial_run() -> None:
    calls = attention_of(
        "gemma2",
        head_dim=16,
        sliding_window=9,
        query_pre_attn_scalar=4,
        attn_logit_softcapping=30.0,
    )
    assert [call.window for call in calls] == [9, None, 9, None]
    assert {
        (call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim) for call in calls
    } == {(4, 2, 16, 16)}
    assert {(call.scale, call.soft_cap) for call in calls} == {(0.5, 30.0)}


def test_chunks_and_sinks_are_read_off_the_run_too() -> None:
    config = {"attention_chunk_size": 8, "head_dim": 8, "num_local_experts": 2}
    calls = attention_of("llama4_text", intermediate_size_mlp=16, **config)
    assert [(call.chunk, call.window, call.sinks) for call in calls] == [
        (8, None, None),
        (8, None, None),
        (8, None, None),
        (None, None, None),
    ]
    calls = attention_of("gpt_oss", head_dim=8, num_local_experts=4, sliding_window=9)
    assert [(call.chunk, call.window, call.sinks) for call in calls] == [
        (None, 9, "sinks"),
        (None, None, "sinks"),
    ] * 2


def test_sinks_that_are_computed_are_refused() -> None:
    module = torch.nn.Module()
    with pytest.raises(ModelError, match="computes its attention sinks"):
        _sinks_name(module, torch.zeros(4), "Odd")


def test_declares_one_attention_layer_per_layer_and_no_weight_memory() -> None:
    own = build()
    model = TransformersModel({**SMALL, "model_type": "olmo2"}, own)
    assert sorted(own.declared.attention) == [0, 1, 2, 3]
    linears = [
        name for name, module in model.model.named_modules() if type(module) is torch.nn.Linear
    ]
    assert linears == []
    on_meta = [
        name for name, tensor in model.model.named_parameters() if tensor.device.type == "meta"
    ]
    assert on_meta == []


@pytest.mark.parametrize(
    ("model_type", "values", "modules"),
    [
        (
            "mixtral",
            {"num_local_experts": 4},
            ("model.layers.0.block_sparse_moe.experts", "w1", "w3", "w2"),
        ),
        (
            "olmoe",
            {"num_experts": 4, "num_experts_per_tok": 2},
            ("model.layers.0.mlp.experts", "gate_proj", "up_proj", "down_proj"),
        ),
        (
            "granitemoe",
            {"num_local_experts": 4},
            ("model.layers.0.block_sparse_moe", "input_linear", "output_linear"),
        ),
    ],
)
def test_stacked_experts_are_pegboards(
    model_type: str, values: dict[str, Any], modules: tuple[str, ...]
) -> None:
    """Their matrices are read where the checkpoint has them: a module per expert, or stacked under
    another name."""
    own = build()
    TransformersModel({**SMALL, "model_type": model_type, "num_hidden_layers": 1, **values}, own)
    (layer,) = [layer for layer in own.declared.layers if isinstance(layer, ModuleExperts)]
    path, *names = modules
    listed = [f"{path}.{expert}.{name}.weight" for expert in range(4) for name in names]
    available = dict.fromkeys(
        listed if len(names) == 3 else [f"{path}.{name}.weight" for name in names]
    )
    first, second = (
        layer.checkpoint_names.expert_modules(f"{layer.module_path}.{name}", available)
        for name in ("gate_up_proj", "down_proj")
    )
    assert first == (path, tuple(names[:-1])) and second == (path, (names[-1],))


def test_experts_that_compute_otherwise_stay_those_of_transformers() -> None:
    model = make_model(
        {**SMALL, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 2}, torch.float32
    )
    assert expert_activation(model.base_model.layers[0].mlp.experts) is None
    model = make_model(
        {**SMALL, "model_type": "mixtral", "num_local_experts": 2, "hidden_act": "relu"},
        torch.float32,
    )
    assert expert_activation(model.base_model.layers[0].mlp.experts) is None


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("no_such_model", {}, "does not know model_type"),
        ("t5", {}, "encoder-decoder"),
        ("mamba", {}, "cannot be replaced"),
        ("falcon", {}, "cannot be replaced"),
        ("bert", {}, "not causal"),
        ("vit", {}, "no causal language model"),
        (
            "hunyuan_v1_moe",
            {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
            "reads the weight of a linear module",
        ),
        ("lfm2", {}, "trial run|times in 4 layers"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "longest request",
        ),
    ],
)
def test_refuses_with_the_reason(model_type: str, values: dict[str, Any], reason: str) -> None:
    sizes = SMALL if model_type not in ("t5", "vit", "mamba", "falcon") else {}
    with pytest.raises(ModelError, match=reason):
        TransformersModel({**sizes, "model_type": model_type, **values}, build())


def test_refuses_pairs() -> None:
    with pytest.raises(ModelError, match="pairs"):
        TransformersModel({**SMALL, "model_type": "llama"}, build(rope_style="pairs"))


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_checkpoint_names_with_and_without_prefixes(prefix: str) -> None:
    names = Names(make_model({**SMALL, "model_type": "llama"}, torch.float32))
    available = {f"{prefix}layers.{index}.self_attn.q_proj.weight": None for index in range(4)}
    assert (
        names.module_path("model.layers.3.self_attn.q_proj", available)
        == f"{prefix}layers.3.self_attn.q_proj"
    )
    with pytest.raises(ModelError, match=r"no tensor for 'model\.norm\.weight'"):
        names.source("model.norm.weight", available)


def test_experts_are_gathered_in_numeric_order() -> None:
    names = Names(
        make_model({**SMALL, "model_type": "mixtral", "num_local_experts": 12}, torch.float32)
    )
    available = {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{matrix}.weight": None
        for expert in range(12)
        for matrix in ("w1", "w2", "w3")
    }
    target = "model.layers.0.mlp.experts.gate_up_proj"
    source = names.source(target, available)
    tensors = {
        name: torch.full((48, 32), float(name.split(".")[5]) + (0.5 if "w3" in name else 0.0))
        for name in source.names
    }
    merged = names.convert(target, source, tensors)
    assert merged.shape == (12, 96, 32)
    assert merged[:, 0, 0].tolist() == [float(expert) for expert in range(12)]
    assert merged[:, 48, 0].tolist() == [expert + 0.5 for expert in range(12)]


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("gemma2", "Gemma2ForRetrieval"),
        ("mpnet", "MPNetForMaskedLM"),
        ("qwen2", "Qwen2ForMaskedLM"),
    ],
)
def test_models_whose_output_is_no_text_are_refused(model_type: str, architecture: str) -> None:
    config = {**SMALL, "head_dim": 8, "model_type": model_type, "architectures": [architecture]}
    with pytest.raises(
        ModelError, match=f"{architecture} computes embeddings, scores or classes and no text"
    ) as told:
        TransformersModel(config, build())
    advised = re.search(r"--hf-overrides.architectures '(.*)'", str(told.value))
    assert (advised is None) == (model_type == "mpnet"), (
        "there is no class of MPNet that could be named"
    )
    if advised:
        make_model({**config, "architectures": json.loads(advised[1])}, torch.float32)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "UnheardOfForCausalLM"])
def test_names_of_language_models_are_taken(architecture: str) -> None:
    make_model({**SMALL, "model_type": "gpt2", "architectures": [architecture]}, torch.float32)


@pytest.mark.parametrize(
    "values",
    [{"num_attention_heads": 0}, {"num_attention_heads": "four"}, {"layer_types": ["odd"] * 4}],
)
def test_configs_that_transformers_cannot_use_are_model_errors(values: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        TransformersModel({**SMALL, "model_type": "qwen3", **values}, build())
