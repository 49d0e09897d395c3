"""Both loaders pass the contract of their kind and the generic contract, if their library is
installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from pegboard_weight_loader_runai_streamer import probe
from pegboard_weight_loader_runai_streamer.loader import ShardedStreamerLoader, StreamerLoader
from pegboard_weight_loader_runai_streamer.plugin import RUNAI_STREAMER, RUNAI_STREAMER_SHARDED
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.spec import Absent
from pegboard.interfaces.weight_loader import (
    ShareFiles,
    WeightLoader,
    WeightLoaderSetup,
    joined,
)
from pegboard.plugins.importing import probe_facts
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_weight_loader import SafetensorsFilesContract

needs_library = pytest.mark.skipif(
    find_spec("runai_model_streamer") is None, reason="runai-model-streamer is not installed"
)


@pytest.mark.parametrize("name", ["runai_streamer", "runai_streamer_sharded"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("weight_loader", name))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    answer = probe.probe(probe_facts())
    assert isinstance(answer, Absent)
    assert "pip install runai-model-streamer" in answer.reason


@needs_library
class TestStreamer(SafetensorsFilesContract):
    spec = RUNAI_STREAMER

    def loader(self, setup: WeightLoaderSetup) -> WeightLoader:
        return StreamerLoader(None, setup)


@needs_library
class TestShardedStreamer(TestStreamer):
    """The share of one rank, which has saved the whole model."""

    spec = RUNAI_STREAMER_SHARDED

    def loader(self, setup: WeightLoaderSetup) -> WeightLoader:
        return ShardedStreamerLoader(None, setup)

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        plain = folder.parent / f"{folder.name}-plain"
        plain.mkdir(exist_ok=True)
        files, values = super().write(plain)
        source = StreamerLoader(None, WeightLoaderSetup())
        checkpoint = source.describe(files)
        wanted = joined(self.whole(values))
        pieces = source.tensors(checkpoint, wanted.values())
        place = ShareFiles(folder=folder, pattern="model{rank}{part}.safetensors")
        saver = ShardedStreamerLoader(None, WeightLoaderSetup())
        saver.save(checkpoint, wanted, pieces, place)
        return LocalFiles(folder), values

    def test_a_file_that_changes_after_its_description_is_named(self, tmp_path: Path) -> None:
        loader, checkpoint, values = self.described(tmp_path)
        path = tmp_path / "model00.safetensors"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ModelError, match=r"model00\.safetensors has changed"):
            list(loader.tensors(checkpoint, self.whole(values)))
