"""The backend `flashinfer`: the library plans each step once for all layers of a kind, torch stores
keys and values, and the library attends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.interfaces.attention import (
    AttentionInputs,
    AttentionLayer,
    AttentionSetup,
    KVCacheSpec,
    KVTensor,
    KVView,
)
from pegboard_attention_flashinfer.plan import pages_of

WORKSPACE_BYTES = 128 * 2**20
"""Memory for the results of long rows whose keys are split. The library's manual recommends it."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the library plans for: layers that are equal in this share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None

    @classmethod
    def of(cls, layer: AttentionLayer) -> LayerKind:
        """Return the kind of a layer."""
        return cls(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.scale,
            layer.window,
            layer.soft_cap,
        )


class Wrappers:
    """The library's objects for the steps of one kind of layer, which keep what was planned.

    The library copies a plan to the device from host memory of the object. A step may be planned
    while the one before has not begun, so there are as many objects as steps that may be under way,
    and they take turns. One whose last copy is not done is waited for. They share the workspace,
    because the device takes one step at a time.
    """

    def __init__(self, kind: LayerKind, workspace: Tensor, count: int) -> None:
        library = import_module("flashinfer")
        self.kind = kind
        is_grouped = kind.num_heads != kind.num_kv_heads
        self.turns = [
            (
                library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"),
                # without tensor cores, it knows only some numbers of heads per KV head
                library.BatchDecodeWithPagedKVCacheWrapper(
                    workspace, "NHD", use_tensor_cores=is_grouped
                ),
            )
            for _ in range(count)
        ]
        is_asynchronous = workspace.device.type == "cuda"
        self.copies = [torch.cuda.Event() if is_asynchronous else None for _ in range(count)]
        self.current: Any = None

    def plan(self, inputs: AttentionInputs, block_size: int, dtype: torch.dtype) -> None:
        """Plan a step. Rows of one token each are decodes."""
        kind = self.kind
        self.turns.append(self.turns.pop(0))
        self.copies.append(self.copies.pop(0))
        prefill, decode = self.turns[0]
        copied = self.copies[0]
        if copied is not None:
            copied.synchronize()
        pages = pages_of(inputs, block_size, kind.window)
        rows = (pages.indptr, pages.indices, pages.last)
        shape = (kind.num_heads, kind.num_kv_heads, kind.head_dim, block_size)
        settings = {
            "sm_scale": kind.scale,
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.soft_cap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        is_decode = bool((pages.starts.diff() == 1).all())
        self.current = decode if is_decode else prefill
        if is_decode:
            decode.plan(*rows, *shape, **settings)
        else:
            prefill.plan(pages.starts, *rows, *shape, causal=True, **settings)
        if copied is not None:
            copied.record()


class FlashInferAttention:
    """Attention of one KV group."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        for layer in setup.layers:
            if layer.value_dim not in (None, layer.head_dim):
                raise ConfigError(
                    f"values must have the width of keys, and layer {layer.layer_index} "
                    f"has keys of {layer.head_dim} channels and values of {layer.value_dim}; name "
                    "another --attention-backend"
                )
        self.dtype: torch.dtype = getattr(torch, setup.dtype)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=setup.device)
        count = setup.limits.max_in_flight + 1
        kinds = dict.fromkeys(map(LayerKind.of, setup.layers))
        self.wrappers = {kind: Wrappers(kind, workspace, count) for kind in kinds}
        self.views: Mapping[int, KVView] = {}
        self.block_size = 0
        self.num_tokens = 0
        self.places: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        shape = (layer.num_kv_heads, layer.head_dim)
        return KVCacheSpec(
            tensors=(KVTensor("k", shape, dtype), KVTensor("v", shape, dtype)), retain=layer.retain
        )

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        self.views = views
        self.block_size = block_size

    def plan(self, inputs: AttentionInputs) -> None:
        """Plan the step for each kind of layer, from the host's arrays."""
        # a token without a slot is written to the null block, which no request reads
        slots = inputs.slot_mapping.clamp(min=0)
        self.places = (slots // self.block_size, slots % self.block_size)
        self.num_tokens = inputs.num_tokens
        if inputs.num_tokens:
            for wrappers in self.wrappers.values():
                wrappers.plan(inputs, self.block_size, self.dtype)

    def bind(self, layer: AttentionLayer) -> Callable[..., Tensor]:
        """Return a closure over the layer's cache. See `AttentionBackend.bind`."""
        owner = layer.layer_index if layer.shares_kv_with is None else layer.shares_kv_with
        caches = (self.views[owner]["k"], self.views[owner]["v"])
        wrappers = self.wrappers[LayerKind.of(layer)]

        def call(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            assert self.places is not None, "call plan() before the forward"
            if k is not None and v is not None:
                caches[0].index_put_(self.places, k)
                caches[1].index_put_(self.places, v)
            count = self.num_tokens
            if not count:
                return torch.zeros_like(q).flatten(1)
            out: Tensor = wrappers.current.run(q[:count].contiguous(), caches)
            if count < len(q):  # padding
                out = torch.cat((out, out.new_zeros(len(q) - count, *out.shape[1:])))
            return out.flatten(1)

        return call
