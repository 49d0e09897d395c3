"""The choice of keys by an index (DeepSeek-AI 2025, "DeepSeek-V3.2"): a kernel computes the scores
of all visible keys, and torch finds the best of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard_attention_triton.attention import _last_key, _place, precision_of

KEYS = 64
SCORES = 2**24
"""How many scores are in memory at once, at most: 64 MiB."""
LOW_BITS = (1 << 32) - 1


@triton.jit(do_not_specialize=["first_token", "num_rows", "most_keys"])
def _score_keys(
    vectors,
    weights,
    cache,
    block_table,
    query_start_loc,
    seq_lens,
    num_keys,
    scores,
    first_token,
    num_rows,
    most_keys,
    vectors_token,
    vectors_head,
    weights_token,
    cache_block,
    cache_slot,
    table_row,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    PAD_D: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_NUM_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The scores of KEYS keys of one token. Keys that it does not see get −∞."""
    place = tl.program_id(0)
    token = first_token + place
    keys = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    row, stop, _ = _place(token, query_start_loc, num_rows, 1)
    before = tl.load(seq_lens + row) - stop
    last_key = _last_key(token, token < stop, before, num_keys, HAS_NUM_KEYS)
    sums = tl.full([KEYS], float("-inf"), tl.float32)
    if tl.program_id(1) * KEYS <= last_key:
        heads = tl.arange(0, PAD_HEADS)
        channels = tl.arange(0, PAD_D)
        is_key = keys <= last_key
        block = tl.load(
            block_table + row.to(tl.int64) * table_row + keys // BLOCK_SIZE, mask=is_key, other=0
        ).to(tl.int64)
        at = cache + block * cache_block + keys % BLOCK_SIZE * cache_slot
        key = tl.load(
            at[None, :] + channels[:, None],
            mask=is_key[None, :] & (channels < D)[:, None],
            other=0,
        )
        vector = tl.load(
            vectors
            + token.to(tl.int64) * vectors_token
            + heads[:, None] * vectors_head
            + channels[None, :],
            mask=(heads < HEADS)[:, None] & (channels < D)[None, :],
            other=0,
        )
        weight = tl.load(
            weights + token.to(tl.int64) * weights_token + heads, mask=heads < HEADS, other=0
        )
        products = tl.dot(vector, key.to(vector.dtype), input_precision=PRECISION)
        of_heads = tl.maximum(products, 0.0) * weight.to(tl.float32)[:, None]
        sums = tl.where(is_key, tl.sum(of_heads, axis=0), float("-inf"))
    to = scores + place.to(tl.int64) * most_keys + keys
    tl.store(to, sums, mask=keys < most_keys)


def choose_keys(
    vectors: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    top_k: int,
    num_keys: Tensor | None = None,
    is_invariant: bool = False,
) -> Tensor | None:
    """Return the numbers of the `top_k` best keys of each token, int64 [T, top_k]: those that it
    sees first, the best of them first, then any others. Return None if no row can have more keys.
    is_invariant: a token has the same ones, in the same order, in every step. Then they are always
    chosen, because the width of the block table may differ, and of equal ones the first are.

    vectors: [T, heads, D]. weights: [T, heads]. Their last dimensions are contiguous. cache: the
    index keys [blocks, block_size, D], also of the new tokens; blocks may lie apart. The others:
    see `paged_attention`. The time that it takes depends on the width of the block table.
    """
    (num_tokens, heads, size) = vectors.shape
    block_size = cache.shape[1]
    most_keys = block_table.shape[1] * block_size
    if is_invariant:
        most_keys = max(most_keys, top_k)  # no token sees those behind the table
    elif most_keys <= top_k:
        return None
    chosen = torch.empty(num_tokens, top_k, dtype=torch.int64, device=vectors.device)
    largest = max(1, SCORES // most_keys)
    for first in range(0, num_tokens, largest):
        count = min(largest, num_tokens - first)
        scores = torch.empty(count, most_keys, dtype=torch.float32, device=vectors.device)
        _score_keys[(count, triton.cdiv(most_keys, KEYS))](
            vectors,
            weights,
            cache,
            block_table,
            query_start_loc,
            seq_lens,
            num_keys,
            scores,
            first,
            len(seq_lens),
            most_keys,
            vectors.stride(0),
            vectors.stride(1),
            weights.stride(0),
            cache.stride(0),
            cache.stride(1),
            block_table.stride(0),
            BLOCK_SIZE=block_size,
            HEADS=heads,
            D=size,
            PAD_HEADS=max(16, triton.next_power_of_2(heads)),
            PAD_D=max(16, triton.next_power_of_2(size)),
            KEYS=KEYS,
            HAS_NUM_KEYS=num_keys is not None,
            PRECISION=precision_of(vectors.dtype),
            num_warps=4,
        )
        chosen[first : first + count] = (
            _invariant_order(scores, top_k) if is_invariant else scores.topk(top_k, -1).indices
        )
    return chosen


def _invariant_order(scores: Tensor, top_k: int) -> Tensor:
    """Return the places of the largest scores of each row, float32 [n, keys] → int64 [n, top_k],
    the lower one first among equal ones. Both are packed into one integer, so the result does not
    depend on how the library treats ties."""
    bits = scores.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    places = torch.arange(scores.shape[1], device=scores.device)
    packed = (ordered << 32) | (LOW_BITS - places)
    return LOW_BITS - (packed.topk(top_k, -1).values & LOW_BITS)
