"""Checkpoints in Mistral's own format (params.json), compared with transformers' models that they
were written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mistral_format import mistral_name, write_mistral
from safetensors.torch import load_file, save_file
from tiny_models import TOLERANCE, Reference, check_parity, make_model, open_llm, random_prompts
from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

from pegboard import SamplingParams

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta": 16.0, "alpha": 2.0}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
LATE = {"original_max_position_embeddings": 16, "beta": 0.3}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "yarn": ("mistral", {"rope_parameters": ROPE}, {"yarn": YARN}),
    "yarn that scales nothing": (
        "mistral",
        {"rope_parameters": {**ROPE, "attention_factor": 1.0}},
        {"yarn": {**YARN, "apply_scale": False}},
    ),
    "late queries": (
        "ministral3",
        {"head_dim": 8, "rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.3}},
        {"yarn": YARN, "llama_4_scaling": LATE},
    ),
    "windows in some layers": (
        "ministral",
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {"sliding_window": [9, None]},
    ),
    "windows in all layers": ("mistral", {"sliding_window": 9}, {"sliding_window": 9}),
    "mixture": (
        "mixtral",
        {"num_local_experts": 4},
        {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    ),
    "latent attention": (
        "mistral4",
        {
            **LATENT,
            "rope_parameters": {
                **ROPE,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
        {"yarn": YARN, "llama_4_scaling": LATE},
    ),
    "latent attention that scales nothing": (
        "mistral4",
        {
            **LATENT,
            "rope_parameters": {**ROPE, "attention_factor": 1.0, "llama_4_scaling_beta": 0.0},
        },
        {"yarn": {**YARN, "apply_scale": False}},
    ),
}


def write(folder: Path, name: str) -> Reference:
    model_type, config, params = MODELS[name]
    model = make_model(model_type, **config)
    write_mistral(folder, model.state_dict(), model.config.to_dict(), **params)
    return Reference(folder, model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_transformers(tmp_path: Path, name: str) -> None:
    check_parity(write(tmp_path, name), load_format="mistral")


@pytest.mark.parametrize("name", ["late queries", "latent attention"])
def test_late_queries_need_no_factors_in_a_short_model(tmp_path: Path, name: str) -> None:
    check_parity(write(tmp_path, name), lengths=(6,), load_format="mistral", max_model_len=16)


def answers(folder: Path, **settings: Any) -> list[list[dict[int, float]]]:
    llm = open_llm(folder, **settings)
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts((6, 17))]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)
    return [
        [{id_: one.logprob for id_, one in place.items()} for place in output.outputs[0].logprobs]
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
        }
    },
}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FP8, {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}),
        (
            {**FP8, "activation_scheme": "dynamic"},
            {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"},
        ),
        (
            {**COMPRESSED, "ignore": ["lm_head", "model.layers.0.mlp.down_proj"]},
            {**COMPRESSED, "ignore": ["output", "layers.0.feed_forward.w2"]},
        ),
    ],
)
def test_quantized_models_are_those_of_hugging_face(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    model = make_model("mistral", head_dim=8)
    plain = tmp_path / "plain"
    model.save_pretrained(plain)
    tensors = {}
    scales = {}
    ignored = ours.get("ignore", [])
    for name, value in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module in ignored:
            tensors[name] = value
            continue
        scale = value.abs().max() / 448
        tensors[name] = (value / scale).to(torch.float8_e4m3fn)
        scales[f"{module}.weight_scale"] = scale
        if ours.get("activation_scheme") == "static":
            scales[f"{module}.input_scale"] = torch.tensor(0.02)
    save_file({**tensors, **scales}, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    write_quantized = {**config, "quantization_config": ours}
    (plain / "config.json").write_text(json.dumps(write_quantized))
    own = tmp_path / "own"
    is_fp8 = "qformat_weight" in theirs
    write_mistral(own, tensors, config, quantization=theirs)
    add_scales(own / "consolidated.safetensors", scales, is_fp8)
    expected = answers(plain)
    for places, others in zip(answers(own, load_format="mistral"), expected, strict=True):
        for place, other in zip(places, others, strict=True):
            assert place == pytest.approx(other, abs=TOLERANCE)


def add_scales(path: Path, scales: dict[str, torch.Tensor], is_fp8: bool) -> None:
    """Add scales to a file of Mistral's. In its own form of FP8 they have other names."""
    names = {name: mistral_name(name) for name in scales}
    if is_fp8:
        for old, new in (("weight_scale", "qscale_weight"), ("input_scale", "qscale_act")):
            names = {name: stored.replace(old, new) for name, stored in names.items()}
    stored = {names[name]: value for name, value in scales.items()}
    save_file({**load_file(path), **stored}, path)
