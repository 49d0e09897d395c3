"""The loader passes the contract of its kind and the generic contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_weight_loader_mistral.loader import MistralLoader
from pegboard_weight_loader_mistral.names import hugging_face_name
from pegboard_weight_loader_mistral.params import read_params
from pegboard_weight_loader_mistral.plugin import MISTRAL
from safetensors.torch import save_file
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import WeightLoader, WeightLoaderSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_weight_loader import WeightLoaderContract

PARAMS: dict[str, Any] = {
    "dim": 8,
    "n_layers": 1,
    "head_dim": 4,
    "hidden_dim": 12,
    "n_heads": 2,
    "n_kv_heads": 1,
    "norm_eps": 1e-05,
    "vocab_size": 16,
    "rope_theta": 1000000.0,
}
STORED = {
    "tok_embeddings.weight": (16, 8),
    "layers.0.attention.wq.weight": (8, 8),
    "layers.0.attention_norm.weight": (8,),
    "layers.0.feed_forward.w2.weight": (8, 12),
    "output.weight": (16, 8),
}


def write_params(folder: Path, **values: Any) -> Path:
    (folder / "params.json").write_text(json.dumps(PARAMS | values))
    return folder / "params.json"


def test_contract() -> None:
    check_entry(installed_entry("weight_loader", "mistral"))


class TestMistral(WeightLoaderContract):
    spec = MISTRAL

    def loader(self, setup: WeightLoaderSetup) -> WeightLoader:
        return MistralLoader(None, setup)

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        random = torch.Generator().manual_seed(1)
        values = {
            name: torch.randn(shape, generator=random).bfloat16() for name, shape in STORED.items()
        }
        write_params(folder)
        save_file(values, folder / "consolidated.safetensors")
        return LocalFiles(folder), {
            str(hugging_face_name(name)): value for name, value in values.items()
        }


class TestMistralShards(TestMistral):
    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        _, values = super().write(folder)
        (folder / "consolidated.safetensors").unlink()
        weight_map = {}
        for index, (name, value) in enumerate(zip(STORED, values.values(), strict=True)):
            file = f"consolidated-{index + 1:05}-of-00005.safetensors"
            save_file({name: value}, folder / file)
            weight_map[name] = file
        index_file = folder / "consolidated.safetensors.index.json"
        index_file.write_text(json.dumps({"weight_map": weight_map}))
        return LocalFiles(folder), values


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("yarn", {"factor": 8}),
        ("yarn", {"factor": 8, "original_max_position_embeddings": 8, "gamma": 1}),
        ("quantization", {"qformat_weight": "int2"}),
        ("quantization", {"qformat_weight": "fp8_e4m3", "qscheme_act": "CHANNEL"}),
        ("use_biases", True),
        ("q_lora_rank", 16),
        ("moe", {"num_experts": 2, "num_experts_per_tok": 1, "num_shared_experts": 1}),
        ("sliding_window", [8, 9]),
        ("multimodal", {"whisper_model_args": {}}),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, key: str, value: Any) -> None:
    path = write_params(tmp_path, **{key: value})
    with pytest.raises(ModelError, match=rf"params\.json: {key} is .*Hugging Face layout"):
        read_params(path)


def test_missing_sizes_are_named(tmp_path: Path) -> None:
    path = write_params(tmp_path, dim=None, n_layers=None)
    with pytest.raises(ModelError, match=r"params\.json has no dim, n_layers"):
        read_params(path)


def test_values_become_those_of_a_config(tmp_path: Path) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2}
    config = read_params(write_params(tmp_path, moe=moe, max_seq_len=64, use_biases=False))
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (4, 2)
    assert (config["hidden_size"], config["max_position_embeddings"]) == (8, 64)


LATENT = {
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}


def test_values_of_latent_attention(tmp_path: Path) -> None:
    moe = {"num_experts": 4, "num_shared_experts": 1, "expert_parallel": 8, "routed_scale": 2.0}
    yarn = {"factor": 4, "original_max_position_embeddings": 16, "beta": 32, "alpha": 1}
    config = read_params(write_params(tmp_path, **LATENT, moe=moe, yarn=yarn))
    assert config["architectures"] == ["MistralLarge3ForCausalLM"]
    assert {name: config[name] for name in LATENT} == LATENT
    assert (config["n_routed_experts"], config["n_shared_experts"]) == (4, 1)
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    plain = {**yarn, "apply_scale": False}
    rule = read_params(write_params(tmp_path, **LATENT, yarn=plain))["rope_parameters"]
    assert rule["attention_factor"] == 1.0 and "mscale_all_dim" not in rule


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**LATENT, "v_head_dim": None}, "has kv_lora_rank, but no v_head_dim"),
        ({**LATENT, "moe": {"use_load_balancing_bias": True}}, r"moe\.use_load_balancing_bias is"),
        ({**LATENT, "moe": 3}, "moe is 3"),
        (
            {
                "moe": {"num_experts": 2, "num_experts_per_tok": 1},
                "llama_4_scaling": {"beta": 0.1},
            },
            "llama_4_scaling is",
        ),
    ],
)
def test_what_does_not_fit_together(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_params(write_params(tmp_path, **values))


def test_quantization(tmp_path: Path) -> None:
    def quantization(**block: Any) -> Any:
        return read_params(write_params(tmp_path, quantization=block))["quantization_config"]

    assert quantization(qformat_weight="fp8_e4m3", qscheme_act="NO_SCALES") == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
    }
    groups = {"group_0": {"targets": ["Linear"]}}
    ignored = ["output", "layers.0.attention.wq", "re:.*vision.*"]
    assert quantization(
        quant_method="COMPRESSED_TENSORS", config_groups=groups, ignore=ignored
    ) == {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "ignore": ["lm_head", "model.layers.0.self_attn.q_proj", "re:.*vision.*"],
    }


def test_images_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_params(tmp_path, vision_encoder={"hidden_size": 8})
    tensors = {"norm.weight": torch.zeros(8), "vision_encoder.ln_pre.weight": torch.zeros(8)}
    save_file(tensors, tmp_path / "consolidated.safetensors")
    checkpoint = MistralLoader(None, WeightLoaderSetup()).describe(LocalFiles(tmp_path))
    assert list(checkpoint.tensors) == ["model.norm.weight"]
    assert "only the language model is served" in caplog.text


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    write_params(tmp_path)
    save_file({"vision.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ModelError, match=r"consolidated\.safetensors has the tensor 'vision"):
        MistralLoader(None, WeightLoaderSetup()).describe(LocalFiles(tmp_path))


def test_the_names_of_tensors() -> None:
    assert hugging_face_name("layers.3.block_sparse_moe.experts.1.w2.weight") == (
        "model.layers.3.block_sparse_moe.experts.1.w2.weight"
    )
    assert hugging_face_name("layers.3.feed_forward.gate.weight") == (
        "model.layers.3.block_sparse_moe.gate.weight"
    )
    assert hugging_face_name("layers.3.experts.11.w2.qscale_act") == (
        "model.layers.3.mlp.experts.11.down_proj.input_scale"
    )
    assert hugging_face_name("layers.3.attention.wkv_b.weight_packed") == (
        "model.layers.3.self_attn.kv_b_proj.weight_packed"
    )
    assert hugging_face_name("layers.3.attention.k_fake_quantizer.qscale_act") == (
        "model.layers.3.self_attn.k_scale"
    )
    assert hugging_face_name("layers.3.attention.wx.weight") is None
    assert hugging_face_name("layers.3.attention.wq.codebook") is None
