"""Both loaders pass the contract of their kind and the generic contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from pegboard_weight_loader_safetensors.dummy import DummyLoader
from pegboard_weight_loader_safetensors.loader import SafetensorsLoader
from pegboard_weight_loader_safetensors.plugin import DUMMY, SAFETENSORS
from safetensors.torch import save_file
from torch import Tensor

from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import WantedWeight, WeightLoaderSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_weight_loader import WeightLoaderContract

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "dtype": "float32",
}


@pytest.mark.parametrize("name", ["safetensors", "dummy"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("weight_loader", name))


class TestSafetensors(WeightLoaderContract):
    spec = SAFETENSORS

    def loader(self, setup: WeightLoaderSetup) -> SafetensorsLoader:
        return SafetensorsLoader(None, setup)

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        random = torch.Generator().manual_seed(1)
        values = {
            "model.a.weight": torch.randn(6, 8, generator=random),
            "model.b.weight": torch.randn(4, 2, generator=random).bfloat16(),
            "model.c.bias": torch.randn(7, generator=random).half(),
        }
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save_file(values, folder / "model.safetensors")
        return LocalFiles(folder), values


class TestShardedSafetensors(TestSafetensors):
    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        _, values = super().write(folder)
        (folder / "model.safetensors").unlink()
        weight_map = {}
        for index, (name, value) in enumerate(values.items()):
            file = f"model-{index + 1:05}-of-00003.safetensors"
            save_file({name: value}, folder / file)
            weight_map[name] = file
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return LocalFiles(folder), values


class TestDummy(WeightLoaderContract):
    spec = DUMMY
    has_weights = False

    def loader(self, setup: WeightLoaderSetup) -> DummyLoader:
        return DummyLoader(None, setup)

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        loader = DummyLoader(None, WeightLoaderSetup())
        wanted = [WantedWeight("model.a.weight", (6, 8)), WantedWeight("model.b.weight", (4,))]
        pieces = loader.tensors(loader.describe(LocalFiles(folder)), wanted)
        return LocalFiles(folder), {
            piece.name: piece.data for piece in pieces if isinstance(piece.data, Tensor)
        }
