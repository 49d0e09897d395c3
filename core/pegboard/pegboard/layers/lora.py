"""LoRA on a linear layer. The adapters' product is added to the output, so the format of the base weight does not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part
from pegboard.layers.build import Build


class AdapterSlots:
    """The stacked matrices A [slots, rank, in] and B [slots, out, rank] of one linear layer. Slot 0 stays zero (the base model).
    Adapters are copied in place, so the addresses that recordings use stay valid."""

    def __init__(self, build: Build, parts: Sequence[Part], in_features: int, out_features: int) -> None:
        limits = build.lora
        assert limits is not None
        self.build = build
        options = {"dtype": getattr(torch, build.dtype), "device": build.device}
        self.modules = {part.name.removesuffix(".weight"): part for part in parts}
        rank = limits.max_rank * len(self.modules)
        self.max_rank = limits.max_rank
        self.a = torch.zeros(limits.num_slots + 1, rank, in_features, **options)
        self.b = torch.zeros(limits.num_slots + 1, out_features, rank, **options)

    def load(self, slot: int, weights: dict[str, tuple[Tensor, Tensor]], scaling: float) -> None:
        """Copy an adapter into a slot. weights: module path → (A [rank, in], B [out, rank]). Modules that the adapter does not
        change get zeros. Raises ModelError if the rank is too large or a shape does not fit."""
        self.a[slot].zero_()
        self.b[slot].zero_()
        for index, (name, part) in enumerate(self.modules.items()):
            if name not in weights:
                continue
            a, b = weights[name]
            fits = a.ndim == 2 and a.shape[1] == self.a.shape[2] and b.shape == (part.rows[1] - part.rows[0], a.shape[0])
            if not fits:
                raise ModelError(f"the shapes of {name} do not fit the model: A {list(a.shape)}, B {list(b.shape)}")
            if a.shape[0] > self.max_rank:
                raise ModelError(f"adapter rank {a.shape[0]} of {name} exceeds max_lora_rank={self.max_rank}")
            first = index * self.max_rank
            self.a[slot, first : first + a.shape[0]].copy_(a)
            self.b[slot, part.rows[0] : part.rows[1], first : first + a.shape[0]].copy_(b * scaling)

    def added_to(self, call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return `call` plus the product of the adapters of the step's tokens."""
        shrink, expand = self.build.kernels["lora_shrink"], self.build.kernels["lora_expand"]
        current, a, b = self.build.lora_slots, self.a, self.b
        assert current is not None

        def forward(x: Tensor) -> Tensor:
            token_slots = current()
            return expand(call(x), shrink(x, a, token_slots), b, token_slots)

        return forward
