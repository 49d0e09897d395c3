"""A float32 matrix in oneDNN's blocked layout, for x86 machines where nothing can be compiled.

It beats the plain one from one row to some hundred (docs/decisions/2026-11-21-float-linear.md has the table). The blocked layout
replaces the plain matrix, it does not double it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.ops.blocks import BlockWeight
from pegboard.ops.linear import FloatWeight

COPY_LIMIT_BYTES = 256 * 1024**2
"""Largest matrix that is held a second time, blocked, when the plain one must stay (an embedding that is also the head)."""

UNPACK_ROWS = 1024
"""From this many rows on, unpacking the matrix and multiplying the plain one is the faster way."""


class OneDNNFloatWeight(FloatWeight):
    """See `FloatWeight`. A table keeps the plain matrix too."""

    _blocked: Tensor | None = None

    def dense(self) -> Tensor:
        if self._plain is not None:
            return self._plain
        assert self._blocked is not None, "either form is there"
        return self._blocked.to_dense()

    def finish(self) -> None:
        assert self._plain is not None, "plain() comes before finish()"
        if self.is_table:
            if self._blocked is not None:
                self._blocked = _pack(self._plain)
        elif self._plain.numel():
            self._blocked, self._plain = _pack(self._plain), None

    def bind(self) -> Callable[[Tensor], Tensor]:
        if self._blocked is None:
            plain = self.plain()
            if not (self.is_table and plain.numel() and plain.nbytes <= COPY_LIMIT_BYTES):
                return super().bind()
            self._blocked = _pack(plain)
        multiply, linear = torch.ops.mkldnn._linear_pointwise.default, functional.linear

        def forward(x: Tensor) -> Tensor:
            if x.shape[0] >= UNPACK_ROWS:
                return linear(x, self.dense())
            return multiply(x, self._blocked, None, "none", [], "")

        return forward

    @property
    def nbytes(self) -> int:
        return sum(form.element_size() * form.numel() for form in (self._plain, self._blocked) if form is not None)


class OneDNNBlockWeight(BlockWeight):
    """See `BlockWeight`: dequantized at `finish`, like the reference."""

    FLOAT = OneDNNFloatWeight


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)
