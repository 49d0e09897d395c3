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


def load_adapter(layers: Iterable[Layer], slot: int, adapter: AdapterRef) -> None:
    """Copy an adapter into a slot of every layer. Raises ModelError if it does not fit the model or its files are damaged."""
    folder = Path(adapter.path)
    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"adapter {adapter.name!r}: cannot read {folder / 'adapter_config.json'}: {error}") from error
    weights = _read(folder, adapter)
    rank = int(config["r"])
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    used: set[str] = set()
    for layer in layers:
        if isinstance(layer, Linear) and layer.adapters is not None:
            own = {name: weights[name] for name in layer.adapters.modules if name in weights}
            layer.adapters.load(slot, own, scaling)
            used |= set(own)
    unknown = sorted(set(weights) - used)
    if unknown:
        raise ModelError(f"adapter {adapter.name!r} changes modules that this model does not have: {', '.join(unknown[:5])}")


def _read(folder: Path, adapter: AdapterRef) -> dict[str, tuple[Tensor, Tensor]]:
    """Return module path → (A, B)."""
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ModelError("reading adapters needs safetensors: pip install safetensors") from error
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ModelError(f"adapter {adapter.name!r}: {path} is missing; only adapters in safetensors files can be read")
    tensors = load_file(path)
    found = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            found[module] = (a, tensors[name.replace(".lora_A.", ".lora_B.")])
    return found
