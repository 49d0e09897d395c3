"""Float matrices. Experts are multiplied in Triton. Torch multiplies all others, unless results
must be batch invariant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.ops.linear import FloatWeight
from pegboard_kernel_triton.experts import multiply_experts
from pegboard_kernel_triton.float_product import multiply_floats

TYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonFloatWeight(FloatWeight):
    """See `FloatWeight`. The products of experts wait for nothing, so they can be captured. Experts
    of other types than `TYPES` are multiplied one by one."""

    IS_INVARIANT = False

    def bind_experts(
        self, num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        if self.dtype not in TYPES:
            return super().bind_experts(num_experts, bias)
        weights = self.plain().view(num_experts, -1, self.shape[1])
        return partial(multiply_experts, weights=weights, bias=bias, is_invariant=self.IS_INVARIANT)


class InvariantFloatWeight(TritonFloatWeight):
    """It is batch invariant: all products have tiles of one size. Slower than torch's, most of all
    for prompts. Refuses types that only torch multiplies."""

    IS_INVARIANT = True

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        activations: torch.dtype | None = None,
    ) -> None:
        if dtype not in TYPES:
            raise ConfigError(
                f"batch_invariant: weights of the type {dtype} are multiplied by torch, whose "
                f"results depend on the batch; known: {', '.join(map(str, TYPES))}"
            )
        super().__init__(shape, dtype, device, is_table, activations)

    def _multiply(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        return partial(multiply_floats, weight=weight)
