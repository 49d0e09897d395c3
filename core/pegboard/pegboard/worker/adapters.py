"""Reads a LoRA adapter in PEFT's layout and copies it into the layers' slots.

The layout is adapter_config.json (`r`, `lora_alpha`, `use_rslora`) next to a safetensors file with the tensors
base_model.model.<module path>.lora_A.weight [rank, in] and ….lora_B.weight [out, rank].
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from pegboard.data.request import AdapterRef
from pegboard.errors import ModelError
from pegboard.layers import Layer, Linear

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


def load_adapter(layers: Iterable[Layer], slot: int, adapter: AdapterRef) -> str | None:
    """Copy an adapter into a slot of every layer. Return None, or why that is not possible: a file is missing or damaged, or it
    does not fit the model. A slot that a failed load has begun to fill is not used before another load fills it."""
    try:
        folder = Path(adapter.path)
        scaling, weights = _scaling(folder / "adapter_config.json"), _read(folder / "adapter_model.safetensors")
        used: set[str] = set()
        for layer in layers:
            if isinstance(layer, Linear) and layer.adapters is not None:
                own = {name: weights[name] for name in layer.adapters.modules if name in weights}
                layer.adapters.load(slot, own, scaling)
                used |= set(own)
        unknown = sorted(set(weights) - used)
        if unknown:
            raise ModelError(f"it changes modules that this model does not have: {', '.join(unknown[:5])}")
    except (ModelError, OSError, ValueError, TypeError) as error:
        return f"adapter {adapter.name!r}: {error}"
    return None


def _scaling(path: Path) -> float:
    """Return the factor of the adapter's product."""
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


def _read(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return module path → (A, B)."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ModelError("reading adapters needs safetensors: pip install safetensors") from error
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
