"""LoRA on a linear layer: the adapters' product is added to the output, so the base weight's format does not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pegboard.errors import ModelError

if TYPE_CHECKING:
    from pegboard.layers.linear import Linear


class AdapterSlots:
    """Stacked A [slots, rank, in] and B [slots, out, rank] of one linear layer; slot 0 stays zero (the base model).

    Adapters are copied in place, so addresses, and recordings with them, stay valid.
    """

    def __init__(self, layer: "Linear") -> None:
        limits, build = layer.build.lora, layer.build
        assert limits is not None
        options = {"dtype": getattr(torch, build.dtype), "device": build.device}
        self.modules = {part.name.removesuffix(".weight"): part for part in layer._layout(layer.in_features)}
        rank = limits.max_rank * len(self.modules)
        self.max_rank = limits.max_rank
        self.a = torch.zeros(limits.num_slots + 1, rank, layer.in_features, **options)
        self.b = torch.zeros(limits.num_slots + 1, layer.out_features, rank, **options)

    def load(self, slot: int, weights: dict[str, tuple[Tensor, Tensor]], scaling: float) -> None:
        """weights: module path → (A [rank, in], B [out, rank]) of the whole layer, of which this rank takes its share; modules
        the adapter does not change are left zero. Raises ModelError for a rank that is too large."""
        self.a[slot].zero_()
        self.b[slot].zero_()
        for index, (name, part) in enumerate(self.modules.items()):
            if name not in weights:
                continue
            a, b = weights[name]
            if part.split_dim == 1:
                a = a[:, part.split_start : part.split_stop]
            elif part.split_dim == 0:
                b = b[part.split_start : part.split_stop]
            if a.shape[0] > self.max_rank:
                raise ModelError(f"adapter rank {a.shape[0]} of {name} is over max_lora_rank={self.max_rank}")
            first = index * self.max_rank
            self.a[slot, first : first + a.shape[0]].copy_(a)
            self.b[slot, part.rows[0] : part.rows[1], first : first + a.shape[0]].copy_(b * scaling)


def with_adapters(call: Callable[[Tensor], Tensor], layer: "Linear") -> Callable[[Tensor], Tensor]:
    """`call` plus the adapters of the step's tokens."""
    slots = layer.adapters or AdapterSlots(layer)
    layer.adapters = slots
    shrink, expand = layer.build.kernels["lora_shrink"], layer.build.kernels["lora_expand"]
    current = layer.build.lora_slots
    assert current is not None
    a, b = slots.a, slots.b

    def forward(x: Tensor) -> Tensor:
        token_slots = current()
        return expand(call(x), shrink(x, a, token_slots), b, token_slots)

    return forward
