"""Features of images and audio, and their own tokens, as embeddings of the language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pegboard.layers import Build, Embedding, Linear, Norm
from pegboard_model_gemma3n.sizes import Embedded
from pegboard_models.norms import PlainNorm


class Embedder(nn.Module):
    """outer: channels of the language model. stop: the token after the last one that has its
    embedding here, of those from `start` on."""

    def __init__(self, build: Build, embedded: Embedded, outer: int, stop: int) -> None:
        super().__init__()
        build = build.alone()
        size = embedded.size
        eps = embedded.eps
        self.start = embedded.start
        self.count = embedded.count
        self.stop = stop
        self.embedding = Embedding(build.at("embedding"), embedded.count, size)
        self.hard_norm = Norm(build.at("hard_embedding_norm"), size, eps)
        self.soft_norm = Norm(build.at("soft_embedding_norm"), size, eps)
        self.projection = Linear(build.at("embedding_projection"), size, outer)
        self.norm = PlainNorm(build.at("embedding_post_projection_norm"), outer, eps)

    def features(self, rows: Tensor) -> Tensor:
        """Return the embeddings of features: [rows, size] → [rows, outer]."""
        embeddings: Tensor = self.norm(self.projection(self.soft_norm(rows)))
        return embeddings

    def tokens(self, places: Tensor) -> Tensor:
        """Return the embeddings of tokens: their places in the table [T] → [T, outer]."""
        hard = self.hard_norm(self.embedding(places))
        embeddings: Tensor = self.norm(self.projection(hard))
        return embeddings

    def replaced(self, input_ids: Tensor, embeddings: Tensor) -> Tensor:
        """Return embeddings [T, outer] of tokens [T], where those that the table has are from
        there."""
        places = (input_ids - self.start).clamp(0, self.count - 1)
        if len(places) > self.count:
            every = torch.arange(self.count, device=places.device)
            ours = self.tokens(every)[places]
        else:
            ours = self.tokens(places)
        is_ours = (input_ids >= self.start) & (input_ids < self.stop)
        return torch.where(is_ours[:, None], ours, embeddings)
