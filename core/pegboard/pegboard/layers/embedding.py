"""The token embedding and the output head, which may be the same table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part
from pegboard.interfaces.weight_loader import WantedWeight
from pegboard.layers.build import Build, WeightLayer, bias_of
from pegboard.layers.linear import with_bias
from pegboard.layers.lora import AdapterSlots
from pegboard.layers.shards import part_of


class Embedding(WeightLayer):
    """[T] token ids → [T, width]. Only the first stage of a model has it, and the last one if the
    head has the same table. A table of learned positions is one, too, built with `build.alone()`,
    so that every rank has all of it and no adapter changes it."""

    def __init__(self, build: Build, num_rows: int, width: int) -> None:
        super().__init__(build)
        self.num_rows = num_rows
        self.width = width
        self.is_head = False

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        if not self.build.stage.is_first:
            self.build.declared.absent.append(self.build.path)
            if not self.is_head:
                return []
        part = Part(f"{self.build.path}.weight", (0, self.num_rows))
        layer = EmbeddingLayer(self.build.path, self.num_rows, self.width, part, self.is_head)
        self.method = self.build.method("embedding", layer)
        return self.method.declare(available)

    def bind(self) -> None:
        if not self.build.stage.is_first:
            return
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
    table. Each rank computes a share of the logits, and all get all of them. A rank reads its share
    of the table once more, because it also needs all of it to look up. Only the last stage of a
    model has a head, and only if the model predicts tokens or classes."""

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
        self.wants_bias = bias
        self.group = build.tensor
        self.tied = tied if self.group.size == 1 else None
        self.embedding = tied
        self.is_absent = not (build.stage.is_last and build.has_text_head)
        if self.tied is not None and not self.is_absent:
            self.tied.is_head = True
        self.padded = -(-num_rows // self.group.size)
        start = min(self.group.rank * self.padded, num_rows)
        self.rows = (start, min(start + self.padded, num_rows))

    def _part(self, name: str) -> Part:
        return part_of(f"{name}.weight", 0, (self.num_rows, self.width), self.rows)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        if self.is_absent:
            self.build.declared.absent.append(self.build.path)
            return []
        if self.tied is not None:
            return []
        name = (self.embedding or self).build.path
        parts = (self._part(name),)
        layer = LinearLayer(name, self.width, self.padded, parts, is_head=True)
        self.method = self.build.method("linear", layer)
        wanted = self.method.declare(available)
        if self.wants_bias:
            self.bias, wanted_biases = bias_of(layer, self.build)
            wanted = [*wanted, *wanted_biases]
        return wanted

    def bind(self) -> None:
        if self.is_absent:
            return
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
        if self.build.lora_head_rows is not None and self.build.lora is not None:
            self.adapters = self.adapters or AdapterSlots(
                self.build, [self._part(self.build.path)], self.width, self.build.lora_head_rows
            )
            multiply = self.adapters.added_to(multiply)
        if self.group.collective is not None:
            multiply = self._gathered(multiply, self.group.collective.all_gather)
        self.forward = lambda hidden: multiply(hidden).float()

    def _gathered(
        self, multiply: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return the logits of all ranks, without the rows that only make their shares equal."""
        num_rows = self.num_rows
        return lambda hidden: gather(multiply(hidden))[:, :num_rows]
