"""Build: what a model's constructor gets; `at()` returns the same for a submodule. Layer: a module
that core loads and binds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError, expect
from pegboard.interfaces.attention import AttentionLayer, KVTensor
from pegboard.interfaces.quantization import (
    EmbeddingLayer,
    LinearLayer,
    QuantizationMethod,
    WeightMethod,
)
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers.engine_rows import EngineRows
from pegboard.layers.shards import Group, Span, Stage
from pegboard.ops import AdapterRows

ALONE = Group()
WHOLE = Stage()


@dataclass(frozen=True, slots=True)
class LoRALimits:
    """The number of adapters that may be loaded at once, and their largest rank. Slot 0, the base
    model, is not counted. dtype: torch name of the type that they are stored in. is_fully_sharded:
    whether the ranks of the model divide both matrices of an adapter, and not only the one that has
    the outputs or the inputs that they divide."""

    num_slots: int
    max_rank: int
    dtype: str
    is_fully_sharded: bool = False


@dataclass(slots=True)
class Declared:
    """What the constructors of one model have registered, in order. taps: depth → the hidden states
    of the last step there, [T, size]. inputs: the names of the numbers that `Model.embed` gets for
    each token, after the ids. axes: the names of the numbers that are added to the place of each
    token in its request; `Model.forward` gets the sums for each name, instead of the places.
    given: the width of what else `Model.embed` gets with each token (see `DraftModel`).
    states: the state of one request in each state layer. weights: each weight method with its layer
    and the quantization method that made it. has_stack: the model has asked which layers of its
    stack to build. has_language: the model has built a language model. absent: the paths of
    modules that are not built. aliases: another path of a module, which adapters may use → its
    path. eager: keys of adapters in slots. While there are any, steps with adapters are not
    replayed from recordings."""

    layers: list[Layer] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    axes: list[str] = field(default_factory=list)
    given: int | None = None
    taps: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, AttentionLayer] = field(default_factory=dict)
    states: dict[int, tuple[KVTensor, ...]] = field(default_factory=dict)
    weights: list[tuple[WeightMethod, LinearLayer | EmbeddingLayer, QuantizationMethod]] = field(
        default_factory=list
    )
    has_stack: bool = False
    has_language: bool = False
    absent: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    eager: set[Any] = field(default_factory=set)


@dataclass(frozen=True)
class Build:
    """path: dotted checkpoint path of the module that is being built ("model.layers.3.self_attn").

    dtype, device: torch names, of activations. plain_dtype: of weights that are not quantized; None
    = dtype. quantization: how weights are stored. plain: the method for layers that `quantization`
    does not take. kernels: op name → bound callable.
    rope_style: how the checkpoint orders Q and K rows. max_positions: no step has a larger
    position; None = only the config limits them. layers: those that are built; None = all. taps:
    the depths at which the model hands out its hidden states. attention: layer index → its bound
    attention or states, which core adds before `bind`. lora_rows: returns which tokens of the step
    use which adapter, or None if none do; lora_head_rows: the same for the rows of the output head.
    None if LoRA is off, and the second for a head that takes no adapters. tensor: the ranks that
    divide each layer. stage: the part of the stack that is built. engines: those that share out
    experts; None = each engine has all of them. stored: the names of the checkpoint's tensors.
    renamed: path → the path that the checkpoint has instead.
    models: builds another architecture (see `language_model`). is_language: the layers are those of
    a language model inside another model. sees_items: of attention layers (see
    `AttentionLayer`). sees_all: all attention layers are bidirectional, as those of encoders.
    target: the module of the model that this one drafts for, whose layers are its own; None = this
    is no draft model. has_text_head: whether the head that predicts tokens is built."""

    dtype: str
    device: str
    quantization: QuantizationMethod
    plain: QuantizationMethod
    kernels: Mapping[str, Callable[..., Any]]
    path: str = ""
    plain_dtype: str | None = None
    rope_style: str = "halves"
    max_positions: int | None = None
    layers: range | None = None
    taps: tuple[int, ...] = ()
    lora: LoRALimits | None = None
    lora_rows: Callable[[], AdapterRows | None] | None = None
    lora_head_rows: Callable[[], AdapterRows | None] | None = None
    tensor: Group = ALONE
    stage: Stage = WHOLE
    engines: EngineRows | None = None
    stored: Collection[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    models: Callable[[Mapping[str, Any], Build], nn.Module] | None = None
    is_language: bool = False
    sees_items: bool = False
    sees_all: bool = False
    target: Any = None
    has_text_head: bool = True
    declared: Declared = field(default_factory=Declared)
    attention: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def at(self, name: str | int) -> Build:
        """Return the same build for a submodule. name: may have several parts."""
        path = self.path
        for part in str(name).split("."):
            path = f"{path}.{part}" if path else part
            path = self.renamed.get(path, path)
        return replace(self, path=path)

    def has(self, path: str) -> bool:
        """Return whether the checkpoint has a tensor below this path."""
        return any(name.startswith(f"{path}.") for name in self.stored)

    def alone(self) -> Build:
        """Return the same build for a part that takes no adapters, and that each rank has as a
        whole."""
        return replace(self.without_adapters(), tensor=ALONE)

    def without_adapters(self) -> Build:
        """Return the same build for a part that takes no adapters."""
        return replace(self, lora=None, lora_rows=None, lora_head_rows=None)

    def language_model(self, config: Mapping[str, Any]) -> nn.Module:
        """Build a model of the architecture that this config names, from any plugin. Raises
        ModelError or PluginError."""
        assert self.models is not None, "this build makes no other models"
        self.declared.has_language = True
        return self.models(config, replace(self, is_language=True))

    @property
    def is_beside_language(self) -> bool:
        """Whether the layers are those of a tower or a projector: not of the language model that
        the model has. Known when all layers are built."""
        return self.declared.has_language and not self.is_language

    @property
    def is_divided(self) -> bool:
        """Whether only a part of the stack of layers is built."""
        return self.layers is not None or self.stage.count > 1

    @property
    def has_first_layer(self) -> bool:
        """Whether the first layer of the stack is built."""
        return self.stage.is_first if self.layers is None else self.layers.start == 0

    def own_layers(self, num_layers: int) -> range:
        """Return the layers to build. Called by the stack, at its path. Raises ModelError if
        `layers` or `taps` name others than those of a model with this number of layers."""
        every = range(num_layers)
        indices = self.stage.layers(num_layers) if self.layers is None else self.layers
        self.declared.has_stack = True
        self.declared.absent += [f"{self.path}.{i}" for i in every if i not in indices]
        if not indices or not {*indices} <= {*every} or not {*self.taps} <= {*every, num_layers}:
            raise ModelError(
                f"the model has {num_layers} layers; it was asked for {indices}, and for its "
                f"states before {list(self.taps)}"
            )
        return indices

    def method(
        self, kind: Literal["linear", "embedding"], layer: LinearLayer | EmbeddingLayer
    ) -> WeightMethod:
        """Return the weight method of a layer: from `quantization`, or from `plain` if that does
        not take the layer."""
        source = self.quantization
        if (method := getattr(source, kind)(layer)) is None:
            source = self.plain
            method = getattr(source, kind)(layer)
        weight_method: WeightMethod = expect(method, WeightMethod, source, kind)
        self.declared.weights.append((weight_method, layer, source))
        return weight_method


class Holder(Protocol):
    """What holds weights of a layer: a weight method, a small tensor."""

    def tensors(self) -> list[Tensor]:
        """Return their memory. A reload writes all of it again."""


class Layer(nn.Module):
    """One step of a model's computation. Subclasses implement `bind`. Those with weights also
    implement `declare`, `accept` and `finish`.

    `bind` stores the composed callable as `self.forward`. Calling the layer calls only this.
    nn.Module's own call would look for hooks, which takes 2.5 µs, several hundred times per step.
    """

    forward: Callable[..., Any]

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build
        build.declared.layers.append(self)

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        """Return the tensors that this layer needs. available: the checkpoint's tensor index."""
        return []

    def accept(self, piece: WeightPiece) -> None:
        """Take one of the declared tensors."""
        raise TypeError(f"{type(self).__name__} takes no weights")

    def finish(self) -> None:
        """Called when all pieces have been accepted."""

    def bind(self) -> None:
        """Compose `self.forward`."""

    def holders(self) -> list[Holder]:
        """Return what holds the weights, once they are loaded. This memory is released while the
        engine sleeps. A layer that keeps small tensors in lists, or memory of its own, adds them
        here."""
        return [item for item in vars(self).values() if isinstance(item, PlainTensor)]


class PlainTensor:
    """A small unquantized tensor of a layer (norm weight, bias), loaded in pieces along dim 0. A
    reload writes to the same address. dtype: torch name; None = the compute type. sources: the rows
    of each tensor that this rank holds; a tensor that is not named is held as a whole."""

    def __init__(
        self,
        names: Mapping[str, tuple[int, int]],
        shape: tuple[int, ...],
        build: Build,
        dtype: str | None = None,
        sources: Mapping[str, Sequence[Span]] | None = None,
    ) -> None:
        self.names = dict(names)
        self.sources = sources or {}
        self.data = torch.empty(
            shape, dtype=getattr(torch, dtype or build.dtype), device=build.device
        )

    def accept(self, piece: WeightPiece) -> None:
        """Copy a piece to its rows. Raises ModelError if it does not fit."""
        if not isinstance(piece.data, Tensor):
            raise ModelError(
                f"tensor {piece.name} is stored as {piece.stored}; a plain type was expected here"
            )
        start, stop = self.names[piece.name]
        target = self.data[start:stop]
        data = piece.data
        if spans := self.sources.get(piece.name):
            data = torch.cat([data[first:last] for first, last in spans])
        if data.shape != target.shape:
            raise ModelError(
                f"tensor {piece.name} has shape {tuple(piece.data.shape)}; the model expects "
                f"{tuple(target.shape)}"
            )
        target.copy_(data)

    def tensors(self) -> list[Tensor]:
        """Return the tensor, in a list."""
        return [self.data]


def bias_of(layer: LinearLayer, build: Build) -> tuple[PlainTensor, list[WantedWeight]]:
    """Return the bias of a layer, and the tensors that it needs: one beside each matrix."""
    rows: dict[str, Span] = {}
    sources: dict[str, list[Span]] = {}
    sizes: dict[str, int] = {}
    for part in layer.parts:
        name = f"{part.name.removesuffix('weight')}bias"
        rows[name] = rows.get(name, part.rows)[0], part.rows[1]
        sizes[name] = part.shape(layer.in_features)[0]
        if part.cut is not None:
            sources.setdefault(name, []).append(part.cut.rows)
    bias = PlainTensor(rows, (layer.out_features,), build, sources=sources)
    return bias, [WantedWeight(name, (size,)) for name, size in sizes.items()]


class WeightLayer(Layer):
    """A layer with one weight and an optional bias. The quantization method chooses the weight's
    format in `declare`."""

    method: WeightMethod | None = None
    bias: PlainTensor | None = None
    adapters: Any = None  # layers.lora.AdapterSlots

    def accept(self, piece: WeightPiece) -> None:
        target = (
            self.bias if self.bias is not None and piece.name in self.bias.names else self.method
        )
        assert target is not None
        target.accept(piece)

    def finish(self) -> None:
        if self.method is not None:
            self.method.finish()

    def holders(self) -> list[Holder]:
        holders: list[Holder] = [] if self.method is None else [self.method]
        return holders + super().holders()
