"""The backend `triton_mla`: latent attention of one KV group. Like `triton`, it reads the step from
the tensors of `AttentionInputs` only."""

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
from pegboard_attention_triton.attention import MOST_SPLIT_TOKENS
from pegboard_attention_triton.expanded import expanded_attention, merged
from pegboard_attention_triton.latent import LATENT_TILE, latent_attention, store_latents
from pegboard_attention_triton.latent_product import multiply_heads
from pegboard_attention_triton.sparse import choose_keys


def has_prompts(step: AttentionInputs, num_tokens: int) -> bool:
    """Whether a step has so many new tokens in each row that it pays to expand their latents."""
    return num_tokens > MOST_SPLIT_TOKENS * len(step.seq_lens)


class TritonLatentAttention:
    """Decodes read the latents themselves (see `Latent`: absorbed), and so do prompts those of
    earlier steps; the latents of their new tokens are expanded. With an index, a token reads the
    latents that it has chosen, and the index keys of all others."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        self.is_invariant = setup.batch_invariant
        self.multiply = multiply_heads if self.is_invariant else _multiply_in_torch
        self.views: Mapping[int, KVView] = {}
        self.inputs: AttentionInputs | None = None

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        """A token stores (c, r) in the type `dtype`. fp8_ds_mla: see `store_latents`."""
        rank = layer.value_dim or 0
        width = layer.head_dim
        stored = dtype
        if dtype == "fp8_ds_mla":
            stored = "uint8"
            width = rank + 4 * -(-rank // LATENT_TILE.value) + 2 * (layer.head_dim - rank)
        tensors = (KVTensor("latent", (width,), stored),)
        if layer.latent is not None and layer.latent.index is not None:
            kind = "bfloat16" if dtype == "fp8_ds_mla" else dtype
            tensors += (KVTensor("index", (layer.latent.index.head_dim,), kind),)
        return KVCacheSpec(tensors=tensors, retain=layer.retain)

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        self.views = views

    def plan(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs

    def bind(self, layer: AttentionLayer) -> Callable[..., Any]:
        """Return a closure over the layer's cache. See `AttentionBackend.bind`."""
        assert layer.latent is not None and layer.value_dim is not None
        cache = self.views[layer.layer_index]["latent"]
        up_k, up_v = layer.latent.matrices()
        rank = layer.value_dim
        choice = layer.latent.index
        # what is packed is read by `latent_attention`; what is expanded depends on the step
        expands = cache.dtype.is_floating_point and not self.is_invariant
        index_keys = None if choice is None else self.views[layer.layer_index]["index"]

        def choose(vectors: Tensor, weights: Tensor, keys: Tensor) -> Tensor | None:
            step = self.inputs
            assert step is not None and choice is not None and index_keys is not None
            half = choice.head_dim // 2
            store_latents(keys[:, :half], keys[:, half:], index_keys, step.slot_mapping)
            rows = step.block_table, step.query_start_loc, step.seq_lens
            more = choice.top_k, step.num_keys, self.is_invariant
            return choose_keys(vectors, weights, index_keys, *rows, *more)

        def call(
            q: Tensor,
            q_rope: Tensor,
            latent: Tensor,
            k_rope: Tensor,
            lse: Tensor | None = None,
            chosen: Tensor | None = None,
        ) -> Tensor:
            step = self.inputs
            assert step is not None, "call plan() before the forward"
            store_latents(latent, k_rope, cache, step.slot_mapping)
            rows = step.block_table, step.query_start_loc, step.seq_lens
            return latent_attention(
                q,
                q_rope,
                cache,
                *rows,
                layer.scale,
                step.num_keys,
                lse,
                chosen,
                is_invariant=self.is_invariant,
            )

        def prompts(
            q: Tensor, absorbed: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor
        ) -> Tensor:
            step = self.inputs
            assert step is not None
            rows = step.block_table, step.query_start_loc, step.seq_lens
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            old = latent_attention(
                absorbed, q_rope, cache, *rows, layer.scale, lse=lse, is_old=True
            )
            stored, turned = (each.to(cache.dtype).to(q.dtype) for each in (latent, k_rope))
            k = torch.matmul(stored, up_k.to(q.dtype).transpose(1, 2)).transpose(0, 1)
            v = torch.matmul(stored, up_v.to(q.dtype)).transpose(0, 1)
            new = expanded_attention(q, q_rope, k, turned, v, step.query_start_loc, layer.scale)
            return merged(new, (self.multiply(old, up_v.to(q.dtype)), lse))

        def attend(
            q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, *index: Tensor
        ) -> Tensor:
            step = self.inputs
            assert step is not None, "call plan() before the forward"
            absorbed = self.multiply(q, up_k.to(q.dtype))
            if expands and not index and step.num_keys is None and has_prompts(step, len(q)):
                store_latents(latent, k_rope, cache, step.slot_mapping)
                return prompts(q, absorbed, q_rope, latent, k_rope).flatten(1)
            chosen = choose(*index) if index else None
            sums = call(absorbed, q_rope, latent, k_rope, None, chosen)
            return self.multiply(sums, up_v.to(q.dtype)).flatten(1)

        def attend_part(q: Tensor, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            return call(q[..., :rank], q[..., rank:], latent, k_rope, lse), lse

        return attend_part if layer.is_part else attend


def _multiply_in_torch(x: Tensor, matrices: Tensor) -> Tensor:
    """Do the same as `multiply_heads`, but the order of sums depends on the number of tokens."""
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)
