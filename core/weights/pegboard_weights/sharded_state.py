"""Load formats of shares: each rank reads its own files, which hold only its share.

A share has the tensors of the checkpoint that the rank reads. Of a matrix that ranks divide, it has
only the rank's rows and columns. The rank gets the matrix in its whole size, in memory that is
never touched outside of its part, so all formats are read as from the checkpoint itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import (
    Box,
    Checkpoint,
    ShareFiles,
    TensorEntry,
    TokenizerPayload,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard_weights.safetensors_files import map_file
from pegboard_weights.safetensors_header import Header, read_header
from pegboard_weights.share_writer import ShareWriter
from pegboard_weights.shares import (
    DESCRIPTION,
    Description,
    SavedTensor,
    Share,
    read_description,
    read_share,
    share_file,
    write_index,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.model_source import LocalFiles

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".index.json")
"""Endings of files of a checkpoint that are not copied."""
UNIT = 256
"""Columns of quantized matrices are saved in multiples of this, which no block crosses."""


class ShareLoader:
    """format: the name of the loader. A loader that reads files in another way overrides `read`."""

    format: ClassVar[str]

    def __init__(self, options: None, setup: WeightLoaderSetup) -> None:
        self.setup = setup

    @staticmethod
    def read(path: Path, keys: Sequence[str]) -> "Iterator[Tensor]":
        """See `pegboard_weights.safetensors_files.Reader`."""
        return map_file(path, keys)

    # --- reading ----------------------------------------------------------------------------------

    def describe(self, files: "LocalFiles") -> Checkpoint:
        folder = files.root if files.root.is_dir() else files.root.parent
        known = read_description(folder)
        shares = [read_share(folder, rank) for rank in range(known.ranks)]
        if len({share.layout for share in shares}) != 1:
            raise ModelError(
                f"{folder} has shares of {' and of '.join(sorted({s.layout for s in shares}))}; "
                "save them again, into a new folder"
            )
        names = {each.file for share in shares for each in share.tensors.values()}
        headers = {file: read_header(folder / file) for file in sorted(names)}
        stamps: list[Any] = [known.digest]
        for file, header in headers.items():
            stamps.append([header.sha256, header.file_bytes, (folder / file).stat().st_mtime_ns])
        return Checkpoint(
            format=self.format,
            path=folder,
            config=known.config,
            architectures=tuple(known.architectures),
            tensors={
                name: _entry(folder, name, each, headers[each.file])
                for share in reversed(shares)
                for name, each in share.tensors.items()
            },
            tokenizer=TokenizerPayload(known.tokenizer_format, folder, known.tokenizer_data),
            quantization=known.quantization,
            dtype=known.dtype,
            rope_style="pairs" if known.rope_style == "pairs" else "halves",
            chat_template=known.chat_template,
            generation_config=known.generation_config,
            digest="sha256:" + hashlib.sha256(json.dumps(stamps).encode()).hexdigest(),
        )

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        """Raises ModelError if the shares were saved by ranks that divide the model otherwise."""
        folder = checkpoint.path
        by_name = {weight.name: weight for weight in wanted}
        if not by_name:
            return
        files: dict[str, list[str]] = {}
        share = self._own_share(folder)
        for name, weight in by_name.items():
            if (saved := share.tensors.get(name)) is None:
                raise ModelError(f"{folder}: rank {self.setup.rank} has no tensor {name!r}")
            if saved.boxes and not (weight.boxes and {*weight.boxes} <= {*saved.boxes}):
                raise ModelError(
                    f"{folder}: rank {self.setup.rank} has saved other parts of {name!r} than it "
                    "reads now; save the shares again"
                )
        for name, saved in share.tensors.items():
            if name in by_name:
                files.setdefault(saved.file, []).append(name)
        for file, names in files.items():
            keys = [key for name in names for key in share.tensors[name].keys(name)]
            stream = self.read(folder / file, keys)
            for name in names:
                saved = share.tensors[name]
                parts = list(islice(stream, len(saved.keys(name))))
                yield _piece(folder / file, name, saved, parts)

    def _own_share(self, folder: Path) -> Share:
        layout = read_share(folder, 0).layout
        if layout != self.setup.layout:
            raise ModelError(
                f"{folder} was saved with {layout}, and this engine has {self.setup.layout}; use "
                "the same, or load the checkpoint itself"
            )
        return read_share(folder, self.setup.rank)

    # --- saving -----------------------------------------------------------------------------------

    def save(
        self,
        checkpoint: Checkpoint,
        wanted: Mapping[str, WantedWeight],
        pieces: Iterable[WeightPiece],
        files: ShareFiles,
    ) -> None:
        """The first rank also writes what describes the model, and copies the other files that are
        next to the checkpoint."""
        rank = self.setup.rank
        pattern = _checked(files.pattern or PATTERN)
        share = Share(self.setup.layout, {})
        try:
            files.folder.mkdir(parents=True, exist_ok=True)
            writer = ShareWriter(files.folder, pattern, rank, files.max_bytes)
            for piece in pieces:
                saved, contents = _saved(piece, wanted[piece.name].boxes)
                saved.file = writer.add(dict(zip(saved.keys(piece.name), contents, strict=True)))
                share.tensors[piece.name] = saved
            writer.close()
            if rank == 0:
                self._describe(checkpoint, files.folder)
            write_index(files.folder / share_file(rank), share)
        except OSError as error:
            raise ModelError(f"cannot save to {files.folder}: {error.strerror or error}") from error

    def _describe(self, checkpoint: Checkpoint, folder: Path) -> None:
        source = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        if checkpoint.tokenizer.directory is not None:
            for path in source.iterdir():
                if path.is_file() and not path.name.endswith(WEIGHTS) and path.name != DESCRIPTION:
                    shutil.copy(path, folder)
        description = Description(
            ranks=self.setup.ranks,
            config=dict(checkpoint.config),
            architectures=list(checkpoint.architectures),
            tokenizer_format=checkpoint.tokenizer.format,
            tokenizer_data=dict(checkpoint.tokenizer.data),
            quantization=None if checkpoint.quantization is None else dict(checkpoint.quantization),
            dtype=checkpoint.dtype,
            rope_style=checkpoint.rope_style,
            chat_template=checkpoint.chat_template,
            generation_config=dict(checkpoint.generation_config),
            digest=checkpoint.digest,
        )
        write_index(folder / DESCRIPTION, description)
        if not (folder / "config.json").exists():
            (folder / "config.json").write_text(json.dumps(description.config), encoding="utf-8")


def _entry(folder: Path, name: str, saved: SavedTensor, header: Header) -> TensorEntry:
    """Raise ModelError if the file lacks the tensor."""
    for key in saved.keys(name):
        if key not in header.tensors:
            raise ModelError(f"{folder / saved.file} lacks {key!r}, which its index places there")
    offset = header.tensors[saved.keys(name)[0]].offset
    return TensorEntry(name, tuple(saved.shape), saved.stored, saved.file, offset, saved.num_bytes)


def _checked(pattern: str) -> str:
    """Raise ModelError unless the pattern is the name of a safetensors file for each rank and
    part."""
    is_name = Path(pattern).name == pattern and pattern.endswith(".safetensors")
    if not is_name or "{rank}" not in pattern or "{part}" not in pattern:
        raise ModelError(
            f"pattern {pattern!r} does not name files; expected {{rank}}, {{part}} and the ending "
            f".safetensors, as in {PATTERN}"
        )
    return pattern


def _saved(piece: WeightPiece, boxes: tuple[Box, ...]) -> tuple[SavedTensor, list[Any]]:
    """Return how a piece is saved, and what is written of it: tensors or arrays of bytes, which are
    views of the piece."""
    data = piece.data
    is_raw = isinstance(data, memoryview)
    shape = list(piece.shape)
    if isinstance(data, memoryview):
        rows = np.frombuffer(data, np.uint8)
        num_bytes = len(rows)
        if boxes:
            rows = rows.reshape(shape[0], -1)
        contents: list[Any] = [rows[_slices(box, shape, rows.shape)] for box in boxes] or [rows]
    else:
        num_bytes = data.nbytes
        contents = [data[tuple(slice(*span) for span in box)] for box in boxes] or [data]
    return SavedTensor(shape, piece.stored, num_bytes, list(boxes), is_raw), contents


def _slices(box: Box, shape: list[int], stored: tuple[int, ...]) -> tuple[slice, slice]:
    """Return the rows of a box, and the bytes of each that its columns are in. shape: of the
    matrix. stored: rows, and bytes of each."""
    rows, (start, stop) = box
    first = start // UNIT * UNIT
    last = min(-(-stop // UNIT) * UNIT, shape[1])
    return slice(*rows), slice(first * stored[1] // shape[1], last * stored[1] // shape[1])


def _piece(path: Path, name: str, saved: SavedTensor, parts: "list[Tensor]") -> WeightPiece:
    """Return the tensor in its whole size. What was not saved is zero."""
    import torch

    shape = tuple(saved.shape)
    if saved.is_raw:
        raw = parts[0].numpy()
        if saved.boxes:
            raw = np.zeros((shape[0], saved.num_bytes // shape[0]), np.uint8)
            for box, part in zip(saved.boxes, parts, strict=True):
                place = raw[_slices(box, saved.shape, raw.shape)]
                _check(path, name, tuple(part.shape), place.shape)
                place[:] = part.numpy()
        _check(path, name, (raw.size,), (saved.num_bytes,))
        return WeightPiece(name, saved.stored, shape, raw.reshape(-1).data)
    whole = parts[0]
    if saved.boxes:
        size = math.prod(shape) * whole.itemsize
        whole = torch.from_numpy(np.zeros(size, np.uint8)).view(whole.dtype).view(shape)
        for box, part in zip(saved.boxes, parts, strict=True):
            target = whole[tuple(slice(*span) for span in box)]
            _check(path, name, tuple(part.shape), tuple(target.shape))
            target.copy_(part)
    _check(path, name, tuple(whole.shape), shape)
    return WeightPiece(name, saved.stored, shape, whole)


def _check(path: Path, name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if stored != expected:
        raise ModelError(
            f"{path}: tensor {name!r} has shape {list(stored)}; its index says {list(expected)}"
        )
