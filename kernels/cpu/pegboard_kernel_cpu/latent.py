"""The attention backend `cpu_mla`: compiled latent attention over the paged cache. Prompts and
decodes read the latents themselves (see `Latent`: absorbed)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.attention import AttentionLayer, AttentionSetup, KVCacheSpec, KVTensor
from pegboard_kernel_cpu.attention import NativeAttention, name_of_type
from pegboard_kernel_cpu.attention_structs import CACHE_TYPES, TILE
from pegboard_kernel_cpu.values import Call, Turn, Value, new, rows_of, submit

CODES_PER_SCALE = 128
FP8_DS_MLA = len(CACHE_TYPES) + 1
"""After the types of attention.h, of which one is not a type of the cache."""


class LatentCache(Structure):
    _fields_ = [
        ("latents", c_void_p),
        ("stride", c_int64),
        *((name, c_int32) for name in ("rank", "rope", "block_size", "type")),
    ]


class IndexCache(Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("stride", c_int64),
        *((name, c_int32) for name in ("size", "block_size", "type")),
    ]


class ChooseKeys(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("vectors", "weights")),
        *((name, c_int64) for name in ("vectors_stride", "weights_stride")),
        ("chosen", c_void_p),
        ("chosen_stride", c_int64),
        ("plan", c_void_p),
        ("cache", IndexCache),
        ("scores", c_void_p),
        ("most_keys", c_int64),
        *((name, c_int32) for name in ("heads", "top_k")),
    ]


class HeadProducts(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("x_stride", "out_stride", "x_head", "out_head")),
        ("weight", c_void_p),
        *((name, c_int64) for name in ("rows", "columns")),
        *((name, c_int32) for name in ("num_heads", "type")),
    ]


class LatentStore(Structure):
    _fields_ = [
        ("absorbed", HeadProducts),
        *((name, c_void_p) for name in ("q_rope", "latent", "k_rope")),
        *(
            (name, c_int64)
            for name in ("q_rope_stride", "q_rope_head", "latent_stride", "k_rope_stride")
        ),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("cos_stride", "sin_stride")),
        ("plan", c_void_p),
        ("cache", LatentCache),
        ("index", c_void_p),
        ("index_stride", c_int64),
        ("index_cache", IndexCache),
        ("pairs", c_int32),
    ]


class LatentArguments(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "out")),
        *((name, c_int64) for name in ("q_stride", "out_stride")),
        ("plan", c_void_p),
        ("cache", LatentCache),
        ("lse", c_void_p),
        ("chosen", c_void_p),
        ("chosen_stride", c_int64),
        *((name, c_int32) for name in ("num_heads", "top_k")),
        ("scale", c_float),
    ]


class NativeLatentAttention(NativeAttention):
    """The latent attention of one KV group. Its plan is that of a layer with one KV head. If keys
    are chosen by an index, every tile has one token."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        super().__init__(options, setup)
        self.scores: np.ndarray | None = None
        if has_index(setup.layers):
            self.scores = np.empty((self.num_threads, 2, setup.limits.max_model_len), np.float32)

    @staticmethod
    def rows_of_token(layers: Sequence[AttentionLayer]) -> int:
        return TILE if has_index(layers) else NativeAttention.rows_of_token(layers)

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        """A token stores (c, r) in the type `dtype`. fp8_ds_mla is vLLM's layout for DeepSeek: C
        codes of float8_e4m3fn, a float32 scale for each 128 of them (their largest magnitude /
        448), and r in bfloat16. Layers with an index also store the index key, in `dtype` or, with
        fp8_ds_mla, in bfloat16."""
        rank = layer.value_dim or 0
        width = layer.head_dim
        stored = index_stored = dtype
        if dtype == "fp8_ds_mla":
            stored = "uint8"
            index_stored = "bfloat16"
            width = rank + 4 * -(-rank // CODES_PER_SCALE) + 2 * (layer.head_dim - rank)
        tensors = [KVTensor("latent", (width,), stored)]
        index = None if layer.latent is None else layer.latent.index
        if index is not None:
            tensors.append(KVTensor("index", (index.head_dim,), index_stored))
        return KVCacheSpec(tensors=tuple(tensors), retain=layer.retain)

    def bind(self, layer: AttentionLayer) -> Callable[..., Any]:
        return (PartOfLatents if layer.is_part else NativeLatentLayer)(self, layer)


class NativeLatentLayer:
    """One bound layer. It is called eagerly, or recorded into a program."""

    def __init__(self, backend: NativeLatentAttention, layer: AttentionLayer) -> None:
        assert layer.latent is not None and layer.value_dim is not None
        self.backend = backend
        self.layer = layer
        self.index = layer.latent.index
        self.up_k, self.up_v = layer.latent.matrices()
        self.rank = layer.value_dim
        views = backend.views[layer.layer_index]
        view = views["latent"]
        self.cache = LatentCache(
            latents=view.data_ptr(),
            stride=view.stride(0) * view.element_size(),
            rank=self.rank,
            rope=layer.head_dim - self.rank,
            block_size=backend.block_size,
            type=FP8_DS_MLA if view.dtype == torch.uint8 else type_of(view),
        )
        self.index_cache = IndexCache()
        if self.index is not None:
            keys = views["index"]
            self.index_cache = IndexCache(
                keys=keys.data_ptr(),
                stride=keys.stride(0) * keys.element_size(),
                size=self.index.head_dim,
                block_size=backend.block_size,
                type=type_of(keys),
            )

    def __call__(
        self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, *index: Tensor
    ) -> Any:
        turn: Turn | None = None
        if type(q) is Value:
            (q_rope, k_rope), turn = q.recorder.take_turn(q_rope, k_rope)
        num_heads = self.layer.num_heads
        queries = new(q, num_heads * self.layer.head_dim)
        q, q_rope = (x if x.stride(2) == 1 else x.contiguous() for x in (q, q_rope))
        reads = {
            "absorbed.x": q,
            "q_rope": q_rope,
            "latent": rows_of(latent),
            "k_rope": rows_of(k_rope),
        }
        if turn is not None:
            reads |= {"cos": turn.cos, "sin": turn.sin}
        if index:
            reads["index"] = rows_of(index[2])
        plan = addressof(self.backend.current)
        store = LatentStore(
            absorbed=self._products(self.up_k, q.stride(1), self.layer.head_dim),
            q_rope_head=q_rope.stride(1),
            plan=plan,
            cache=self.cache,
            index_cache=self.index_cache,
            pairs=turn is not None and turn.pairs,
        )
        attend = LatentArguments(
            plan=plan, cache=self.cache, num_heads=num_heads, scale=self.layer.scale
        )
        calls = [Call("latent_store", store, reads, {"absorbed.out": queries}, self)]
        attended = {"q": queries}
        if self.index is not None:
            attend.top_k = self.index.top_k
            attended["chosen"] = new(q, self.index.top_k, torch.int32)
            calls.append(self._choose(index[0], index[1], attended["chosen"]))
        sums = new(q, num_heads * self.rank)
        width = self.up_v.shape[2]
        out = new(q, num_heads * width)
        values = self._products(self.up_v, self.rank, width)
        calls += [
            Call("attend_latent", attend, attended, {"out": sums}, self),
            Call("head_products", values, {"x": sums}, {"out": out}, self),
        ]
        submit(q, *calls)
        return out

    def _choose(self, vectors: Tensor, weights: Tensor, chosen: Tensor) -> Call:
        """Return the call that chooses the keys of each query."""
        scores = self.backend.scores
        assert self.index is not None and scores is not None
        arguments = ChooseKeys(
            plan=addressof(self.backend.current),
            cache=self.index_cache,
            scores=scores.ctypes.data,
            most_keys=scores.shape[2],
            heads=self.index.num_heads,
            top_k=self.index.top_k,
        )
        reads = {"vectors": rows_of(vectors), "weights": rows_of(weights)}
        return Call("choose_keys", arguments, reads, {"chosen": chosen}, self)

    def _products(self, weight: Tensor, x_head: int, out_head: int) -> HeadProducts:
        """Return the product with an up-projection [H, rows, columns]. x_head, out_head: floats
        from head to head."""
        num_heads, rows, columns = weight.shape
        return HeadProducts(
            x_head=x_head,
            out_head=out_head,
            weight=weight.data_ptr(),
            rows=rows,
            columns=columns,
            num_heads=num_heads,
            type=type_of(weight),
        )


class PartOfLatents(NativeLatentLayer):
    """A layer whose cache has a part of the latents (see `AttentionLayer`). It is not recorded."""

    def __call__(self, q: Tensor, latent: Tensor, k_rope: Tensor, *_: Tensor) -> Any:
        rows = rows_of(q)
        plan = addressof(self.backend.current)
        num_heads = self.layer.num_heads
        store = LatentStore(plan=plan, cache=self.cache)
        attend = LatentArguments(
            plan=plan, cache=self.cache, num_heads=num_heads, scale=self.layer.scale
        )
        out = new(rows, num_heads * self.rank)
        lse = new(rows, num_heads)
        reads = {"latent": rows_of(latent), "k_rope": rows_of(k_rope)}
        submit(
            rows,
            Call("latent_store", store, reads, {}, self),
            Call("attend_latent", attend, {"q": rows}, {"out": out, "lse": lse}, self),
        )
        return out.view(len(q), num_heads, -1), lse


def has_index(layers: Sequence[AttentionLayer]) -> bool:
    """Return whether an index chooses the keys of a layer."""
    return any(layer.latent is not None and layer.latent.index is not None for layer in layers)


def type_of(tensor: Tensor) -> int:
    """Return the number of the tensor's type in csrc/attention.h."""
    return CACHE_TYPES[name_of_type(tensor)]
