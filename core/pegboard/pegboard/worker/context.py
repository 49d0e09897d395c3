"""Context parallel: ranks that share out the tokens of the KV cache, and the rows of a step.

Of every `size * run` consecutive tokens of a request, each rank stores `run` consecutive ones. With
all queries, each rank attends to the keys that it has. The results are put together by the sums of
their exponentials (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").

Two groups share out the tokens. The ranks of `heads` hold the same KV head and different queries of
it, and gather the queries. The ranks of `rows` hold the same weights and compute different rows of
a step, and gather queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pegboard.config.schema import EngineConfig
from pegboard.errors import ConfigError
from pegboard.interfaces.attention import AttentionLayer, Full
from pegboard.layers.shards import Group


def check_context(config: EngineConfig, block_size: int) -> None:
    """Raise ConfigError if ranks cannot share out tokens and rows so."""
    shared = config.decode_context_parallel_size
    size = config.tensor_parallel_size
    run = config.cp_kv_cache_interleave_size
    if size % shared:
        raise ConfigError(
            f"decode_context_parallel_size is {shared}, which does not divide "
            f"tensor_parallel_size={size}: it is a part of these ranks"
        )
    if block_size % run:
        raise ConfigError(
            f"cp_kv_cache_interleave_size is {run}, which does not divide block_size={block_size}"
        )
    if config.prefill_context_parallel_size > 1:
        for name in ("max_loras", "calculate_kv_scales"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name} needs all rows of a step on one rank; remove it, or set "
                    "prefill_context_parallel_size to 1"
                )


Forward = Callable[..., Tensor]


class Rows:
    """The rows of a step, which the ranks of a group share out. Each rank has equally many; the
    last ones may be padding. count: of the step that is computed now."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.count = 0

    def compute(self, forward: Forward, rows: Tensor, *positions: Tensor) -> Tensor:
        """Return forward(rows [T, width], positions [T], …), of which this rank computes its
        part."""
        self.count = len(rows)
        return self.gathered(forward(self.part(rows), *map(self.part, positions)))

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's rows of x [T, …]."""
        size = -(-self.count // self.group.size)
        part = x[size * self.group.rank :][:size]
        return functional.pad(part, (0, 0) * (x.dim() - 1) + (0, size - len(part)))

    def gathered(self, part: Tensor) -> Tensor:
        """Return the rows [T, …] of all ranks. part: those of this rank."""
        return part if self.group.size == 1 else self.group.all_rows(part)[: self.count]


@dataclass(frozen=True)
class Context:
    """The ranks that share out the tokens of the KV cache: those of `heads` times those of `rows`.
    run: consecutive tokens of a rank."""

    tokens: Group = Group()
    heads: Group = Group()
    rows: Rows = field(default_factory=lambda: Rows(Group()))
    run: int = 1

    def stored(self, num_tokens: np.ndarray) -> np.ndarray:
        """Return how many of the first `num_tokens` tokens of a request this rank stores."""
        rounds, rest = np.divmod(num_tokens, self.run * self.tokens.size)
        stored: np.ndarray = rounds * self.run
        return stored + np.clip(rest - self.run * self.tokens.rank, 0, self.run)

    def divides(self, layer: AttentionLayer) -> bool:
        """Whether the tokens of this layer are shared out. Each rank keeps windows and chunks
        whole, because they are short."""
        return self.tokens.size > 1 and layer.retain == Full() and not layer.encoder

    def as_part(self, layer: AttentionLayer) -> AttentionLayer:
        """Return a layer as its backend sees it: with some of the tokens, and with the queries of
        all ranks. Raises ConfigError if that is not possible."""
        if not self.divides(layer):
            return layer
        for what, is_there in (
            ("sinks", layer.sinks is not None),
            ("an index of its keys", layer.latent is not None and layer.latent.index is not None),
        ):
            if is_there:
                raise ConfigError(
                    f"layer {layer.layer_index} has {what}, which cannot be computed where ranks "
                    "share out tokens; set decode_context_parallel_size and "
                    "prefill_context_parallel_size to 1"
                )
        return replace(layer, num_heads=layer.num_heads * self.heads.size, is_part=True)

    def joined(self, layer: AttentionLayer, attend: Callable[..., Any]) -> Callable[..., Tensor]:
        """Return a layer's bound attention. attend: of its backend, which saw `as_part(layer)`."""
        if not self.divides(layer):
            return attend if self.rows.group.size == 1 else self._on_all_rows(attend)
        return self._latent(layer, attend) if layer.latent is not None else self._plain(attend)

    def _on_all_rows(self, attend: Callable[..., Any]) -> Callable[..., Tensor]:
        def call(*new: Tensor | None) -> Tensor:
            return self.rows.part(attend(*self._all_rows(new)))

        return call

    def _plain(self, attend: Callable[..., Any]) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            q, *new = self._all_rows((self._all_heads(q), k, v))
            return self._join(*attend(q, *new)).flatten(1).to(q.dtype)

        return call

    def _latent(self, layer: AttentionLayer, attend: Callable[..., Any]) -> Callable[..., Tensor]:
        latent = layer.latent
        assert latent is not None

        def call(q: Tensor, q_rope: Tensor, c: Tensor, k_rope: Tensor) -> Tensor:
            up_k, up_v = (each.to(q.dtype) for each in latent.matrices())
            absorbed = torch.bmm(q.transpose(0, 1), up_k).transpose(0, 1)
            queries = self._all_heads(torch.cat((absorbed, q_rope), -1))
            sums = self._join(*attend(*self._all_rows((queries, c, k_rope)))).to(q.dtype)
            return torch.bmm(sums.transpose(0, 1), up_v).transpose(0, 1).flatten(1)

        return call

    def _all_rows(self, tensors: tuple[Tensor | None, ...]) -> list[Any]:
        return [None if x is None else self.rows.gathered(x) for x in tensors]

    def _all_heads(self, q: Tensor) -> Tensor:
        """Return the queries [T, heads of all ranks, D]."""
        if (collective := self.heads.collective) is None:
            return q
        beside = collective.all_gather(q.flatten(1).contiguous())
        return beside.view(len(q), -1, q.shape[2])

    def _join(self, out: Tensor, lse: Tensor) -> Tensor:
        """Return the attention of this rank's rows and heads to all keys, float32 [T, H, Dv]. out
        [T, heads of all ranks, Dv], lse [T, heads of all ranks]: to the keys that this rank has."""
        assert self.tokens.collective is not None
        part = torch.cat((out.float(), lse.unsqueeze(-1)), -1)
        beside = self.tokens.collective.all_gather(part.flatten(1))
        parts = self.rows.part(beside).view(-1, self.tokens.size, *part.shape[1:])
        num_heads = part.shape[1] // self.heads.size
        parts = parts[:, :, num_heads * self.heads.rank :][:, :, :num_heads]
        weights = parts[..., -1:].softmax(1)
        return (parts[..., :-1] * weights).sum(1)
