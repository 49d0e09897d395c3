"""Multiplying with a float weight matrix.

On x86 CPUs a float32 weight is multiplied in oneDNN's blocked layout, which beats the plain one from one row to some hundred
(docs/decisions/2026-11-21-float-linear.md has the table). The blocked layout replaces the plain matrix, it does not double it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

COPY_LIMIT_BYTES = 256 * 1024**2
"""Largest matrix that is held a second time, blocked, when the plain one must stay (an embedding that is also the head)."""

UNPACK_ROWS = 1024
"""From this many rows on, unpacking the matrix and multiplying the plain one is the faster way."""

_X86 = platform.machine().lower() in ("x86_64", "amd64")


class FloatWeight:
    """A matrix [out, in], zeros at first. Write into `plain()`, then call `finish`; both may come again later.

    keep_plain: the plain matrix is needed while serving (to look rows up), so a blocked one can only stand beside it.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str, keep_plain: bool = False) -> None:
        self.shape, self.keep_plain = shape, keep_plain
        self._plain: Tensor | None = torch.zeros(shape, dtype=dtype, device=device)
        self._blocked: Tensor | None = None

    def plain(self) -> Tensor:
        """The matrix itself, to be written into. After `finish` it may have to be unpacked first: read with `dense`."""
        if self._plain is None:
            self._plain = self.dense()
        return self._plain

    def dense(self) -> Tensor:
        """The values, bit for bit as they were written; may be the matrix itself or new memory."""
        if self._plain is not None:
            return self._plain
        assert self._blocked is not None, "either form is there"
        return self._blocked.to_dense()

    def finish(self) -> None:
        """All values are written: pack. Callables from `bind` see the new values."""
        assert self._plain is not None, "plain() comes before finish()"
        if self.keep_plain:
            if self._blocked is not None:
                self._blocked = _pack(self._plain)
        elif is_packable(self._plain):
            self._blocked, self._plain = _pack(self._plain), None

    def bind(self) -> Callable[[Tensor], Tensor]:
        """The callable [T, in] → [T, out]."""
        if self._blocked is None:
            plain = self.plain()
            if not (self.keep_plain and is_packable(plain) and plain.nbytes <= COPY_LIMIT_BYTES):
                return bind_linear(plain)
            self._blocked = _pack(plain)
        multiply, linear = torch.ops.mkldnn._linear_pointwise.default, functional.linear

        def forward(x: Tensor) -> Tensor:
            if x.shape[0] >= UNPACK_ROWS:
                return linear(x, self.dense())
            return multiply(x, self._blocked, None, "none", [], "")

        return forward

    def bind_lookup(self) -> Callable[[Tensor], Tensor]:
        """The callable [T] row indices → [T, in]; only with keep_plain."""
        table = self.plain()
        return lambda ids: functional.embedding(ids, table)

    @property
    def nbytes(self) -> int:
        """Bytes held now, in either form."""
        return sum(form.element_size() * form.numel() for form in (self._plain, self._blocked) if form is not None)


def is_packable(weight: Tensor) -> bool:
    """Whether a blocked layout of this weight exists here and was measured to be faster."""
    return (
        _X86
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()
    )


def bind_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The callable [T, in] → [T, out] for a plain weight [out, in] whose address stays."""
    linear = functional.linear
    return lambda x: linear(x, weight)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)
