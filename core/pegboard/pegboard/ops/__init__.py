"""Ops: what the layers compute with. Each op has its signature, docstring and plain-torch reference
here.

The reference defines the op. Every kernel's contract test compares with it, and it is used if no
kernel plugin is suitable. Fast versions are plugins of the `kernel` kind. Layers get the chosen one
as `kernels[op]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pegboard.ops.activation import gelu_tanh_mul, silu_mul
from pegboard.ops.blocks import BlockWeight
from pegboard.ops.experts import route, sort_by_expert, sum_experts
from pegboard.ops.float_codes import CodeWeight
from pegboard.ops.linear import FloatWeight
from pegboard.ops.lora import AdapterExchange, AdapterRows, expert_adapter_rows, lora_add
from pegboard.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from pegboard.ops.rope import rope
from pegboard.ops.sampling import sample_tokens
from pegboard.ops.states import StateRows

OPS: dict[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (
        rms_norm,
        add_rms_norm,
        layer_norm,
        add_layer_norm,
        rope,
        silu_mul,
        gelu_tanh_mul,
        route,
        sort_by_expert,
        sum_experts,
        lora_add,
        expert_adapter_rows,
        sample_tokens,
    )
}
"""Name of every op → its reference."""

WEIGHT_FORMATS: dict[str, Callable[..., Any]] = {
    "float_weight": FloatWeight,
    "block_weight": BlockWeight,
    "code_weight": CodeWeight,
}
"""Name of every weight format → its reference: a class that holds a matrix in the layout that it is
multiplied in."""

REFERENCES = OPS | WEIGHT_FORMATS

INVARIANT = frozenset(
    {"rope", "silu_mul", "gelu_tanh_mul", "sort_by_expert", "expert_adapter_rows"}
)
"""The references whose results do not depend on the batch (see `spec.BATCH_INVARIANT`): they
compute number by number, or copy. torch's products and sums are cut by the number of rows."""

__all__ = [
    "INVARIANT",
    "OPS",
    "REFERENCES",
    "WEIGHT_FORMATS",
    "AdapterExchange",
    "AdapterRows",
    "BlockWeight",
    "CodeWeight",
    "FloatWeight",
    "StateRows",
    *OPS,
]
