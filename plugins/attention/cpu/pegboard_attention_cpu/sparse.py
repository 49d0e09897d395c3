"""The choice of keys by an index (DeepSeek-AI 2025, "DeepSeek-V3.2"). The other keys are masked, so
it takes as long as attention to all keys: this is the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pegboard.interfaces.attention import AttentionLayer, KVTensor, SparseIndex
from pegboard_attention_cpu.plan import Bucket, Chunk, Plan

Gather = Callable[..., Tensor]
Write = Callable[[Tensor, Tensor], object]


def index_tensors(layer: AttentionLayer, dtype: str) -> tuple[KVTensor, ...]:
    """Return what a layer with an index stores besides its latents. dtype: of the latents."""
    if layer.latent is None or layer.latent.index is None:
        return ()
    return (
        KVTensor(
            "index", (layer.latent.index.head_dim,), "bfloat16" if dtype == "fp8_ds_mla" else dtype
        ),
    )


class Chooser:
    """Chooses the keys of each query of a step, in one layer. cache: the index keys, [blocks,
    block_size, head_dim]. write, gather: see `LatentLayer`."""

    def __init__(self, index: SparseIndex, cache: Tensor, write: Write, gather: Gather) -> None:
        self.index = index
        self.cache = cache
        self.write = write
        self.gather = gather

    def store(self, plan: Plan, vectors: Tensor, weights: Tensor, keys: Tensor) -> None:
        """Write the index keys of a step, and keep its vectors [T, heads, head_dim] and weights [T,
        heads]."""
        self.vectors = vectors.float()
        self.weights = weights.float()
        keys = keys if plan.stored is None else keys[plan.stored]
        self.write(plan.slots, keys.to(self.cache.dtype))

    def of_bucket(self, bucket: Bucket, bias: Tensor) -> Tensor:
        """bias [n, 1, 1, keys] → the same, with −inf also for the keys that a row's query did not
        choose."""
        if bucket.num_keys <= self.index.top_k:
            return bias
        tokens = slice(bucket.num_rows) if bucket.tokens is None else bucket.tokens
        keys = self._read(bucket.blocks).view(bucket.num_rows, bucket.num_keys, -1)
        scores = torch.bmm(self.vectors[tokens], keys.transpose(1, 2)).relu_()
        scores = torch.bmm(self.weights[tokens].unsqueeze(1), scores)
        return self._chosen(scores.unsqueeze(1), bias)

    def of_chunk(self, chunk: Chunk, bias: Tensor | None) -> Tensor | None:
        """bias [queries, keys] or None for causal → the same for the keys that each query chose."""
        if chunk.num_keys <= self.index.top_k:
            return bias
        tokens = slice(chunk.start, chunk.stop)
        count = chunk.stop - chunk.start
        keys = self._read(chunk.blocks)[: chunk.num_keys]
        if bias is None:
            bias = torch.full((count, count), float("-inf")).triu_(1)
        scores = torch.zeros(count, chunk.num_keys)
        # all heads at once would need their number times this memory
        for head in range(self.index.num_heads):
            scores.addcmul_(
                self.weights[tokens, head, None], (self.vectors[tokens, head] @ keys.T).relu_()
            )
        return self._chosen(scores, bias)

    def _read(self, blocks: Tensor) -> Tensor:
        return self.gather(self.cache, blocks).flatten(0, 1).float()

    def _chosen(self, scores: Tensor, bias: Tensor) -> Tensor:
        best = scores.masked_fill_(bias.isinf(), float("-inf")).topk(self.index.top_k, -1).indices
        return torch.full_like(bias, float("-inf")).scatter_(-1, best, 0) + bias
