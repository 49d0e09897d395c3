"""A float32 matrix in oneDNN's blocked layout, for x86 machines on which nothing can be compiled.

Its products are faster than those of the plain matrix from one row to some hundred rows (see the
table in docs/decisions/2026-11-21-float-linear.md). The blocked layout replaces the plain matrix,
so it takes no additional memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.ops.blocks import BlockWeight
from pegboard.ops.float_codes import CodeWeight
from pegboard.ops.linear import FloatWeight

COPY_LIMIT_BYTES = 256 * 1024**2
"""Largest matrix of which a blocked copy is kept in addition to the plain one. Both are needed for
an embedding that is also the head."""

UNPACK_ROWS = 1024
"""From this number of rows on, it is faster to unpack the matrix and multiply with the plain
one."""


class OneDNNFloatWeight(FloatWeight):
    """See `FloatWeight`. A table also keeps the plain matrix."""

    _blocked: Tensor | None = None

    def dense(self) -> Tensor:
        if self._plain is not None:
            return self._plain
        assert self._blocked is not None, "either the plain or the blocked matrix exists"
        return self._blocked.to_dense()

    def finish(self) -> None:
        assert self._plain is not None, "call plain() before finish()"
        if self.is_table:
            if self._blocked is not None:
                self._blocked = _pack(self._plain)
        elif self._plain.numel():
            self._blocked = _pack(self._plain)
            self._plain = None

    def bind(self) -> Callable[[Tensor], Tensor]:
        if self._blocked is None:
            plain = self.plain()
            if not (self.is_table and plain.numel() and plain.nbytes <= COPY_LIMIT_BYTES):
                return super().bind()
            self._blocked = _pack(plain)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        linear = functional.linear

        def forward(x: Tensor) -> Tensor:
            if x.shape[0] >= UNPACK_ROWS:
                return linear(x, self.dense())
            return multiply(x, self._blocked, None, "none", [], "")

        return forward

    def tensors(self) -> list[Tensor]:
        return [form for form in (self._plain, self._blocked) if form is not None]


class OneDNNBlockWeight(BlockWeight):
    """See `BlockWeight`. Like the reference, it dequantizes the weight in `finish`."""

    FLOAT = OneDNNFloatWeight


class OneDNNCodeWeight(CodeWeight):
    """See `CodeWeight`. Like the reference, it expands the codes in `finish`."""

    FLOAT = OneDNNFloatWeight


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)
