"""What attention and 8-bit floats mean: the references of the contract tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

FLOAT8 = {"float8_e4m3fn": (3, 7, 448.0), "float8_e5m2": (2, 15, 57344.0)}
"""8-bit floats: bits of the mantissa, bias of the exponent, and the largest number (Micikevicius et
al. 2022)."""


def nearest(x: np.ndarray, mantissa: int, bias: int, largest: float) -> np.ndarray:
    """Round x to the nearest number of an 8-bit float, ties to the even code."""
    exponent = np.floor(np.log2(np.maximum(np.abs(x.astype(np.float64)), 2.0 ** (1 - bias))))
    step = 2.0 ** (exponent - mantissa)
    return np.clip(np.round(x.astype(np.float64) / step) * step, -largest, largest)


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
    chunk: int | None = None,
    sinks: Tensor | None = None,
    num_keys: Tensor | None = None,
) -> Tensor:
    """The reference, slow and readable: compute causal attention of each row's newest tokens over
    its whole history.

    q: [T, H, D], with the rows one after another, as `query_start_loc` [B+1] says. k_cache,
    v_cache: [blocks, block_size, K, D or Dv]. block_table: [B, max_blocks]. seq_lens: [B],
    including the new tokens, whose KV is already in the cache. Query token i of a row with n new
    tokens is at position seq_len − n + i. window, chunk, sinks: see `AttentionLayer`. num_keys: see
    `AttentionInputs`. Heads are grouped: H is a multiple of K (Ainslie et al. 2023). Returns [T, H,
    Dv].
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])
    block_size = k_cache.shape[1]
    for row in range(len(seq_lens)):
        start = int(query_start_loc[row])
        stop = int(query_start_loc[row + 1])
        length = int(seq_lens[row])
        if start == stop:
            continue
        blocks = block_table[row, : -(-length // block_size)].long()
        keys = k_cache[blocks].flatten(0, 1)[:length].float()
        values = v_cache[blocks].flatten(0, 1)[:length].float()
        group = q.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group, 1)
        values = values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query_positions = torch.arange(length - (stop - start), length, device=q.device)[:, None]
        key_positions = torch.arange(length, device=q.device)[None, :]
        last = query_positions if num_keys is None else num_keys[start:stop, None] - 1
        hidden = key_positions > last
        if window is not None:
            hidden |= key_positions <= query_positions - window
        if chunk is not None:
            hidden |= key_positions < query_positions // chunk * chunk
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:  # one more key, whose value is zero
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, stop - start, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
