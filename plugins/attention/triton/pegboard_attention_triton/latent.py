"""Latent attention (MLA) over the paged cache. Queries are multiplied with the up-projection of
keys before, and results with that of values after (see `Latent`: absorbed), so the kernel reads the
stored latents only.

All heads have the same keys, so the heads of a token are more queries on the same keys. A program
computes some heads of a few consecutive tokens of one row (a tile). The latents that it reads are
keys and values at once. Rows are found and keys are split as in `attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard_attention_triton.attention import (
    LOG2_E,
    Tiles,
    _decode,
    _last_key,
    _log,
    _merge,
    _place,
    _weigh,
    choose_splits,
    device_facts,
    precision_of,
)
from pegboard_attention_triton.store import _encode

LATENT_TILE = tl.constexpr(128)
"""Channels of a latent that share a scale in the type fp8_ds_mla."""


@triton.jit
def _scale_of(token, channels, C: tl.constexpr):
    """Return the places of the scales of channels, in a packed token."""
    return (token + C).to(tl.pointer_type(tl.float32), bitcast=True) + channels // LATENT_TILE


@triton.jit
def _rope_of(token, C: tl.constexpr):
    """Return the place of the rotated part of a packed token."""
    SCALES: tl.constexpr = (C + LATENT_TILE - 1) // LATENT_TILE * 4
    return (token + C + SCALES).to(tl.pointer_type(tl.bfloat16), bitcast=True)


@triton.jit
def _latents(
    token,
    is_key,
    channels,
    turned,
    C: tl.constexpr,
    R: tl.constexpr,
    STORED: tl.constexpr,
    KEYS: tl.constexpr,
    PAD_C: tl.constexpr,
):
    """Return the latents [KEYS, PAD_C] and the rotated parts [PAD_R, KEYS] of tokens. token: their
    places. channels, turned: numbers of the channels of both. STORED: see `_attend_latents`."""
    is_turned = is_key[None, :] & (turned < R)[:, None]
    latent = tl.load(
        token[:, None] + channels[None, :],
        mask=is_key[:, None] & (channels < C)[None, :],
        other=0,
    )
    if STORED == "":
        rope = tl.load(token[None, :] + C + turned[:, None], mask=is_turned, other=0)
        return latent, rope
    else:
        SCALES: tl.constexpr = PAD_C // LATENT_TILE
        places = tl.arange(0, SCALES) * LATENT_TILE
        is_scale = is_key[:, None] & (places < C)[None, :]
        scales = tl.load(_scale_of(token[:, None], places[None, :], C), mask=is_scale, other=0)
        numbers = _decode(latent, STORED).to(tl.float32)
        numbers = tl.reshape(numbers, [KEYS, SCALES, LATENT_TILE]) * scales[:, :, None]
        rope = tl.load(_rope_of(token[None, :], C) + turned[:, None], mask=is_turned, other=0)
        return tl.reshape(numbers, [KEYS, PAD_C]), rope


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _attend_latents(
    q,
    q_rope,
    cache,
    block_table,
    query_start_loc,
    seq_lens,
    num_keys,
    chosen,
    out,
    maxima,
    sums,
    lse,
    num_rows,
    num_tokens,
    scale,
    q_token,
    q_head,
    rope_token,
    rope_head,
    cache_block,
    cache_slot,
    table_row,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    STORED: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAD_C: tl.constexpr,
    PAD_R: tl.constexpr,
    HAS_NUM_KEYS: tl.constexpr,
    IS_OLD: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_PART: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The attention of one tile, GROUP heads and one split. STORED: the format of 8-bit floats (see
    `_decode`) if tokens are packed (fp8_ds_mla), where PAD_C is a multiple of 128; "" = they are C
    + R numbers. chosen: [T, CHOSEN] keys that a token attends to, where a tile has one token;
    CHOSEN: 0 = all. IS_OLD: tokens attend to those before the step only. Results go to out [T,
    HEADS, SPLITS, C]. See `attention._attend`."""
    tile = tl.program_id(0)
    first_head = tl.program_id(1) * GROUP
    split = tl.program_id(2)
    row, stop, first_token = _place(tile, query_start_loc, num_rows, TOKENS)
    if TOKENS > 1 and (first_token >= stop) & (row < num_rows - 1):
        return
    before = tl.load(seq_lens + row) - stop
    num_old = before + tl.load(query_start_loc + row)

    queries = tl.arange(0, QUERIES)
    channels = tl.arange(0, PAD_C)
    turned = tl.arange(0, PAD_R)
    tokens = first_token + queries // GROUP
    heads = first_head + queries % GROUP
    is_head = (queries < TOKENS * GROUP) & (heads < HEADS)
    is_query = is_head & (tokens < stop)
    last_keys = _last_key(tokens, is_query, before, num_keys, HAS_NUM_KEYS)
    if IS_OLD:
        last_keys = tl.where(is_query, num_old - 1, -1)
    q_at = q + tokens.to(tl.int64)[:, None] * q_token + heads.to(tl.int64)[:, None] * q_head
    query = tl.load(
        q_at + channels[None, :], mask=is_query[:, None] & (channels < C)[None, :], other=0
    )
    rope_at = q_rope + tokens.to(tl.int64)[:, None] * rope_token + heads[:, None] * rope_head
    query_rope = tl.load(
        rope_at + turned[None, :], mask=is_query[:, None] & (turned < R)[None, :], other=0
    )

    # keys 0 … end − 1 are visible to at least one query of the tile, and this split computes first
    # … last − 1 of them, none without a query
    last_token = tl.where(first_token < stop, tl.minimum(first_token + TOKENS, stop) - 1, -1)
    end = tl.maximum(_last_key(last_token, last_token >= 0, before, num_keys, HAS_NUM_KEYS) + 1, 0)
    if CHOSEN > 0:
        end = tl.minimum(end, CHOSEN)
    if IS_OLD:
        end = tl.where(first_token < stop, num_old, 0)
    per_split = (end + KEYS * SPLITS - 1) // (KEYS * SPLITS) * KEYS
    first = split * per_split
    last = tl.minimum(first + per_split, end)

    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.full([QUERIES], 0, tl.float32)
    values = tl.full([QUERIES, PAD_C], 0, tl.float32)
    for at in range(first, last, KEYS):
        keys = at + tl.arange(0, KEYS)
        is_key = keys < last
        if CHOSEN > 0:
            of_token = chosen + first_token.to(tl.int64) * CHOSEN
            keys = tl.load(of_token + keys, mask=is_key, other=0).to(tl.int32)
        block = tl.load(
            block_table + row.to(tl.int64) * table_row + keys // BLOCK_SIZE, mask=is_key, other=0
        ).to(tl.int64)
        token = cache + block * cache_block + keys % BLOCK_SIZE * cache_slot
        latent, rope = _latents(token, is_key, channels, turned, C, R, STORED, KEYS, PAD_C)
        latent = latent.to(query.dtype)
        scores = tl.dot(query, tl.trans(latent), input_precision=PRECISION)
        scores += tl.dot(query_rope, rope.to(query.dtype), input_precision=PRECISION)
        is_visible = is_key[None, :] & (keys[None, :] <= last_keys[:, None])
        scores = tl.where(is_visible, scores * (scale * LOG2_E), float("-inf"))
        weights, shrink, maximum, total = _weigh(scores, maximum, total)
        products = tl.dot(weights.to(query.dtype), latent, input_precision=PRECISION)
        values = values * shrink[:, None] + products

    # Tokens that belong to no row (padding) come after the last row, and become zero.
    end_written = tl.where(row == num_rows - 1, num_tokens, stop)
    is_written = is_head & (tokens < end_written)
    places = (tokens.to(tl.int64) * HEADS + heads) * SPLITS + split
    if SPLITS == 1:
        if IS_PART:
            tl.store(lse + places, _log(maximum, total), mask=is_written)
        values = values / tl.where(total == 0, 1.0, total)[:, None]
    else:
        tl.store(maxima + places, maximum, mask=is_written)
        tl.store(sums + places, total, mask=is_written)
    tl.store(
        out + places[:, None] * C + channels[None, :],
        values.to(out.dtype.element_ty),
        mask=is_written[:, None] & (channels < C)[None, :],
    )


@triton.jit
def _store_latents(
    latent,
    k_rope,
    cache,
    slot_mapping,
    latent_token,
    rope_token,
    cache_block,
    cache_slot,
    BLOCK_SIZE: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PAD_C: tl.constexpr,
    PAD_R: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """One program for each token. PAD_C: a power of two; a multiple of 128 if tokens are packed."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        to = cache + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_slot
        turned = tl.arange(0, PAD_R)
        rope = tl.load(k_rope + token * rope_token + turned, mask=turned < R, other=0)
        if IS_PACKED:
            SCALES: tl.constexpr = PAD_C // LATENT_TILE
            places = tl.arange(0, SCALES)
            channels = places[:, None] * LATENT_TILE + tl.arange(0, LATENT_TILE)[None, :]
            x = tl.load(latent + token * latent_token + channels, mask=channels < C, other=0)
            x = x.to(tl.float32)
            scales = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=1), 448.0), 2.0**-126)
            codes = _encode(tl.div_rn(x, scales[:, None]), 3, 448.0)
            tl.store(to + channels, codes, mask=channels < C)
            at = _scale_of(to, places * LATENT_TILE, C)
            tl.store(at, scales, mask=places * LATENT_TILE < C)
            tl.store(_rope_of(to, C) + turned, rope.to(tl.bfloat16), mask=turned < R)
        else:
            channels = tl.arange(0, PAD_C)
            x = tl.load(latent + token * latent_token + channels, mask=channels < C, other=0)
            kind = cache.dtype.element_ty
            tl.store(to + channels, x.to(kind), mask=channels < C)
            tl.store(to + C + turned, rope.to(kind), mask=turned < R)


def store_latents(latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the latents and rotated parts of a step's tokens to the paged cache.

    latent: [T, C]. k_rope: [T, R]. Their last dimension is contiguous. cache: [blocks, block_size,
    C + R], of a float type; blocks may lie apart. Or uint8, in the layout fp8_ds_mla: C codes of
    float8_e4m3fn, a float32 scale for each 128 of them (their largest magnitude / 448), and the
    rotated part in bfloat16. slot_mapping: [T] int64, block_id * block_size + offset; −1 = do not
    store.
    """
    num_tokens, rank = latent.shape
    is_packed = cache.dtype == torch.uint8
    if num_tokens:
        _store_latents[(num_tokens,)](
            latent,
            k_rope,
            cache,
            slot_mapping,
            latent.stride(0),
            k_rope.stride(0),
            cache.stride(0),
            cache.stride(1),
            BLOCK_SIZE=cache.shape[1],
            C=rank,
            R=k_rope.shape[1],
            PAD_C=max(LATENT_TILE.value if is_packed else 16, triton.next_power_of_2(rank)),
            PAD_R=triton.next_power_of_2(k_rope.shape[1]),
            IS_PACKED=is_packed,
        )


def latent_tiles(
    num_tokens: int,
    num_rows: int,
    num_heads: int,
    width: int,
    itemsize: int,
    most_keys: int,
    processors: int,
) -> Tiles:
    """Choose by shapes only. width: channels of a latent. itemsize: bytes of a number of a query.
    most_keys: of the longest row that the block table has room for. processors: of the device."""
    keys = 32 if width * itemsize <= 1024 else 16
    largest = 64 if width * itemsize <= 512 else 32 if width * itemsize <= 1024 else 16
    of_row = triton.next_power_of_2(triton.cdiv(num_tokens * num_heads, num_rows))
    queries = max(16, min(largest, of_row))  # a matrix product has at least 16 rows
    group = min(num_heads, queries)
    tokens = 1 if num_tokens == num_rows else queries // group
    num_tiles = max(num_rows, triton.cdiv(num_tokens, tokens)) * triton.cdiv(num_heads, group)
    splits = choose_splits(num_tokens, num_rows, num_tiles, most_keys, processors)
    return Tiles(tokens, queries, keys, splits, 8 if queries >= 32 and width > 128 else 4)


def invariant_latent_tiles(num_heads: int, width: int, itemsize: int, has_choice: bool) -> Tiles:
    """Return the tiles of every step, for batch invariance: those of long prompts, with fewer keys
    where small chips need that for packed latents. has_choice: tokens choose their keys, so a tile
    has one token. See `latent_tiles`."""
    keys = 32 if width * itemsize <= 512 else 16
    queries = 64 if width * itemsize <= 512 else 32 if width * itemsize <= 1024 else 16
    tokens = 1 if has_choice else queries // min(num_heads, queries)
    return Tiles(tokens, queries, keys, 1, 8 if queries >= 32 and width > 128 else 4)


def latent_attention(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    num_keys: Tensor | None = None,
    lse: Tensor | None = None,
    chosen: Tensor | None = None,
    is_old: bool = False,
    is_invariant: bool = False,
) -> Tensor:
    """Compute causal attention of each row's newest tokens to the latents of its whole history,
    with sums in float32.

    q: [T, H, C], multiplied with the up-projection of keys. q_rope: [T, H, R]. Their last dimension
    is contiguous. cache: see `store_latents`; the latents of the new tokens are already there.
    chosen: the keys that each token attends to, of those that it sees (see `choose_keys`).
    is_old: only to tokens before the step. The others: see `paged_attention`. Returns [T, H, C].

    Tokens after those of the last row (padding) give zeros.
    """
    (num_tokens, num_heads, rank) = q.shape
    rope = q_rope.shape[2]
    num_rows = len(seq_lens)
    block_size = cache.shape[1]
    out = torch.empty(num_tokens, num_heads, rank, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    processors, converts = device_facts(q.device)
    stored = ""
    if cache.dtype == torch.uint8:
        stored = "e4m3 native" if converts else "e4m3"
    num_chosen = 0 if chosen is None else chosen.shape[1]
    if is_invariant:
        tiles = invariant_latent_tiles(num_heads, rank, q.element_size(), num_chosen > 0)
    else:
        tiles = latent_tiles(
            num_tokens,
            num_tokens if num_chosen else num_rows,  # then a tile has one token
            num_heads,
            rank,
            q.element_size(),
            num_chosen or block_table.shape[1] * block_size,
            processors,
        )
    group = min(num_heads, tiles.queries)
    num_tiles = num_tokens if tiles.tokens == 1 else num_tokens // tiles.tokens + num_rows
    splits = tiles.splits
    parts = out
    maxima = out
    sums = out
    if splits > 1:
        parts = torch.empty(
            num_tokens, num_heads, splits, rank, dtype=torch.float32, device=q.device
        )
        maxima, sums = torch.empty(
            2, num_tokens, num_heads, splits, dtype=torch.float32, device=q.device
        )
    pad = max(LATENT_TILE.value if stored else 16, triton.next_power_of_2(rank))
    _attend_latents[(num_tiles, triton.cdiv(num_heads, group), splits)](
        q,
        q_rope,
        cache,
        block_table,
        query_start_loc,
        seq_lens,
        num_keys,
        chosen,
        parts,
        maxima,
        sums,
        lse,
        num_rows,
        num_tokens,
        scale,
        q.stride(0),
        q.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        HEADS=num_heads,
        GROUP=group,
        C=rank,
        R=rope,
        STORED=stored,
        TOKENS=tiles.tokens,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        PAD_C=pad,
        PAD_R=max(16, triton.next_power_of_2(rope)),
        HAS_NUM_KEYS=num_keys is not None,
        IS_OLD=is_old,
        CHOSEN=num_chosen,
        IS_PART=lse is not None,
        SPLITS=splits,
        PRECISION=precision_of(q.dtype),
        num_warps=tiles.warps,
        num_stages=2,
    )
    if splits > 1:
        _merge[(num_tokens * num_heads,)](
            parts,
            maxima,
            sums,
            out,
            lse,
            DV=rank,
            PAD_DV=pad,
            IS_PART=lse is not None,
            SPLITS=splits,
        )
    return out
