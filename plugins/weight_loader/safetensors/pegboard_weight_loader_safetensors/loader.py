"""Weight loader `safetensors`: describes a Hugging Face directory without torch, and streams its
tensors from mapped files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pegboard.data.checkpoint_file import read_object
from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TensorEntry,
    TokenizerPayload,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard_weight_loader_safetensors.config_values import check_config
from pegboard_weight_loader_safetensors.header import Header, read_header
from pegboard_weight_loader_safetensors.hf_files import (
    architectures,
    chat_template,
    config_dtype,
    quantization_config,
    read_config,
    read_optional,
    with_defaults,
)

if TYPE_CHECKING:
    from pegboard.interfaces.model_source import LocalFiles

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 64 * 1024 * 1024
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
BASE_MODELS = {"layers.0.": "model.", "h.0.": "transformer."}
"""How a tensor of the first layer is named in the checkpoint of a base model, and what is before it
in that of a whole model."""
COMPUTE_DTYPES = ("float32", "bfloat16", "float16", "float64")


class SafetensorsLoader:
    def __init__(self, options: None, setup: WeightLoaderSetup) -> None:
        pass

    def describe(self, files: "LocalFiles") -> Checkpoint:
        directory = files.root if files.root.is_dir() else files.root.parent
        config = read_config(directory)
        headers, tensors = _read_index(files.root)
        tensors = _of_whole_model(tensors)
        check_config(directory / "config.json", config, tensors.values())
        return Checkpoint(
            format="safetensors",
            path=directory,
            config=with_defaults(config),
            architectures=architectures(config, directory),
            tensors=tensors,
            tokenizer=TokenizerPayload("hf", directory=directory),
            quantization=quantization_config(config, directory),
            dtype=config_dtype(config) or _main_dtype(tensors),
            chat_template=chat_template(directory),
            generation_config=read_optional(directory / "generation_config.json"),
            digest=_digest(directory, headers, files.digests),
        )

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        """Yields views of the mapped files."""
        from safetensors import SafetensorError, safe_open

        for file, entries in _by_file(checkpoint, wanted).items():
            path = checkpoint.path / file
            try:
                with safe_open(path, framework="pt") as opened:
                    for entry in entries:
                        data = opened.get_tensor(entry.key or entry.name)
                        yield WeightPiece(entry.name, entry.stored, tuple(data.shape), data)
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} has changed since it was described, or is damaged: {error}"
                ) from error


def _of_whole_model(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors under the names that a model with a head has. Some checkpoints were saved
    from the model without its head (GPT-2, Qwen3-Embedding), whose names lack the first part."""
    for first, prefix in BASE_MODELS.items():
        if any(name.startswith(first) for name in tensors):
            names = {
                name: name if name.startswith("lm_head.") else prefix + name for name in tensors
            }
            return {
                full: replace(tensors[name], name=full, key=name) for name, full in names.items()
            }
    return dict(tensors)


def _by_file(
    checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
) -> dict[str, list[TensorEntry]]:
    """Return the distinct tensors of each file, ordered by their position in the file."""
    chosen = []
    for name in dict.fromkeys(weight.name for weight in wanted):
        entry = checkpoint.tensors.get(name)
        if entry is None:
            raise ModelError(f"{checkpoint.path} has no tensor {name!r}, which the model needs")
        chosen.append(entry)
    files: dict[str, list[TensorEntry]] = {}
    for entry in sorted(chosen, key=lambda entry: (entry.file, entry.offset)):
        files.setdefault(entry.file, []).append(entry)
    return files


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
        return _read_shards(indexes[0])
    path = root / SINGLE if (root / SINGLE).is_file() else _only_file(root)
    header = read_header(path)
    return {path.name: header}, header.tensors


def _read_shards(index: Path) -> tuple[dict[str, Header], dict[str, TensorEntry]]:
    weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise ModelError(f"{index} has no usable weight_map; expected {{tensor name: file name}}")
    headers: dict[str, Header] = {}
    for file in sorted(set(weight_map.values())):
        path = PurePosixPath(file)
        if (
            len(path.parts) != 1
            or ".." in path.parts
            or "\\" in file
            or ":" in file
            or "\0" in file
            or path.suffix != ".safetensors"
        ):
            raise ModelError(
                f"{index} names the file {file!r}; expected a .safetensors file next to the index"
            )
        if not (index.parent / file).is_file():
            raise ModelError(
                f"{index} names {file}, which is missing: the download is incomplete, fetch it "
                "again"
            )
        headers[file] = read_header(index.parent / file)
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
            f"{root} contains only pickled weights ({', '.join(pickled[:4])}). Unpickling can run "
            "any code, so Pegboard does not read them. If you trust the files, convert them "
            "once: transformers' "
            "AutoModelForCausalLM.from_pretrained(dir).save_pretrained(new_dir)"
        )
    raise ModelError(f"{root} contains no weights: expected {SINGLE}, or {INDEX} and its shards")


def _main_dtype(tensors: Mapping[str, TensorEntry]) -> str | None:
    """Return the floating-point type with the most bytes, or None if there is none."""
    sizes: dict[str, int] = {}
    for entry in tensors.values():
        sizes[entry.stored] = sizes.get(entry.stored, 0) + entry.num_bytes
    return max(
        (name for name in COMPUTE_DTYPES if name in sizes),
        key=lambda name: sizes[name],
        default=None,
    )


def _digest(directory: Path, headers: Mapping[str, Header], known: Mapping[str, str]) -> str:
    """Return a digest of the source's digests, if it has any. Otherwise hash the header, size and
    modification time of every file: hashing gigabytes of weights would take longer than loading
    them."""
    parts: list[Any] = []
    for name, header in sorted(headers.items()):
        stamp = f"{header.sha256}:{header.file_bytes}:{(directory / name).stat().st_mtime_ns}"
        parts.append(f"{name}:{known.get(name) or stamp}")
    parts.append(hashlib.sha256((directory / "config.json").read_bytes()).hexdigest())
    return "sha256:" + hashlib.sha256("\n".join(parts).encode()).hexdigest()
