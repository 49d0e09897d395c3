"""The stages of a decoder, which core calls."""

from __future__ import annotations

from torch import Tensor, nn

from pegboard.layers import Embedding, Head, LayerStack, Rope


class Decoder(nn.Module):
    """[T] token ids → [T, vocab] logits. rope: its rotation of a step is given to the layers; None
    = they do not rotate. embed_scale, logits_scale: factors."""

    def __init__(
        self,
        embedding: Embedding,
        layers: LayerStack,
        head: Head,
        rope: Rope | None = None,
        *,
        embed_scale: float = 1.0,
        logits_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = layers
        self.head = head
        self.rope = rope
        self.embed_scale = embed_scale
        self.logits_scale = logits_scale

    def embed(self, input_ids: Tensor) -> Tensor:
        return scaled(self.embedding(input_ids), self.embed_scale)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.layers(hidden, None if self.rope is None else self.rope(positions))

    def logits(self, hidden: Tensor) -> Tensor:
        return scaled(self.head(hidden), self.logits_scale)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x · factor."""
    return x if factor == 1.0 else x * factor
