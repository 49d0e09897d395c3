"""The token embedding and the output head, which may be the same table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ConfigError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part
from pegboard.interfaces.weight_loader import WantedWeight
from pegboard.layers.build import Build, PlainTensor, WeightLayer
from pegboard.layers.linear import with_bias
from pegboard.layers.lora import AdapterSlots


class Embedding(WeightLayer):
    """[T] token ids → [T, width]."""

    def __init__(self, build: Build, num_rows: int, width: int) -> None:
        super().__init__(build)
        self.num_rows = num_rows
        self.width = width
        self.is_head = False

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        part = Part(f"{self.build.path}.weight", (0, self.num_rows))
        layer = EmbeddingLayer(self.build.path, self.num_rows, self.width, part, self.is_head)
        self.method = self.build.method("embedding", layer)
        return self.method.declare(available)

    def bind(self) -> None:
        assert self.method is not None
        call = self.method.bind(self.build.kernels)
        if self.build.lora is not None:
            part = Part(f"{self.build.path}.weight", (0, self.width))
            self.adapters = self.adapters or AdapterSlots(
                self.build, [part], self.num_rows, self.build.lora_rows
            )
            call = self.adapters.added_to(call)
        self.forward = call


class Head(WeightLayer):
    """[N, width] → [N, num_rows] float32 logits. With `tied`, it multiplies with the embedding's
    table."""

    def __init__(
        self,
        build: Build,
        num_rows: int,
        width: int,
        *,
        tied: Embedding | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__(build)
        if tied is not None and bias:
            raise ConfigError(f"{build.path}: a tied head has no bias")
        self.num_rows = num_rows
        self.width = width
        self.tied = tied
        self.wants_bias = bias
        if tied is not None:
            tied.is_head = True

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        if self.tied is not None:
            return []
        part = Part(f"{self.build.path}.weight", (0, self.num_rows))
        layer = LinearLayer(self.build.path, self.width, self.num_rows, (part,), is_head=True)
        self.method = self.build.method("linear", layer)
        wanted = self.method.declare(available)
        if self.wants_bias:
            bias = f"{self.build.path}.bias"
            self.bias = PlainTensor({bias: (0, self.num_rows)}, (self.num_rows,), self.build)
            wanted.append(WantedWeight(bias, (self.num_rows,)))
        return wanted

    def bind(self) -> None:
        if self.tied is not None:
            method = self.tied.method
            bind_head = getattr(method, "bind_head", None)
            if bind_head is None:
                raise ConfigError(
                    f"{self.build.path}: {type(method).__name__} does not support a tied output "
                    "head"
                )
            multiply = bind_head(self.build.kernels)
        else:
            assert self.method is not None
            multiply = self.method.bind(self.build.kernels)

        if self.bias is not None:
            multiply = with_bias(multiply, self.bias.data)
        if self.build.lora is not None:
            part = Part(f"{self.build.path}.weight", (0, self.num_rows))
            self.adapters = self.adapters or AdapterSlots(
                self.build, [part], self.width, self.build.lora_head_rows
            )
            multiply = self.adapters.added_to(multiply)
        self.forward = lambda hidden: multiply(hidden).float()
