"""Linear layers: y = x Wᵀ + b, whole, split over ranks, or merged from several checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.interfaces.quantization import LinearLayer, Part
from pegboard.interfaces.weight_loader import WeightSlice
from pegboard.layers.build import Build, PlainTensor, WeightLayer
from pegboard.layers.lora import AdapterSlots

Split = Literal["column", "row"] | None


class Linear(WeightLayer):
    """[T, in_features] → [T, out_features] (this rank's share when split by column).

    parts: a merged weight, {sibling module name: rows}; build.path is then their common parent. Without parts the layer
    is one checkpoint module at build.path. split "column" shares out rows, "row" shares columns and sums over ranks
    (unless reduce=False). bias: True, or "auto" = if the checkpoint has one.
    """

    def __init__(
        self,
        build: Build,
        in_features: int,
        out_features: int,
        *,
        split: Split = None,
        parts: Mapping[str, int] | None = None,
        bias: bool | Literal["auto"] = False,
        reduce: bool = True,
    ) -> None:
        super().__init__(build)
        self.split, self.wants_bias, self.reduce = split, bias, reduce
        size = build.tensor.size
        names = {f"{build.path}.{part}": rows for part, rows in parts.items()} if parts else {build.path: out_features}
        for name, rows in names.items():
            extent = rows if split == "column" else in_features
            if split and extent % size:
                raise ConfigError(f"{name}: {extent} does not divide by tensor_parallel_size={size}")
        if sum(names.values()) != out_features:
            raise ConfigError(f"{build.path}: parts {dict(parts or {})} do not add up to {out_features}")
        self.modules_by_name = names
        self.in_features = in_features // size if split == "row" else in_features
        self.out_features = out_features // size if split == "column" else out_features
        self.adapters: AdapterSlots | None = None

    def _layout(self) -> tuple[Part, ...]:
        """Where each checkpoint tensor goes in the merged weight, and which slice of it this rank takes."""
        rank, size = self.build.tensor.rank, self.build.tensor.size
        in_full = self.in_features * (size if self.split == "row" else 1)
        parts, start = [], 0
        for name, rows in self.modules_by_name.items():
            own = rows // size if self.split == "column" else rows
            if size == 1 or self.split is None:
                cut: tuple[int | None, int, int] = (None, 0, 0)
            elif self.split == "column":
                cut = (0, rank * own, (rank + 1) * own)
            else:
                cut = (1, rank * self.in_features, (rank + 1) * self.in_features)
            parts.append(Part(f"{name}.weight", (start, start + own), (rows, in_full), *cut))
            start += own
        return tuple(parts)

    def declare(self, available: Mapping[str, Any]) -> list[WeightSlice]:
        parts = self._layout()
        layer = LinearLayer(self.build.path, self.in_features, self.out_features, parts)
        self.method = self.build.quantization.linear(layer) or self.build.plain.linear(layer)
        assert self.method is not None, "the plain method takes every layer"
        wanted = [WeightSlice(p.name, p.split_dim, p.split_start, p.split_stop, p.shape) for p in parts]
        wanted += [WeightSlice(name) for name in self.method.declare()]
        return wanted + self._declare_bias(parts, available)

    def _declare_bias(self, parts: tuple[Part, ...], available: Mapping[str, Any]) -> list[WeightSlice]:
        biases = {p.name.removesuffix("weight") + "bias": p for p in parts}
        has = self.wants_bias is True or (self.wants_bias == "auto" and any(name in available for name in biases))
        if not has:
            return []
        self.bias = PlainTensor({name: p.rows for name, p in biases.items()}, (self.out_features,), self.build)
        self.bias.data.zero_()
        if self.split == "row" and self.build.tensor.rank:
            self.bias = None  # added once, on rank 0, before the sum
            return []
        by_row = self.split == "column" and self.build.tensor.size > 1
        return [
            WeightSlice(name, 0 if by_row else None, p.split_start, p.split_stop, p.shape[:1])
            for name, p in biases.items()
            if name in available or self.wants_bias is True
        ]

    def bind(self) -> None:
        assert self.method is not None
        call = self.method.bind(self.build.kernels)
        if self.build.lora is not None:
            self.adapters = self.adapters or AdapterSlots(self.build, self._layout(), self.in_features, self.out_features)
            call = self.adapters.added_to(call)
        if self.bias is not None:
            call = _with_bias(call, self.bias.data)
        collective = self.build.tensor.collective
        if self.split == "row" and self.reduce and collective is not None:
            call = _with_sum(call, collective.all_reduce)
        self.forward = call


class QKVLinear(Linear):
    """The merged query, key and value projection: [T, hidden] → q [T, H, D], k [T, K, D], v [T, K, D] (this rank's heads)."""

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool | Literal["auto"] = False,
        names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        size = build.tensor.size
        if num_kv_heads % size:
            raise ConfigError(f"{build.path}: {num_kv_heads} KV heads do not divide by tensor_parallel_size={size}")
        rows = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        parts = dict(zip(names, rows, strict=True))
        super().__init__(build, hidden_size, sum(rows), split="column", parts=parts, bias=bias)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads // size, num_kv_heads // size, head_dim

    def bind(self) -> None:
        super().bind()
        project, num_heads, num_kv_heads, head_dim = self.forward, self.num_heads, self.num_kv_heads, self.head_dim
        first_value = num_heads + num_kv_heads

        def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            heads = project(x).view(x.shape[0], -1, head_dim)
            return heads[:, :num_heads], heads[:, num_heads:first_value], heads[:, first_value:]

        self.forward = forward


def _with_bias(call: Callable[[Tensor], Tensor], bias: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: call(x).add_(bias)


def _with_sum(call: Callable[[Tensor], Tensor], all_reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: all_reduce(call(x))
