"""Weights that are stored as small integers with a scale per block of consecutive columns, and
their products.

This is the neutral form that quantization methods hand over and that kernels repack. It says what a
matrix *means*, not how a file or a kernel arranges it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from pegboard.ops.linear import FloatWeight
from pegboard.ops.rounding import Rounding, after_rounding

if TYPE_CHECKING:
    from pegboard.interfaces.quantization import ExpertMemory, RepackEntry


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some rows of a matrix: W[r, c] = scale[r, b] · (codes[r, c] − zero[r, b]) + minimum[r, b]
    with b = c // block_size.

    bits: from 1 to 8. codes: [rows, columns], uint8 from 0 to 2^bits − 1, or int8 if bits = 8.
    scale, minimum: [rows, columns / block_size], both float16 or both float32, exactly as stored;
    minimum None = 0. zero: one number for all blocks, or, if minimum is None, int8 [rows, columns /
    block_size]. block_size: 16, or a multiple of 32 that divides the columns. order: int64
    [columns], where each column of codes belongs in W (GPTQ's act order); None = in order.

    outer: float16 [1 or 2, rows, columns / N], the second level of scales that are integers
    themselves. N columns of a row share outer[0], which their scales are multiplied with, and
    outer[1] for their minimums. N is a multiple of block_size and 32. The integers are int8, or
    uint8 with the scale in the lower four bits and the minimum in the upper four (minimum is None
    then).
    """

    bits: int
    block_size: int
    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    zero: int | Tensor = 0
    order: Tensor | None = None
    outer: Tensor | None = None

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Return scales and minimums of one level, as float32 [rows, columns / block_size].
        minimums: None = 0."""
        scale = self.scale
        minimum = self.minimum
        if self.outer is None:
            return scale.float(), None if minimum is None else minimum.float()
        if scale.dtype == torch.uint8:
            scale, minimum = scale & 15, scale >> 4
        outer = self.outer.float().repeat_interleave(scale.shape[1] // self.outer.shape[2], dim=2)
        return scale * outer[0], None if minimum is None else minimum * outer[1]

    def dense(self) -> Tensor:
        """Return the rows as float32 [rows, columns]."""
        (rows, columns) = self.codes.shape
        (scale, minimum) = self.scales()
        zero = self.zero.float().unsqueeze(-1) if isinstance(self.zero, Tensor) else self.zero
        blocks = (self.codes.float().view(rows, -1, self.block_size) - zero) * scale.unsqueeze(-1)
        if minimum is not None:
            blocks = blocks + minimum.unsqueeze(-1)
        if self.order is None:
            return blocks.view(rows, columns)
        return torch.empty(rows, columns).index_copy_(1, self.order, blocks.view(rows, columns))


class Rows(Protocol):
    """Some rows of a matrix: `Blocks`, or the form of another weight format."""

    def dense(self) -> Tensor: ...


class BlockWeight:
    """A matrix [out, in] made of `Blocks`, which may have different formats. Rows that were not
    written are zero.

    This reference dequantizes in `finish` and computes in `dtype`. A kernel plugin's class (weight
    format `block_weight`) has the same methods and multiplies the integers. is_table: rows are also
    looked up (an embedding). cache: keeps the packed layout of this weight between starts; None =
    it is not kept. rounding: of what is multiplied; None = a kernel may round it as finely as its
    tests declare.
    """

    FLOAT: ClassVar[type[FloatWeight]] = FloatWeight
    """What the dequantized matrix is held in."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        cache: RepackEntry | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self.shape = shape
        self.rounding = rounding
        self._float = self.FLOAT(shape, dtype, device, is_table)

    @classmethod
    def takes(cls, rounding: Rounding, is_faster: bool) -> bool:
        """Return whether products can be computed with this rounding. is_faster: also faster than
        without it."""
        return not is_faster

    def restore(self) -> bool:
        """Take the layout that an earlier start left in the cache. Returns True if the weight is
        then finished. Called once, before the first `write`. The reference keeps nothing."""
        return False

    def write(self, start: int, blocks: Rows) -> None:
        """Write `blocks` to the rows from `start` on. It may be called again later, followed by
        `finish`."""
        values = blocks.dense()
        self._float.plain()[start : start + len(values)] = values

    def finish(self) -> None:
        """Bring all written rows into the layout to compute with."""
        self._float.finish()

    def bind(self) -> Callable[[Tensor], Tensor]:
        """Return the callable [T, in] → [T, out]."""
        return after_rounding(self.rounding, self._float.bind())

    def bind_experts(
        self, num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the callable of a weight of experts: (x [N, in], starts [E + 1]) → [N, out / E].
        See `ExpertsMethod`."""
        call = self._float.bind_experts(num_experts, bias)
        return after_rounding(self.rounding, call)

    def expert_memory(self, num_experts: int) -> "ExpertMemory | None":
        """See `MovableExpertsMethod`."""
        return self._float.expert_memory(num_experts)

    def bind_lookup(self) -> Callable[[Tensor], Tensor]:
        """Return the callable [T] row indices → [T, in]. Only for a table."""
        return self._float.bind_lookup()

    def dense(self) -> Tensor:
        """Return the matrix as float32 [out, in]."""
        return self._float.dense().float()

    def tensors(self) -> list[Tensor]:
        """Return the memory that is held. When all rows are written again, `finish` writes all of
        it again."""
        return self._float.tensors()
