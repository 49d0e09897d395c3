"""The backend `flash_attn`: torch stores keys and values, and one call of the library attends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

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

OLDEST_DEVICE = (8, 0)
"""The lowest compute capability that the library has kernels for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the library needs to know of a step. places: of its tokens in the cache, block and slot.
    starts, key_starts: int32 [rows + 1], where the queries and keys of each row would begin if they
    lay one after another. table: int32 [rows, blocks]. most_queries, most_keys: of a row."""

    num_tokens: int
    places: tuple[Tensor, Tensor]
    starts: Tensor
    key_starts: Tensor
    table: Tensor
    most_queries: int
    most_keys: int


class FlashAttention:
    """Attention of one KV group."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        check_device(setup.device)
        for layer in setup.layers:
            if layer.value_dim not in (None, layer.head_dim):
                raise ConfigError(
                    f"flash-attn reads values of the width of keys, and layer {layer.layer_index} "
                    f"has keys of {layer.head_dim} channels and values of {layer.value_dim}; name "
                    "another --attention-backend"
                )
        self.attend = import_module("flash_attn").flash_attn_varlen_func
        self.views: Mapping[int, KVView] = {}
        self.block_size = 0
        self.current: Plan | None = None

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
        """Take what the device has, and the largest lengths from the host: the library divides its
        work by them, so a recorded call would serve no longer row."""
        rows = inputs.num_rows
        counts = inputs.query_start_loc_cpu[1 : rows + 1] - inputs.query_start_loc_cpu[:rows]
        key_starts = inputs.query_start_loc.new_zeros(rows + 1)
        torch.cumsum(inputs.seq_lens[:rows], 0, dtype=torch.int32, out=key_starts[1:])
        # a token without a slot is written to the null block, which no request reads
        slots = inputs.slot_mapping.clamp(min=0)
        self.current = Plan(
            inputs.num_tokens,
            (slots // self.block_size, slots % self.block_size),
            inputs.query_start_loc[: rows + 1],
            key_starts,
            inputs.block_table[:rows],
            int(counts.max(initial=0)),
            int(inputs.seq_lens_cpu[:rows].max(initial=0)),
        )

    def bind(self, layer: AttentionLayer) -> Callable[..., Tensor]:
        """Return a closure over the layer's cache. See `AttentionBackend.bind`."""
        owner = layer.layer_index if layer.shares_kv_with is None else layer.shares_kv_with
        k_cache = self.views[owner]["k"]
        v_cache = self.views[owner]["v"]
        # both ends are included, and the current token is one of the window
        window = (-1, -1) if layer.window is None else (layer.window - 1, 0)
        soft_cap = layer.soft_cap or 0.0
        scale = layer.scale

        def call(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            step = self.current
            assert step is not None, "call plan() before the forward"
            if k is not None and v is not None:
                k_cache.index_put_(step.places, k)
                v_cache.index_put_(step.places, v)
            count = step.num_tokens
            if not count:
                return torch.zeros_like(q).flatten(1)
            out: Tensor = self.attend(
                q[:count],
                k_cache,
                v_cache,
                step.starts,
                step.key_starts,
                step.most_queries,
                step.most_keys,
                softmax_scale=scale,
                causal=True,
                window_size=window,
                softcap=soft_cap,
                block_table=step.table,
            )
            if count < len(q):  # padding
                out = torch.cat((out, out.new_zeros(len(q) - count, *out.shape[1:])))
            return out.flatten(1)

        return call


def check_device(name: str) -> None:
    """Raise ConfigError if the library has no kernels for this device."""
    device = torch.device(name)
    if device.type != "cuda":  # a device of tests
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_DEVICE:
        raise ConfigError(
            f"flash-attn needs compute capability {OLDEST_DEVICE[0]}.{OLDEST_DEVICE[1]} or higher, "
            f"and this GPU has {capability[0]}.{capability[1]}; use --attention-backend triton"
        )
