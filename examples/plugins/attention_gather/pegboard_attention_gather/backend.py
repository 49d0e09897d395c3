"""Causal attention over the blocks of the cache. Letters: T tokens, H heads, K KV heads, D
head_dim; for R, N and L see `rows`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pegboard.interfaces.attention import (
    AttentionInputs,
    AttentionLayer,
    AttentionSetup,
    KVCacheSpec,
    KVTensor,
    KVView,
)
from pegboard_attention_gather.rows import Rows, rows_of

Reach = tuple[int | None, int | None]
"""Window and chunk of a layer."""


class GatherAttention:
    """The attention of the layers of one KV group."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        self._views: Mapping[int, KVView] = {}
        self._block_size = 0
        self._inputs: AttentionInputs | None = None
        self._rows: dict[Reach, list[Rows]] = {}
        self._stored = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        """Every token stores a key and a value. Blocks that left the window or chunk may be dropped
        (`retain`)."""
        key = KVTensor("k", (layer.num_kv_heads, layer.head_dim), dtype)
        value = KVTensor("v", (layer.num_kv_heads, layer.value_dim or layer.head_dim), dtype)
        return KVCacheSpec(tensors=(key, value), retain=layer.retain)

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        self._views = views
        self._block_size = block_size

    def plan(self, inputs: AttentionInputs) -> None:
        """Begin a step. The rows are laid out when the first layer asks for them."""
        self._inputs = inputs
        self._rows = {}
        self._stored = (inputs.slot_mapping >= 0).nonzero()[:, 0]

    def _rows_for(self, layer: AttentionLayer) -> list[Rows]:
        """Return the rows of this step. Layers with the same window or chunk share them."""
        assert self._inputs is not None, "plan() comes before the bound calls"
        reach = (layer.window, layer.chunk)
        if reach not in self._rows:
            self._rows[reach] = rows_of(self._inputs, layer, self._block_size)
        return self._rows[reach]

    def bind(self, layer: AttentionLayer) -> Callable[..., Tensor]:
        owner = layer.layer_index if layer.shares_kv_with is None else layer.shares_kv_with
        view: Any = self._views[owner]
        keys = view["k"]
        values = view["v"]  # [blocks, block_size, K, D]

        def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            if k is not None and v is not None:
                self._store(k, keys)
                self._store(v, values)
            out = q.new_zeros(q.shape[0], layer.num_heads, values.shape[-1])
            for rows in self._rows_for(layer):
                out[rows.tokens] = _attend(q[rows.tokens], keys, values, rows, layer.scale)
            return out.flatten(1)

        return attend

    def _store(self, new: Tensor, cache: Tensor) -> None:
        """Write new [T, K, D] to its slots, except tokens that have none."""
        assert self._inputs is not None, "plan() comes before the bound calls"
        slots = self._inputs.slot_mapping[self._stored]
        places = slots // self._block_size, slots % self._block_size
        cache[places] = new[self._stored].to(cache.dtype)


def _attend(q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float) -> Tensor:
    """Attend from q [R, N, H, D] to the keys of each row. Return [R, N, H, D]."""
    k, v = (
        cache[rows.blocks, rows.offsets].to(q.dtype).transpose(1, 2) for cache in (keys, values)
    )
    out = scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=rows.visible, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)
