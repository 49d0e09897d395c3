"""Products with a float weight matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.interfaces.quantization import ExpertMemory, QuantizationSetup
from pegboard.ops.experts import one_by_one


class FloatWeight:
    """A matrix [out, in], which is zero at first. Write to `plain()`, then call `finish`. Both may
    be called again later.

    is_table: rows are also looked up (an embedding). activations: the type of what is multiplied,
    and of all results; None = dtype. If it differs, a product may round what is multiplied to
    dtype. A kernel plugin's class (weight format `float_weight`) has the same methods and may hold
    the matrix in another layout. This reference holds it plain.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_table: bool = False,
        activations: torch.dtype | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.is_table = is_table
        self.activations = activations or dtype
        self._plain: Tensor | None = torch.zeros(shape, dtype=dtype, device=device)

    def plain(self) -> Tensor:
        """Return the matrix itself, to write to. After `finish` it may first have to be unpacked.
        To read the values, use `dense`."""
        if self._plain is None:
            self._plain = self.dense()
        return self._plain

    def dense(self) -> Tensor:
        """Return the values, bit for bit as they were written. This may be the matrix itself or new
        memory."""
        assert self._plain is not None, "a class that packs the matrix must unpack it here"
        return self._plain

    def finish(self) -> None:
        """Pack the matrix, after all values were written. Callables from `bind` see the new
        values."""

    def bind(self) -> Callable[[Tensor], Tensor]:
        """Return the callable [T, in] → [T, out]."""
        return self._multiply(self.plain())

    def _multiply(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        if self.activations == self.dtype:
            return partial(functional.linear, weight=weight)
        return lambda x: functional.linear(x.to(self.dtype), weight).to(self.activations)

    def bind_experts(
        self, num_experts: int, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the callable of a weight of experts: (x [N, in], starts [E + 1]) → [N, out / E].
        See `ExpertsMethod`."""
        weights = self.plain().view(num_experts, -1, self.shape[1])
        return one_by_one(
            [self._multiply(weight) for weight in weights],
            weights.shape[1],
            bias,
        )

    def expert_memory(self, num_experts: int) -> ExpertMemory | None:
        """See `MovableExpertsMethod`."""
        weights = self.plain().view(num_experts, -1)
        return ExpertMemory([str(self.dtype), *self.shape], [[weight] for weight in weights])

    def bind_lookup(self) -> Callable[[Tensor], Tensor]:
        """Return the callable [T] row indices → [T, in]. Only for a table."""
        table = self.plain()
        if self.activations == self.dtype:
            return lambda ids: functional.embedding(ids, table)
        return lambda ids: functional.embedding(ids, table).to(self.activations)

    def tensors(self) -> list[Tensor]:
        """Return the memory that is held now. After `plain()`, `finish` writes all of it again."""
        return [] if self._plain is None else [self._plain]


def make_float_weight(
    setup: QuantizationSetup, shape: tuple[int, int], is_table: bool = False
) -> FloatWeight:
    """Return a new matrix of `setup.plain_dtype`, of the chosen class."""
    dtype = getattr(torch, setup.plain_dtype or setup.dtype)
    activations = getattr(torch, setup.dtype)
    weight: FloatWeight = setup.kernels["float_weight"](
        shape, dtype, setup.device, is_table=is_table, activations=activations
    )
    return weight
