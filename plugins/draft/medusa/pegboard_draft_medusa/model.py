"""Medusa heads (Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple
decoding heads"). Each has residual blocks x + SiLU(W x + b) and an output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, Head, Linear, read, size_of
from pegboard_drafts.token_ids import TokenIds


class Blocks(nn.Module):
    """The residual blocks of one head: [N, size] → [N, size]."""

    def __init__(self, build: Build, count: int, size: int) -> None:
        super().__init__()
        paths = [build.at("layers").at(index) for index in range(count)]
        self.layers = nn.ModuleList(
            Linear(path, size, size, bias=f"{path.path}.bias" in build.stored) for path in paths
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden))
        return hidden


class MedusaModel(nn.Module):
    """Implements `pegboard.interfaces.model.Model`. It has no layers that attend, so only `logits`
    is used."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        size = size_of(config, "hidden_size")
        vocab_size = size_of(config, "vocab_size")
        self.most_drafts = size_of(config, "num_heads")
        num_layers = size_of(config, "num_hidden_layers")
        self.blocks = nn.ModuleList(
            Blocks(build.at("blocks").at(index), num_layers, size)
            for index in range(self.most_drafts)
        )
        rows = size_of(config, "head_size")
        self.heads: list[Callable[[Tensor], Tensor]]
        if read(config, "original_lm_head", bool):
            self.heads = [shared_head(build, rows, size)] * self.most_drafts
        else:
            paths = [build.at("lm_heads").at(index) for index in range(self.most_drafts)]
            self.heads = [Head(path, rows, size) for path in paths]
        count = size_of(config, "truncated_vocab_size")
        path = build.at("token_map")
        self.map = TokenIds(path, count, vocab_size) if count < vocab_size else None
        self.is_cut = count < rows

    @property
    def token_ids(self) -> Tensor | None:
        """The target's id of each token [truncated_vocab_size]; None = they are the same."""
        return None if self.map is None else self.map.ids.data

    def embed(self, input_ids: Tensor) -> Tensor:
        """Hand the tokens through."""
        return input_ids

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        """Hand the target's hidden states through."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of all heads side by side: [N, size] → [N, heads · vocabulary]
        float32."""
        parts = [head(block(hidden)) for block, head in zip(self.blocks, self.heads, strict=True)]
        if self.is_cut and (ids := self.token_ids) is not None:
            parts = [part.index_select(-1, ids) for part in parts]
        return torch.cat(parts, -1)


def shared_head(build: Build, num_rows: int, width: int) -> Callable[[Tensor], Tensor]:
    """Return the output head of all Medusa heads: the checkpoint's, or the target's if it has
    none."""
    for name in ("lm_head", "lm_heads.0"):
        if build.has(name):
            return Head(build.at(name), num_rows, width)
    logits: Callable[[Tensor], Tensor] = build.target.logits
    return logits
