"""LoRA on a layer with a weight. The adapters' product is added to the output, so the format of the
weight does not matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part
from pegboard.layers.build import Build
from pegboard.layers.shards import Span
from pegboard.ops import AdapterExchange, AdapterRows

LANES = 16
"""The ranks of each part are padded to a multiple of this."""

Divided = Literal["ranks", "outputs"]
"""What the ranks of a model divide of the adapters of a layer: the ranks of A, or the outputs of
B."""

Weights = Mapping[str, tuple[Tensor, Tensor]]
"""The matrices of an adapter: module path → A [rank, in] and B [out, rank]."""

Fitted = list[tuple[int, Tensor, Tensor]]
"""The matrices of one adapter in one layer: number of the part, A transposed, and B times the
scaling, transposed."""


class AdapterSlots:
    """The matrices A [slots, in, parts · rank] and B [slots, rank, out] of one layer (see
    `ops.lora_add`). Adapters are copied in place, so the addresses that recordings use stay valid.
    rows: returns the rows of the step's adapters; None = there are none. num_experts: the parts are
    those of each expert, one expert after the other, and each adapter has as many slots. divides:
    what else than rows and columns of the parts the group `build.tensor` divides. With "ranks",
    members take the ranks of an adapter in turn, and parts of the same module have one A. orders:
    module path → the adapters' row of each row of B, if the layer has them in another order.
    """

    def __init__(
        self,
        build: Build,
        parts: Sequence[Part],
        in_features: int,
        rows: Callable[[], AdapterRows | None] | None,
        num_experts: int = 1,
        *,
        divides: Divided | None = None,
    ) -> None:
        limits = build.lora
        assert limits is not None and rows is not None
        self.rows = rows
        self.kernels = build.kernels
        self.max_rank = limits.max_rank
        self.orders: dict[str, Tensor] = {}
        self.modules = [(part.name.removesuffix(".weight"), part) for part in parts]
        self.num_experts = num_experts
        self.num_parts = len(parts) // num_experts
        self.divides = divides
        group = build.tensor
        bounds = (0, *(part.rows[1] for part in parts[: self.num_parts]))
        self.outputs = group.share(bounds[-1]) if divides == "outputs" else (0, bounds[-1])
        self.bounds = tuple(clamped(end, self.outputs) - self.outputs[0] for end in bounds)
        self.turns = slice(group.rank, None, group.size) if divides == "ranks" else slice(None)
        if divides is None:
            self.width = padded(limits.max_rank)
            self.firsts = [part * self.width for part in range(self.num_parts)]
        else:
            self.width = len(range(limits.max_rank)[:: self.turns.step])
            names = [name for name, _ in self.modules]
            places = {name: place for place, name in enumerate(dict.fromkeys(names))}
            self.firsts = [places[name] * self.width for name in names]
        options = {"dtype": getattr(torch, limits.dtype), "device": build.device}
        num_slots = limits.num_slots * num_experts
        self.a = torch.zeros(
            num_slots, in_features, padded(self.firsts[-1] + self.width), **options
        )
        self.b = torch.zeros(num_slots, limits.max_rank, self.bounds[-1], **options)
        self.ranks = torch.zeros(num_slots, dtype=torch.int32, device=build.device)
        self.columns = torch.zeros_like(self.ranks)
        self.exchange: AdapterExchange | None = None
        if divides is not None and (collective := group.collective) is not None:
            is_gathered = divides == "ranks"
            self.exchange = AdapterExchange(
                collective.all_gather if is_gathered else collective.all_reduce,
                group.size if is_gathered else 1,
                self.firsts,
                self.columns,
            )

    def fitted(self, weights: Weights, scaling: float) -> Fitted:
        """Return an adapter's matrices for this layer as they are stored. weights: module path → (A
        [rank, in], B [out, rank]). Raises ModelError if the rank is too large, a shape does not fit
        or a value is not finite."""
        weights_of_parts = []
        for index, (name, part) in enumerate(self.modules):
            if name not in weights:
                continue
            a, b = weights[name]
            rows, columns = part.shape(self.a.shape[1])
            fits = a.ndim == 2 and a.shape[1] == columns and b.shape == (rows, a.shape[0])
            if not fits:
                raise ModelError(
                    f"the shapes of {name} do not fit the model: A {list(a.shape)}, B "
                    f"{list(b.shape)}"
                )
            if a.shape[0] > self.max_rank:
                raise ModelError(
                    f"adapter rank {a.shape[0]} of {name} exceeds max_lora_rank={self.max_rank}"
                )
            if name in self.orders:
                b = b[self.orders[name]]
            if part.cut is not None:
                a = a[:, slice(*part.cut.columns)]
                b = b[slice(*part.cut.rows)]
            a = a[self.turns]
            if self.divides == "outputs":
                b = b[slice(*(clamped(end, part.rows) - part.rows[0] for end in self.outputs))]
            a = a.T.to(self.a.dtype).contiguous()
            b = (b * scaling).T.to(self.b.dtype).contiguous()
            if not (a.isfinite().all() and b.isfinite().all()):
                raise ModelError(f"{name} has values that are not finite")
            weights_of_parts.append((index, a, b))
        return weights_of_parts

    def load(self, slot: int, fitted: Fitted) -> None:
        """Copy an adapter into a slot, from 1 on. Modules that the adapter does not change get
        zeros."""
        slots = slice((slot - 1) * self.num_experts, slot * self.num_experts)
        a = self.a[slots]
        b = self.b[slots]
        ranks = self.ranks[slots]
        columns = self.columns[slots]
        if ranks.any():
            a.zero_()
            b.zero_()
            ranks.zero_()
            columns.zero_()
        for index, own_a, own_b in fitted:
            expert, part = divmod(index, self.num_parts)
            first = self.firsts[part]
            held = own_a.shape[1]
            rank = len(own_b)
            a[expert, :, first : first + held].copy_(own_a)
            b[expert, :rank, self.bounds[part] : self.bounds[part + 1]].copy_(own_b)
            ranks[expert] = max(rank, int(ranks[expert]))
            # other parts have as many columns: products that nobody computes could be NaN
            columns[expert] = max(self.firsts[-1] + held if held else 0, int(columns[expert]))

    def unstacked(
        self, a: Tensor, b: Tensor, held: Sequence[int], num_experts: int
    ) -> Weights | None:
        """Return the adapters of the modules from one that changes the matrices of all experts
        (PEFT's `target_parameters`): A [E · rank, in] and B [out, rank · E]. None if these do not
        have the shapes of this layer. held: the experts whose modules the layer has."""
        shapes = {name: part.shape(self.a.shape[1]) for name, part in self.modules}
        columns = next(iter(shapes.values()))[1]
        rows = sum(count for count, _ in shapes.values()) // len(held)
        if a.shape[1:] != (columns,) or a.shape[0] % num_experts or b.shape != (rows, a.shape[0]):
            return None
        each_a = a.view(num_experts, -1, columns)
        each_b = b.view(rows, -1, num_experts)
        matrices = {}
        first = 0
        for index, (name, (count, _)) in enumerate(shapes.items()):
            first %= rows
            expert = held[index * len(held) // len(shapes)]
            matrices[name] = each_a[expert], each_b[first : first + count, :, expert]
            first += count
        return matrices

    def product(self) -> Callable[[Tensor, Tensor, AdapterRows], Tensor]:
        """Return what adds the products of the adapters to y, for the input x: (y [T, out], x [T,
        in], rows) → y."""
        add = self.kernels["lora_add"]
        a = self.a
        b = self.b
        ranks = self.ranks
        bounds = self.bounds
        if (exchange := self.exchange) is None:
            return lambda y, x, rows: add(y, x, a, b, ranks, bounds, rows)
        first, last = self.outputs

        def divided(y: Tensor, x: Tensor, rows: AdapterRows) -> Tensor:
            add(y[:, first:last], x, a, b, ranks, bounds, rows, exchange)
            return y

        return divided

    def added_to(self, call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return `call` plus the products of the adapters. A step without adapters only calls
        `call`."""
        add = self.product()
        rows_of_step = self.rows

        def forward(x: Tensor) -> Tensor:
            y = call(x)
            rows = rows_of_step()
            return y if rows is None else add(y, x, rows)

        return forward


def padded(count: int) -> int:
    """Return the multiple of LANES that is not smaller."""
    return -(-count // LANES) * LANES


def clamped(index: int, span: Span) -> int:
    """Return the index in [start, stop] that is nearest."""
    return min(max(index, span[0]), span[1])
