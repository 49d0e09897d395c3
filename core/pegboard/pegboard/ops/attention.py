"""Attention over a paged KV cache, in a slow and readable form."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Compute causal attention of each row's newest tokens over its whole history.

    q: [T, H, D], with the rows one after another, as `query_start_loc` [B+1] says. k_cache, v_cache: [blocks, block_size, K, D or
    Dv]. block_table: [B, max_blocks]. seq_lens: [B], including the new tokens, whose KV is already in the cache. Query token i of
    a row with n new tokens is at position seq_len − n + i. window: in tokens, including the token itself. Heads are grouped: H is
    a multiple of K (Ainslie et al. 2023). Returns [T, H, Dv].
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])
    block_size = k_cache.shape[1]
    for row in range(len(seq_lens)):
        start, stop, length = int(query_start_loc[row]), int(query_start_loc[row + 1]), int(seq_lens[row])
        if start == stop:
            continue
        blocks = block_table[row, : -(-length // block_size)].long()
        keys = k_cache[blocks].flatten(0, 1)[:length].float()
        values = v_cache[blocks].flatten(0, 1)[:length].float()
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query_positions = torch.arange(length - (stop - start), length, device=q.device)[:, None]
        key_positions = torch.arange(length, device=q.device)[None, :]
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
