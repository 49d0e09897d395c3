"""Reads a LoRA adapter from a GGUF file.

The file has `general.type` "adapter", `adapter.type` "lora" and `adapter.lora.alpha`. Its tensors
have the names of the base model with the endings .lora_a [rank, in] and .lora_b [out, rank]. The
rows of .lora_b are in the order of a base model in GGUF.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint, TensorEntry, WeightPiece
from pegboard_pack_gguf.delivery import changed
from pegboard_pack_gguf.dequantize import dequantize_into
from pegboard_pack_gguf.ggml_types import PLAIN
from pegboard_pack_gguf.header import GGUFHeader, GGUFTensor, read_header
from pegboard_pack_gguf.hf_config import config_of_language
from pegboard_pack_gguf.loader import plain_tensor
from pegboard_pack_gguf.metadata import Metadata
from pegboard_pack_gguf.table_parts import UNPERMUTE, Architecture, Change
from pegboard_pack_gguf.tables import ARCHITECTURES

_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?(\w+)\.weight\.(lora_[ab])")
MAX_BYTES = 1 << 34
"""Larger adapters are refused before they are read."""

Pair = tuple[Tensor, Tensor]


def read_adapter(folder: Path, checkpoint: Checkpoint) -> tuple[float, dict[str, Pair]]:
    """Return the factor of the adapter's products, and {module path: (A [rank, in], B [out,
    rank])}, float32. checkpoint: of the base model. Raises ModelError for a file that is damaged,
    or that is not an adapter of such a model."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"{folder} has {len(files)} GGUF files; an adapter is one")
    header = read_header(files[0])
    architecture = _architecture(header)
    alpha = Metadata(header, "adapter.lora").number("alpha")
    if sum(tensor.num_bytes for tensor in header.tensors) > MAX_BYTES:
        raise ModelError(f"{header.path} is larger than any LoRA adapter")
    parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for tensor in header.tensors:
        path, part, ending = _place(header, tensor, architecture)
        parts.setdefault((path, part), {})[ending] = _values(header, tensor)
    pairs: dict[str, Pair] = {}
    for (path, part), pair in parts.items():
        if len(pair) != 2:
            raise ModelError(
                f"{header.path}: {path} lacks {'lora_b' if 'lora_a' in pair else 'lora_a'}"
            )
        a = pair["lora_a"]
        b = pair["lora_b"]
        if a.shape[0] != b.shape[1]:
            raise ModelError(
                f"{header.path}: the ranks of {path} differ: {a.shape[0]} and {b.shape[1]}"
            )
        scaled = b * (alpha / a.shape[0])
        if part in architecture.split:
            pairs |= _taken_apart(header, path, architecture.split[part], a, scaled, checkpoint)
            continue
        change = _change(architecture, part, checkpoint)
        if change is not None:
            piece = WeightPiece(f"{path}.weight", "float32", tuple(scaled.shape), scaled)
            scaled = _tensor(changed(piece, change, config_of_language(checkpoint.config)))
        pairs[path] = (a, scaled)
    return 1.0, pairs


def _architecture(header: GGUFHeader) -> Architecture:
    metadata = header.metadata
    kind = metadata.get("general.type")
    form = metadata.get("adapter.type")
    if kind != "adapter" or form != "lora":
        raise ModelError(
            f"{header.path} is not a LoRA adapter: general.type is {kind!r}, and adapter.type is "
            f"{form!r}"
        )
    if "adapter.alora.invocation_tokens" in metadata:
        raise ModelError(
            f"{header.path} is an adapter that works from certain tokens on (aLoRA), which is not "
            "supported"
        )
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{header.path} is an adapter of a model of the architecture {name!r}, which is not "
            "supported"
        )
    return ARCHITECTURES[name]


def _place(
    header: GGUFHeader, tensor: GGUFTensor, architecture: Architecture
) -> tuple[str, str, str]:
    """Returns the path of the module on Hugging Face, its GGUF name, and "lora_a" or "lora_b"."""
    match = _NAME.fullmatch(tensor.name)
    names = architecture.top if match is None or match[1] is None else architecture.layer
    known = match is not None and (match[2] in names or match[2] in architecture.split)
    if match is None or not known or len(tensor.shape) != 2:
        raise ModelError(
            f"{header.path}: tensor {tensor.name!r} {tensor.shape} is not supported in an adapter"
        )
    prefix = f"{architecture.layers}.{int(match[1])}." if match[1] is not None else ""
    return prefix + names.get(match[2], match[2]), match[2], match[3]


def _change(architecture: Architecture, part: str, checkpoint: Checkpoint) -> Change | None:
    """Returns what turns the rows of a base model in GGUF into those of this base model."""
    if architecture.rope_style == "pairs":
        return None if checkpoint.rope_style == "pairs" else UNPERMUTE.get(part)
    return architecture.changes.get(part)


def _taken_apart(
    header: GGUFHeader,
    path: str,
    names: tuple[str, str, str],
    a: Tensor,
    b: Tensor,
    checkpoint: Checkpoint,
) -> dict[str, Pair]:
    """Returns the adapters of Q, K and V, which are stored one after the other with the same A."""
    config = config_of_language(checkpoint.config)
    heads = [
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["num_key_value_heads"],
    ]
    total = sum(heads)
    if len(b) % total:
        raise ModelError(
            f"{header.path}: {path} has {len(b)} rows, which are not {total} equal heads"
        )
    rows = [count * (len(b) // total) for count in heads]
    prefix = path.rpartition(".")[0]
    return {
        f"{prefix}.{name}": (a, rows_of) for name, rows_of in zip(names, b.split(rows), strict=True)
    }


def _values(header: GGUFHeader, tensor: GGUFTensor) -> Tensor:
    entry = TensorEntry(
        tensor.name,
        tensor.shape,
        tensor.type.stored,
        header.path.name,
        tensor.offset,
        tensor.num_bytes,
    )
    if tensor.type.name in PLAIN:
        return plain_tensor(header.path, entry).float()
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.num_bytes)
    values = torch.empty(tensor.shape)
    dequantize_into(memoryview(data), tensor.type.stored, values)
    return values


def _tensor(piece: WeightPiece) -> Tensor:
    assert isinstance(piece.data, Tensor)
    return piece.data
