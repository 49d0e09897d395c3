"""Both loaders pass the contract of their kind and the generic contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from pegboard_weight_loader_pt.loader import PickledLoader
from pegboard_weight_loader_pt.numpy_copies import NumpyCopiesLoader
from pegboard_weight_loader_pt.plugin import NPCACHE, PT
from torch import Tensor

from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import WeightLoader, WeightLoaderSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_weight_loader import WeightLoaderContract

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "dtype": "float32",
}


def values_of_a_model() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    return {
        "model.a.weight": torch.randn(6, 8, generator=random),
        "model.b.weight": torch.randn(4, 2, generator=random).bfloat16(),
        "model.c.bias": torch.randn(7, generator=random).half(),
        "model.turned": torch.randn(3, 5, generator=random).T,
        "model.scale": torch.randn(4, 4, generator=random).to(torch.float8_e4m3fn),
        "model.number": torch.tensor(3),
    }


@pytest.mark.parametrize("name", ["pt", "npcache"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("weight_loader", name))


class TestPickled(WeightLoaderContract):
    spec = PT

    def loader(self, setup: WeightLoaderSetup) -> WeightLoader:
        return PickledLoader(None, setup)

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        values = values_of_a_model()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        torch.save(values, folder / "pytorch_model.bin")
        return LocalFiles(folder), values


class TestOldPickled(TestPickled):
    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        values = values_of_a_model()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        del values["model.scale"]  # PyTorch 1.5 had no such type
        torch.save(values, folder / "weights.pt", _use_new_zipfile_serialization=False)
        return LocalFiles(folder), values


class TestPickledShards(TestPickled):
    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        _, values = super().write(folder)
        (folder / "pytorch_model.bin").unlink()
        weight_map = {}
        for index, (name, value) in enumerate(values.items()):
            file = f"pytorch_model-{index + 1:05}-of-00006.bin"
            torch.save({name: value}, folder / file)
            weight_map[name] = file
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return LocalFiles(folder), values


class TestNumpyCopies(TestPickled):
    spec = NPCACHE
    by_name_only = True

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path_factory.mktemp("cache")))

    def loader(self, setup: WeightLoaderSetup) -> WeightLoader:
        return NumpyCopiesLoader(None, setup)
