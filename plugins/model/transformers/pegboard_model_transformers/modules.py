"""Pegboard's layers as replacements for modules of a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Attention, Build, Embedding, Experts, Head, Layer, Linear
from pegboard.layers.activation import OPS
from pegboard.layers.build import Holder
from pegboard_model_transformers.names import Names, Source
from pegboard_model_transformers.shares import Share


class ModuleLinear(Linear):
    """Replaces an nn.Linear: [1, T, in] → [1, T, out]. share: what this rank holds of it."""

    def __init__(self, build: Build, linear: nn.Linear, names: Names, share: Share) -> None:
        super().__init__(
            build,
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            split="columns" if share.is_summed else None,
            heads=share.heads,
        )
        self.names = names
        self.section = linear.out_features, share.rows or (0, linear.out_features)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        path = self.names.module_path(self.build.path, available)
        self.build = replace(self.build, path=path)
        self.hold({path: [self.section]})
        return super().declare(available)

    def bind(self) -> None:
        super().bind()
        multiply = self.forward

        def forward(x: Tensor) -> Tensor:
            out: Tensor = multiply(x.reshape(-1, x.shape[-1]))
            return out.view(*x.shape[:-1], -1)

        self.forward = forward


class ModuleAttention(Attention):
    """Attends for an attention module. sinks: the name of the module's parameter with the sinks;
    None = it has none. options: see `Attention`."""

    def __init__(
        self, build: Build, *sizes: int, names: Names, sinks: str | None, **options: Any
    ) -> None:
        super().__init__(build, *sizes, has_sinks=sinks is not None, **options)
        self.names = names
        self.target = f"{build.path}.{sinks}"

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        if self.sinks is not None:
            name = self._sinks_name(available)
            (rows,) = self.sinks.names.values()
            (spans,) = self.sinks.sources.values()
            self.sinks.names = {name: rows}
            self.sinks.sources = {name: spans}
            self.wanted_sinks = [WantedWeight(name, wanted.shape) for wanted in self.wanted_sinks]
        return super().declare(available)

    def _sinks_name(self, available: Mapping[str, Any]) -> str:
        source = self.names.source(self.target, available)
        if source.converter is not None:
            raise ModelError(
                f"{self.target} is stored as {', '.join(source.names)}, which cannot be converted"
            )
        return source.names[0]


EXPERT_TENSORS = ("gate_up_proj", "down_proj")
"""The parameters of a module that `ModuleExperts` replaces."""


def expert_activation(module: nn.Module) -> str | None:
    """Return the activation of a module of stacked experts that Pegboard computes itself:
    gate_up_proj [E, 2F, hidden], down_proj [E, hidden, F], down(activation(gate) · up), called with
    (x, ids, weights). None = it is no such module."""
    kind: Any = type(module)
    shape = {
        "is_concatenated": True,
        "is_transposed": False,
        "has_bias": False,
        "has_gate": True,
        "has_post_expert_norm": False,
    }
    if any(getattr(module, name, None) is not value for name, value in shape.items()):
        return None
    if {name for name, _ in module.named_parameters()} != set(
        EXPERT_TENSORS
    ) or kind._apply_gate is not _default_apply_gate:
        return None
    return next(
        (name for name in OPS if type(ACT2FN[name]) is type(getattr(module, "act_fn", None))), None
    )


class ModuleExperts(Experts):
    """Replaces a module of stacked experts: (x [T, hidden], ids [T, k], weights [T, k]) → [T,
    hidden]."""

    def __init__(self, build: Build, module: Any, activation: str, names: Names) -> None:
        num_experts, hidden_size, width = module.down_proj.shape
        super().__init__(build, num_experts, hidden_size, width, rule=None, activation=activation)
        self.module_path = build.path
        self.checkpoint_names = names

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        first, second = (
            self.checkpoint_names.expert_modules(f"{self.module_path}.{name}", available)
            for name in EXPERT_TENSORS
        )
        if first[0] != second[0]:
            raise ModelError(
                f"the experts of {self.module_path} are stored at {first[0]} and at {second[0]}"
            )
        self.build = replace(self.build, path=first[0])
        (merged, *_) = first[1]
        (down, *_) = second[1]
        self.merged = merged
        self.names = (*(first[1] if len(first[1]) == 2 else ("gate_proj", "up_proj")), down)
        return super().declare(available)

    def bind(self) -> None:
        super().bind()
        compute = self.forward

        def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            out: Tensor = compute(x.reshape(-1, x.shape[-1]), weights.float(), ids.int())
            return out.view(x.shape)

        self.forward = forward


class ModuleEmbedding(Embedding):
    """Replaces the token embedding. Its rows are multiplied by `scale`, as in Gemma's embedding
    class."""

    def __init__(self, build: Build, embedding: nn.Embedding, names: Names) -> None:
        super().__init__(build, embedding.num_embeddings, embedding.embedding_dim)
        self.names = names
        scale = getattr(embedding, "embed_scale", None)
        self.scale = scale.item() if isinstance(scale, Tensor) else scale

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        self.build = replace(self.build, path=self.names.module_path(self.build.path, available))
        return super().declare(available)

    def bind(self) -> None:
        super().bind()
        if self.scale is not None:
            look_up = self.forward
            scale = torch.tensor(
                self.scale, dtype=getattr(torch, self.build.dtype), device=self.build.device
            )
            self.forward = lambda ids: look_up(ids) * scale


class ModuleHead(Head):
    """Replaces `lm_head`: [1, N, width] → [1, N, num_rows] float32."""

    def __init__(
        self, build: Build, linear: nn.Linear, names: Names, tied: Embedding | None
    ) -> None:
        super().__init__(
            build, linear.out_features, linear.in_features, tied=tied, bias=linear.bias is not None
        )
        self.names = names

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        if self.embedding is None and not self.is_absent:
            self.build = replace(
                self.build, path=self.names.module_path(self.build.path, available)
            )
        return super().declare(available)

    def bind(self) -> None:
        super().bind()
        if not self.is_absent:
            multiply = self.forward
            self.forward = lambda hidden: multiply(hidden[0])[None]


class ModuleTensors(Layer):
    """Every parameter and persistent buffer that no other layer holds. They have the compute type
    and are stored where their modules expect them."""

    def __init__(self, build: Build, model: nn.Module, targets: list[str], names: Names) -> None:
        super().__init__(build)
        self.targets = targets
        self.names = names
        self.held: dict[str, Tensor] = {}
        for target in targets:
            path, _, name = target.rpartition(".")
            self.held[target] = self._materialize(model.get_submodule(path), name)
        self.sources: dict[str, Source] = {}
        self.owners: dict[str, str] = {}
        self.waiting: dict[str, dict[str, Tensor]] = {}

    def _materialize(self, module: nn.Module, name: str) -> Tensor:
        meta = getattr(module, name)
        dtype = getattr(torch, self.build.dtype) if meta.is_floating_point() else meta.dtype
        data = torch.empty(meta.shape, dtype=dtype, device=self.build.device)
        if name in module._parameters:
            module._parameters[name] = nn.Parameter(data, requires_grad=False)
        else:
            module._buffers[name] = data
        return data

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        self.sources = {target: self.names.source(target, available) for target in self.targets}
        self.owners = {
            name: target for target, source in self.sources.items() for name in source.names
        }
        self.waiting = {}
        wanted = []
        for target, source in self.sources.items():
            shape = tuple(self.held[target].shape) if source.converter is None else ()
            wanted += [WantedWeight(name, shape) for name in source.names]
        return wanted

    def accept(self, piece: WeightPiece) -> None:
        target = self.owners[piece.name]
        if not isinstance(piece.data, Tensor):
            raise ModelError(
                f"tensor {piece.name} is stored as {piece.stored}; a plain type was expected here"
            )
        source = self.sources[target]
        if source.converter is None:
            self._fill(target, piece.data, piece.name)
            return
        parts = self.waiting.setdefault(target, {})
        parts[piece.name] = piece.data.clone()
        if len(parts) == len(source.names):
            self._fill(
                target, self.names.convert(target, source, self.waiting.pop(target)), piece.name
            )

    def _fill(self, target: str, data: Tensor, name: str) -> None:
        tensor = self.held[target]
        if data.shape != tensor.shape:
            raise ModelError(
                f"tensor {name} has shape {tuple(data.shape)}; the model expects "
                f"{tuple(tensor.shape)}"
            )
        tensor.copy_(data)

    def bind(self) -> None:
        """Does nothing: the modules use the tensors directly."""

    def holders(self) -> list[Holder]:
        return [self]

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the modules."""
        return list(self.held.values())
