"""The stages of a decoder, which core calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pegboard.layers import Build, Embedding, Head, LayerStack, Norm, Rope, read, size_of


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the modules of a decoder."""

    root: str = "model"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"


class DecoderSizes:
    """The values that every decoder reads from a checkpoint's config. eps, is_tied: where the
    config does not say them."""

    def __init__(
        self, config: Mapping[str, Any], *, eps: float = 1e-6, is_tied: bool = False
    ) -> None:
        self.hidden_size = size_of(config, "hidden_size")
        self.num_layers = size_of(config, "num_hidden_layers")
        self.vocab_size = size_of(config, "vocab_size")
        self.eps = read(config, "rms_norm_eps", float) or eps
        tied = read(config, "tie_word_embeddings", bool)
        self.is_tied = is_tied if tied is None else tied


class Decoder(nn.Module):
    """[T] token ids → [T, vocab] logits. make: builds a layer (see `LayerStack`). norm: of the
    layers' results. rope: its rotation of a step is given to the layers; None = they do not rotate.
    embed_scale, logits_scale: factors."""

    def __init__(
        self,
        build: Build,
        make: Callable[[Build, int], nn.Module],
        sizes: DecoderSizes,
        *,
        norm: type[Norm] = Norm,
        rope: Rope | None = None,
        names: Names | None = None,
        embed_scale: float = 1.0,
        logits_scale: float = 1.0,
    ) -> None:
        super().__init__()
        names = names or Names()
        inner = build.at(names.root)
        hidden = sizes.hidden_size
        self.embedding = Embedding(inner.at(names.embedding), sizes.vocab_size, hidden)
        self.layers = LayerStack(
            inner.at(names.layers),
            sizes.num_layers,
            make,
            norm(inner.at(names.norm), hidden, sizes.eps),
        )
        tied = self.embedding if sizes.is_tied else None
        self.head = Head(build.at(names.head), sizes.vocab_size, hidden, tied=tied)
        self.rope = rope
        self.embed_scale = embed_scale
        self.logits_scale = logits_scale

    def embed(self, input_ids: Tensor) -> Tensor:
        return scaled(self.embedding(input_ids), self.embed_scale)

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        return self.layers(hidden, None if self.rope is None else self.rope(*positions))

    def logits(self, hidden: Tensor) -> Tensor:
        return scaled(self.head(hidden), self.logits_scale)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x · factor."""
    return x if factor == 1.0 else x * factor
