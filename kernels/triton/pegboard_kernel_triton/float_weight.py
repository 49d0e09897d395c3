"""A float matrix whose experts are multiplied in Triton. Torch multiplies all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pegboard.ops.linear import FloatWeight
from pegboard_kernel_triton.experts import multiply_experts

TYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonFloatWeight(FloatWeight):
    """See `FloatWeight`. The products of experts wait for nothing, so they can be captured. Experts
    of other types than `TYPES` are multiplied one by one."""

    def bind_experts(
        self, num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        if self.dtype not in TYPES:
            return super().bind_experts(num_experts, bias)
        weights = self.plain().view(num_experts, -1, self.shape[1])
        return partial(multiply_experts, weights=weights, bias=bias)
