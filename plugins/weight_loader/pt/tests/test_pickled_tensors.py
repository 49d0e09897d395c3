"""Files of torch.save: what is refused, that nothing of a file runs, and the copies."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_weight_loader_pt.loader import PickledLoader
from pegboard_weight_loader_pt.numpy_copies import NumpyCopiesLoader
from pegboard_weight_loader_pt.pickled_tensors import read_state_file
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import WantedWeight, WeightLoaderSetup

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_new", [True, False])
def test_nothing_of_a_file_runs(tmp_path: Path, is_new: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    values = {"a": torch.zeros(2), "b": Trap(tmp_path / "trap")}
    torch.save(values, path, _use_new_zipfile_serialization=is_new)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is refused.*posix\.mkdir"):
        read_state_file(path)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), "holds a StoredTensor"),
        ([torch.zeros(2)], "holds a list"),
        ({}, "holds a dict"),
        ({"state_dict": {"a": torch.zeros(2)}}, r"torch\.save\(state\['state_dict'\], file\)"),
        ({"a": torch.zeros(2), "step": 3}, "'step' is a int"),
        ({3: torch.zeros(2)}, "3 is a StoredTensor"),
        (nn.Linear(2, 2), r"asks for torch\.nn\.modules\.linear\.Linear"),
    ],
)
def test_what_is_no_state_dict_is_refused_by_name(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "model.bin"
    torch.save(value, path)
    with pytest.raises(ModelError, match=rf"model\.bin .*{message}"):
        read_state_file(path)


def test_parameters_and_the_dictionary_of_a_module_are_plain(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    path = tmp_path / "model.bin"
    torch.save(module.state_dict(), path)
    assert read_state_file(path).tensors["weight"].shape == (2, 3)
    torch.save(OrderedDict(weight=module.weight), path)
    entry = read_state_file(path).tensors["weight"]
    data = path.read_bytes()[entry.offset : entry.offset + entry.num_bytes]
    assert torch.equal(
        torch.frombuffer(bytearray(data), dtype=torch.float32), module.weight.view(-1)
    )


def test_other_archives_and_compressed_storages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello", "")
    with pytest.raises(ModelError, match=r"model\.bin is a zip archive, but none of torch\.save"):
        read_state_file(path)
    torch.save({"a": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as source:
        members = {member.filename: source.read(member) for member in source.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(ModelError, match="no uncompressed storage '0'"):
        read_state_file(path)


def test_a_pickle_that_is_no_file_of_torch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ModelError, match=r"model\.bin is no file of torch\.save"):
        read_state_file(path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.booleans(), st.integers(0, 1 << 30), st.integers(0, 255), st.booleans())
def test_a_damaged_file_is_an_error_or_stays_inside_its_bounds(
    tmp_path: Path, is_new: bool, place: int, byte: int, is_cut: bool
) -> None:
    path = tmp_path / "model.bin"
    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}
    torch.save(values, path, _use_new_zipfile_serialization=is_new)
    content = bytearray(path.read_bytes())
    place %= len(content)
    content[place] = byte
    path.write_bytes(content[:place] if is_cut else content)
    try:
        tensors = read_state_file(path).tensors
    except ModelError as error:
        assert "model.bin" in str(error)
    else:
        assert all(one.offset + one.num_bytes <= len(content) for one in tensors.values())


# --- folders --------------------------------------------------------------------------------------


def folder_of(tmp_path: Path, **files: dict[str, Tensor]) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, values in files.items():
        torch.save(values, folder / f"{name}.pth")
    return folder


def test_parts_of_the_same_tensors_are_refused(tmp_path: Path) -> None:
    part = {"a": torch.zeros(2)}
    folder = folder_of(tmp_path, consolidated_0=part, consolidated_1=part)
    with pytest.raises(ModelError, match="both have the tensor 'a'.*Hugging Face layout"):
        PickledLoader(None, WeightLoaderSetup()).describe(LocalFiles(folder))


def test_tensors_of_several_files_and_of_trainers(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.zeros(3)})
    torch.save({"lr": 1}, folder / "training_args.bin")
    loader = PickledLoader(None, WeightLoaderSetup())
    checkpoint = loader.describe(LocalFiles(folder))
    assert {name: entry.file for name, entry in checkpoint.tensors.items()} == {
        "a": "one.pth",
        "b": "two.pth",
    }
    pieces = loader.tensors(checkpoint, [WantedWeight("b"), WantedWeight("a")])
    assert [(piece.name, piece.data.tolist()) for piece in pieces] == [
        ("a", [1, 1]),
        ("b", [0, 0, 0]),
    ]


def test_copies_are_made_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("PEGBOARD_CACHE", str(cache))
    loader = NumpyCopiesLoader(None, WeightLoaderSetup())

    def read(folder: Path) -> list[float]:
        checkpoint = loader.describe(LocalFiles(folder))
        (piece,) = loader.tensors(checkpoint, [WantedWeight("a")])
        return piece.data.tolist()

    def copies() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}

    folder = folder_of(tmp_path, one={"a": torch.ones(2), "b": torch.ones(3)})
    assert read(folder) == [1, 1]
    before = copies()
    assert len(before) == 2
    assert read(folder) == [1, 1]
    assert copies() == before
    folder = folder_of(tmp_path, one={"a": torch.full((3,), 2.0)})
    assert read(folder) == [2, 2, 2]
    (copy,) = copies()
    assert copy not in before
    copy.write_bytes(b"damaged")
    with pytest.raises(ModelError, match="damaged.*delete"):
        read(folder)
