"""Experts: feed-forward blocks of which a router chooses a few for each token."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.quantization import ExpertMemory, LinearLayer, WeightMethod
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight, WeightPiece
from pegboard.layers.activation import OPS
from pegboard.layers.build import Build, Holder, Layer, PlainTensor, bias_of
from pegboard.layers.lora import AdapterSlots, Weights
from pegboard.layers.shards import Span, part_of, scaled, stacked
from pegboard.layers.slots import Slots
from pegboard.ops.experts import RouterRule

Modules = dict[str, tuple[int, tuple[Span, ...]]]
"""Module of an expert → its rows, and those that this rank holds."""


class ExpertActivation(Protocol):
    """An activation of experts that a model plugin brings."""

    def bind(
        self, kernels: Mapping[str, Callable[..., Any]], is_interleaved: bool
    ) -> Callable[[Tensor], Tensor]:
        """Return the callable [T, 2F] → [T, F]. is_interleaved: gate and up alternate; otherwise
        up follows gate."""


class Experts(Layer):
    """(x [T, hidden], logits [T, E], shared [T, hidden] or None, gate [T, 1] or None) → [T,
    hidden]: the weighted sum of down(activation(gate(x), up(x))) of the chosen experts. shared,
    gate: see `ops.sum_experts`. rule: None = the model itself chooses; `logits` is then replaced by
    weights [T, k] and ids [T, k], as `ops.route` returns them.

    The checkpoint has a module per expert at build.path ("….experts.3.gate_proj"; `names`: of gate,
    up and down), or tensors with all experts below each other: one per name, or `merged` with gate
    and up of each expert ("….experts.gate_up_proj", [E, 2F, hidden]). Stacked tensors are handed to
    the quantization method as if each expert had its own, so it does not know about them.

    names: without the first one, experts have no gate: down(relu(up(x))²), and activation is
    "relu2". bias: gate, up and down have biases. is_transposed: stacked floats are [E, in, out];
    None = if their shapes fit only so.
    is_interleaved: gate and up alternate in `merged`. correction: name of the tensor [E] that
    corrects the choice (see `ops.route`). weighs_input: the weights are multiplied with the input
    of the experts, not with their output (Llama 4).
    """

    def __init__(
        self,
        build: Build,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        rule: RouterRule | None,
        activation: str | ExpertActivation = "silu",
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        merged: str = "gate_up_proj",
        bias: bool = False,
        is_transposed: bool | None = False,
        is_interleaved: bool = False,
        correction: str | None = None,
        weighs_input: bool = False,
    ) -> None:
        super().__init__(build)
        known = tuple(OPS) if len(names) == 3 else ("relu2",)
        if isinstance(activation, str) and activation not in known:
            raise ModelError(
                f"{build.path}: unknown activation {activation!r}; known: {', '.join(known)}"
            )
        if rule is not None and (
            not 0 < rule.top_k <= num_experts or num_experts % rule.num_groups
        ):
            raise ModelError(f"{build.path}: {rule} does not fit {num_experts} experts")
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.rule = rule
        self.activation = activation
        self.names = names
        self.merged = merged
        self.wants_bias = bias
        self.correction_name = correction
        self.weighs_input = weighs_input
        self.is_transposed = is_transposed
        self.is_interleaved = is_interleaved
        self.group = build.tensor if build.engines is None else build.engines.experts
        self.held = self.group.experts(num_experts)
        self.slots = (
            Slots(self.group, num_experts, build.device) if self.group.moves_experts else None
        )
        is_whole = self.group.shares_out_experts
        self.span = (0, intermediate_size) if is_whole else self.group.share(intermediate_size)
        self.correction: PlainTensor | None = None
        self.methods: list[WeightMethod] = []
        self.linears: list[LinearLayer] = []
        self.biases: list[PlainTensor] = []
        self.adapters: list[AdapterSlots] = []

    def declare(self, available: Mapping[str, TensorEntry]) -> list[WantedWeight]:
        present = {
            name: entry
            for name, entry in available.items()
            if name.startswith(f"{self.build.path}.")
        }
        index = self._per_expert(present)
        present |= {name: entry for name, (entry, *_) in index.items()}
        self.is_merged = any(
            name.startswith(f"{self.build.path}.0.{self.merged}.") for name in index
        )
        *before, down = self.names
        width = self.intermediate_size
        span = self.span
        names = [self.merged] if self.is_merged else before
        first: Modules = dict.fromkeys(names, (width, (span,)))
        if self.is_merged and self.is_interleaved:
            first[self.merged] = (2 * width, (scaled(span, 2),))
        elif self.is_merged:
            both = stacked([(width, span), (width, span)])
            first[self.merged] = (2 * width, tuple(both))
        inputs = (0, self.hidden_size)
        last: Modules = {down: (self.hidden_size, (inputs,))}
        self.targets: dict[str, list[tuple[str, int | None, Any]]] = {}
        self.methods = []
        self.linears = []
        self.biases = []
        wanted: dict[str, WantedWeight] = {}
        for columns, count, modules in ((inputs, self.hidden_size, first), (span, width, last)):
            layer = self._linear(columns, count, modules)
            method = self.build.method("linear", layer)
            self.methods.append(method)
            self.linears.append(layer)
            declared: list[tuple[WantedWeight, Any]] = [
                (weight, method) for weight in method.declare(present)
            ]
            # what the ranks add up has the bias of an expert once
            is_another = self.group.rank > 0 and not self.group.shares_out_experts
            if self.wants_bias and not (modules is last and is_another):
                bias, wanted_biases = bias_of(layer, self.build)
                self.biases.append(bias)
                declared += [(weight, bias) for weight in wanted_biases]
            for weight, target in declared:
                entry, name, expert = index.get(weight.name, (None, weight.name, None))
                if entry is not None and weight.shape != entry.shape:
                    message = (
                        f"has shape {list(available[name].shape)}; each of {self.num_experts} "
                        "experts"
                    )
                    raise ModelError(f"tensor {name} {message} needs {list(weight.shape)}")
                self.targets.setdefault(name, []).append((weight.name, expert, target))
                wanted[name] = (
                    weight if entry is None else WantedWeight(name, available[name].shape)
                )
        if self.correction_name is not None:
            self.correction = PlainTensor(
                {self.correction_name: (0, self.num_experts)}, (self.num_experts,), self.build
            )
            self.targets[self.correction_name] = [(self.correction_name, None, self.correction)]
            wanted[self.correction_name] = WantedWeight(self.correction_name, (self.num_experts,))
        return list(wanted.values())

    def _linear(self, columns: Span, num_columns: int, modules: Modules) -> LinearLayer:
        """Return the matrix with these modules of each expert below each other. columns: those of
        `num_columns` that this rank holds."""
        parts = []
        start = 0
        for expert in self.held:
            for module, (num_rows, spans) in modules.items():
                for span in spans:
                    name = f"{self.build.path}.{expert}.{module}.weight"
                    part = part_of(name, start, (num_rows, num_columns), span, columns)
                    parts.append(part)
                    start = part.rows[1]
        path = f"{self.build.path}.{'-'.join(modules)}"
        return LinearLayer(
            path, columns[1] - columns[0], start, tuple(parts), num_experts=len(self.held)
        )

    def _per_expert(
        self, available: Mapping[str, TensorEntry]
    ) -> dict[str, tuple[TensorEntry, str, int | None]]:
        """Return what the checkpoint's stacked tensors are for each expert: its tensor, the stacked
        one, and the expert; None = a tensor that is the same for all."""
        prefix = f"{self.build.path}."
        sources: dict[str, tuple[TensorEntry, str, int | None]] = {}
        for name, entry in available.items():
            last = name.removeprefix(prefix)
            module = next(
                (
                    m
                    for m in (self.merged, *self.names)
                    if last == m or last.startswith((f"{m}.", f"{m}_"))
                ),
                None,
            )
            if module is None:
                continue
            ending = last[len(module) + 1 :] or "weight"
            if ending != "bias" and not ending.startswith(("weight", "input_scale")):
                ending = f"weight_{ending}"
            is_stack = entry.shape[:1] == (self.num_experts,)
            shape = entry.shape[1:] if is_stack else entry.shape
            if ending == "weight" and self._is_transposed(module, shape):
                shape = shape[::-1]
            for expert in range(self.num_experts):
                piece = replace(entry, name=f"{prefix}{expert}.{module}.{ending}", shape=shape)
                sources[piece.name] = piece, name, expert if is_stack else None
        return sources

    def _is_transposed(self, module: str, shape: Sequence[int]) -> bool:
        """Return whether a matrix is stored as [in, out]. shape: its own. If the model does not
        say, it is, unless the shape says otherwise."""
        if self.is_transposed is not None:
            return self.is_transposed
        inputs = self.intermediate_size if module == self.names[-1] else self.hidden_size
        return tuple(shape[1:]) != (inputs,)

    def accept(self, piece: WeightPiece) -> None:
        for name, expert, target in self.targets[piece.name]:
            target.accept(
                replace(piece, name=name) if expert is None else self._cut(piece, name, expert)
            )

    def _cut(self, piece: WeightPiece, name: str, expert: int) -> WeightPiece:
        """Return one expert's part of a stacked tensor."""
        data = piece.data
        shape = tuple(piece.shape[1:])
        if not isinstance(data, Tensor):
            size = len(data) // self.num_experts
            return WeightPiece(name, piece.stored, shape, data[expert * size : (expert + 1) * size])
        matrix = data[expert]
        module, _, ending = name.removeprefix(f"{self.build.path}.{expert}.").rpartition(".")
        if ending == "weight" and self._is_transposed(module, shape):
            matrix = matrix.T
        return WeightPiece(name, piece.stored, tuple(matrix.shape), matrix)

    def finish(self) -> None:
        for method in self.methods:
            method.finish()

    def bind(self) -> None:
        kernels = self.build.kernels
        num_experts = len(self.held)
        rule = self.rule
        calls: list[Callable[[Tensor, Tensor], Tensor]] = []
        for index, method in enumerate(self.methods):
            bind_experts = getattr(method, "bind_experts", None)
            if bind_experts is None:
                raise ConfigError(
                    f"{self.build.path}: {type(method).__name__} does not support experts"
                )
            has_bias = index < len(self.biases)
            bias = self.biases[index].data.view(num_experts, -1) if has_bias else None
            calls.append(bind_experts(kernels, num_experts, bias))
        first, down = calls
        if not isinstance(self.activation, str):
            activation = self.activation.bind(kernels, self.is_merged and self.is_interleaved)
        else:
            activation = kernels[OPS[self.activation]] if len(self.names) == 3 else squared_relu
        sort = kernels["sort_by_expert"]
        held = self._places() if self.slots is None else self.slots.turns
        counts = None if self.slots is None else self.slots.counts
        add_up = kernels["sum_experts"]
        correction = None if self.correction is None else self.correction.data
        weighs_input = self.weighs_input
        step_rows = self.build.lora_rows if self.build.lora is not None else None
        if step_rows is not None:
            self.adapters = self.adapters or [
                AdapterSlots(self.build, linear.parts, linear.in_features, step_rows, num_experts)
                for linear in self.linears
            ]
            adapter_rows = kernels["expert_adapter_rows"]
            (add_first, add_down) = (slots.product() for slots in self.adapters)

        def compute(
            x: Tensor,
            weights: Tensor,
            ids: Tensor,
            shared: Tensor | None = None,
            gate: Tensor | None = None,
        ) -> Tensor:
            rows, places, starts = sort(
                x, ids, num_experts, weights if weighs_input else None, held, counts
            )
            if step_rows is None or (used := step_rows()) is None:
                rows = down(activation(first(rows, starts)), starts)
            else:
                used = adapter_rows(used, places, starts)
                hidden = activation(add_first(first(rows, starts), rows, used))
                rows = add_down(down(hidden, starts), hidden, used)
            total: Tensor = add_up(rows, places, None if weighs_input else weights, shared, gate)
            return total

        if (engines := self.build.engines) is not None:
            compute = plus_shared(engines.on_all(compute, self.num_experts))
        elif (collective := self.group.collective) is not None:
            compute = self._summed(compute, collective.all_reduce)
        self.forward = compute
        if rule is not None:
            route = kernels[rule.op]

            def forward(
                x: Tensor, logits: Tensor, shared: Tensor | None = None, gate: Tensor | None = None
            ) -> Tensor:
                weights, ids = route(logits, rule, correction)
                return compute(x, weights, ids, shared, gate)

            self.forward = forward

    def _summed(
        self, compute: Callable[..., Tensor], add_up: Callable[[Tensor], Tensor]
    ) -> Callable[..., Tensor]:
        """Return `compute` plus the results of the other ranks. All ranks have the shared result;
        the first adds it."""
        if self.group.rank:
            return lambda x, weights, ids, shared=None, gate=None: add_up(compute(x, weights, ids))
        return lambda *inputs: add_up(compute(*inputs))

    def _places(self) -> Tensor | None:
        """Return the place of each expert among those of this rank, -1 for the others and for
        the id after the last one, which padding has: int32 [E + 1]. None if the rank has all."""
        if len(self.held) == self.num_experts:
            return None
        places = torch.full((self.num_experts + 1,), -1, dtype=torch.int32)
        places[list(self.held)] = torch.arange(len(self.held), dtype=torch.int32)
        return places.to(self.build.device)

    def memory(self) -> ExpertMemory:
        """Return the memory of the experts that this rank holds, after `finish`. Raises ConfigError
        if a weight's experts cannot be exchanged."""
        count = len(self.held)
        memories: list[ExpertMemory] = []
        for method in self.methods:
            find = getattr(method, "expert_memory", None)
            if find is None or (memory := find(count)) is None:
                raise ConfigError(
                    f"{self.build.path}: {type(method).__name__} stores its experts in a form in "
                    "which they cannot move to other ranks; remove enable_eplb"
                )
            memories.append(memory)
        biases = [bias.data.view(count, -1) for bias in self.biases]
        forms = [*(memory.form for memory in memories), *([*bias.shape] for bias in biases)]
        experts = [
            [
                *chain(*(memory.experts[slot] for memory in memories)),
                *(bias[slot] for bias in biases),
            ]
            for slot in range(count)
        ]
        return ExpertMemory(forms, experts)

    def holders(self) -> list[Holder]:
        return [*self.methods, *self.biases, *super().holders()]

    def unstacked(self, weights: Weights) -> Weights:
        """Split a stacked adapter into one per expert (see `AdapterSlots.unstacked`). PEFT names
        these like transformers' module of the experts, or its base layer. That module is called as
        in the checkpoint, or it is `experts` there, or `mlp.experts` of the decoder layer. Leave
        out the experts of other ranks. Raises ModelError if the shapes do not fit."""
        unstacked = dict(weights)
        path = self.build.path
        modules = (path, f"{path}.experts", re.sub(r"(.*\.\d+)\..*", r"\1.mlp.experts", path))
        for name in (
            f"{module}{last}" for module in dict.fromkeys(modules) for last in ("", ".base_layer")
        ):
            if (pair := unstacked.pop(name, None)) is not None:
                split = (
                    slots.unstacked(*pair, self.held, self.num_experts) for slots in self.adapters
                )
                pairs = next((pairs for pairs in split if pairs is not None), None)
                if pairs is None:
                    raise ModelError(
                        f"the shapes of {name} do not fit {self.num_experts} experts with "
                        f"{self.hidden_size} and {self.intermediate_size} channels: A "
                        f"{list(pair[0].shape)}, B {list(pair[1].shape)}"
                    )
                unstacked |= pairs
        others = {*range(self.num_experts)}.difference(self.held)
        for expert in others:
            for module in (self.merged, *self.names):
                unstacked.pop(f"{path}.{expert}.{module}", None)
        return unstacked


def plus_shared(compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return `compute` plus the result of shared experts (see `ops.sum_experts`)."""

    def call(
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        total = compute(x, weights, ids)
        if shared is None:
            return total
        factor = 1.0 if gate is None else gate.float().sigmoid()
        return (total.float() + shared.float() * factor).to(total.dtype)

    return call


def squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()
