"""Linear layers: y = x Wᵀ + b. The weight is one checkpoint tensor, or several that are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.interfaces.quantization import LinearLayer, Part
from pegboard.interfaces.weight_loader import WantedWeight
from pegboard.layers.build import Build, PlainTensor, WeightLayer
from pegboard.layers.lora import AdapterSlots
from pegboard.plan.weight_update import FLOATS


class Linear(WeightLayer):
    """[T, in_features] → [T, out_features].

    parts: {sibling module name: rows} of a merged weight; build.path is then their common parent.
    Without parts, the layer is one checkpoint module at build.path. is_router: the outputs choose
    experts, so floats are not quantized while they are loaded. That would save little memory, and
    small errors choose other experts.
    """

    def __init__(
        self,
        build: Build,
        in_features: int,
        out_features: int,
        *,
        parts: Mapping[str, int] | None = None,
        bias: bool = False,
        is_router: bool = False,
    ) -> None:
        super().__init__(build)
        self.is_router = is_router
        names = (
            {f"{build.path}.{part}": rows for part, rows in parts.items()}
            if parts
            else {build.path: out_features}
        )
        if sum(names.values()) != out_features:
            raise ConfigError(
                f"{build.path}: parts {dict(parts or {})} do not add up to {out_features}"
            )
        self.modules_by_name = names
        self.wants_bias = bias
        self.in_features = in_features
        self.out_features = out_features

    def _layout(self) -> tuple[Part, ...]:
        """Return where each checkpoint tensor is in the merged weight."""
        parts = []
        start = 0
        for name, rows in self.modules_by_name.items():
            parts.append(Part(f"{name}.weight", (start, start + rows)))
            start += rows
        return tuple(parts)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        parts = self._layout()
        layer = LinearLayer(self.build.path, self.in_features, self.out_features, parts)
        stays_plain = self.is_router and all(
            part.name in available and available[part.name].stored in FLOATS for part in parts
        )
        self.method = (
            replace(self.build, quantization=self.build.plain) if stays_plain else self.build
        ).method("linear", layer)
        wanted = self.method.declare(available)
        if self.wants_bias:
            rows = {part.name.removesuffix("weight") + "bias": part.rows for part in parts}
            self.bias = PlainTensor(rows, (self.out_features,), self.build)
            wanted = [
                *wanted,
                *(WantedWeight(name, (stop - start,)) for name, (start, stop) in rows.items()),
            ]
        return wanted

    def bind(self) -> None:
        assert self.method is not None
        call = self.method.bind(self.build.kernels)
        call = call if self.bias is None else with_bias(call, self.bias.data)
        if self.build.lora is not None:
            self.adapters = self.adapters or AdapterSlots(
                self.build, self._layout(), self.in_features, self.build.lora_rows
            )
            call = self.adapters.added_to(call)
        self.forward = call


class QKVLinear(Linear):
    """The merged query, key and value projection: [T, hidden] → q [T, H, D], k [T, K, D], v [T, K,
    D]."""

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
    ) -> None:
        parts = {
            "q_proj": num_heads * head_dim,
            "k_proj": num_kv_heads * head_dim,
            "v_proj": num_kv_heads * head_dim,
        }
        super().__init__(build, hidden_size, sum(parts.values()), parts=parts, bias=bias)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim

    def bind(self) -> None:
        super().bind()
        project = self.forward
        num_heads = self.num_heads
        num_kv_heads = self.num_kv_heads
        head_dim = self.head_dim
        first_value = num_heads + num_kv_heads

        def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            heads = project(x).view(x.shape[0], -1, head_dim)
            return heads[:, :num_heads], heads[:, num_heads:first_value], heads[:, first_value:]

        self.forward = forward


def with_bias(call: Callable[[Tensor], Tensor], bias: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `call` plus the bias [out]."""
    return lambda x: call(x).add_(bias)
