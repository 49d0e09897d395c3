"""Contract tests of the kind `weight_loader`. A plugin's test file:

class TestMyLoader(WeightLoaderContract):
    spec = MY_LOADER

    def loader(self, setup: WeightLoaderSetup) -> WeightLoader:
        return MyLoader(None, setup)

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        ...  # a small checkpoint, and its tensors by checkpoint name
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    WantedWeight,
    WeightLoader,
    WeightLoaderSetup,
    WeightLoaderSpec,
    WeightPiece,
)

NO_TORCH = """
import importlib, sys
from pathlib import Path
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import WeightLoaderSetup
module, _, name = sys.argv[1].partition(":")
getattr(importlib.import_module(module), name)(None, WeightLoaderSetup()).describe(LocalFiles(Path(sys.argv[2])))
assert "torch" not in sys.modules, "describe() imported torch"
"""  # noqa: E501


class WeightLoaderContract:
    """Every weight loader passes these. Override `spec`, `loader` and `write`. has_weights: False
    for a loader that makes up the weights. by_name_only: the loader is never chosen by the files,
    so its spec has no patterns."""

    spec: WeightLoaderSpec
    has_weights = True
    by_name_only = False

    def loader(self, setup: WeightLoaderSetup) -> WeightLoader:
        """Return a new loader."""
        raise AssertionError("override WeightLoaderContract.loader")

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        """Write a checkpoint into the empty `folder`."""
        raise AssertionError("override WeightLoaderContract.write")

    def described(self, folder: Path) -> tuple[WeightLoader, Checkpoint, Mapping[str, Tensor]]:
        files, values = self.write(folder)
        loader = self.loader(WeightLoaderSetup())
        return loader, loader.describe(files), values

    def whole(self, values: Mapping[str, Tensor]) -> list[WantedWeight]:
        return [WantedWeight(name, tuple(value.shape)) for name, value in values.items()]

    def check(self, piece: WeightPiece, expected: Tensor) -> None:
        """The piece names its stored type. Plain data has exactly the bits that were written."""
        assert tuple(piece.shape) == tuple(expected.shape), (
            f"{piece.name}: logical shape {piece.shape}"
        )
        if isinstance(piece.data, Tensor):
            assert piece.stored == str(piece.data.dtype).removeprefix("torch.")
            assert torch.equal(piece.data.to(expected.dtype), expected), (
                f"{piece.name} is not what was written"
            )

    def test_the_description_is_complete_plain_and_stable(self, tmp_path: Path) -> None:
        """The description can be sent to other processes. Its digest identifies the content and is
        equal for equal files."""
        loader, checkpoint, values = self.described(tmp_path)
        again = loader.describe(LocalFiles(checkpoint.path))
        assert again == checkpoint
        assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint
        assert checkpoint.architectures and all(
            isinstance(name, str) for name in checkpoint.architectures
        )
        assert checkpoint.digest, (
            "an empty digest would mix up the block hashes of different models"
        )
        assert isinstance(checkpoint.config.get("hidden_size"), int), (
            "the config must be Hugging Face-shaped"
        )
        assert bool(checkpoint.tensors) or not self.has_weights
        assert not checkpoint.tensors or set(values) <= set(checkpoint.tensors)
        for name, entry in checkpoint.tensors.items():
            assert (name, entry.num_bytes >= 0) == (entry.name, True)
            assert name not in values or entry.shape == tuple(values[name].shape)

    def test_a_part_of_the_tensors_is_read_after_the_file_is_closed(self, tmp_path: Path) -> None:
        loader, checkpoint, values = self.described(tmp_path)
        names = sorted(values)[:2]
        wanted = [want for want in self.whole(values) if want.name in names]
        pieces = list(loader.tensors(checkpoint, wanted))
        assert sorted(piece.name for piece in pieces) == names
        for piece in pieces:
            self.check(piece, values[piece.name])

    def test_the_files_are_recognised(self, tmp_path: Path) -> None:
        """`file_patterns` and `magic` of the spec match a weight file of the checkpoint."""
        if self.by_name_only:
            assert not self.spec.file_patterns
            return
        files, _ = self.write(tmp_path)
        paths = (
            [files.root]
            if files.root.is_file()
            else [path for path in files.root.iterdir() if path.is_file()]
        )
        named = [
            path
            for path in paths
            if any(fnmatch(path.name, pattern) for pattern in self.spec.file_patterns)
        ]
        assert not self.has_weights or any(
            path.read_bytes().startswith(self.spec.magic or b"") for path in named
        )

    def test_describe_imports_no_torch(self, tmp_path: Path) -> None:
        files, _ = self.write(tmp_path)
        command = [sys.executable, "-c", NO_TORCH, self.spec.implementation, str(files.root)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr

    def test_every_wanted_tensor_comes_once_in_file_order(self, tmp_path: Path) -> None:
        """Pieces may be requested in any order. A second request gives the same as the first."""
        loader, checkpoint, values = self.described(tmp_path)
        wanted = self.whole(values)
        wanted = [
            wanted[index] for index in np.random.default_rng(0).permutation(len(wanted))
        ] + wanted[:1]
        places = []
        seen = []
        # the next piece may overwrite this one, so check it now
        for piece in loader.tensors(checkpoint, wanted):
            self.check(piece, values[piece.name])
            seen.append(piece.name)
            if entry := checkpoint.tensors.get(piece.name):
                places.append((entry.file, entry.offset))
        assert sorted(seen) == sorted(values)
        assert places == sorted(places)

    def test_nothing_wanted_is_nothing_read(self, tmp_path: Path) -> None:
        loader, checkpoint, _ = self.described(tmp_path)
        assert list(loader.tensors(checkpoint, [])) == []

    def test_an_unknown_tensor_is_named(self, tmp_path: Path) -> None:
        loader, checkpoint, _ = self.described(tmp_path)
        with pytest.raises(ModelError, match="no_such_tensor"):
            list(loader.tensors(checkpoint, [WantedWeight("no_such_tensor")]))

    def test_damage_is_found_and_the_file_named(self, tmp_path: Path) -> None:
        """A checkpoint without its last bytes is refused, and so is one whose weight file is
        empty."""
        if not self.has_weights:
            return
        files, values = self.write(tmp_path)
        loader = self.loader(WeightLoaderSetup())
        tensors = loader.describe(files).tensors
        last = max(tensors.values(), key=lambda entry: (entry.file, entry.offset))
        folder = files.root if files.root.is_dir() else files.root.parent
        path = folder / last.file
        content = path.read_bytes()
        for damaged in (content[: last.offset + last.num_bytes - 1], b""):
            path.write_bytes(damaged)
            with pytest.raises(ModelError, match=path.name.replace(".", r"\.")):
                list(loader.tensors(loader.describe(files), self.whole(values)))

    def test_a_place_without_a_checkpoint_is_refused_by_path(self, tmp_path: Path) -> None:
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(ModelError, match="empty"):
            self.loader(WeightLoaderSetup()).describe(LocalFiles(empty))


def write_config(folder: Path) -> dict[str, Tensor]:
    """Write a config.json, and return tensors of several types for the checkpoint beside it."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    random = torch.Generator().manual_seed(1)
    return {
        "model.a.weight": torch.randn(6, 8, generator=random),
        "model.b.weight": torch.randn(4, 2, generator=random).bfloat16(),
        "model.c.bias": torch.randn(7, generator=random).half(),
        "model.d.number": torch.tensor(3),
    }


class SafetensorsFilesContract(WeightLoaderContract):
    """Loaders that read safetensors files by another library pass these, too."""

    by_name_only = True

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        from safetensors.torch import save_file

        values = write_config(folder)
        save_file(values, folder / "model.safetensors")
        return LocalFiles(folder), values

    def test_a_file_that_changes_after_its_description_is_named(self, tmp_path: Path) -> None:
        loader, checkpoint, values = self.described(tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ModelError, match=r"model\.safetensors has changed"):
            list(loader.tensors(checkpoint, self.whole(values)))
