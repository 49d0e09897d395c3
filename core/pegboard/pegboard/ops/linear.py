"""Multiplying with a float weight matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


class FloatWeight:
    """A matrix [out, in], zeros at first. Write into `plain()`, then call `finish`; both may come again later.

    is_table: rows are looked up too (an embedding). A kernel plugin's class (weight format `float_weight`) has the same methods
    and may hold the matrix in another layout; this reference holds it plain.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str, is_table: bool = False) -> None:
        self.shape, self.is_table = shape, is_table
        self._plain: Tensor | None = torch.zeros(shape, dtype=dtype, device=device)

    def plain(self) -> Tensor:
        """The matrix itself, to be written into. After `finish` it may have to be unpacked first: read with `dense`."""
        if self._plain is None:
            self._plain = self.dense()
        return self._plain

    def dense(self) -> Tensor:
        """The values, bit for bit as they were written; may be the matrix itself or new memory."""
        assert self._plain is not None, "a class that packs the matrix unpacks it here"
        return self._plain

    def finish(self) -> None:
        """All values are written: pack. Callables from `bind` see the new values."""

    def bind(self) -> Callable[[Tensor], Tensor]:
        """The callable [T, in] → [T, out]."""
        linear, weight = functional.linear, self.plain()
        return lambda x: linear(x, weight)

    def bind_lookup(self) -> Callable[[Tensor], Tensor]:
        """The callable [T] row indices → [T, in]; only of a table."""
        table = self.plain()
        return lambda ids: functional.embedding(ids, table)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._plain.nbytes if self._plain is not None else 0
