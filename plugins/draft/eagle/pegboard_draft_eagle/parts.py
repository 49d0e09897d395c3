"""What heads may share with the model that they are made for."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pegboard.layers import Build, Embedding, Head
from pegboard_models.decoder import DecoderSizes


def root_of(build: Build, name: str) -> Build:
    """Return the build at which the checkpoint has this module: it may be inside of "model"."""
    return build.at("model") if build.has(f"model.{name}") else build


def embedding_of(build: Build, sizes: DecoderSizes) -> Callable[[Tensor], Tensor]:
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
