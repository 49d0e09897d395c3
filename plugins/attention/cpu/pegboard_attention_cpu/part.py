"""Attention to a part of the keys, where other ranks have the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pegboard.interfaces.attention import AttentionLayer, Full
from pegboard_attention_cpu.plan import Plan

QUERIES = 128
"""Queries of a prompt that are computed together, because their scores take memory."""

Store = Callable[..., None]
"""(plan, the step's keys and values, as the layer gets them): writes them to the cache."""
Read = Callable[[Tensor, torch.dtype, Tensor | None], tuple[Tensor, Tensor]]
"""(blocks, dtype, unseen) → the keys [n, K, D] and values [n, K, Dv] in these blocks. unseen: see
`Scratch.gather`."""


class PartOfKeys:
    """One bound layer, whose cache has a part of the tokens. plan: returns the step's plan."""

    def __init__(
        self, layer: AttentionLayer, plan: Callable[[], Plan], store: Store, read: Read
    ) -> None:
        self.layer = layer
        self.value_dim = layer.value_dim or layer.head_dim
        self.plan = plan
        self.store = store
        self.read = read

    def __call__(self, q: Tensor, *new: Tensor | None) -> tuple[Tensor, Tensor]:
        plan = self.plan()
        self.store(plan, *new)
        out = torch.empty(*q.shape[:2], self.value_dim, dtype=q.dtype)
        lse = torch.empty(q.shape[:2])
        for bucket in plan.buckets:
            tokens = slice(bucket.num_rows) if bucket.tokens is None else bucket.tokens
            shape = bucket.num_rows, bucket.num_keys
            read = self.read(bucket.blocks, torch.float32, bucket.unseen[Full()])
            keys, values = (x.unflatten(0, shape) for x in read)
            bias = bucket.bias[Full()]
            sums, logs = self._attend(q[tokens].unsqueeze(1), keys, values, bias)
            out[tokens] = sums[:, 0].to(q.dtype)
            lse[tokens] = logs[:, 0]
        for chunk in plan.chunks:
            read = self.read(chunk.blocks, torch.float32, None)
            keys, values = (x[None, : chunk.num_keys] for x in read)
            bias = chunk.bias[Full()]
            assert bias is not None
            for start in range(chunk.start, chunk.stop, QUERIES):
                stop = min(start + QUERIES, chunk.stop)
                hidden = bias[start - chunk.start : stop - chunk.start]
                sums, logs = self._attend(q[None, start:stop], keys, values, hidden)
                out[start:stop] = sums[0].to(q.dtype)
                lse[start:stop] = logs[0]
        return out, lse

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q [n, Q, H, D], keys [n, L, K, D], values [n, L, K, Dv], and a bias [Q, L] or [n, 1, 1,
        L] → sums [n, Q, H, Dv] and logs [n, Q, H]."""
        heads = self.layer.num_kv_heads
        queries = q.float().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)  # n, K, H/K, Q, D
        scores = queries @ keys.permute(0, 2, 3, 1).unsqueeze(2) * self.layer.scale
        if (cap := self.layer.soft_cap) is not None:
            scores = torch.tanh(scores / cap) * cap
        scores += bias if bias.dim() == 2 else bias.unsqueeze(1)
        lse = scores.logsumexp(-1)
        # without keys, −∞ − −∞ would be NaN
        weights = (scores - lse.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)).exp()
        sums = weights @ values.transpose(1, 2).unsqueeze(2)
        return sums.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2)
