"""Chooses the attention backend of every layer and builds one instance per KV group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.config.limits import Limits
from pegboard.errors import ModelError
from pegboard.interfaces.attention import AttentionBackend, AttentionLayer, AttentionNeed, AttentionSetup, KVCacheSpec, KVPlan
from pegboard.interfaces.quantization import QuantizationMethod
from pegboard.plugins.discovery import Entry
from pegboard.plugins.registry import Registry


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """What every backend is told beside its layers. kv_dtype: what the user wants stored; None = what the checkpoint's
    quantization method wants, else dtype."""

    platform: str
    dtype: str
    kv_dtype: str | None
    device: str
    limits: Limits
    num_threads: int
    explicit: str | None


class AttentionGroups:
    """The model's attention layers: the chosen backend of each, what each stores, and the bound callables."""

    def __init__(
        self,
        registry: Registry,
        layers: Mapping[int, AttentionLayer],
        limits: AttentionLimits,
        quantization: QuantizationMethod,
        kernels: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.registry, self.layers, self.limits, self.kernels = registry, layers, limits, kernels
        wants = quantization.kv_cache if limits.kv_dtype is None else lambda layer: None
        self.quantized = {index: wants(layer) for index, layer in layers.items()}
        self.entries = {index: self._choose(layer) for index, layer in layers.items()}
        self.backends: list[tuple[int, AttentionBackend]] = []
        self.bound: dict[int, Callable[..., Any]] = {}

    def _stored_dtype(self, layer: AttentionLayer) -> str:
        quantized = self.quantized[layer.layer_index]
        return quantized.dtype if quantized else self.limits.kv_dtype or self.limits.dtype

    def _choose(self, layer: AttentionLayer) -> Entry:
        limits = self.limits
        need = AttentionNeed(
            platform=limits.platform,
            dtype=limits.dtype,
            kv_dtype=self._stored_dtype(layer),
            head_dim=layer.head_dim,
            kind=layer.kind,
            window=layer.window is not None,
            sinks=layer.sinks,
            soft_cap=layer.soft_cap is not None,
            alibi=layer.alibi is not None,
            block_size=limits.limits.block_size,
        )
        key = "+".join(f"{name}={value}" for name, value in need.wants().items())
        known = self.registry.decisions.get(("attention", key))
        return (known or self.registry.choose("attention", need, explicit=limits.explicit, key=key)).require()

    def kv_specs(self) -> dict[int, KVCacheSpec]:
        """What each layer that owns a cache stores."""
        specs = {}
        for index, layer in self.layers.items():
            if layer.shares_kv_with is not None:
                continue
            backend: Any = self.registry.load(self.entries[index])
            spec = backend.kv_spec(layer, self._stored_dtype(layer), self.quantized[index])
            if spec is None:
                raise ModelError(f"attention layer {index} stores no keys and values; such models are not supported yet")
            specs[index] = spec
        return specs

    def not_replayed(self) -> str:
        """Why steps of this model cannot be recorded; "" = they can."""
        eager = {entry.id for entry in self.entries.values() if "replay" not in self.registry.spec(entry).flags}
        return f"the attention of {', '.join(sorted(eager))} cannot be replayed" if eager else ""

    def attach(self, plan: KVPlan, views: Mapping[int, Mapping[str, Any]]) -> dict[int, Callable[..., Any]]:
        """Build the backends over the memory of `views` and bind every layer; returns {layer index: bound attention}."""
        self.backends, self.bound = [], {}
        for group_index, group in enumerate(plan.groups):
            members = [layer for layer in self.layers.values() if self._owner(layer) in group.layers]
            for entry in dict.fromkeys(self.entries[layer.layer_index] for layer in members):
                own = tuple(layer for layer in members if self.entries[layer.layer_index] == entry)
                backend = self.registry.build(entry, self._setup(own))
                backend.attach(views, group.block_size)
                self.backends.append((group_index, backend))
                for layer in own:
                    self.bound[layer.layer_index] = backend.bind(layer)
        return self.bound

    @staticmethod
    def _owner(layer: AttentionLayer) -> int:
        return layer.layer_index if layer.shares_kv_with is None else layer.shares_kv_with

    def _setup(self, layers: tuple[AttentionLayer, ...]) -> AttentionSetup:
        limits = self.limits
        return AttentionSetup(
            layers=layers,
            dtype=limits.dtype,
            device=limits.device,
            limits=limits.limits,
            num_threads=limits.num_threads,
            kernels=self.kernels,
            quantization=self.quantized[layers[0].layer_index],
        )
