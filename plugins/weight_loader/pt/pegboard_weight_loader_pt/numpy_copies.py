"""Weight loader `npcache`: files of torch.save, through numpy copies that are made once and mapped
from then on.

The copies of a file are in PEGBOARD_CACHE/npcache, in a folder named after its path. In it, a
folder named after the size and the time of modification of the file has one .npy file per tensor.
Types that numpy lacks (bfloat16, 8-bit floats) are kept as unsigned integers of their size.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.env import cache_dir
from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TensorEntry,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard.log import get_logger
from pegboard_weight_loader_pt.loader import (
    describe_pickled,
    load_state,
    stamp_of,
    tensor_of,
)
from pegboard_weights.checkpoint_files import by_file

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.model_source import LocalFiles

log = get_logger(__name__)

IN_NUMPY = {"bfloat16": "uint16", **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), "uint8")}
IN_NUMPY["float8_e8m0fnu"] = "uint8"
"""Types that numpy lacks → the type of their copies."""


class NumpyCopiesLoader:
    def __init__(self, options: None, setup: WeightLoaderSetup) -> None:
        self.folder = cache_dir() / "npcache"

    def describe(self, files: "LocalFiles") -> Checkpoint:
        return describe_pickled("npcache", files)

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        """Yields views of the mapped copies, which are made first if there are none."""
        for file, entries in by_file(checkpoint, wanted).items():
            every = [entry for entry in checkpoint.tensors.values() if entry.file == file]
            copies = self._copies(checkpoint.path / file, every)
            for entry in entries:
                data = _mapped(copies / _file_of(entry), entry)
                yield WeightPiece(entry.name, entry.stored, entry.shape, data)

    def _copies(self, path: Path, entries: list[TensorEntry]) -> Path:
        """Return the folder with the copies of a file. It appears only when it is complete."""
        place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
        copies = self.folder / place / stamp_of(path)
        if copies.is_dir():
            return copies
        log.info("%s is copied to %s, which is done once", path, copies)
        try:
            copies.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=copies.parent) as temporary:
                fresh = Path(temporary) / "copies"
                fresh.mkdir()
                _write(path, entries, fresh)
                if not copies.is_dir():  # of another rank, which was faster
                    _publish(fresh, copies)
        except OSError as error:
            raise ModelError(
                f"cannot copy {path} to {copies.parent}: {error.strerror or error}; move the cache "
                "with PEGBOARD_CACHE, or use --load-format pt"
            ) from error
        for old in copies.parent.iterdir():
            if old != copies and not old.name.startswith("."):
                shutil.rmtree(old, ignore_errors=True)
        return copies


def _publish(fresh: Path, copies: Path) -> None:
    try:
        os.rename(fresh, copies)
    except OSError:
        if not copies.is_dir():
            raise


def _file_of(entry: TensorEntry) -> str:
    """Return the name of a copy. The name of a tensor may have any characters."""
    return hashlib.sha256((entry.key or entry.name).encode()).hexdigest()[:32] + ".npy"


def _write(path: Path, entries: list[TensorEntry], folder: Path) -> None:
    import numpy as np
    import torch

    state = load_state(path)
    for entry in entries:
        data = tensor_of(path, state, entry)
        if (name := IN_NUMPY.get(entry.stored)) is not None:
            data = data.contiguous().view(getattr(torch, name))
        np.save(folder / _file_of(entry), np.ascontiguousarray(data.numpy()).reshape(entry.shape))


def _mapped(path: Path, entry: TensorEntry) -> "Tensor":
    import numpy as np
    import torch

    try:
        # pages that are written to become private, so torch does not warn of a read-only array
        values = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the copy {path} of {entry.name!r} is damaged ({error}); delete {path.parent}"
        ) from error
    if values.shape != entry.shape or str(values.dtype) != IN_NUMPY.get(entry.stored, entry.stored):
        raise ModelError(f"{path} is no copy of {entry.name!r}; delete {path.parent}")
    return torch.from_numpy(values).view(getattr(torch, entry.stored))
