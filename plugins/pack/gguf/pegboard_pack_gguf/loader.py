"""Weight loader `gguf`: describes a GGUF file in Hugging Face terms (no torch) and streams its
tensors from mapped memory."""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TensorEntry,
    TokenizerPayload,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard_pack_gguf.architectures import (
    BY_MODEL_TYPE,
    architecture_of,
    change_of,
    has_offset,
    joined_entries,
    joined_parts,
    tensor_entries,
    up_projection_parts,
)
from pegboard_pack_gguf.ggml_types import PLAIN
from pegboard_pack_gguf.header import GGUFHeader, read_header
from pegboard_pack_gguf.hf_config import config_of_language, hf_config, token_ids
from pegboard_pack_gguf.metadata import Metadata
from pegboard_pack_gguf.mmproj import PARTS, Mmproj, find_mmproj
from pegboard_pack_gguf.options import GGUFFiles
from pegboard_pack_gguf.table_parts import Architecture
from pegboard_pack_gguf.vocabulary import end_token_ids

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.model_source import LocalFiles

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
PAYLOAD_PREFIX = "tokenizer."
FLOATS = ("float32", "float16", "bfloat16", "float64")


class GGUFLoader:
    def __init__(self, options: GGUFFiles | None, setup: WeightLoaderSetup) -> None:
        self.options = options or GGUFFiles()

    def describe(self, files: "LocalFiles") -> Checkpoint:
        path = find_file(files.root)
        header = read_header(path)
        headers = [header, *_other_shards(header)]
        whole = replace(
            header, tensors=tuple(tensor for part in headers for tensor in part.tensors)
        )
        prefix, architecture = architecture_of(header)
        config = hf_config(whole, prefix, architecture)
        tensors = _index(headers, architecture, config)
        beside = find_mmproj(path, self.options.mmproj)
        if beside is not None:
            mmproj = _mmproj(beside, Metadata(header, prefix), architecture, config)
            config = mmproj.config()
            tensors |= _index_of_tower(mmproj, path.parent)
            headers.append(mmproj.header)
        template = header.metadata.get("tokenizer.chat_template")
        generation_config: dict[str, Any] = dict(token_ids(header))
        tokenizer_data = _tokenizer_data(header)
        if ends := end_token_ids(tokenizer_data):
            generation_config["eos_token_id"] = ends
        return Checkpoint(
            format="gguf",
            path=path,
            config=config,
            architectures=tuple(config["architectures"]),
            tensors=tensors,
            tokenizer=TokenizerPayload("gguf", data=tokenizer_data),
            quantization={"quant_method": "gguf"},
            dtype=_main_dtype(tensors),
            rope_style=architecture.rope_style,
            chat_template=template if isinstance(template, str) else None,
            generation_config=generation_config,
            digest=_digest(headers, files.digests),
        )

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        """Yields blocks as read-only views of the mapped file, and plain types as tensors over
        private mappings. Tensors that the converter changed are changed back, in new memory."""
        config = config_of_language(checkpoint.config)
        architecture = BY_MODEL_TYPE[config["model_type"]]
        files = _MappedFiles(checkpoint.path.parent)
        chosen = [
            _entry(checkpoint, name) for name in dict.fromkeys(weight.name for weight in wanted)
        ]
        for entry in sorted(chosen, key=lambda entry: (entry.file, entry.offset)):
            if entry.name.startswith(PARTS):
                from pegboard_pack_gguf.mmproj_delivery import delivered

                yield delivered(entry, checkpoint, files.piece)
                continue
            parts = up_projection_parts(entry, checkpoint.tensors) if architecture.is_latent else ()
            if parts:
                from pegboard_pack_gguf.delivery import up_projection

                yield up_projection(
                    entry, *(files.piece(_entry(checkpoint, part)) for part in parts)
                )
                continue
            if names := joined_parts(architecture.joined, entry.name, checkpoint.tensors):
                from pegboard_pack_gguf.delivery import changed, joined

                pieces = [
                    _delivered(files.piece(_entry(checkpoint, name)), architecture, config)
                    for name in names
                ]
                whole = joined(entry, pieces)
                change = architecture.joined_change
                yield whole if change is None else changed(whole, change, config)
                continue
            piece = files.piece(entry)
            if has_offset(architecture, entry.name) and not isinstance(piece.data, memoryview):
                piece = replace(piece, data=piece.data - architecture.norm_offset)
            yield _delivered(piece, architecture, config)


class _MappedFiles:
    """The files of a model. Each is mapped when the first tensor in it is wanted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.maps: dict[str, mmap.mmap] = {}

    def piece(self, entry: TensorEntry) -> WeightPiece:
        path = self.folder / entry.file
        data = self.maps.get(entry.file)
        if data is None:
            data = self.maps[entry.file] = _map_file(path)
        if entry.offset + entry.num_bytes > len(data):
            raise ModelError(
                f"{path} has shrunk since it was described: {entry.name!r} is past its end"
            )
        if entry.stored in PLAIN.values():
            return WeightPiece(entry.name, entry.stored, entry.shape, plain_tensor(path, entry))
        return WeightPiece(
            entry.name,
            entry.stored,
            entry.shape,
            memoryview(data)[entry.offset : entry.offset + entry.num_bytes],
        )


def find_file(root: Path) -> Path:
    """Returns the GGUF file of a model: `root` itself, or the only one (or the first shard of the
    only set) in that directory."""
    if SHARD.fullmatch(root.name) or root.is_file():
        match = SHARD.fullmatch(root.name)
        return root if match is None else root.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")
    if not root.is_dir():
        raise ModelError(f"there is no GGUF file or directory {root}")
    names = sorted(path.name for path in root.glob("*.gguf") if not path.name.startswith("mmproj"))
    firsts = [name for name in names if not (match := SHARD.fullmatch(name)) or int(match[2]) == 1]
    if len(firsts) == 1:
        return root / firsts[0]
    if not firsts:
        raise ModelError(
            f"{root} contains no GGUF file"
            + (f", only later parts of one: {', '.join(names)}" if names else "")
        )
    raise ModelError(
        f"{root} contains several models; name one of these files: {', '.join(firsts)}"
    )


def _other_shards(first: GGUFHeader) -> list[GGUFHeader]:
    """Returns the shards 2…N that belong to the first one. Only the first contains the metadata of
    the model."""
    match = SHARD.fullmatch(first.path.name)
    num_shards = first.metadata.get("split.count", 1)
    if match is None:
        if num_shards not in (0, 1):
            raise ModelError(
                f"{first.path} is one of {num_shards} parts; keep their names, like "
                "name-00001-of-00002.gguf"
            )
        return []
    if num_shards != int(match[3]):
        raise ModelError(
            f"{first.path} says that it is one of {num_shards!r} parts, but its name says "
            f"{int(match[3])}"
        )
    headers = []
    for number in range(2, num_shards + 1):
        path = first.path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        if not path.is_file():
            raise ModelError(
                f"{first.path} is the first of {num_shards} parts, and {path.name} is missing; "
                "download it too"
            )
        header = read_header(path)
        if (
            header.metadata.get("split.no") != number - 1
            or header.metadata.get("split.count") != num_shards
        ):
            raise ModelError(f"{path} is not part {number} of {num_shards} of {first.path.name}")
        headers.append(header)
    count = sum(len(header.tensors) for header in (first, *headers))
    expected = first.metadata.get("split.tensors.count", count)
    if expected != count:
        raise ModelError(
            f"the {num_shards} parts of {first.path} contain {count} tensors; {expected!r} were "
            "split"
        )
    return headers


def _index(
    headers: list[GGUFHeader], architecture: Architecture, config: Mapping[str, Any]
) -> dict[str, TensorEntry]:
    index: dict[str, TensorEntry] = {}
    for header in headers:
        for entry in tensor_entries(header, architecture, config):
            if entry.name in index:
                raise ModelError(f"{header.path}: {entry.name!r} occurs twice")
            index[entry.name] = entry
    index |= {
        entry.name: entry
        for entry in joined_entries(str(headers[0].path), index, architecture.joined)
    }
    return index


def _mmproj(
    path: Path, language: Metadata, architecture: Architecture, text: Mapping[str, Any]
) -> Mmproj:
    """Returns a tower. language, architecture, text: of its language model."""
    if architecture.layers != "model.layers":
        raise ModelError(
            f"{path}: a {architecture.class_name} with images or audio is not supported; use "
            "--weight_loader.gguf.mmproj none to serve it alone"
        )
    tokens = language.header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        tokens = []
    return Mmproj(path, language, text, tokens)


def _index_of_tower(mmproj: Mmproj, folder: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of the tower and its projector. folder: of the language model."""
    path = mmproj.header.path
    file = path.name if path.parent == folder else str(path)
    index = {entry.name: entry for entry in mmproj.entries(file)}
    joined = joined_entries(str(path), index, mmproj.projector.joined)
    return index | {entry.name: entry for entry in joined}


def _tokenizer_data(header: GGUFHeader) -> dict[str, Any]:
    """Returns everything under "tokenizer." by the rest of its name ("ggml.tokens"), and the
    settings that decide whether special tokens strip white space."""
    data = {
        key.removeprefix(PAYLOAD_PREFIX): value
        for key, value in header.metadata.items()
        if key.startswith(PAYLOAD_PREFIX)
    }
    return {**data, "name": header.metadata.get("general.name", ""), "path": str(header.path)}


def _main_dtype(tensors: Mapping[str, TensorEntry]) -> str | None:
    """Returns the type with the most bytes in matrices, or None when that is a block type or a type
    of integers."""
    sizes: dict[str, int] = {}
    for entry in tensors.values():
        if len(entry.shape) > 1:
            sizes[entry.stored] = sizes.get(entry.stored, 0) + entry.num_bytes
    main = max(sizes, key=lambda stored: sizes[stored], default="")
    return {"float64": "float32"}.get(main, main) if main in FLOATS else None


def _digest(headers: list[GGUFHeader], known: Mapping[str, str]) -> str:
    """Returns the source's own digests if it has them. Otherwise the identity consists of header,
    size and modification time, because hashing gigabytes of weights would take longer than loading
    them."""
    parts = []
    for header in headers:
        name = header.path.name
        parts.append(
            known.get(name)
            or f"{name}:{header.sha256}:{header.file_bytes}:{header.path.stat().st_mtime_ns}"
        )
    return "sha256:" + hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _entry(checkpoint: Checkpoint, name: str) -> TensorEntry:
    entry = checkpoint.tensors.get(name)
    if entry is None:
        raise ModelError(f"{checkpoint.path} has no tensor {name!r}")
    return entry


def _delivered(
    piece: WeightPiece, architecture: Architecture, config: Mapping[str, Any]
) -> WeightPiece:
    change = change_of(architecture, piece.name) if architecture.changes else None
    if change is None:
        return piece
    from pegboard_pack_gguf.delivery import changed

    return changed(piece, change, config)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot map {path}: {error}") from error


def plain_tensor(path: Path, entry: TensorEntry) -> "Tensor":
    """Returns a tensor of a plain type over its own private mapping. Torch needs writable memory,
    and a writable mapping of the whole file would count against the memory that the system can
    commit."""
    import torch

    start = entry.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    skip = entry.offset - start
    with path.open("rb") as file:
        data = mmap.mmap(
            file.fileno(), skip + entry.num_bytes, access=mmap.ACCESS_COPY, offset=start
        )
    dtype = getattr(torch, entry.stored)
    tensor = torch.frombuffer(
        data, dtype=dtype, count=entry.num_bytes // dtype.itemsize, offset=skip
    )
    return tensor.view(entry.shape)
