"""What a checkpoint says about the rounding of activations (W8A8), and when it is done."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import QuantizationSetup
from pegboard.log import get_logger
from pegboard.ops import REFERENCES
from pegboard.ops.rounding import LARGEST, LEAST, Rounding
from pegboard_weights.config import QuantConfig

log = get_logger(__name__)

SCALE = "input_scale"
"""Ending of the tensor with a static scale."""
ZERO = "input_zero_point"
"""Ending of the tensor with the zero point of a static scale."""
TYPES = {"int": "int8", "float": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class AskedRounding:
    """See `Rounding`. is_static: its scale and zero point are the tensors `input_scale` and
    `input_zero_point` of a module. If modules are merged, those are taken that hold the values of
    all, as vLLM does."""

    type: str
    group: int = 0
    is_static: bool = False
    is_symmetric: bool = True
    is_shared: bool = False

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings of the tensors that it is read from."""
        if not self.is_static:
            return ()
        return (SCALE,) if self.is_symmetric else (SCALE, ZERO)

    def rounding(self, stored: Sequence[Sequence[float]] = ()) -> Rounding:
        """Return the rounding. stored: the values of `endings` for each of the merged modules."""
        scale: float | None = None
        zero = 0
        if stored and self.is_symmetric:
            scale = max(scale for (scale,) in stored)
        elif stored and len(set(map(tuple, stored))) == 1:
            scale = stored[0][0]
            zero = round(stored[0][1])
        elif stored:
            low = min(scale * (LEAST - zero) for scale, zero in stored)
            high = max(scale * (LARGEST[self.type] - zero) for scale, zero in stored)
            scale = (high - low) / (LARGEST[self.type] - LEAST)
            zero = round(LEAST - low / scale)
        return Rounding(self.type, self.group, scale, self.is_symmetric, zero, self.is_shared)

    def __str__(self) -> str:
        columns = f" and {self.group} columns" if self.group else ""
        owner = "step" if self.is_shared else f"token{columns}"
        scale = "a stored scale" if self.is_static else f"a scale per {owner}"
        return f"{self.type} with {scale}" + ("" if self.is_symmetric else " and zero points")


def checked_scale(scale: float, name: str) -> float:
    """Return a static scale, which is divided by."""
    if not 0 < scale < math.inf:
        raise ModelError(f"tensor {name} is {scale}; this format divides by it")
    return scale


def scheme_rounding(scheme: QuantConfig | None) -> AskedRounding | None:
    """Return what `input_activations` of a group of compressed-tensors asks for. None = nothing, or
    something that is not computed: other bits, floats with zero points, groups of other sizes.
    Floats with a scale per step get one per token, as vLLM gives them."""
    if scheme is None:
        return None
    values = scheme.values
    kind = TYPES.get(str(values.get("type", "int")))
    strategy = values.get("strategy", "token" if values.get("dynamic") else "tensor")
    is_symmetric = values.get("symmetric", True) is True
    if kind is None or values.get("num_bits", 8) != 8 or not (is_symmetric or kind == "int8"):
        return None
    if not values.get("dynamic"):
        asked = AskedRounding(kind, is_static=True, is_symmetric=is_symmetric)
        return asked if strategy == "tensor" else None
    if strategy in ("token", "tensor"):
        is_shared = strategy == "tensor" and kind == "int8"
        return AskedRounding(kind, is_symmetric=is_symmetric, is_shared=is_shared)
    group = values.get("group_size")
    is_group = strategy == "group" and type(group) is int and group > 0 and group % 32 == 0
    return AskedRounding(kind, int(str(group)), is_symmetric=is_symmetric) if is_group else None


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
