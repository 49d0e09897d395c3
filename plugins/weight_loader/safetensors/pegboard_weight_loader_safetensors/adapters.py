"""Reads a LoRA adapter in PEFT's layout: adapter_config.json next to adapter_model.safetensors.

The tensors of a linear layer are base_model.model.<module path>.lora_A.weight [rank, in] and
….lora_B.weight [out, rank]. An embedding has ….lora_embedding_A [rank, vocab] and
….lora_embedding_B [hidden, rank]. The experts of a layer have such matrices one by one, or together
(`target_parameters`): A [experts · rank, in] and B [out, rank · experts] with the names ….experts
and ….experts.base_layer. If embeddings or the head are changed, PEFT also writes the weights of the
base model, as ….base_layer.weight. They are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint, TensorEntry
from pegboard_weight_loader_safetensors.adapter_config import Scaling, read_scaling
from pegboard_weights.safetensors_header import read_header

PREFIX = "base_model.model."
BASE = ".base_layer.weight"
ENDINGS = {".lora_A.weight": 0, ".lora_B.weight": 1, ".lora_embedding_A": 0, ".lora_embedding_B": 1}
"""Ending of a tensor's name → 0 for A, 1 for B."""
TYPES = ("float32", "float16", "bfloat16", "float64")
MAX_BYTES = 1 << 34
"""Larger adapters are refused before they are read."""
MAX_PATH = 400
"""The most characters of a module's path."""

Pair = tuple[Tensor, Tensor]


def read_adapter(folder: Path, checkpoint: Checkpoint) -> tuple[float, dict[str, Pair]]:
    """Return the factor of the adapter's products, and {module path: (A, B)} in the types of the
    file. checkpoint: of the base model. If modules have different factors, the returned factor is
    1, and each B (float32) is already scaled. Raises ModelError for a file that is missing or
    damaged, or that asks for what is not supported."""
    scaling = read_scaling(folder / "adapter_config.json")
    path = folder / "adapter_model.safetensors"
    names = _names(path, checkpoint)
    factors = {module: _factor(path, module, pair, scaling) for module, pair in names.items()}
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    pairs = {module: (tensors[a.name], tensors[b.name]) for module, (a, b) in names.items()}
    if checkpoint.rope_style == "pairs":
        config = checkpoint.config.get("text_config", checkpoint.config)
        pairs = {name: (a, _in_pairs(name, b, config)) for name, (a, b) in pairs.items()}
    factor = 1.0
    if len(set(factors.values())) == 1:
        factor = next(iter(factors.values()))
    else:
        pairs = {name: (a, b.float() * factors[name]) for name, (a, b) in pairs.items()}
    first = _missing_part(pairs, checkpoint)
    return factor, {first + name: pair for name, pair in pairs.items()}


def _factor(
    path: Path, module: str, pair: tuple[TensorEntry, TensorEntry], scaling: Scaling
) -> float:
    a, b = pair
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise ModelError(
            f"{path}: A of {module} has the shape {list(a.shape)}, and B has {list(b.shape)}; "
            "expected [rank, in] and [out, rank]"
        )
    experts = module.removesuffix(".base_layer")
    if experts.endswith(".experts"):  # the matrices of all experts
        rank = scaling.rank_of(experts)
        if a.shape[0] % rank:
            raise ModelError(
                f"{path}: A of {module} has {a.shape[0]} rows, which are not a multiple of the "
                f"rank {rank}"
            )
        return scaling.of(experts, rank)
    return scaling.of(module, a.shape[0])


def _names(path: Path, checkpoint: Checkpoint) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """Return A and B of every module, from the header alone."""
    if not path.is_file():
        pickled = path.with_suffix(".bin").is_file()
        message = (
            f"{path.stem}.bin is a pickle, which is never read"
            if pickled
            else "only safetensors files can be read"
        )
        raise ModelError(f"{path} is missing; {message}")
    header = read_header(path)
    if header.file_bytes > MAX_BYTES:
        raise ModelError(
            f"{path} has {header.file_bytes} bytes; an adapter has at most {MAX_BYTES}"
        )
    pairs: dict[str, dict[int, TensorEntry]] = {}
    for name, entry in header.tensors.items():
        if name.endswith(BASE) and _is_of_base(name, entry, checkpoint):
            continue
        ending = next((end for end in ENDINGS if name.endswith(end)), None)
        module = name.removesuffix(ending or "").removeprefix(PREFIX)
        if ending is None or entry.stored not in TYPES or len(module) > MAX_PATH:
            raise ModelError(
                f"{path}: {name[:MAX_PATH]} ({entry.stored}) is not supported{_reason(name)}"
            )
        if pairs.setdefault(module, {}).setdefault(ENDINGS[ending], entry) is not entry:
            raise ModelError(f"{path}: {module} has the matrix {'AB'[ENDINGS[ending]]} twice")
    for module, pair in pairs.items():
        if len(pair) != 2:
            raise ModelError(f"{path}: {module}.lora_{'B' if 0 in pair else 'A'}.weight is missing")
    if not pairs:
        raise ModelError(f"{path} has no tensors")
    return {module: (pair[0], pair[1]) for module, pair in pairs.items()}


def _missing_part(modules: Collection[str], checkpoint: Checkpoint) -> str:
    """Return what the modules' names lack: those of an adapter for a model without a head may lack
    the first part. "" = nothing, or it is not certain."""
    known = {name.rpartition(".")[0] for name in checkpoint.tensors}
    if not known.isdisjoint(modules):
        return ""
    parts = {name.partition(".")[0] for name in known}
    fits = [part for part in parts if any(f"{part}.{name}" in known for name in modules)]
    return f"{fits[0]}." if len(fits) == 1 else ""


def _is_of_base(name: str, entry: TensorEntry, checkpoint: Checkpoint) -> bool:
    """Return whether a tensor can be the base model's. It has another shape if the adapter adds
    tokens."""
    known = checkpoint.tensors.get(f"{name.removeprefix(PREFIX).removesuffix(BASE)}.weight")
    return known is None or known.shape == entry.shape


def _reason(name: str) -> str:
    if "magnitude_vector" in name:
        return ": it belongs to a DoRA adapter"
    if name.endswith(".bias"):
        return ": adapters that change biases are not supported"
    if name.endswith(".weight") and ".lora_" not in name:
        return (
            ": it is a whole weight, as of modules_to_save or of new tokens; merge it into the "
            "base model"
        )
    return ""


def _in_pairs(name: str, b: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return B with the rows of Q and K in the order of a base model that stores rotary channels in
    pairs."""
    sizes = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    heads = config.get(sizes.get(name.rpartition(".")[2], ""))
    if not heads or len(b) % (2 * heads):
        return b
    return b.view(heads, 2, -1, b.shape[1]).transpose(1, 2).reshape(b.shape)
