"""A matrix of floats in oneDNN's blocked layout, for x86 machines on which nothing can be compiled.

Its products are faster than those of the plain matrix from one row to some hundred rows (see the
table in docs/decisions/2026-11-21-float-linear.md). The blocked layout replaces the plain matrix.
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
    """See `FloatWeight`. A table also keeps the plain matrix. 16-bit floats stay plain if the CPU
    multiplies them in hardware. Otherwise the blocked matrix is float32, which takes twice their
    memory."""

    _blocked: Tensor | None = None

    @property
    def _is_plain(self) -> bool:
        return (self.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()) or (
            self.dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()
        )

    def dense(self) -> Tensor:
        if self._plain is not None:
            return self._plain
        assert self._blocked is not None, "either the plain or the blocked matrix exists"
        return self._blocked.to_dense().to(self.dtype)

    def finish(self) -> None:
        assert self._plain is not None, "call plain() before finish()"
        if self._is_plain:
            return
        if self.is_table:
            if self._blocked is not None:
                self._blocked = _pack(self._plain)
        elif self._plain.numel():
            self._blocked = _pack(self._plain)
            self._plain = None

    def bind(self) -> Callable[[Tensor], Tensor]:
        if self._blocked is None:
            plain = self.plain()
            is_small = 4 * plain.numel() <= COPY_LIMIT_BYTES
            if self._is_plain or not (self.is_table and plain.numel() and is_small):
                return super().bind()
            self._blocked = _pack(plain)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        linear = functional.linear

        def forward(x: Tensor) -> Tensor:
            if x.shape[0] >= UNPACK_ROWS:
                assert self._blocked is not None
                return linear(x, self._blocked.to_dense())
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
    return torch.ops.mkldnn._reorder_linear_weight(weight.float(), None)
