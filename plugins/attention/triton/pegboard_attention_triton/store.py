"""Keys and values of a step, stored in the paged KV cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 1024
"""Channels that one program copies at a time."""


@triton.jit
def _store_kv(
    k, v, k_cache, v_cache, slot_mapping,
    k_token, k_head, v_token, v_head, k_block, k_slot, v_block, v_slot,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program for each token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_to, v_to = k_cache + block * k_block + offset * k_slot, v_cache + block * v_block + offset * v_slot
        for start in range(0, HEADS * D, CHANNELS):
            at = start + tl.arange(0, CHANNELS)
            x = tl.load(k + token * k_token + at // D * k_head + at % D, mask=at < HEADS * D)
            tl.store(k_to + at, x.to(k_cache.dtype.element_ty), mask=at < HEADS * D)
        for start in range(0, HEADS * DV, CHANNELS):
            at = start + tl.arange(0, CHANNELS)
            x = tl.load(v + token * v_token + at // DV * v_head + at % DV, mask=at < HEADS * DV)
            tl.store(v_to + at, x.to(v_cache.dtype.element_ty), mask=at < HEADS * DV)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the keys and values of a step's tokens to the paged KV cache.

    k: [T, K, D]. v: [T, K, Dv]. Their last dimension is contiguous. k_cache, v_cache: [blocks, block_size, K, D or Dv], of any
    float type; blocks may lie apart. slot_mapping: [T] int64, block_id * block_size + offset; −1 = do not store.
    """
    num_tokens, heads, width = k.shape
    if num_tokens:
        _store_kv[(num_tokens,)](
            k, v, k_cache, v_cache, slot_mapping,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
            BLOCK_SIZE=k_cache.shape[1], HEADS=heads, D=width, DV=v.shape[2],
            CHANNELS=min(CHANNELS, triton.next_power_of_2(heads * max(width, v.shape[2]))),
        )  # fmt: skip
