"""The loader passes the contract of its kind and the generic contract, if its library is
installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from pegboard_weight_loader_tensorizer import probe
from pegboard_weight_loader_tensorizer.index import HEADER, read_index
from pegboard_weight_loader_tensorizer.loader import TensorizerLoader
from pegboard_weight_loader_tensorizer.plugin import TENSORIZER
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.spec import Absent
from pegboard.interfaces.weight_loader import WeightLoader, WeightLoaderSetup
from pegboard.plugins.importing import probe_facts
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_weight_loader import WeightLoaderContract, write_config

needs_library = pytest.mark.skipif(
    find_spec("tensorizer") is None, reason="tensorizer is not installed"
)


def test_contract() -> None:
    check_entry(installed_entry("weight_loader", "tensorizer"))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    answer = probe.probe(probe_facts())
    assert isinstance(answer, Absent)
    assert "pip install tensorizer" in answer.reason


@needs_library
class TestTensorizer(WeightLoaderContract):
    spec = TENSORIZER

    def loader(self, setup: WeightLoaderSetup) -> WeightLoader:
        return TensorizerLoader(None, setup)

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        from tensorizer import TensorSerializer

        values = write_config(folder)
        serializer = TensorSerializer(str(folder / "model.tensors"))
        serializer.write_state_dict(values)
        serializer.close()
        return LocalFiles(folder), values

    def test_a_file_that_changes_after_its_description_is_named(self, tmp_path: Path) -> None:
        loader, checkpoint, values = self.described(tmp_path)
        path = tmp_path / "model.tensors"
        path.write_bytes(path.read_bytes()[:300])
        with pytest.raises(ModelError, match=r"model\.tensors has changed"):
            list(loader.tensors(checkpoint, self.whole(values)))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.tensors"
    for content, message in (
        (b"hello", "is no file of tensorizer"),
        (b"|TZR|\x02", "is truncated or damaged"),
        (b"|TZR|" + HEADER.pack(3, bytes(32), 0, 0), "is encrypted"),
        (b"|TZR|" + HEADER.pack(4, b"\1" + bytes(31), 0, 0), "is encrypted"),
        (b"|TZR|" + HEADER.pack(9, bytes(32), 0, 0), "has version 9"),
        (b"|TZR|" + HEADER.pack(1, bytes(32), 0, 0) + b"\xff" * 8, "is damaged"),
        (b"|TZR|" + HEADER.pack(1, bytes(32), 0, 1) + bytes(8), "is truncated or damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=rf"model\.tensors {message}"):
            read_index(path)
