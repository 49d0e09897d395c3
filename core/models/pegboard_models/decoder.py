"""The stages of a decoder, which core calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from pegboard.layers import Build, Embedding, Head, LayerStack, Norm, Rope


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the modules of a decoder."""

    root: str = "model"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"


class Decoder(nn.Module):
    """[T] token ids → [T, vocab] logits. make: builds a layer (see `LayerStack`). norm, eps: of the
    layers' results. rope: its rotation of a step is given to the layers; None = they do not rotate.
    embed_scale, logits_scale: factors."""

    def __init__(
        self,
        build: Build,
        make: Callable[[Build, int], nn.Module],
        *,
        vocab_size: int,
        hidden: int,
        num_layers: int,
        eps: float,
        norm: type[Norm] = Norm,
        is_tied: bool = False,
        rope: Rope | None = None,
        names: Names | None = None,
        embed_scale: float = 1.0,
        logits_scale: float = 1.0,
    ) -> None:
        super().__init__()
        names = names or Names()
        inner = build.at(names.root)
        self.embedding = Embedding(inner.at(names.embedding), vocab_size, hidden)
        self.layers = LayerStack(
            inner.at(names.layers), num_layers, make, norm(inner.at(names.norm), hidden, eps)
        )
        tied = self.embedding if is_tied else None
        self.head = Head(build.at("lm_head"), vocab_size, hidden, tied=tied)
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
