"""Configs that lack a value: a model then takes the value that the config class of transformers
gives it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from test_dense_parity import ARCHITECTURES as DENSE
from test_encoder_parity import ARCHITECTURES as ENCODERS
from test_experts_parity import ARCHITECTURES as EXPERTS
from test_gemma3n_parity import CASES as GEMMA3N
from test_latent_parity import ARCHITECTURES as LATENT
from test_llama_parity import ARCHITECTURES as LLAMA
from test_rotated_encoder_parity import ARCHITECTURES as ROTATED
from test_state_parity import ARCHITECTURES as STATES
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from pegboard.errors import PegboardError
from pegboard.layers import Build
from pegboard.layers.build import PlainTensor
from pegboard.plugins.importing import import_object, import_spec
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.fake_build import FakeQuantization, FakeWeight, fake_build
from pegboard_weights.hf_files import config_defaults, with_defaults

Case = tuple[str, dict[str, Any]]
CASES: dict[str, Case] = {
    **LLAMA,
    **DENSE,
    **EXPERTS,
    **LATENT,
    **STATES,
    "qwen3, windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    **{f"gemma3n, {name}": ("gemma3n_text", values) for name, values in GEMMA3N.items()},
    **{name: (name.lower().replace("xlmr", "xlm-r"), values) for name, values in ENCODERS.items()},
    **{
        name: (name.lower().replace("nomicb", "nomic_b"), values)
        for name, values in ROTATED.items()
    },
}
UNUSED = {
    *PretrainedConfig().to_dict(),
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "initializer_range",
}
UNUSED = UNUSED - {"tie_word_embeddings"} | {"attention_dropout"}
ELSEWHERE = {("dbrx", "attn_config"), ("dbrx", "rope_parameters"), ("olmo3", "rope_parameters")}
"""Values that the config has in another place, too."""
MODULE = {*vars(nn.Module())}
Built = tuple[Any, Build]


@functools.cache
def model_class(architecture: str) -> Any:
    return import_object(import_spec(installed_entry("model", architecture)).implementation)


def build(config: Mapping[str, Any], architecture: str) -> Built | None:
    """Return what decides what the model computes, and what its layers were built with. None: the
    config is refused."""
    method = FakeQuantization("meta")
    made = fake_build(quantization=method, plain=method)
    try:
        return describe(model_class(architecture)(config, made)), made
    except PegboardError:
        return None


def tensors(build: Build) -> set[tuple[Any, ...]]:
    """Return the name and the shape of each tensor that the layers need."""
    found: set[tuple[Any, ...]] = set()
    for layer in build.declared.layers:
        layer.declare({})
        for item in layer.holders():
            if isinstance(item, FakeWeight):
                found |= {(part.name, part.rows, item.weight.shape[1]) for part in item.parts}
            elif isinstance(item, PlainTensor):
                found |= {(name, rows, *item.data.shape[1:]) for name, rows in item.names.items()}
    return found


def describe(value: Any) -> Any:
    """Return all numbers, names, shapes and constants of an object."""
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, PlainTensor):
        return value.names, tuple(value.data.shape), value.data.dtype
    if isinstance(value, Build):
        return value.path, value.rope_style, value.max_positions
    if isinstance(value, functools.partial):
        return describe((value.func, value.args, value.keywords))
    if isinstance(value, Mapping):
        return {str(key): describe(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [describe(inner) for inner in value]
    if isinstance(value, nn.Module):
        parts = vars(value)
        own = {name: part for name, part in parts.items() if name not in MODULE}
        return type(value).__name__, describe(
            {**own, **parts["_modules"], **parts["_buffers"], **parts["_parameters"]}
        )
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__, [
            describe(cell.cell_contents) for cell in getattr(value, "__closure__", None) or ()
        ]
    names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())} | {
        *getattr(value, "__dict__", ())
    }
    return (
        (type(value).__name__, describe({name: getattr(value, name) for name in names}))
        if names
        else value
    )


@pytest.fixture(autouse=True)
def memory_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **more: empty(*args, **more).zero_())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_a_value_that_the_config_lacks(sizes: dict[str, Any], name: str) -> None:
    """Each value is removed, one at a time. A wrong size is not looked at if a tensor that the
    model needs shows it."""
    model_type, values = CASES[name]
    chosen = {key: value for key, value in {**sizes, **values}.items() if value is not None}
    whole = AutoConfig.for_model(model_type, **chosen)
    config = whole.to_dict()
    architecture = str(
        (MODEL_MAPPING_NAMES if name in ENCODERS | ROTATED else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[
            model_type
        ]
    )
    expected = build(config, architecture)
    assert expected is not None
    for field in sorted({*config} - UNUSED):
        without = {key: value for key, value in config.items() if key != field}
        found = build(with_defaults(without), architecture)
        if found is None or found[0] == expected[0] or (model_type, field) in ELSEWHERE:
            continue
        try:
            told = type(whole).from_dict(dict(without)).to_dict()
        except (ValueError, StrictDataclassError):  # transformers refuses it
            continue
        theirs = build(told, architecture)
        if theirs is not None and found[0] != theirs[0]:
            assert not tensors(found[1]) <= tensors(theirs[1]), (
                f"{model_type} without {field} differs from transformers, with {told.get(field)!r}"
            )


@pytest.mark.parametrize("model_type", config_defaults())
def test_the_defaults_are_those_of_transformers(model_type: str) -> None:
    theirs = AutoConfig.for_model(model_type)
    for name, value in config_defaults()[model_type].items():
        told = (
            theirs.rope_parameters["rope_theta"]
            if name == "rope_theta"
            else getattr(type(theirs), name, None)
        )
        assert value == (getattr(theirs, name) if told is None else told), name


@pytest.mark.parametrize("name", ["deepseek_v2, groups", "deepseek_v3"])
def test_every_layer_has_experts_if_the_config_does_not_say_which(
    sizes: dict[str, Any], name: str
) -> None:
    """Published configs have `moe_layer_freq`, and the config classes of transformers do not."""
    model_type, values = LATENT[name]
    config = AutoConfig.for_model(model_type, **{**sizes, **values}).to_dict()
    config = {key: value for key, value in config.items() if key != "mlp_layer_types"}
    plain, first, second = (
        build({**config, **more}, str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]))
        for more in ({}, {"moe_layer_freq": 1}, {"moe_layer_freq": 2})
    )
    assert plain is not None and first is not None and second is not None
    assert plain[0] == first[0] != second[0]
