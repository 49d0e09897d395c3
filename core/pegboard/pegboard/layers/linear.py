"""Linear layers: y = x Wᵀ + b. The weight is one checkpoint tensor, or several that are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.interfaces.quantization import LinearLayer, Part
from pegboard.interfaces.weight_loader import WantedWeight
from pegboard.layers.build import Build, WeightLayer, bias_of
from pegboard.layers.lora import AdapterSlots, Divided
from pegboard.layers.shards import Span, part_of, scaled, stacked
from pegboard.plan.weight_update import FLOATS


class Linear(WeightLayer):
    """[T, in_features] → [T, out_features].

    parts: {sibling module name: rows} of a merged weight; build.path is then their common parent.
    Several numbers of rows are the sections of one tensor. Without parts, the layer is one
    checkpoint module at build.path. is_router: the outputs choose experts, so floats are not
    quantized while they are loaded. That would save little memory, and small errors choose other
    experts. Layers beside a language model (towers, projectors) keep their floats, too.

    split: what ranks divide. "rows": each holds a share of the outputs of every part, and returns
    only those. "columns": each takes a share of the inputs, and all get the sum. None: each
    computes everything. heads: (query heads, KV heads, channels of each) if the outputs of a layer
    that is split by rows are queries, or the inputs of one that is split by columns are the results
    of attention; ranks then divide the heads as attention does.
    """

    def __init__(
        self,
        build: Build,
        in_features: int,
        out_features: int,
        *,
        parts: Mapping[str, int | tuple[int, ...]] | None = None,
        bias: bool = False,
        is_router: bool = False,
        split: Literal["rows", "columns"] | None = None,
        heads: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__(build)
        self.is_router = is_router
        sections = (
            {
                build.at(part).path: (rows,) if isinstance(rows, int) else rows
                for part, rows in parts.items()
            }
            if parts
            else {build.path: (out_features,)}
        )
        self.wants_bias = bias
        self.group = build.tensor
        self.is_summed = split == "columns" and self.group.size > 1
        self.whole_in_features = in_features
        self.columns = (0, in_features)
        share = self.group.share if heads is None else partial(self._channels, heads)
        if self.is_summed:
            self.columns = share(in_features)
        self.in_features = self.columns[1] - self.columns[0]
        held = share if split == "rows" else everything
        self.hold({name: [(rows, held(rows)) for rows in each] for name, each in sections.items()})
        whole = sum(self.modules_by_name.values())
        if whole != out_features:
            raise ConfigError(
                f"{build.path}: parts {dict(parts or {})} do not add up to {out_features}"
            )

    def hold(self, modules: Mapping[str, Sequence[tuple[int, Span]]]) -> None:
        """Read the weight from these modules: the sections of each, with the rows of the section
        that this rank holds."""
        self.modules_by_name = {
            name: sum(rows for rows, _ in sections) for name, sections in modules.items()
        }
        self.spans = {name: stacked(sections) for name, sections in modules.items()}
        self.out_features = rows_of(self.spans)

    def _channels(self, heads: tuple[int, int, int], count: int) -> Span:
        """Return the channels of this rank's query heads. count: of all ranks."""
        num_heads, num_kv_heads, head_dim = heads
        return scaled(self.group.heads(num_heads, num_kv_heads)[0], head_dim)

    def _layout(self) -> tuple[Part, ...]:
        """Return where each checkpoint tensor is in the merged weight."""
        parts = []
        start = 0
        for name, spans in self.spans.items():
            shape = (self.modules_by_name[name], self.whole_in_features)
            for span in spans:
                part = part_of(f"{name}.weight", start, shape, span, self.columns)
                parts.append(part)
                start = part.rows[1]
        return tuple(parts)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        parts = self._layout()
        layer = LinearLayer(self.build.path, self.in_features, self.out_features, parts)
        stays_plain = (self.is_router or self.build.is_beside_language) and all(
            part.name in available and available[part.name].stored in FLOATS for part in parts
        )
        self.method = (
            replace(self.build, quantization=self.build.plain) if stays_plain else self.build
        ).method("linear", layer)
        wanted = self.method.declare(available)
        # what the ranks add up has the bias once
        if self.wants_bias and not (self.is_summed and self.group.rank):
            self.bias, wanted_biases = bias_of(layer, self.build)
            wanted = [*wanted, *wanted_biases]
        return wanted

    def bind(self) -> None:
        assert self.method is not None
        call = self.method.bind(self.build.kernels)
        call = call if self.bias is None else with_bias(call, self.bias.data)
        if self.build.lora is not None:
            parts = self._layout()
            self.adapters = self.adapters or AdapterSlots(
                self.build,
                parts,
                self.in_features,
                self.build.lora_rows,
                divides=self._also_divided(parts),
            )
            call = self.adapters.added_to(call)
        self.forward = self.group.summed(call) if self.is_summed else call

    def _also_divided(self, parts: Sequence[Part]) -> Divided | None:
        """Return what else the ranks divide of the adapters than their weights ask for."""
        lora = self.build.lora
        if lora is None or not lora.is_fully_sharded or self.group.collective is None:
            return None
        if self.is_summed:
            return "outputs"
        return "ranks" if any(part.cut is not None for part in parts) else None


class QKVLinear(Linear):
    """The merged query, key and value projection: [T, hidden] → q [T, H, D], k [T, K, D], v [T, K,
    D]. Each rank has its share of the heads. names: of the checkpoint's modules; if they are fewer
    than three, the last one has the rows of several below each other."""

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        sizes = [count * head_dim for count in (num_heads, num_kv_heads, num_kv_heads)]
        parts = {name: sum(sizes[i] for i in each) for name, each in stored_in(names).items()}
        super().__init__(build, hidden_size, sum(sizes), parts=parts, bias=bias)
        heads, kv_heads = self.group.heads(num_heads, num_kv_heads)
        spans = [scaled(span, head_dim) for span in (heads, kv_heads, kv_heads)]
        self.hold(
            {
                build.at(name).path: [(sizes[i], spans[i]) for i in each]
                for name, each in stored_in(names).items()
            }
        )
        self.num_heads = heads[1] - heads[0]
        self.num_kv_heads = kv_heads[1] - kv_heads[0]
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


def everything(count: int) -> Span:
    """Return the share of a rank that holds all."""
    return 0, count


def stored_in(names: Sequence[str]) -> dict[str, range]:
    """Return which of queries (0), keys (1) and values (2) each module has."""
    last = len(names) - 1
    return {name: range(i, 3 if i == last else i + 1) for i, name in enumerate(names)}


def rows_of(spans: Mapping[str, Sequence[Span]]) -> int:
    """Return the number of rows in these spans."""
    return sum(stop - start for each in spans.values() for start, stop in each)


def with_bias(call: Callable[[Tensor], Tensor], bias: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `call` plus the bias [out]."""
    return lambda x: call(x).add_(bias)
