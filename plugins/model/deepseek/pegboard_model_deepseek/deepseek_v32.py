"""DeepSeek-V3.2 (DeepSeek-AI 2025): DeepSeek-V3 with an index, which chooses the keys that each
query attends to.

The published inference code also rotates index vectors by a Hadamard matrix, which changes no
product, and rounds them to 8 bits. Here they keep the type of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.interfaces.attention import SparseIndex
from pegboard.layers import Build, LayerNorm, Linear, Rotation, size_of
from pegboard_model_deepseek.decoder import LatentSelfAttention
from pegboard_model_deepseek.deepseek import DeepseekV3Model
from pegboard_model_deepseek.shape import Shape

INDEX_EPS = 1e-6
"""The epsilon of the index keys' norm. Configs do not contain it."""


class DeepseekV32Model(DeepseekV3Model):
    def attention(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        return SparseAttention(build, index, shape, config, self.pairs)


class SparseAttention(LatentSelfAttention):
    """Latent attention to the keys with the best scores. The first channels of index vectors and
    keys are rotated in halves, whatever the order of the attention's own channels."""

    def __init__(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any], pairs: bool
    ) -> None:
        heads, size, top_k = (
            size_of(config, f"index_{name}") for name in ("n_heads", "head_dim", "topk")
        )
        if shape.q_rank is None or min(heads, top_k) < 1 or size < shape.rope_dim:
            values = (
                f"q_lora_rank={shape.q_rank}, index_n_heads={heads}, index_topk={top_k} and "
                f"index_head_dim={size}"
            )
            expected = (
                "positive numbers, and an index_head_dim of at least "
                f"qk_rope_head_dim={shape.rope_dim}"
            )
            raise ModelError(f"the checkpoint's config has {values}; expected {expected}")
        super().__init__(
            build, index, shape, shape.scale(config), pairs, choice=SparseIndex(heads, size, top_k)
        )
        indexer = build.at("indexer")
        self.heads = heads
        self.size = size
        self.vectors = Linear(indexer.at("wq_b"), shape.q_rank, heads * size)
        self.keys = Linear(indexer.at("wk"), shape.hidden_size, size)
        self.norm = LayerNorm(indexer.at("k_norm"), size, INDEX_EPS)
        self.weights = Linear(indexer.at("weights_proj"), shape.hidden_size, heads)
        self.rotate = build.kernels["rope"]

    def indexed(
        self, hidden: Tensor, small: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, ...]:
        """Return the index vectors [T, heads, size], their weights [T, heads], and the index key
        [T, size]."""
        assert rotation is not None, "this architecture has rotary embeddings"
        vectors = self.vectors(small).unflatten(1, (self.heads, self.size))
        keys = self.norm(self.keys(hidden)).unsqueeze(1)
        weights = self.weights(hidden).float() * (self.heads * self.size) ** -0.5
        turned, key = (self.rotate(x, *rotation, False) for x in (vectors, keys))
        return turned, weights, key.squeeze(1)
