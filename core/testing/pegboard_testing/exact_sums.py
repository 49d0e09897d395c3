"""A check that torch adds up no floats, because a GPU chooses the order by the number of rows. What
is batch invariant there leaves this to kernels, or adds number by number.

with OnlyExactSums():
    …
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SUMS = frozenset(
    (
        *("sum", "cumsum", "mean", "var", "std", "var_mean", "prod", "cumprod", "trace"),
        *("norm", "vector_norm", "linalg_vector_norm", "rms_norm", "layer_norm", "group_norm"),
        *("softmax", "log_softmax", "logsumexp", "logcumsumexp", "scaled_dot_product_attention"),
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "linear", "bilinear"),
        *("addmm", "addmm_", "baddbmm", "addbmm", "addmv", "einsum", "tensordot", "inner"),
        *("conv1d", "conv2d", "conv3d", "index_add_", "scatter_add_", "scatter_reduce_"),
    )
)


class OnlyExactSums(TorchFunctionMode):
    """Inside, these functions refuse floats. Sums of whole numbers are exact in any order."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in SUMS:
            with torch._C.DisableTorchFunction():
                are_exact = name in ("sum", "cumsum") and _is_whole(args[0])
            assert are_exact, f"{name} adds up floats in torch"
        return function(*args, **(kwargs or {}))


def _is_whole(x: Tensor) -> bool:
    return not x.is_floating_point() or bool((x == x.trunc()).all())
