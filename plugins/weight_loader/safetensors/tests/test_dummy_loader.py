"""The dummy loader: weights depend only on seed and name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pegboard_weight_loader_safetensors import dummy
from pegboard_weight_loader_safetensors.dummy import DummyLoader

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import Checkpoint, WantedWeight, WeightLoaderSetup


def describe(directory: Path, **extra: object) -> Checkpoint:
    (directory / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], **extra})
    )
    return DummyLoader(None, WeightLoaderSetup()).describe(LocalFiles(directory))


def make(checkpoint: Checkpoint, piece: WantedWeight, seed: int = 0) -> torch.Tensor:
    (made,) = DummyLoader(None, WeightLoaderSetup(seed=seed)).tensors(checkpoint, [piece])
    assert made.shape == tuple(made.data.shape)
    return made.data


def test_weights_follow_from_seed_and_name(tmp_path: Path) -> None:
    checkpoint = describe(tmp_path)
    first = make(checkpoint, WantedWeight("a.weight", (64, 32)))
    assert torch.equal(first, make(checkpoint, WantedWeight("a.weight", (64, 32))))
    assert not torch.equal(first, make(checkpoint, WantedWeight("b.weight", (64, 32))))
    assert not torch.equal(first, make(checkpoint, WantedWeight("a.weight", (64, 32)), seed=1))
    assert first.std().item() == pytest.approx(0.02, rel=0.1)


def test_norm_weights_are_one(tmp_path: Path) -> None:
    assert make(describe(tmp_path), WantedWeight("model.norm.weight", (5,))).tolist() == [1.0] * 5


def test_weights_have_the_type_of_the_config(tmp_path: Path) -> None:
    checkpoint = describe(tmp_path, dtype="bfloat16")
    for name in ("a.weight", "b.bias"):
        assert make(checkpoint, WantedWeight(name, (4,))).dtype == torch.bfloat16


def test_large_weights_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy, "DRAWN_NUMBERS", 10)
    numbers = make(describe(tmp_path), WantedWeight("a.weight", (4, 6))).flatten()
    assert len(numbers.unique()) == 10
    assert torch.equal(numbers[10:], numbers[:14])


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not give its shape"):
        make(describe(tmp_path), WantedWeight("x.scales"))
    with pytest.raises(ModelError, match="quantized"):
        describe(tmp_path, quantization_config={"quant_method": "gptq"})
