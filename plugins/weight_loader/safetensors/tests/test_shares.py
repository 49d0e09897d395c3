"""What a rank saves and reads, without an engine. Index files come from strangers: a damaged one
is an error that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pegboard_weight_loader_safetensors.loader import SafetensorsLoader
from pegboard_weight_loader_safetensors.plugin import SHARDED_STATE
from pegboard_weight_loader_safetensors.sharded import ShardedStateLoader
from safetensors.torch import save_file
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import (
    Box,
    Checkpoint,
    ShareFiles,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
    joined,
)
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_weight_loader import WeightLoaderContract

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}
VALUES: Mapping[str, Tensor] = {
    "model.a.weight": torch.arange(48.0).view(6, 8),
    "model.b.weight": torch.arange(8.0).view(4, 2).bfloat16(),
    "model.c.bias": torch.arange(7.0).half(),
}


def saved(
    folder: Path,
    values: Mapping[str, Tensor],
    wanted: Mapping[str, WantedWeight],
    setup: WeightLoaderSetup,
) -> Path:
    """Save these values as the share of a rank."""
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(CONFIG))
    save_file(dict(values), source / "model.safetensors")
    loader = SafetensorsLoader(None, WeightLoaderSetup())
    checkpoint = loader.describe(LocalFiles(source))
    pieces = loader.tensors(checkpoint, wanted.values())
    files = ShareFiles(folder=folder / "shares")
    ShardedStateLoader(None, setup).save(checkpoint, wanted, pieces, files)
    return files.folder


def whole(values: Mapping[str, Tensor]) -> dict[str, WantedWeight]:
    return {name: WantedWeight(name, tuple(value.shape)) for name, value in values.items()}


def test_contract() -> None:
    check_entry(installed_entry("weight_loader", "sharded_state"))


class TestShardedState(WeightLoaderContract):
    spec = SHARDED_STATE

    def loader(self, setup: WeightLoaderSetup) -> ShardedStateLoader:
        return ShardedStateLoader(None, setup)

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        shares = saved(folder, VALUES, whole(VALUES), WeightLoaderSetup())
        return LocalFiles(shares), VALUES


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, int]) -> Box:
    spans = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        spans.append((start, draw(st.integers(start + 1, size))))
    return tuple(spans)


def raw_pieces(values: Mapping[str, Tensor]) -> Iterator[WeightPiece]:
    """Give bytes of imaginary blocks: four bits for each column."""
    for name, value in values.items():
        shape = (value.shape[0], value.shape[1] * 2)
        data = memoryview(value.byte().contiguous().view(-1).numpy())
        yield WeightPiece(name, "Q4_0", shape, data)


@given(data=st.data())
def test_a_rank_gets_what_it_reads(data: st.DataObject) -> None:
    """Floats within the boxes, and the blocks of these rows and columns, are those that were
    saved."""
    shape = data.draw(st.tuples(st.integers(1, 9), st.sampled_from([1, 3, 8, 128, 192, 320])))
    is_raw = shape[1] % 16 == 0 and data.draw(st.booleans())
    logical = (shape[0], shape[1] * 2) if is_raw else shape
    chosen = tuple(data.draw(st.lists(boxes(logical), max_size=3)))
    values = {"a": torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1)).float()}
    wanted = joined([WantedWeight("a", logical, chosen)])
    setup = WeightLoaderSetup(rank=0, ranks=1, layout="alone")
    with TemporaryDirectory() as folder:
        loader = ShardedStateLoader(None, setup)
        source = Path(folder) / "model.safetensors"
        save_file(values, source)
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        checkpoint = SafetensorsLoader(None, setup).describe(LocalFiles(source))
        pieces: Iterator[WeightPiece] = (
            raw_pieces(values)
            if is_raw
            else SafetensorsLoader(None, setup).tensors(checkpoint, wanted.values())
        )
        shares = Path(folder) / "shares"
        loader.save(checkpoint, wanted, pieces, ShareFiles(folder=shares))
        described = loader.describe(LocalFiles(shares))
        (piece,) = loader.tensors(described, wanted.values())
        assert tuple(piece.shape) == logical
        found = piece.data
        if not isinstance(found, Tensor):
            found = torch.tensor(list(found)).view(shape).float()
        for rows, (start, stop) in chosen or [((0, logical[0]), (0, logical[1]))]:
            span = (start // 2, -(-stop // 2)) if is_raw else (start, stop)
            place = slice(*rows), slice(*span)
            assert torch.equal(found[place], values["a"][place])


def test_only_what_was_saved_is_read(tmp_path: Path) -> None:
    """A rank that reads more than its share has, or other parts of a tensor, is told so."""
    values = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}
    wanted = {"a": WantedWeight("a", (4, 4), (((0, 2), (0, 4)),))}
    shares = saved(tmp_path, values, wanted, WeightLoaderSetup())
    loader = ShardedStateLoader(None, WeightLoaderSetup())
    checkpoint = loader.describe(LocalFiles(shares))
    for more in (WantedWeight("a", (4, 4)), WantedWeight("a", (4, 4), (((1, 3), (0, 4)),))):
        with pytest.raises(ModelError, match="other parts of 'a' than it reads now"):
            list(loader.tensors(checkpoint, [more]))
    with pytest.raises(ModelError, match="rank 0 has no tensor 'b'"):
        list(loader.tensors(checkpoint, [WantedWeight("b", (4, 4))]))


def test_every_share_must_be_there(tmp_path: Path) -> None:
    setup = WeightLoaderSetup(rank=0, ranks=2)
    shares = saved(tmp_path, VALUES, whole(VALUES), setup)
    with pytest.raises(ModelError, match=r"shares-rank-1\.json"):
        ShardedStateLoader(None, setup).describe(LocalFiles(shares))
    other = json.loads((shares / "shares-rank-0.json").read_text())
    other["layout"] = "three ranks"
    (shares / "shares-rank-1.json").write_text(json.dumps(other))
    with pytest.raises(ModelError, match="has shares of  and of three ranks"):
        ShardedStateLoader(None, setup).describe(LocalFiles(shares))


def test_a_share_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "shares").mkdir()
    (tmp_path / "shares" / "model-rank-0-part-0.safetensors").write_text("mine")
    with pytest.raises(ModelError, match="cannot save to .*: File exists"):
        saved(tmp_path, VALUES, whole(VALUES), WeightLoaderSetup())


Damage = tuple[list[str], Any, str]
DAMAGES: dict[str, Damage] = {
    "a file elsewhere": (["tensors", "model.a.weight", "file"], "../a.safetensors", "next to it"),
    "a file of another kind": (["tensors", "model.a.weight", "file"], "config.json", "next to it"),
    "an end past the tensor": (
        ["tensors", "model.a.weight", "boxes"],
        [[[0, 7], [0, 8]]],
        "has parts",
    ),
    "a part without rows": (["tensors", "model.a.weight", "boxes"], [[[3, 3], [0, 8]]], "has part"),
    "a part of a vector": (["tensors", "model.c.bias", "boxes"], [[[0, 3]]], "has parts"),
    "too many bytes": (["tensors", "model.a.weight", "num_bytes"], 10**12, "too many for"),
    "another shape": (["tensors", "model.a.weight", "shape"], [3, 16], "its index says"),
    "no such part": (["tensors", "model.a.weight", "boxes"], [[[0, 6], [0, 8]]], "lacks"),
    "a size below zero": (["tensors", "model.a.weight", "shape"], [-6, -8], "is damaged"),
    "text": (["tensors"], "many", "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_index_is_named(tmp_path: Path, name: str) -> None:
    keys, value, message = DAMAGES[name]
    loader = ShardedStateLoader(None, WeightLoaderSetup())
    shares = saved(tmp_path, VALUES, whole(VALUES), WeightLoaderSetup())
    path = shares / "shares-rank-0.json"
    index = json.loads(path.read_text())
    place = index
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message) as caught:
        checkpoint: Checkpoint = loader.describe(LocalFiles(shares))
        list(loader.tensors(checkpoint, whole(VALUES).values()))
    assert str(shares) in str(caught.value)
