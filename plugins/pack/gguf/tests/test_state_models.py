"""GGUF files of models with states: what their metadata says about layers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from pegboard_pack_gguf.loader import GGUFLoader

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import Checkpoint, WantedWeight, WeightLoaderSetup

LOADER = GGUFLoader(None, WeightLoaderSetup())
SSM = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
    "attention.head_count_kv": [0, 2],
}


def describe(
    write_gguf: Any, arch: str, tensors: dict[str, np.ndarray] | None = None, **metadata: Any
) -> Checkpoint:
    chosen = {**SSM, **{key.replace("__", "."): value for key, value in metadata.items()}}
    given = {"token_embd.weight": np.ones((64, 32), np.float32), **(tensors or {})}
    path: Path = write_gguf(arch, tensors=given, metadata=chosen)
    return LOADER.describe(LocalFiles(path))


def test_layers_with_attention(write_gguf: Any) -> None:
    granite = describe(write_gguf, "granitehybrid").config
    assert (
        granite["layer_types"] == ["linear_attention", "full_attention"]
        and granite["position_embedding_type"] == "nope"
    )
    assert (
        granite["shared_intermediate_size"],
        granite["num_key_value_heads"],
        granite["mamba_d_head"],
    ) == (64, 2, 8)
    kinds = describe(write_gguf, "nemotron_h", feed_forward_length=[64, 0]).config[
        "layers_block_type"
    ]
    assert kinds == ["mlp", "full_attention"]
    jamba = describe(
        write_gguf,
        "jamba",
        {"blk.1.ffn_gate_inp.weight": np.ones((4, 32), np.float32)},
        expert_count=4,
    ).config
    assert [
        jamba[f"{kind}_layer_{part}"]
        for kind in ("attn", "expert")
        for part in ("period", "offset")
    ] == [2, 1, 2, 1]
    assert (jamba["mamba_expand"], jamba["num_experts"]) == (2, 4)
    assert describe(write_gguf, "jamba", expert_count=4).config["num_experts"] == 1


def test_layers_that_draft_tokens_have_counts_of_their_own(write_gguf: Any) -> None:
    metadata = {
        **QWEN,
        "attention__head_count_kv": [0, 2, 2],
        "feed_forward_length": [16, 0, 16],
        "block_count": 3,
    }
    found = describe(write_gguf, "nemotron_h_moe", **metadata, nextn_predict_layers=1)
    assert found.config["layers_block_type"] == ["moe", "full_attention"]


def test_a_model_without_attention_has_no_heads(write_gguf: Any) -> None:
    none = {"attention__head_count": 0, "attention__head_count_kv": 0, "feed_forward_length": 0}
    found = describe(write_gguf, "mamba", **none)
    assert (
        found.architectures == ("MambaForCausalLM",) and "num_attention_heads" not in found.config
    )
    falcon = describe(write_gguf, "mamba", **none, ssm__dt_b_c_rms=True)
    assert falcon.architectures == ("FalconMambaForCausalLM",)
    assert falcon.config["intermediate_size"] == 64


@pytest.mark.parametrize(
    ("arch", "metadata", "told"),
    [
        (
            "granitehybrid",
            {"attention__head_count_kv": [0, 2, 2]},
            "from 0 to .* for each of 2 layers",
        ),
        (
            "granitehybrid",
            {"attention__head_count_kv": [1, 2]},
            r"is \[1, 2\] for 4 heads; expected 0 or one divisor",
        ),
        ("granitehybrid", {"attention__head_count_kv": [0, 3]}, "expected 0 or one divisor"),
        (
            "granitehybrid",
            {"ssm__time_step_rank": 7},
            "ssm.inner_size is 64, which 7 heads cannot share",
        ),
        (
            "granitehybrid",
            {"rope__scaling__finetuned": True, "rope__dimension_count": 4},
            "as in Bamba",
        ),
        (
            "nemotron_h",
            {"feed_forward_length": [32, 64]},
            "feed_forward_length differs between layers",
        ),
        ("mamba2", {"ssm__group_count": 0}, "ssm.group_count is 0"),
        (
            "jamba",
            {"ssm__inner_size": 40},
            "inner_size is 40, which is not a multiple of the embedding length 32",
        ),
        (
            "jamba",
            {"block_count": 5, "attention__head_count_kv": [2, 2, 0, 0, 2]},
            r"\[0, 1, 4\] are attn_layers, which are not",
        ),
        ("lfm2", {}, "shortconv.l_cache is missing"),
    ],
)
def test_senseless_metadata(
    write_gguf: Any, arch: str, metadata: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        describe(write_gguf, arch, **metadata)


def test_tensors_of_a_state_get_the_form_of_checkpoints(write_gguf: Any) -> None:
    random = np.random.default_rng(0)
    stored = {
        "ssm_a": -np.exp(random.standard_normal((8, 1))),
        "ssm_d": random.standard_normal((8, 1)),
        "ssm_dt.bias": random.standard_normal(8),
        "ssm_norm.weight": random.standard_normal((2, 32)),
        "ssm_conv1d.weight": random.standard_normal((128, 4)),
    }
    tensors = {f"blk.0.{name}": values.astype(np.float32) for name, values in stored.items()}
    found = describe(write_gguf, "mamba2", tensors)
    expected = {
        "A_log": np.log(-stored["ssm_a"]).reshape(8),
        "D": stored["ssm_d"].reshape(8),
        "dt_bias": stored["ssm_dt.bias"],
        "norm.weight": stored["ssm_norm.weight"].reshape(64),
        "conv1d.weight": stored["ssm_conv1d.weight"].reshape(128, 1, 4),
    }
    names = {f"backbone.layers.0.mixer.{name}": values for name, values in expected.items()}
    assert set(names) < set(found.tensors)
    for piece in LOADER.tensors(found, [WantedWeight(name) for name in names]):
        assert (
            piece.shape
            == tuple(piece.data.shape)
            == found.tensors[piece.name].shape
            == names[piece.name].shape
        )
        torch.testing.assert_close(
            piece.data, torch.from_numpy(names[piece.name]).float(), rtol=1e-6, atol=1e-6
        )


QWEN = {
    "ssm__state_size": 4,
    "ssm__time_step_rank": 4,
    "attention__head_count_kv": 2,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 16,
    "expert_shared_feed_forward_length": 16,
}
MERGED = "model.layers.0.linear_attn.in_proj_qkvz.weight"


@pytest.mark.parametrize("stored", ["F32", "Q8_0"])
def test_rows_of_linear_attention_get_the_order_of_key_heads(write_gguf: Any, stored: str) -> None:
    """2 key heads of 4 channels, 4 value heads of 16. Each row is filled with its number."""
    rows = np.repeat(np.arange(144, dtype=np.float32)[:, None], 32, 1)
    parts = {"blk.0.attn_qkv.weight": rows[:80], "blk.0.attn_gate.weight": rows[80:]}
    kind = gguf.GGMLQuantizationType[stored]
    given = {"token_embd.weight": np.ones((64, 32), np.float32), **parts}
    metadata = {**SSM, **{key.replace("__", "."): value for key, value in QWEN.items()}}
    path = write_gguf(
        "qwen3next", tensors=given, types=dict.fromkeys(parts, stored), metadata=metadata
    )
    (piece,) = LOADER.tensors(LOADER.describe(LocalFiles(path)), [WantedWeight(MERGED)])
    values = (
        piece.data.numpy()
        if isinstance(piece.data, torch.Tensor)
        else np.frombuffer(piece.data, np.uint8).reshape(144, -1)
    )
    found = values if stored == "F32" else gguf.quants.dequantize(values, kind)
    first = [*range(4), *range(8, 12), *range(16, 48), *range(80, 112)]
    second = [*range(4, 8), *range(12, 16), *range(48, 80), *range(112, 144)]
    np.testing.assert_allclose(found[:, 0], [*first, *second], rtol=2e-3)


def test_projections_of_linear_attention_that_do_not_fit_are_refused(write_gguf: Any) -> None:
    parts = {
        "blk.0.attn_qkv.weight": np.ones((79, 32), np.float32),
        "blk.0.attn_gate.weight": np.ones((64, 32), np.float32),
    }
    found = describe(write_gguf, "qwen3next", parts, **QWEN)
    with pytest.raises(
        ModelError, match=r"has 143 rows, expected 8 \+ 8 \+ 64 \+ 64 for 2 key heads"
    ):
        list(LOADER.tensors(found, [WantedWeight(MERGED)]))
    both = {**parts, "blk.0.ssm_in.weight": np.ones((144, 32), np.float32)}
    with pytest.raises(
        ModelError, match=r"has both 'model.layers.0.linear_attn.in_proj_qkvz.weight' and its parts"
    ):
        describe(write_gguf, "qwen3next", both, **QWEN)
