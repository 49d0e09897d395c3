"""From `quantization` in Mistral's params.json to a config's quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.errors import ModelError, brief
from pegboard_weight_loader_mistral.names import hugging_face_name

ACTIVATIONS = {"TENSOR": "static", "NO_SCALES": "dynamic", None: "static"}
"""qscheme_act → how activations are rounded. `TENSOR` has a scale per module in the checkpoint."""


def quantization_of(path: Path, block: Any) -> dict[str, Any]:
    """Return the part of a config that says how weights are stored. path: of params.json. block:
    its value of `quantization`; None = not quantized. Raises ModelError for a form that is not
    known."""
    if not block:
        return {}
    if isinstance(block, Mapping):
        form = block.get("qformat_weight")
        activations = block.get("qscheme_act")
        if form == "fp8_e4m3" and activations in ACTIVATIONS:
            scheme = ACTIVATIONS[activations]
            return {"quantization_config": {"quant_method": "fp8", "activation_scheme": scheme}}
        method = str(block.get("quant_method", "")).lower().replace("_", "-")
        if method == "compressed-tensors" or (not method and "config_groups" in block):
            return {"quantization_config": _renamed(block)}
    raise ModelError(
        f"{path}: quantization is {brief(block)}; expected qformat_weight 'fp8_e4m3' with "
        "qscheme_act 'TENSOR' or 'NO_SCALES', or the format of compressed-tensors; use the model "
        "in Hugging Face layout"
    )


def _renamed(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block with the names of modules that it leaves out in Hugging Face layout."""
    ignored = block.get("ignore")
    listed = {"ignore": [_module(each) for each in ignored]} if isinstance(ignored, list) else {}
    return {**block, "quant_method": "compressed-tensors", **listed}


def _module(name: Any) -> Any:
    known = hugging_face_name(f"{name}.weight")
    return name if known is None else known.removesuffix(".weight")
