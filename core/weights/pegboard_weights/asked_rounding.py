"""What a checkpoint says about the rounding of activations (W8A8), and when it is done."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import QuantizationSetup
from pegboard.log import get_logger
from pegboard.ops import REFERENCES
from pegboard.ops.rounding import Rounding
from pegboard_weights.config import QuantConfig

log = get_logger(__name__)

SCALE = "input_scale"
"""Ending of the tensor with a static scale."""
TYPES = {"int": "int8", "float": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class AskedRounding:
    """See `Rounding`. is_static: its scale is the tensor `input_scale` of a module. If modules are
    merged, the largest one is taken, as vLLM does."""

    type: str
    group: int = 0
    is_static: bool = False

    def rounding(self, scale: float | None = None) -> Rounding:
        """Return the rounding with the stored scale."""
        return Rounding(self.type, self.group, scale)

    def __str__(self) -> str:
        columns = f" and {self.group} columns" if self.group else ""
        scale = "a stored scale" if self.is_static else f"a scale per token{columns}"
        return f"{self.type} with {scale}"


def checked_scale(scale: float, name: str) -> float:
    """Return a static scale, which is divided by."""
    if not 0 < scale < math.inf:
        raise ModelError(f"tensor {name} is {scale}; this format divides by it")
    return scale


def scheme_rounding(scheme: QuantConfig | None) -> AskedRounding | None:
    """Return what `input_activations` of a group of compressed-tensors asks for. None = nothing, or
    something that is not computed: other bits, zero points, groups of integers."""
    if scheme is None:
        return None
    values = scheme.values
    kind = TYPES.get(str(values.get("type", "int")))
    strategy = values.get("strategy", "token" if values.get("dynamic") else "tensor")
    is_symmetric = values.get("symmetric", True) is True
    if kind is None or values.get("num_bits", 8) != 8 or not is_symmetric:
        return None
    if not values.get("dynamic"):
        return AskedRounding(kind, is_static=True) if strategy == "tensor" else None
    if strategy == "token":
        return AskedRounding(kind)
    group = values.get("group_size")
    is_group = strategy == "group" and type(group) is int and group > 0 and group % 32 == 0
    return AskedRounding(kind, int(str(group))) if is_group else None


def choose_rounding(
    setup: QuantizationSetup, method: str, form: str, asked: Collection[AskedRounding | None]
) -> frozenset[AskedRounding]:
    """Return which of the roundings are done, and say so in the log. form: the weight format whose
    products have them."""
    kernel: Any = setup.kernels[form] if setup.rounding != "none" else None
    chosen = set()
    for each in dict.fromkeys(asked):
        if each is None:
            continue
        if kernel is not None and (
            setup.rounding == "checkpoint" or kernel.takes(each.rounding(), True)
        ):
            chosen.add(each)
            log.info("%s: activations are rounded to %s, as the checkpoint asks", method, each)
        else:
            log.info(
                "%s: activations are not rounded to %s, although the checkpoint asks for it; "
                "activation_quantization=%s",
                method,
                each,
                setup.rounding,
            )
    return frozenset(chosen)


def kernel_of(setup: QuantizationSetup, form: str, rounding: Rounding | None) -> Any:
    """Return the class that holds a weight: the chosen one, or the reference if that does not
    compute with the rounding."""
    kernel: Any = setup.kernels[form]
    is_taken = rounding is None or kernel.takes(rounding, False)
    return kernel if is_taken else REFERENCES[form]
