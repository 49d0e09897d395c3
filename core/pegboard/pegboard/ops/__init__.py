"""Ops: what the layers compute with. Each op's signature, docstring and plain-torch reference live here.

The reference is the meaning of an op, the judge of every kernel's contract test, and the last resort when no kernel plugin
is suitable. Fast versions are plugins of the `kernel` kind; layers receive whichever was chosen as `kernels[op]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pegboard.ops.activation import gelu_tanh_mul, silu_mul
from pegboard.ops.attention import paged_attention
from pegboard.ops.blocks import BlockWeight
from pegboard.ops.linear import FloatWeight
from pegboard.ops.lora import lora_expand, lora_shrink
from pegboard.ops.norm import add_rms_norm, rms_norm
from pegboard.ops.rope import rope
from pegboard.ops.sampling import sample_tokens

OPS: dict[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (
        rms_norm,
        add_rms_norm,
        rope,
        silu_mul,
        gelu_tanh_mul,
        paged_attention,
        lora_shrink,
        lora_expand,
        sample_tokens,
    )
}
"""Every op by name with its reference."""

WEIGHT_FORMATS: dict[str, Callable[..., Any]] = {"float_weight": FloatWeight, "block_weight": BlockWeight}
"""Classes that hold a matrix in the layout it is multiplied with, by name with their reference."""

REFERENCES = OPS | WEIGHT_FORMATS

__all__ = ["OPS", "REFERENCES", "WEIGHT_FORMATS", "BlockWeight", "FloatWeight", *OPS]
