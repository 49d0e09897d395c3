"""Chooses the attention backend of every layer and builds one instance per KV group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from pegboard.errors import ConfigError, expect
from pegboard.installed import Entry
from pegboard.interfaces.attention import (
    AttentionBackend,
    AttentionInputs,
    AttentionLayer,
    AttentionNeed,
    AttentionSetup,
    KVCacheSpec,
    KVPlan,
)
from pegboard.interfaces.platform import Trait
from pegboard.interfaces.quantization import QuantizationMethod
from pegboard.ops import StateRows
from pegboard.plugins.registry import Registry
from pegboard.worker.context import Context
from pegboard.worker.recordings import Outside

EXACT_TYPES = {"float32", "bfloat16", "float16"}
"""Types of keys and values that need no scales."""
K_RANGE = 200.0
V_RANGE = 100.0
"""The codes of the largest key and value if scales are calculated. They are vLLM's. e4m3 leaves a
headroom of 2.2 times for keys and 4.5 times for values."""
SHARED_OUT = "the exchange between ranks that share out tokens cannot be replayed"


class StateGroup:
    """The state layers of one KV group, in the place of an attention backend. Ops compute the
    states, so only ops are chosen."""

    rows: StateRows

    def bind(self, states: Mapping[str, Any]) -> Callable[..., Tensor]:
        """Return the callable of a layer with these states (see `StateLayer`)."""
        return lambda call, width, *given: call(states, self.rows, *given)

    def plan(self, inputs: AttentionInputs) -> None:
        """Find the states of the step's rows."""
        is_whole = inputs.num_rows == len(inputs.seq_lens_cpu)
        self.rows = StateRows(
            inputs.block_table,
            inputs.seq_lens,
            inputs.query_start_loc,
            inputs.query_start_loc_cpu.tolist() if is_whole else None,
        )


class AttentionGroups:
    """The model's attention layers: the backend chosen for each, what each stores, and the bound
    callables. Layers that store 8-bit floats get their scales here. They are 1 until weights are
    loaded or `setting_scales` is called.

    need, setup: what all layers have in common. need.kv_dtype: the type that the user wants stored;
    None = the type that the checkpoint's quantization method asks for, or else `plain_dtype`, the
    type of weights that are not quantized. explicit: the backend that the user named. context: the
    ranks that share out the tokens. states: what each state layer stores.
    """

    def __init__(
        self,
        registry: Registry,
        layers: dict[int, AttentionLayer],
        quantization: QuantizationMethod,
        need: AttentionNeed,
        setup: AttentionSetup,
        plain_dtype: str,
        explicit: str | None,
        context: Context,
        states: Mapping[int, KVCacheSpec] | None = None,
    ) -> None:
        self.states = dict(states or {})
        self.registry = registry
        self.layers = layers
        self.need = need
        self.setup = setup
        self.context = context
        dtypes = {
            i: quantization.kv_cache(layer) if layer.latent is None and not layer.encoder else None
            for i, layer in layers.items()
        }
        self.stored = {i: need.kv_dtype or asked or plain_dtype for i, asked in dtypes.items()}
        self.stored |= {i: setup.dtype for i, layer in layers.items() if layer.encoder}
        for index, layer in layers.items():
            if layer.exact_keys and (stored := self.stored[index]) not in EXACT_TYPES:
                raise ConfigError(
                    f"the KV cache of this model cannot store {stored}; use --kv-cache-dtype auto"
                )
            if self.stored[index].startswith("float8") and layer.latent is None:
                scales = torch.ones(2, layer.num_kv_heads, device=setup.device)
                layers[index] = replace(layer, k_scale=scales[0], v_scale=scales[1])
        self.entries = {index: self._choose(layer, explicit) for index, layer in layers.items()}
        self.backends: list[tuple[int, AttentionBackend | StateGroup]] = []

    def _choose(self, layer: AttentionLayer, explicit: str | None) -> Entry:
        stored = self.stored[layer.layer_index]
        need = replace(
            self.need,
            kv_dtype=stored if layer.latent is None and not layer.encoder else None,
            latent=None if layer.latent is None else stored,
            head_dim=layer.head_dim,
            window=layer.window is not None,
            chunk=layer.chunk is not None,
            sinks=layer.sinks is not None,
            soft_cap=layer.soft_cap is not None,
            encoder=layer.encoder,
            distance_bias=layer.distance_bias is not None,
            part=self.context.divides(layer),
            items=layer.sees_items,
            sparse=layer.latent is not None and layer.latent.index is not None,
        )
        key = "+".join(f"{name}={value}" for name, value in need.wants().items())
        decision = self.registry.decisions.get(("attention", key))
        if decision is None:
            decision = self.registry.choose("attention", need, explicit=explicit, key=key)
        return decision.require()

    def kv_specs(self) -> dict[int, KVCacheSpec]:
        """Return what each layer stores, for the layers that have their own cache."""
        specs = dict(self.states)
        for index, layer in self.layers.items():
            if layer.shares_kv_with is not None:
                continue
            backend: Any = self.registry.load(self.entries[index])
            part = self.context.as_part(layer)
            spec = expect(
                backend.kv_spec(part, self.stored[index]), KVCacheSpec, backend, "kv_spec"
            )
            ranks = self.context.tokens.size if part.is_part else 1
            specs[index] = msgspec.structs.replace(spec, ranks=ranks)
        return specs

    def layout(self) -> str:
        """Name what the bytes of the cache mean: the backends with their versions (one for all
        layers, or one per layer), each of which has its own arrangement of the cache, and a digest
        of the scales."""
        names = [
            f"{entry.name} ({entry.distribution} {entry.version})"
            for entry in self.entries.values()
        ]
        scales = [
            s
            for layer in self.layers.values()
            for s in (layer.k_scale, layer.v_scale)
            if s is not None
        ]
        digest = (
            [f"scales {hashlib.sha256(repr([s.tolist() for s in scales]).encode()).hexdigest()}"]
            if scales
            else []
        )
        return ", ".join([*(names[:1] if len(set(names)) == 1 else names), *digest])

    def not_replayed(self, pads: bool, trait: Trait) -> str:
        """Return why this stage of the model cannot be recorded; "" if it can. pads: see
        `Replay`."""
        if self.context.tokens.size > 1:
            return SHARED_OUT
        if self.states and pads and trait == "forward":
            return "layers with states cannot replay padded prompts"
        eager = {
            entry.id
            for entry in self.entries.values()
            if "replay" not in self.registry.spec(entry).flags
        }
        return f"the attention of {', '.join(sorted(eager))} cannot be replayed" if eager else ""

    def not_in_pieces(self) -> str:
        """Return why steps cannot be recorded without their attention; "" if they can."""
        return SHARED_OUT if self.context.tokens.size > 1 else ""

    def outside(
        self, bound: Mapping[int, Callable[..., Any]], leave: Outside
    ) -> dict[int, Callable[..., Any]]:
        """Return what layers call in place of their bound attention or states while they are
        recorded without it. leave: see `PiecewiseReplay.outside`."""

        def without(run: Callable[..., Any], call: Any, width: int, *given: Tensor) -> Tensor:
            return leave(partial(run, call, width), width)(*given)

        return {
            **{
                index: leave(bound[index], layer.num_heads * layer.result_dim)
                for index, layer in self.layers.items()
            },
            **{index: partial(without, bound[index]) for index in self.states},
        }

    def attach(
        self, plan: KVPlan, views: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, Callable[..., Any]]:
        """Build the backends on the memory of `views` and bind every layer. Returns {layer index:
        bound attention or states}."""
        self.backends = []
        bound: dict[int, Callable[..., Any]] = {}
        for group_index, group in enumerate(plan.groups):
            if group.spec.unit == "request" and group.layers:
                states = StateGroup()
                self.backends.append((group_index, states))
                bound.update({index: states.bind(views[index]) for index in group.layers})
                continue
            members: dict[Entry, list[AttentionLayer]] = {}
            for index, layer in self.layers.items():
                owner = index if layer.shares_kv_with is None else layer.shares_kv_with
                if owner in group.layers:
                    layer_of_cache = self.layers[owner]
                    scaled = replace(
                        layer, k_scale=layer_of_cache.k_scale, v_scale=layer_of_cache.v_scale
                    )
                    members.setdefault(self.entries[index], []).append(scaled)
            for entry, attention_layers in members.items():
                parts = [self.context.as_part(layer) for layer in attention_layers]
                setup = self.setup
                if parts[0].encoder_tokens is not None:  # every token is a row
                    most = setup.limits.max_num_batched_tokens
                    setup = replace(setup, limits=replace(setup.limits, max_num_seqs=most))
                backend = self.registry.build(entry, replace(setup, layers=tuple(parts)))
                backend.attach(views, group.num_slots)
                self.backends.append((group_index, backend))
                for layer, part in zip(attention_layers, parts, strict=True):
                    bound[layer.layer_index] = self.context.joined(layer, backend.bind(part))
        return bound

    def setting_scales(
        self, bound: Mapping[int, Callable[..., Any]]
    ) -> dict[int, Callable[..., Any]]:
        """Return the bound attention of all layers with scales. Each call first sets its layer's
        scales by the keys and values that it is about to store."""

        def wrap(layer: AttentionLayer, attend: Callable[..., Any]) -> Callable[..., Any]:
            def call(q: Tensor, k: Tensor | None, v: Tensor | None) -> Any:
                for new, scale, code in ((k, layer.k_scale, K_RANGE), (v, layer.v_scale, V_RANGE)):
                    if new is not None and scale is not None:
                        scale.fill_(float(new.abs().max()) / code or 1.0)
                return attend(q, k, v)

            return call

        return {
            index: wrap(layer, bound[index])
            for index, layer in self.layers.items()
            if layer.k_scale is not None
        }
