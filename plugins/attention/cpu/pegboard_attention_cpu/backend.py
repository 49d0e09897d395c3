"""The backend `cpu_paged`: gathers keys and values block by block and passes them to torch's fused
attention."""

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
from pegboard_attention_cpu.latent import LatentLayer, latent_tensor
from pegboard_attention_cpu.part import PartOfKeys
from pegboard_attention_cpu.plan import Bucket, Chunk, Plan, make_plan
from pegboard_attention_cpu.sparse import Chooser, index_tensors


def rounded(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return x [T, K, D] as the cache stores it. scale: [K], of 8-bit floats; what they cannot hold
    becomes their largest number."""
    if scale is None:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return (x / scale.unsqueeze(1)).clamp(-largest, largest).to(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """Return 8-bit floats as bytes: torch does not index them on a CPU. All else is returned
    unchanged."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def writer(cache: Tensor) -> Callable[[Tensor, Tensor], object]:
    """Return the callable (slots, their bytes or numbers) that writes to a cache [blocks,
    block_size, …]. Blocks that hold more than one tensor are not contiguous, and their slots have
    no common index."""
    cells = as_bytes(cache)
    block_size = cache.shape[1]
    if cells.is_contiguous():
        slots = cells.flatten(0, 1)
        return lambda index, data: slots.index_copy_(0, index, data)
    return lambda index, data: cells.index_put_((index // block_size, index % block_size), data)


class Scratch:
    """Memory that all layers of a step gather into. Its pages are already mapped, and are still in
    the CPU's cache when they are read. Allocating memory for every gather took longer than
    copying."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def gather(self, cache: Tensor, blocks: Tensor, unseen: Tensor | None = None) -> Tensor:
        """Return cache[blocks], which is valid until the next gather. unseen: slots among them
        whose contents become zeros. A state may have been stored there, whose bytes may mean NaN as
        keys, and 0 · NaN is not 0."""
        cache, dtype = as_bytes(cache), cache.dtype
        size = len(blocks) * cache[0].numel()
        if self.memory.numel() < size or self.memory.dtype != cache.dtype:
            self.memory = torch.empty(size, dtype=cache.dtype)
        rows = torch.index_select(
            cache, 0, blocks, out=self.memory[:size].view(len(blocks), *cache.shape[1:])
        )
        if unseen is not None and len(unseen):
            rows.flatten(0, 1).index_fill_(0, unseen, 0)
        return rows.view(dtype)


class CPUPagedAttention:
    """Attention of one KV group."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        self.layers = setup.layers
        self.rules = {layer.retain for layer in setup.layers}
        self.views: Mapping[int, KVView] = {}
        self.block_size = 0
        self.current: Plan | None = None
        self.key_scratch = Scratch()
        self.value_scratch = Scratch()

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        if layer.latent is not None:
            return KVCacheSpec(tensors=(latent_tensor(layer, dtype), *index_tensors(layer, dtype)))
        value_dim = layer.value_dim or layer.head_dim
        return KVCacheSpec(
            tensors=(
                KVTensor("k", (layer.num_kv_heads, layer.head_dim), dtype),
                KVTensor("v", (layer.num_kv_heads, value_dim), dtype),
            ),
            retain=layer.retain,
        )

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        self.views = views
        self.block_size = block_size

    def plan(self, inputs: AttentionInputs) -> None:
        self.current = make_plan(inputs, self.block_size, self.rules)

    def _planned(self) -> Plan:
        assert self.current is not None, "call plan() before the forward"
        return self.current

    def bind(self, layer: AttentionLayer) -> Callable[..., Any]:
        """Return a closure over the layer's cache. See `AttentionBackend.bind`."""
        if layer.latent is not None:
            view = self.views[layer.layer_index]
            cache = view["latent"]
            chooser = None
            if layer.latent.index is not None:
                chooser = Chooser(
                    layer.latent.index,
                    view["index"],
                    writer(view["index"]),
                    self.value_scratch.gather,
                )
            gather = self.key_scratch.gather
            latents = LatentLayer(
                layer, cache, writer(cache), self._planned, attention_of(layer), gather, chooser
            )
            if layer.is_part:
                return PartOfKeys(layer, self._planned, latents.store, latents.keys_and_values)
            return latents
        owner = layer.layer_index if layer.shares_kv_with is None else layer.shares_kv_with
        k_cache = self.views[owner]["k"]
        v_cache = self.views[owner]["v"]
        stored = k_cache.dtype
        write_k = writer(k_cache)
        write_v = writer(v_cache)
        bucket_attention = _bucket_attention(layer, self.key_scratch, self.value_scratch)
        chunk_attention = _chunk_attention(layer)
        width = layer.num_heads * (layer.value_dim or layer.head_dim)

        def store(plan: Plan, k: Tensor | None, v: Tensor | None) -> None:
            if k is not None and v is not None:
                own_k, own_v = (k, v) if plan.stored is None else (k[plan.stored], v[plan.stored])
                write_k(plan.slots, as_bytes(rounded(own_k, stored, layer.k_scale)))
                write_v(plan.slots, as_bytes(rounded(own_v, stored, layer.v_scale)))

        def read(
            blocks: Tensor, dtype: torch.dtype, unseen: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            keys = self.key_scratch.gather(k_cache, blocks, unseen).flatten(0, 1).to(dtype)
            values = self.value_scratch.gather(v_cache, blocks, unseen).flatten(0, 1).to(dtype)
            return _scaled(keys, layer.k_scale), _scaled(values, layer.v_scale)

        if layer.is_part:
            return PartOfKeys(layer, self._planned, store, read)

        def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            plan = self._planned()
            store(plan, k, v)
            out = torch.empty(q.shape[0], width, dtype=q.dtype)
            for bucket in plan.buckets:
                result = bucket_attention(q, k_cache, v_cache, bucket)
                if bucket.tokens is None:
                    out[: bucket.num_rows] = result
                else:
                    out[bucket.tokens] = result
            for chunk in plan.chunks:
                out[chunk.start : chunk.stop] = chunk_attention(q, k, v, k_cache, v_cache, chunk)
            return out

        return attend


def attention_of(
    layer: AttentionLayer,
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]:
    """Return the callable for softmax(q kᵀ · scale + bias) v on [n, heads, queries, D]. It is
    torch's fused kernel, unless the layer has sinks or caps its scores."""
    scale = layer.scale
    soft_cap = layer.soft_cap
    sinks = layer.sinks
    if soft_cap is None and sinks is None:

        def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
            return scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=causal, scale=scale
            )

        return fused

    def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        scores = q @ k.transpose(-1, -2) * scale
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        elif bias is not None:
            scores = scores + bias
        # a key whose value is zero; heads that share a KV head may be queries of one head
        if sinks is not None:
            sink_scores = sinks.to(q.dtype).view(q.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink_scores), -1)
        return scores.softmax(-1)[..., : k.shape[-2]] @ v

    return plain


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return x [n, K, …] times the scale [K], in the type of x."""
    return x if scale is None else (x * scale.view(-1, *(1,) * (x.dim() - 2))).to(x.dtype)


def _bucket_attention(
    layer: AttentionLayer, key_scratch: Scratch, value_scratch: Scratch
) -> Callable[[Tensor, Tensor, Tensor, Bucket], Tensor]:
    """Return the attention of decode rows. The query heads that share a KV head are treated as
    queries of one head, so keys and values are read once."""
    attend = attention_of(layer)
    rule = layer.retain
    k_scale = layer.k_scale
    v_scale = layer.v_scale
    num_kv_heads = layer.num_kv_heads
    group = layer.num_heads // layer.num_kv_heads

    def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, bucket: Bucket) -> Tensor:
        n = bucket.num_rows
        length = bucket.num_keys
        queries = q[:n] if bucket.tokens is None else q[bucket.tokens]
        queries = _scaled(queries.reshape(n, num_kv_heads, group, -1), k_scale)
        keys, values = (
            scratch.gather(cache, bucket.blocks, bucket.unseen[rule])
            .view(n, length, num_kv_heads, -1)
            .transpose(1, 2)
            .to(q.dtype)
            for scratch, cache in ((key_scratch, k_cache), (value_scratch, v_cache))
        )
        bias = bucket.bias[rule].to(q.dtype)
        return _scaled(attend(queries, keys, values, bias, False), v_scale).reshape(n, -1)

    return run


def _kept(cache: Tensor, chunk: Chunk, unseen: int) -> Tensor:
    """Return the chunk's keys or values as they are stored: [num_keys, K, D]. The first `unseen` of
    them become zeros (see `Scratch.gather`)."""
    rows = as_bytes(cache).index_select(0, chunk.blocks).flatten(0, 1)[: chunk.num_keys]
    rows[:unseen].zero_()
    return rows.view(cache.dtype)


def _chunk_attention(layer: AttentionLayer) -> Callable[..., Tensor]:
    """Return the attention of one row's prompt, or of a chunk of it that follows cached tokens."""
    attend = attention_of(layer)
    rule = layer.retain
    k_scale = layer.k_scale
    v_scale = layer.v_scale
    group = layer.num_heads // layer.num_kv_heads

    def run(
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        chunk: Chunk,
    ) -> Tensor:
        queries = q[chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0)
        if chunk.is_whole and k is not None and v is not None:
            keys = k[chunk.start : chunk.stop]
            values = v[chunk.start : chunk.stop]
        else:
            keys, values = (
                _scaled(_kept(cache, chunk, chunk.unseen[rule]).to(q.dtype), scale)
                for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
            )
        keys = keys.transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0)
        values = values.transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0)
        bias = chunk.bias[rule]
        bias = bias if bias is None else bias.to(q.dtype)
        return (
            attend(queries, keys, values, bias, bias is None)[0]
            .transpose(0, 1)
            .reshape(queries.shape[2], -1)
        )

    return run
