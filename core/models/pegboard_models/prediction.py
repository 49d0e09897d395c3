"""Multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 2.2): a layer
after the last one of a model predicts one token more, from the hidden states at a token and the
embedding of the next one.

Whether its own states are given with the next token before or after their norm, and whether the
first position has an embedding, are those of vLLM, which published checkpoints are used with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Embedding, Head, Linear, Norm, size_of

Step = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class PredictorForm:
    """What distinguishes the layers of one family. Names are relative to the path of
    its parts.

    layer: of the decoder layer; "" = the same as the other parts. norm: of the states before the
    head; "" = they have none. embedding, head: the target's are used if the checkpoint has none, or
    with "".
    hidden_first: the order of the two halves before the projection. masks_first: the embedding at
    the first position is zero. gives_normed: the states are given with the next token after the
    norm.
    """

    layer: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    embedding: str = "embed_tokens"
    head: str = "shared_head.head"
    hidden_first: bool = False
    masks_first: bool = True
    gives_normed: bool = True

    def layer_of(self, build: Build) -> Build:
        """Return the build of the decoder layer. build: of the parts."""
        return build.at(self.layer) if self.layer else build


class Sizes(Protocol):
    """The sizes of a model."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eps(self) -> float: ...


class TokenPredictor(nn.Module):
    """Implements `pegboard.interfaces.draft.DraftModel`. build: of the parts. layer: the decoder
    layer, (hidden [T, size], None, *step) → (hidden, residual). step: returns what the layer gets
    besides, from the positions [T]. make_norm: (build, size, eps) → one
    of the norms."""

    def __init__(
        self,
        build: Build,
        layer: nn.Module,
        step: Step,
        sizes: Sizes,
        form: PredictorForm,
        make_norm: Callable[..., Norm] = Norm,
    ) -> None:
        super().__init__()
        hidden = sizes.hidden_size

        def norm(name: str) -> Norm:
            return make_norm(build.at(name), hidden, sizes.eps)

        self.form = form
        self.embedding_norm = norm(form.embedding_norm)
        self.hidden_norm = norm(form.hidden_norm)
        self.projection = Linear(build.at(form.projection), 2 * hidden, hidden)
        self.block = layer
        self.step = step
        self.norm = norm(form.norm) if form.norm else None
        self.embedding: Callable[[Tensor], Tensor] = build.target.embed
        if form.embedding and build.has(build.at(form.embedding).path):
            self.embedding = Embedding(build.at(form.embedding), sizes.vocab_size, hidden)
        self.head: Callable[[Tensor], Tensor] = build.target.logits
        if form.head and build.has(build.at(form.head).path):
            self.head = Head(build.at(form.head), sizes.vocab_size, hidden)
        build.declared.given = hidden

    def start(self, hidden: Tensor) -> Tensor:
        """Return the target's states [T, size] as they are."""
        return hidden

    def embed(self, input_ids: Tensor, *given: Tensor) -> Tensor:
        """Return the embeddings and what is given, side by side [T, 2 · size]."""
        embedded = self.embedding(input_ids)
        return torch.cat([embedded, given[0].to(embedded.dtype)], -1)

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        """Return the states [T, size] that are given with the next token."""
        embedded, given = (part.contiguous() for part in hidden.chunk(2, -1))
        if self.form.masks_first:
            embedded = embedded * (positions[0] > 0).unsqueeze(-1).to(embedded.dtype)
        halves = [self.embedding_norm(embedded), self.hidden_norm(given)]
        if self.form.hidden_first:
            halves.reverse()
        joined = self.projection(torch.cat(halves, -1))
        out, residual = self.block.forward(joined, None, *self.step(*positions))
        if self.norm is not None and self.form.gives_normed:
            normed: Tensor = self.norm.add(out, residual)[0]
            return normed
        summed: Tensor = out if residual is None else out + residual
        return summed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, V] of states that `forward` has returned."""
        if self.norm is not None and not self.form.gives_normed:
            hidden = self.norm(hidden)
        return self.head(hidden)


def count_layers(config: Mapping[str, Any]) -> int:
    """Return the number of the model's own layers. Raises ModelError if it is not positive."""
    count = size_of(config, "num_hidden_layers")
    if count < 1:
        raise ModelError(
            f"the checkpoint's config has num_hidden_layers={count}; expected a positive number"
        )
    return count


def predictor_path(config: Mapping[str, Any]) -> str:
    """Return the path of the first layer of this kind, which follows the model's own layers."""
    return f"model.layers.{count_layers(config)}"


def check_target(build: Build, architecture: str, method: str = "mtp") -> None:
    """Raise ModelError if the model is built for itself. architecture, method: their names."""
    if build.target is None:
        raise ModelError(
            f"{architecture} predicts tokens of another model and generates no text of its own; "
            f"serve that model, and set the method {method} in speculative_config"
        )
