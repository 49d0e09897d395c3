"""Ops: what the layers compute with. Each op's signature, docstring and plain-torch reference live here.

The reference is the meaning of an op, the judge of every kernel's contract test, and the last resort when no kernel plugin
is suitable. Fast versions are plugins of the `kernel` kind; layers receive whichever was chosen as `kernels[op]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pegboard.ops.activation import gelu_tanh_mul, silu_mul
from pegboard.ops.attention import paged_attention
from pegboard.ops.blocks import BlockWeight as block_weight
from pegboard.ops.linear import FloatWeight as float_weight
from pegboard.ops.lora import lora_expand, lora_shrink
from pegboard.ops.norm import add_rms_norm, layer_norm, rms_norm
from pegboard.ops.rope import rope

REFERENCES: dict[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (rms_norm, add_rms_norm, layer_norm, rope, silu_mul, gelu_tanh_mul, paged_attention, lora_shrink, lora_expand)
} | {"block_weight": block_weight, "float_weight": float_weight}
"""Every op by name with its reference. The last two are classes: a weight keeps its matrix in the layout it multiplies with."""

__all__ = ["REFERENCES", *REFERENCES]
