"""Reads a LoRA adapter in PEFT's layout.

The layout is adapter_config.json (`r`, `lora_alpha`, `use_rslora`) next to a safetensors file with the tensors
base_model.model.<module path>.lora_A.weight [rank, in] and ….lora_B.weight [out, rank].
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


def read_adapter(folder: Path, checkpoint: Checkpoint) -> tuple[float, dict[str, tuple[Tensor, Tensor]]]:
    """Return the factor of the adapter's products, and {module path: (A, B)}. checkpoint: of the base model. Raises ModelError
    for a file that is missing or damaged."""
    found = _matrices(folder / "adapter_model.safetensors")
    if checkpoint.rope_style == "pairs":
        found = {name: (a, _in_pairs(name, b, checkpoint.config)) for name, (a, b) in found.items()}
    return _scaling(folder / "adapter_config.json"), found


def _in_pairs(name: str, b: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return B with the rows of Q and K in the order of a base model that stores rotary channels in pairs."""
    sizes = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    heads = config.get(sizes.get(name.rpartition(".")[2], ""))
    if not heads or b.ndim != 2 or len(b) % (2 * heads):
        return b
    return b.view(heads, 2, -1, b.shape[1]).transpose(1, 2).reshape(b.shape)


def _scaling(path: Path) -> float:
    try:
        config = json.loads(path.read_text("utf-8")) if path.is_file() else None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is {'missing' if config is None else 'not a JSON object'}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not isinstance(alpha, int | float) or not (0 < rank < 2**31 and abs(alpha) < 2**31):
        raise ModelError(
            f"{path}: expected a rank `r` of at least 1 and a number `lora_alpha`, got {rank!r:.60} and {alpha!r:.60}"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matrices(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    if not path.is_file():
        raise ModelError(f"{path} is missing; only adapters in safetensors files can be read")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    modules = {name.removesuffix(A).removesuffix(B) for name in tensors}
    for name in [*(name for name in tensors if not name.endswith((A, B))), *(name + end for name in modules for end in (A, B))]:
        if name not in tensors or not name.endswith((A, B)):
            raise ModelError(f"{path}: {name} is {'not supported' if name in tensors else 'missing'}")
    return {name.removeprefix(PREFIX): (tensors[name + A], tensors[name + B]) for name in modules}
