"""GGUF files of models with experts whose tensors are not those of the model on Hugging Face:
joined, left out, or refused."""

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
HEADS = 4
RANK = 16
NOPE = 32
ROPE = 8
VALUE = 12
LATENT: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": RANK,
    "attention.key_length": RANK + ROPE,
    "attention.value_length": RANK,
    "attention.key_length_mla": NOPE + ROPE,
    "attention.value_length_mla": VALUE,
    "rope.dimension_count": ROPE,
    "expert_feed_forward_length": 16,
}
JOINED = "model.layers.0.self_attn.kv_b_proj.weight"


def describe(path: Path) -> Checkpoint:
    return LOADER.describe(LocalFiles(path))


def latent_tensors(**changed: np.ndarray | None) -> dict[str, np.ndarray]:
    """The tensors of one layer that latent attention has, and those of the model."""
    random = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": random.standard_normal((64, 32)).astype(np.float32),
        "blk.0.attn_k_b.weight": random.standard_normal((HEADS, RANK, NOPE)).astype(np.float32),
        "blk.0.attn_v_b.weight": random.standard_normal((HEADS, VALUE, RANK)).astype(np.float32),
    }
    replaced = {f"blk.0.{name}.weight": values for name, values in changed.items()}
    return {name: values for name, values in {**tensors, **replaced}.items() if values is not None}


@pytest.mark.parametrize("stored", ["F32", "Q8_0"])
def test_projections_of_keys_and_values_are_joined(write_gguf, stored: str) -> None:
    tensors = latent_tensors()
    keys = tensors["blk.0.attn_k_b.weight"]
    path = write_gguf(
        "deepseek2", tensors=tensors, types={"blk.0.attn_k_b.weight": stored}, metadata=LATENT
    )
    if stored != "F32":
        kind = gguf.GGMLQuantizationType[stored]
        keys = gguf.quants.dequantize(gguf.quants.quantize(keys, kind), kind)
    found = describe(path)
    (piece,) = LOADER.tensors(found, [WantedWeight(JOINED)])
    expected = np.concatenate((keys.swapaxes(1, 2), tensors["blk.0.attn_v_b.weight"]), 1).reshape(
        -1, RANK
    )
    assert piece.shape == found.tensors[JOINED].shape == expected.shape
    assert torch.equal(piece.data, torch.from_numpy(expected))
    assert found.architectures == ("DeepseekV2ForCausalLM",)


def test_projections_that_do_not_fit_are_refused(write_gguf) -> None:
    with pytest.raises(
        ModelError, match=r"attn_k_b.weight' has shape \(4, 32, 16\), expected \(4, 16, 32\)"
    ):
        describe(
            write_gguf(
                "deepseek2",
                tensors=latent_tensors(attn_k_b=np.ones((4, 32, 16), np.float32)),
                metadata=LATENT,
            )
        )
    found = describe(
        write_gguf("deepseek2", tensors=latent_tensors(attn_v_b=None), metadata=LATENT)
    )
    with pytest.raises(
        ModelError, match="has no tensor 'model.layers.0.self_attn.v_b_proj.weight'"
    ):
        list(LOADER.tensors(found, [WantedWeight(JOINED)]))
    for shape, told in (
        ((4, 12, 8), "which does not fit"),
        ((4, 10, 16), r"have \(168, 16\) rows and columns, expected"),
    ):
        tensors = latent_tensors(attn_v_b=np.ones(shape, np.float32))
        found = describe(write_gguf("deepseek2", tensors=tensors, metadata=LATENT))
        with pytest.raises(ModelError, match=told):
            list(LOADER.tensors(found, [WantedWeight(JOINED)]))


def test_a_file_with_both_layouts_uses_the_whole_one(write_gguf) -> None:
    whole = (
        np.random.default_rng(1).standard_normal((HEADS * (NOPE + VALUE), RANK)).astype(np.float32)
    )
    found = describe(
        write_gguf("deepseek2", tensors=latent_tensors(attn_kv_b=whole), metadata=LATENT)
    )
    (piece,) = LOADER.tensors(found, [WantedWeight(JOINED)])
    assert np.array_equal(piece.data.numpy(), whole)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (
            {"attention.key_length_mla": ROPE},
            "key_length_mla is 8, of which 8 channels are rotated",
        ),
        ({"expert_gating_func": 4}, "expert_gating_func is 4, expected 1 or 2"),
        ({"nextn_predict_layers": 2}, "block_count is 2, expected at least 3"),
        ({"attention.kv_lora_rank": 0}, "kv_lora_rank is 0"),
    ],
)
def test_senseless_metadata(write_gguf, metadata: dict, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        describe(write_gguf("deepseek2", tensors=latent_tensors(), metadata={**LATENT, **metadata}))


def test_how_experts_are_chosen(write_gguf) -> None:
    def config(**metadata: int) -> dict[str, Any]:
        return dict(
            describe(
                write_gguf("deepseek2", tensors=latent_tensors(), metadata={**LATENT, **metadata})
            ).config
        )

    assert (config()["scoring_func"], config()["topk_method"]) == ("softmax", "greedy")
    grouped = config(expert_group_count=4, expert_group_used_count=2, expert_gating_func=2)
    assert (grouped["scoring_func"], grouped["topk_method"]) == ("sigmoid", "group_limited_greedy")
    assert (grouped["n_group"], grouped["topk_group"]) == (4, 2)
    corrected = latent_tensors() | {"blk.1.exp_probs_b.bias": np.ones(4, np.float32)}
    found = describe(write_gguf("deepseek2", tensors=corrected, metadata=LATENT))
    assert (found.architectures, found.config["scoring_func"]) == (
        ("DeepseekV3ForCausalLM",),
        "sigmoid",
    )
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in found.tensors
    with pytest.raises(ModelError, match="expert_gating_func is 1, expected 2"):
        describe(
            write_gguf("deepseek2", tensors=corrected, metadata={**LATENT, "expert_gating_func": 1})
        )


def test_layers_that_draft_tokens_are_left_out(write_gguf) -> None:
    metadata = {
        "nextn_predict_layers": 1,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 16,
    }
    tensors = {
        "token_embd.weight": np.ones((64, 32), np.float32),
        "blk.0.attn_norm.weight": np.ones(32, np.float32),
        "blk.1.attn_norm.weight": np.ones(32, np.float32),
        "blk.1.nextn.eh_proj.weight": np.ones((32, 64), np.float32),
    }
    found = describe(write_gguf("glm4moe", tensors=tensors, metadata=metadata))
    assert found.config["num_hidden_layers"] == 1
    assert set(found.tensors) == {
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
    }
    with pytest.raises(ModelError, match="nextn.eh_proj.weight' has no place"):
        describe(
            write_gguf("glm4moe", tensors=tensors, metadata={**metadata, "nextn_predict_layers": 0})
        )


SHARED = {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 48}
WHOLE = "model.layers.0.shared_mlp.input_linear.weight"


def shared_tensors(up: tuple[int, int] | None = (48, 32)) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"token_embd": (64, 32), "blk.0.ffn_gate_shexp": (48, 32), "blk.0.ffn_up_shexp": up}
    return {
        f"{name}.weight": random.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
        if shape
    }


@pytest.mark.parametrize(
    "types", [("F32", "F32"), ("F16", "F16"), ("Q8_0", "Q8_0"), ("Q8_0", "F32"), ("F16", "F32")]
)
def test_gate_and_up_are_joined(write_gguf, types: tuple[str, str]) -> None:
    """Blocks stay blocks if both have one type. Else they become floats."""
    tensors = shared_tensors()
    names = ("blk.0.ffn_gate_shexp.weight", "blk.0.ffn_up_shexp.weight")
    chosen = dict(zip(names, types, strict=True))
    found = describe(write_gguf("granitemoe", tensors=tensors, types=chosen, metadata=SHARED))
    kinds = [gguf.GGMLQuantizationType[kind] for kind in types]
    packed = [
        gguf.quants.quantize(tensors[name], kind) for name, kind in zip(names, kinds, strict=True)
    ]
    (piece,) = LOADER.tensors(found, [WantedWeight(WHOLE)])
    assert (
        piece.shape == found.tensors[WHOLE].shape == (96, 32)
        and piece.stored == found.tensors[WHOLE].stored
    )
    if types == ("Q8_0", "Q8_0"):
        assert bytes(piece.data) == b"".join(part.tobytes() for part in packed)
    else:
        values = [
            gguf.quants.dequantize(part, kind) for part, kind in zip(packed, kinds, strict=True)
        ]
        assert np.array_equal(piece.data.float().numpy(), np.concatenate(values))
        assert piece.stored == ("float16" if types == ("F16", "F16") else "float32")


@pytest.mark.parametrize(
    ("up", "told"),
    [(None, "has no 'model.layers.0.shared_mlp.up_proj"), ((48, 64), r"of shape \(48, 64\)")],
)
def test_parts_that_cannot_be_joined_are_refused(
    write_gguf, up: tuple[int, int] | None, told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        describe(write_gguf("granitemoe", tensors=shared_tensors(up), metadata=SHARED))


def test_shared_experts_that_do_not_fit_their_number(write_gguf) -> None:
    metadata = {**SHARED, "expert_feed_forward_length": 16, "expert_shared_count": 5}
    with pytest.raises(
        ModelError, match="expert_shared_count is 5, which does not divide the 48 rows"
    ):
        describe(write_gguf("bailingmoe2", tensors=shared_tensors(), metadata=metadata))
