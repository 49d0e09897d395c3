"""EAGLE heads (Li et al. 2024, "EAGLE: speculative sampling requires rethinking feature
uncertainty"). A head joins the embedding of a token with the target's hidden states before it, and
computes the hidden states at the token. Its layers are those of the target's family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.layers import Build, Embedding, Head, LayerStack, Linear, Norm
from pegboard_models.decoder import scaled
from pegboard_models.prediction import Sizes, Step, check_target


@dataclass(frozen=True)
class EagleForm:
    """Where a family's heads have their parts. Names are relative to that of `fc`, "" = there is no
    such part.

    norm: of the layers' result. embedding_norm, hidden_norm: of what is joined. unit: the layers
    compute the sum of the architecture, divided by this (see `LayerStack`).
    """

    layers: str = "layers"
    norm: str = "norm"
    embedding_norm: str = ""
    hidden_norm: str = ""
    unit: float = 1.0


class EagleHead(nn.Module):
    """Implements `pegboard.interfaces.draft.DraftModel`. make: (build, index) → one of `count`
    layers, (hidden [T, size], residual, *step) → (hidden, residual). step: returns what layers get
    besides, from the positions [T]. architecture: the name of the head. Raises ModelError if there
    is no target."""

    token_ids: Tensor | None = None
    embedding_scale = 1.0

    def __init__(
        self,
        build: Build,
        make: Callable[[Build, int], nn.Module],
        step: Step,
        sizes: Sizes,
        count: int,
        architecture: str,
        form: EagleForm | None = None,
    ) -> None:
        super().__init__()
        check_target(build, architecture, "eagle")
        form = form or EagleForm()
        hidden = sizes.hidden_size
        root = root_of(build, "fc")

        def norm(name: str) -> Norm | None:
            return Norm(root.at(name), hidden, sizes.eps) if name else None

        joined = root.at("fc")
        has_bias = f"{joined.path}.bias" in build.stored
        self.embedding_norm = norm(form.embedding_norm)
        self.hidden_norm = norm(form.hidden_norm)
        self.fc = Linear(joined, 2 * hidden, hidden, bias=has_bias)
        self.layers = LayerStack(root.at(form.layers), count, make, norm(form.norm))
        self.step = step
        self.unit = form.unit
        self.embedding = embedding_of(root, sizes)
        self.head = head_of(build, sizes.vocab_size, hidden)
        build.declared.given = hidden

    def start(self, hidden: Tensor) -> Tensor:
        """Return what is given with a token, from the target's states [T, size] before it."""
        return hidden

    def embed(self, input_ids: Tensor, *given: Tensor) -> Tensor:
        """Return the embeddings and what is given, joined [T, size]."""
        embedded = scaled(self.embedding(input_ids), self.embedding_scale)
        states = given[0].to(embedded.dtype)
        if self.embedding_norm is not None:
            embedded = self.embedding_norm(embedded)
        if self.hidden_norm is not None:
            states = self.hidden_norm(states)
        out: Tensor = self.fc(torch.cat([embedded, states], -1))
        return out

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        """Return the states [T, size] that are given with the next token."""
        if self.unit == 1.0:
            return self.layers(hidden, *self.step(*positions))
        return self.layers(hidden / self.unit, *self.step(*positions)) * self.unit

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, V] of states that `forward` has returned."""
        out: Tensor = self.head(hidden)
        return out


class FirstLayer(nn.Module):
    """A layer that is not preceded by a norm: hidden + attention(hidden), then what `mlp` adds."""

    def __init__(self, attention: nn.Module, norm: Norm, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm = norm
        self.mlp = mlp

    def forward(self, hidden: Tensor, residual: None, *step: Any) -> tuple[Tensor, Tensor]:
        attended = self.attention.forward(hidden, *step)
        hidden, total = self.norm.add(attended, hidden)
        return self.mlp.forward(hidden), total


def root_of(build: Build, name: str) -> Build:
    """Return the build at which the checkpoint has this module: it may be inside of "model"."""
    return build.at("model") if build.has(f"model.{name}") else build


def embedding_of(build: Build, sizes: Sizes) -> Callable[[Tensor], Tensor]:
    """Return the checkpoint's embedding, or the target's if it has none."""
    table = build.at("embed_tokens")
    if build.has(table.path):
        return Embedding(table, sizes.vocab_size, sizes.hidden_size)
    embed: Callable[[Tensor], Tensor] = build.target.embed
    return embed


def head_of(build: Build, num_rows: int, width: int) -> Callable[[Tensor], Tensor]:
    """Return the checkpoint's output head, or the target's if it has none."""
    head = build.at("lm_head")
    if build.has(head.path):
        return Head(head, num_rows, width)
    logits: Callable[[Tensor], Tensor] = build.target.logits
    return logits
