"""The backend `triton`: one kernel stores keys and values, and another one attends.

They read the step from the tensors of `AttentionInputs` only, so their calls can be recorded. A
step needs nothing else: the kernels find out which token belongs to which row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pegboard.interfaces.attention import (
    AttentionInputs,
    AttentionLayer,
    AttentionSetup,
    KVCacheSpec,
    KVTensor,
    KVView,
)
from pegboard_attention_triton.attention import paged_attention
from pegboard_attention_triton.store import store_kv


class TritonAttention:
    """Attention of one KV group."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        self.is_invariant = setup.batch_invariant
        self.views: Mapping[int, KVView] = {}
        self.inputs: AttentionInputs | None = None

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        return KVCacheSpec(
            tensors=(
                KVTensor("k", (layer.num_kv_heads, layer.head_dim), dtype),
                KVTensor("v", (layer.num_kv_heads, layer.value_dim or layer.head_dim), dtype),
            ),
            retain=layer.retain,
        )

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        self.views = views

    def plan(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs

    def bind(self, layer: AttentionLayer) -> Callable[..., Any]:
        """Return a closure over the layer's cache. See `AttentionBackend.bind`."""
        owner = layer.layer_index if layer.shares_kv_with is None else layer.shares_kv_with
        k_cache = self.views[owner]["k"]
        v_cache = self.views[owner]["v"]
        scales = (layer.k_scale, layer.v_scale)
        features = (layer.window, layer.soft_cap, layer.chunk, layer.sinks)

        def call(
            q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None
        ) -> Tensor:
            step = self.inputs
            assert step is not None, "call plan() before the forward"
            if k is not None and v is not None:
                store_kv(k, v, k_cache, v_cache, step.slot_mapping, *scales)
            rows = step.block_table, step.query_start_loc, step.seq_lens
            more = (*features, *scales, step.num_keys, lse, self.is_invariant)
            return paged_attention(q, k_cache, v_cache, *rows, layer.scale, *more)

        def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            return call(q, k, v).flatten(1)

        def attend_part(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            return call(q, k, v, lse), lse

        return attend_part if layer.is_part else attend
