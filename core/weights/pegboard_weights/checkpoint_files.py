"""What weight loaders of Hugging Face directories share: the description of a checkpoint, from its
JSON files and the tensors in its weight files. This module does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from pegboard.data.checkpoint_file import read_object
from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TensorEntry,
    TokenizerPayload,
    WantedWeight,
)
from pegboard_weights.config_values import check_config
from pegboard_weights.hf_files import (
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

MAX_INDEX_BYTES = 64 * 1024 * 1024
BASE_MODELS = {
    "embed_in.": "gpt_neox.",
    "embeddings.weight": "backbone.",
    "decoder.embed_tokens.": "model.",
    "layers.0.": "model.",
    "h.0.": "transformer.",
}
"""How the name of a tensor begins in the checkpoint of a base model → what is before it in that of
a whole model. The first that fits counts."""
HEADS = ("lm_head.", "score.")
"""What a whole model has beside its base model."""
COMPUTE_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """path: the file that the config was read from. config: in the shape of Hugging Face.
    rope_style: see Checkpoint."""

    path: Path
    config: dict[str, Any]
    rope_style: Literal["halves", "pairs"] = "halves"


def described(
    format: str,
    files: "LocalFiles",
    tensors: Mapping[str, TensorEntry],
    stamps: Mapping[str, str],
    source: ConfigSource | None = None,
) -> Checkpoint:
    """Return the description of a checkpoint. format: the name of the loader. tensors: as the files
    name them. stamps: file name → what changes with the content of the file, used where the source
    knows no digest. source: where the config is from, if not from config.json. Raises ModelError
    for a config that is missing or damaged."""
    directory = files.root if files.root.is_dir() else files.root.parent
    source = source or ConfigSource(directory / "config.json", read_config(directory))
    config = source.config
    tensors = of_whole_model(tensors)
    check_config(source.path, config, tensors.values())
    return Checkpoint(
        format=format,
        path=directory,
        config=with_defaults(config),
        architectures=architectures(config, directory),
        tensors=tensors,
        tokenizer=TokenizerPayload("hf", directory=directory),
        quantization=quantization_config(config, directory),
        rope_style=source.rope_style,
        dtype=config_dtype(config) or main_dtype(tensors),
        chat_template=chat_template(directory),
        generation_config=read_optional(directory / "generation_config.json"),
        digest=digest(source.path, stamps, files.digests),
    )


def of_whole_model(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors under the names that a model with a head has. Some checkpoints were saved
    from the model without its head (GPT-2, Qwen3-Embedding), whose names lack the first part."""
    for first, prefix in BASE_MODELS.items():
        if any(name.startswith(first) for name in tensors):
            names = {name: name if name.startswith(HEADS) else prefix + name for name in tensors}
            return {
                full: replace(tensors[name], name=full, key=tensors[name].key or name)
                for name, full in names.items()
            }
    return dict(tensors)


def by_file(checkpoint: Checkpoint, wanted: Iterable[WantedWeight]) -> dict[str, list[TensorEntry]]:
    """Return the distinct tensors of each file, ordered by their position in the file. Raises
    ModelError if the checkpoint lacks one."""
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


def read_weight_map(index: Path, endings: tuple[str, ...]) -> dict[str, str]:
    """Return the file of each tensor, as an index file says. endings: of these files. Raises
    ModelError for a damaged index, and for a file that is missing or not next to the index."""
    weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise ModelError(f"{index} has no usable weight_map; expected {{tensor name: file name}}")
    for file in sorted(set(weight_map.values())):
        path = PurePosixPath(file)
        if (
            len(path.parts) != 1
            or ".." in path.parts
            or "\\" in file
            or ":" in file
            or "\0" in file
            or path.suffix not in endings
        ):
            raise ModelError(
                f"{index} names the file {file!r}; expected a {' or '.join(endings)} file next to "
                "the index"
            )
        if not (index.parent / file).is_file():
            raise ModelError(
                f"{index} names {file}, which is missing: the download is incomplete, fetch it "
                "again"
            )
    return weight_map


def main_dtype(tensors: Mapping[str, TensorEntry]) -> str | None:
    """Return the floating-point type with the most bytes, or None if there is none."""
    sizes: dict[str, int] = {}
    for entry in tensors.values():
        sizes[entry.stored] = sizes.get(entry.stored, 0) + entry.num_bytes
    return max(
        (name for name in COMPUTE_DTYPES if name in sizes),
        key=lambda name: sizes[name],
        default=None,
    )


def digest(config: Path, stamps: Mapping[str, str], known: Mapping[str, str]) -> str:
    """Return a digest of the config file and of the weight files: of the source's digests, if it
    has any, otherwise of the stamps. Hashing gigabytes of weights would take longer than loading
    them."""
    parts = [f"{name}:{known.get(name) or stamp}" for name, stamp in sorted(stamps.items())]
    parts.append(hashlib.sha256(config.read_bytes()).hexdigest())
    return "sha256:" + hashlib.sha256("\n".join(parts).encode()).hexdigest()
