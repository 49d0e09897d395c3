"""Keys and values of a step, stored in the paged KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 1024
"""Channels that one program copies at a time."""
EIGHT_BITS = {torch.float8_e4m3fn: (3, 448.0), torch.float8_e5m2: (2, 57344.0)}
"""8-bit floats: bits of the mantissa, and the largest number (Micikevicius et al. 2022)."""


@triton.jit
def _encode(x, MANTISSA: tl.constexpr, LARGEST: tl.constexpr):
    """Return the codes of the 8-bit floats nearest to x (float32), ties to the even code. Larger
    numbers than LARGEST become LARGEST. MANTISSA: bits of the mantissa, 3 (e4m3fn) or 2 (e5m2). The
    float32 bits are rounded to the code's. For numbers below the smallest normal one, adding a
    large power of two rounds to the step between them."""
    BIAS: tl.constexpr = (1 << (6 - MANTISSA)) - 1
    DROPPED: tl.constexpr = 23 - MANTISSA
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED) - (
        (127 - BIAS) << MANTISSA
    )
    STEP: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)
    small = (size + STEP).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 2.0 ** (1 - BIAS), small, normal)
    return (code | sign).to(tl.uint8)


@triton.jit
def _stored(
    x, scales, heads, mask, DTYPE: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr
):
    """Return x as the cache stores it. scales: of the heads, if it stores 8-bit floats (MANTISSA >
    0)."""
    if MANTISSA:
        return _encode(
            tl.div_rn(x.to(tl.float32), tl.load(scales + heads, mask=mask, other=1)),
            MANTISSA,
            LARGEST,
        )
    else:
        return x.to(DTYPE)


@triton.jit
def _store_kv(
    k,
    v,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    slot_mapping,
    k_token,
    k_head,
    v_token,
    v_head,
    k_block,
    k_slot,
    v_block,
    v_slot,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CHANNELS: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One program for each token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        k_to = k_cache + block * k_block + offset * k_slot
        v_to = v_cache + block * v_block + offset * v_slot
        for start in range(0, HEADS * D, CHANNELS):
            at = start + tl.arange(0, CHANNELS)
            mask = at < HEADS * D
            x = tl.load(k + token * k_token + at // D * k_head + at % D, mask=mask, other=0)
            tl.store(
                k_to + at,
                _stored(x, k_scale, at // D, mask, k_cache.dtype.element_ty, MANTISSA, LARGEST),
                mask=mask,
            )
        for start in range(0, HEADS * DV, CHANNELS):
            at = start + tl.arange(0, CHANNELS)
            mask = at < HEADS * DV
            x = tl.load(v + token * v_token + at // DV * v_head + at % DV, mask=mask, other=0)
            tl.store(
                v_to + at,
                _stored(x, v_scale, at // DV, mask, v_cache.dtype.element_ty, MANTISSA, LARGEST),
                mask=mask,
            )


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of a step's tokens to the paged KV cache.

    k: [T, K, D]. v: [T, K, Dv]. Their last dimension is contiguous. k_cache, v_cache: [blocks,
    block_size, K, D or Dv], of any float type; blocks may lie apart. k_scale, v_scale: float32 [K],
    given exactly if the caches store 8-bit floats. A code then stands for code · scale, and what is
    larger than all codes becomes the largest. slot_mapping: [T] int64, block_id * block_size +
    offset; −1 = do not store.
    """
    num_tokens, heads, width = k.shape
    mantissa, largest = EIGHT_BITS.get(k_cache.dtype, (0, 0.0))
    if mantissa:
        k_cache = k_cache.view(torch.uint8)
        v_cache = v_cache.view(torch.uint8)
    if num_tokens:
        _store_kv[(num_tokens,)](
            k,
            v,
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            slot_mapping,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            v_cache.stride(0),
            v_cache.stride(1),
            BLOCK_SIZE=k_cache.shape[1],
            HEADS=heads,
            D=width,
            DV=v.shape[2],
            CHANNELS=min(CHANNELS, triton.next_power_of_2(heads * max(width, v.shape[2]))),
            MANTISSA=mantissa,
            LARGEST=largest,
        )
