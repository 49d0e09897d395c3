"""The backend `flex`: gathers the keys and values of some rows, and calls torch's flex_attention
with a mask over their positions (Dong et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from pegboard.interfaces.attention import (
    AttentionInputs,
    AttentionLayer,
    AttentionSetup,
    KVCacheSpec,
    KVTensor,
    KVView,
)
from pegboard_attention_flex.options import FlexOptions
from pegboard_attention_flex.plan import QUERIES, Part, parts_of


class FlexAttention:
    """Attention of one KV group."""

    def __init__(self, options: FlexOptions, setup: AttentionSetup) -> None:
        self.views: Mapping[int, KVView] = {}
        self.block_size = 0
        self.slots = torch.empty(0)
        self.parts: list[Part] = []
        self.most_queries = None if options.compile else QUERIES
        self.flex = torch.compile(flex_attention) if options.compile else flex_attention

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
        self.block_size = block_size

    def plan(self, inputs: AttentionInputs) -> None:
        """Note the parts of the step. A token without a slot is written to the null block, which no
        request reads: to leave it out, its place would have to be known on the host."""
        self.slots = inputs.slot_mapping.clamp(min=0)
        self.parts = list(parts_of(inputs, self.block_size, self.most_queries))

    def bind(self, layer: AttentionLayer) -> Callable[..., Any]:
        """Return a closure over the layer's cache. See `AttentionBackend.bind`."""
        owner = layer.layer_index if layer.shares_kv_with is None else layer.shares_kv_with
        k_cache = self.views[owner]["k"]
        v_cache = self.views[owner]["v"]
        value_dim = layer.value_dim or layer.head_dim
        rule = layer.retain
        compute = computing(layer, self.flex)

        def call(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
            if k is not None and v is not None:
                places = self.slots // self.block_size, self.slots % self.block_size
                k_cache.index_put_(places, k.to(k_cache.dtype))
                v_cache.index_put_(places, v.to(v_cache.dtype))
            out = q.new_zeros(*q.shape[:2], value_dim)
            lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
            for part in self.parts:
                queries = q[part.tokens].unflatten(0, (part.rows, -1)).transpose(1, 2)
                keys, values = (
                    cache[part.blocks].flatten(1, 2).transpose(1, 2).to(q.dtype)
                    for cache in (k_cache, v_cache)
                )
                values.masked_fill_(part.unseen(rule)[:, None, :, None], 0)
                sums, logs = compute(queries, keys, values, part.mask(rule))
                out[part.tokens] = sums.transpose(1, 2).flatten(0, 1)
                if logs is not None:
                    lse[part.tokens] = logs.transpose(1, 2).flatten(0, 1)
            return out, lse

        return call if layer.is_part else lambda q, k, v: call(q, k, v)[0].flatten(1)


def computing(layer: AttentionLayer, flex: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable (queries [rows, H, queries, D], keys [rows, K, keys, D], values, mask) →
    (sums [rows, H, queries, Dv], logs of the sums of exp(score) [rows, H, queries]). The logs are
    None if nothing needs them: torch cannot compile them for a CPU.

    A sink is one more score without a value, so it only makes the sums smaller: by the share
    exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse − sink)."""
    soft_cap = layer.soft_cap
    sinks = layer.sinks
    more_results = AuxRequest(lse=sinks is not None or layer.is_part)
    score_mod = None
    if soft_cap is not None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.tanh(score / soft_cap) * soft_cap

    def compute(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> tuple[Tensor, Any]:
        sums, more = flex(
            queries,
            keys,
            values,
            score_mod=score_mod,
            block_mask=mask,
            scale=layer.scale,
            enable_gqa=layer.num_heads != layer.num_kv_heads,
            return_aux=more_results,
        )
        logs = more.lse
        if sinks is not None:
            share = torch.sigmoid(logs - sinks.view(-1, 1))
            sums = (sums.float() * share.unsqueeze(-1)).to(queries.dtype)
        return sums, logs

    return compute
