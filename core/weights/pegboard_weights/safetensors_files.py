"""Describes a directory of safetensors files, and reads them. Only reading imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TensorEntry,
    WantedWeight,
    WeightPiece,
)
from pegboard_weights.checkpoint_files import by_file, described, read_weight_map
from pegboard_weights.safetensors_header import Header, read_header

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.model_source import LocalFiles

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


Reader = Callable[[Path, Sequence[str]], "Iterator[Tensor]"]
"""Yields the tensors of a safetensors file that have these keys, in this order. Raises ModelError
for a file that has changed."""


def describe_safetensors(format: str, files: "LocalFiles") -> Checkpoint:
    """Return the description of a directory with safetensors files, or of one such file next to its
    config.json. format: the name of the loader. Raises ModelError."""
    headers, tensors = _read_index(files.root)
    directory = files.root if files.root.is_dir() else files.root.parent
    return described(format, files, tensors, stamps_of(directory, headers))


def stamps_of(directory: Path, headers: Mapping[str, Header]) -> dict[str, str]:
    """Return the header, size and modification time of every file, as text."""
    return {
        name: f"{header.sha256}:{header.file_bytes}:{(directory / name).stat().st_mtime_ns}"
        for name, header in headers.items()
    }


def read_tensors(
    checkpoint: Checkpoint, wanted: Iterable[WantedWeight], read: Reader
) -> Iterator[WeightPiece]:
    """Yield the wanted tensors of safetensors files, in file order. Raises ModelError for a file
    that has changed."""
    for file, entries in by_file(checkpoint, wanted).items():
        path = checkpoint.path / file
        values = read(path, [entry.key or entry.name for entry in entries])
        for entry, data in zip(entries, values, strict=True):
            yield WeightPiece(entry.name, entry.stored, tuple(data.shape), data)


def map_file(path: Path, keys: Sequence[str]) -> "Iterator[Tensor]":
    """Yield tensors of a file as views of the mapped file. It is a `Reader`."""
    from safetensors import safe_open

    with blaming(path), safe_open(path, framework="pt") as opened:
        for key in keys:
            yield opened.get_tensor(key)


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Turn the errors of a library that reads a described file into ModelError. What the user of
    the tensors raises is left alone."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # some libraries raise it itself
        raise ModelError(
            f"{path} has changed since it was described, or is damaged: {error}"
        ) from error


def _read_index(root: Path) -> tuple[dict[str, Header], dict[str, TensorEntry]]:
    """Return the headers by file, and the tensors of the model: those of a single file, or those
    that an index file assigns to several files."""
    if root.is_file():
        header = read_header(root)
        return {root.name: header}, header.tensors
    indexes = (
        [root / INDEX]
        if (root / INDEX).is_file()
        else sorted(root.glob("*.safetensors.index.json"))
    )
    if (root / SINGLE).is_file() and not (root / INDEX).is_file():
        indexes = []
    if len(indexes) > 1:
        raise ModelError(
            f"{root} contains several models: {', '.join(path.name for path in indexes)}; "
            f"expected {INDEX}"
        )
    if indexes:
        return read_shards(indexes[0])
    path = root / SINGLE if (root / SINGLE).is_file() else _only_file(root)
    header = read_header(path)
    return {path.name: header}, header.tensors


def read_shards(index: Path) -> tuple[dict[str, Header], dict[str, TensorEntry]]:
    """Return the headers by file, and the tensors that an index file assigns to the files. Raises
    ModelError."""
    weight_map = read_weight_map(index, (".safetensors",))
    headers = {file: read_header(index.parent / file) for file in sorted(set(weight_map.values()))}
    tensors = {}
    for name, file in weight_map.items():
        entry = headers[file].tensors.get(name)
        if entry is None:
            raise ModelError(f"{index} places tensor {name!r} in {file}, which does not contain it")
        tensors[name] = entry
    return headers, tensors


def _only_file(root: Path) -> Path:
    if not root.is_dir():
        raise ModelError(f"there is no model directory {root}")
    files = sorted(
        path for path in root.glob("*.safetensors") if not path.name.startswith("adapter_")
    )
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(path.name for path in files[:8])
        raise ModelError(
            f"{root} contains {len(files)} safetensors files ({names}) and no {INDEX} that says "
            "what each of them contains"
        )
    pickled = sorted(path.name for pattern in PICKLED for path in root.glob(pattern))
    if pickled:
        raise ModelError(
            f"{root} contains only pickled weights ({', '.join(pickled[:4])}). This load format "
            "does not read them. If they are plain tensors, --load-format pt reads them without "
            "running any code of theirs"
        )
    raise ModelError(f"{root} contains no weights: expected {SINGLE}, or {INDEX} and its shards")
