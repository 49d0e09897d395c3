"""Paged attention: one kernel for steps of any kind, and a second one that merges the parts of long
rows.

A program computes the attention of a few consecutive tokens of one row (a tile), for the query
heads that share one KV head. These heads are treated as more queries on the same keys, so each key
is read once for all of them. If a step has few tokens per row (decodes, drafts), there may be too
few tiles for the device. The keys of each row are then split, and the results of the splits are
merged by their maxima and sums. The number of splits depends on shapes only, so a recorded step
serves rows of any length.

For batch invariance, all steps have the same tiles (`invariant_tiles`), and nothing is split. A
query then adds up its keys in the same order in every step: in runs of KEYS that are counted from
the row's first token. Runs without a visible key, which other queries of the tile need, leave its
sums as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
PROGRAMS_PER_PROCESSOR = 4
MOST_SPLITS = 32
KEYS_PER_SPLIT = 128
"""Rows are split into parts of at least this many keys."""
MOST_SPLIT_TOKENS = 16
"""Rows with more tokens than this, on average, are not split."""
INVARIANT_QUERIES = 64
"""Queries of a tile, for batch invariance. Steps of few tokens fill a part of it, and read their
keys as fast, because a matrix product of this size is faster than memory."""


@triton.jit
def _row_of(tile, query_start_loc, num_rows, TOKENS: tl.constexpr):
    """Return the row of a tile. The tiles of row r start at query_start_loc[r] // TOKENS + r, or,
    with one token per tile, at query_start_loc[r]. Some tiles are empty."""
    low = 0
    high = num_rows
    if TOKENS == 1:
        guess = tl.minimum(tile, num_rows - 1).to(tl.int32)  # right in a step of one token per row
        if (tl.load(query_start_loc + guess) == tile) & (
            tl.load(query_start_loc + guess + 1) > tile
        ):
            low = guess
            high = guess + 1
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start_loc + middle)
        if TOKENS > 1:
            first = first // TOKENS + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _place(tile, query_start_loc, num_rows, TOKENS: tl.constexpr):
    """Return the row of a tile, the token after the row's last one, and the tile's first token. An
    empty tile begins at or after the row's end."""
    row = _row_of(tile, query_start_loc, num_rows, TOKENS)
    start = tl.load(query_start_loc + row)
    first = tile if TOKENS == 1 else start + (tile - start // TOKENS - row) * TOKENS
    return row, tl.load(query_start_loc + row + 1), first.to(tl.int32)


@triton.jit
def _weigh(scores, maximum, total):
    """Add some keys to the softmax of queries. scores: [queries, keys], as powers of two. Returns
    the weights of the keys, what the sums before are to be multiplied with, and the new maximum and
    total."""
    larger = tl.maximum(maximum, tl.max(scores, axis=1))
    finite = tl.where(larger == float("-inf"), 0.0, larger)  # a query that sees no key yet
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(maximum - finite)
    return weights, shrink, larger, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def _decode(codes, STORED: tl.constexpr):
    """Return the numbers that 8-bit floats stand for, exactly, in float16. What is not stored in 8
    bits is returned as it is."""
    if STORED == "e4m3 native":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif STORED == "e4m3":
        wide = codes.to(tl.uint16)
        return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    elif STORED == "e5m2":
        return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        return codes


@triton.jit
def _first_key(position, reach, RULE: tl.constexpr):
    """Return the first position that the token at `position` attends to."""
    if RULE == "window":
        return tl.maximum(position - reach + 1, 0)
    elif RULE == "chunk":
        return position // reach * reach
    else:
        return position * 0


@triton.jit
def _last_key(token, is_token, before, num_keys, HAS_NUM_KEYS: tl.constexpr):
    """Return the last key of its row that a token attends to, −1 without a token. before: keys of
    the row, less the step's tokens up to its last one."""
    if HAS_NUM_KEYS:
        return tl.load(num_keys + token, mask=is_token, other=0) - 1
    else:
        return tl.where(is_token, before + token, -1)


@triton.jit
def _log(maximum, total):
    """Return the natural logarithm of total · 2^maximum. Without keys, it is −∞."""
    return (maximum + tl.log2(tl.where(total == 0, 1.0, total))) / LOG2_E


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _attend(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    sinks,
    block_table,
    query_start_loc,
    seq_lens,
    num_keys,
    out,
    maxima,
    sums,
    lse,
    num_rows,
    num_tokens,
    scale,
    soft_cap,
    reach,
    q_token,
    q_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    table_row,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    STORED: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    RULE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_NUM_KEYS: tl.constexpr,
    IS_PART: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The attention of one tile, one KV head and one split. STORED: the format of 8-bit floats in
    the cache (see `_decode`); "" = it holds none. k_scale, v_scale: of their KV heads. RULE:
    "window" or "chunk", of `reach` tokens, or "". Results go to out [T, H, SPLITS, Dv]. With
    several splits, the maxima (in powers of two) and sums of the softmax go to [T, H, SPLITS].
    HAS_NUM_KEYS: `num_keys` is given. IS_PART: `lse` is, too. IS_INVARIANT: keys are read together
    with the same ones in every step, see above."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row, stop, first_token = _place(tile, query_start_loc, num_rows, TOKENS)
    if TOKENS > 1 and (first_token >= stop) & (row < num_rows - 1):
        return
    before = tl.load(seq_lens + row) - stop

    queries = tl.arange(0, QUERIES)
    channels = tl.arange(0, PAD_D)
    value_channels = tl.arange(0, PAD_DV)
    tokens = first_token + queries // GROUP
    heads = kv_head * GROUP + queries % GROUP
    is_query = (queries < TOKENS * GROUP) & (tokens < stop)
    last_keys = _last_key(tokens, is_query, before, num_keys, HAS_NUM_KEYS)
    q_at = q + tokens.to(tl.int64)[:, None] * q_token + heads[:, None] * q_head + channels[None, :]
    query = tl.load(q_at, mask=is_query[:, None] & (channels < D)[None, :], other=0)

    # keys begin … end − 1 are visible to at least one query of the tile, and this split computes
    # first … last − 1 of them, none without a query
    last_token = tl.where(first_token < stop, tl.minimum(first_token + TOKENS, stop) - 1, -1)
    end = tl.maximum(_last_key(last_token, last_token >= 0, before, num_keys, HAS_NUM_KEYS) + 1, 0)
    begin = _first_key(before + first_token, reach, RULE)
    run = begin // KEYS * KEYS if IS_INVARIANT else begin
    per_split = (end - run + KEYS * SPLITS - 1) // (KEYS * SPLITS) * KEYS
    first = run + split * per_split
    last = tl.minimum(first + per_split, end)

    if STORED != "":
        scale *= tl.load(k_scale + kv_head)
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.full([QUERIES], 0, tl.float32)
    if HAS_SINKS:  # the first split has one more key, whose value is zero
        maximum = tl.where(split == 0, tl.load(sinks + heads) * LOG2_E, maximum)
        total = tl.where(split == 0, 1.0, total)
    values = tl.full([QUERIES, PAD_DV], 0, tl.float32)
    for at in range(first, last, KEYS):
        keys = at + tl.arange(0, KEYS)
        is_key = keys < last
        if IS_INVARIANT and RULE != "":
            is_key &= keys >= begin  # the blocks before may belong to another row
        block = tl.load(
            block_table + row.to(tl.int64) * table_row + keys // BLOCK_SIZE, mask=is_key, other=0
        ).to(tl.int64)
        k_at = k_cache + block * k_block + keys % BLOCK_SIZE * k_slot + kv_head * k_head
        key = tl.load(
            k_at[None, :] + channels[:, None],
            mask=is_key[None, :] & (channels < D)[:, None],
            other=0,
        )
        scores = (
            tl.dot(query, _decode(key, STORED).to(query.dtype), input_precision=PRECISION) * scale
        )
        if HAS_SOFT_CAP:
            scores = soft_cap * (2 * tl.sigmoid(2 * scores / soft_cap) - 1)
        is_visible = is_key[None, :] & (keys[None, :] <= last_keys[:, None])
        if RULE != "":
            is_visible &= keys[None, :] >= _first_key(before + tokens, reach, RULE)[:, None]
        scores = tl.where(is_visible, scores * LOG2_E, float("-inf"))
        weights, shrink, maximum, total = _weigh(scores, maximum, total)
        v_at = v_cache + block * v_block + keys % BLOCK_SIZE * v_slot + kv_head * v_head
        value = tl.load(
            v_at[:, None] + value_channels[None, :],
            mask=is_key[:, None] & (value_channels < DV)[None, :],
            other=0,
        )
        value = _decode(value, STORED).to(query.dtype)
        products = tl.dot(weights.to(query.dtype), value, input_precision=PRECISION)
        values = values * shrink[:, None] + products

    if STORED != "":
        values *= tl.load(v_scale + kv_head)
    # Tokens that belong to no row (padding) come after the last row, and become zero.
    end_written = tl.where(row == num_rows - 1, num_tokens, stop)
    is_written = (queries < TOKENS * GROUP) & (tokens < end_written)
    places = (tokens.to(tl.int64) * GROUP * tl.num_programs(1) + heads) * SPLITS + split
    if SPLITS == 1:
        if IS_PART:
            tl.store(lse + places, _log(maximum, total), mask=is_written)
        values = values / tl.where(total == 0, 1.0, total)[:, None]
    else:
        tl.store(maxima + places, maximum, mask=is_written)
        tl.store(sums + places, total, mask=is_written)
    tl.store(
        out + places[:, None] * DV + value_channels[None, :],
        values.to(out.dtype.element_ty),
        mask=is_written[:, None] & (value_channels < DV)[None, :],
    )


@triton.jit
def _merge(
    parts,
    maxima,
    sums,
    out,
    lse,
    DV: tl.constexpr,
    PAD_DV: tl.constexpr,
    IS_PART: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the splits of one head of one token."""
    place = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    channels = tl.arange(0, PAD_DV)
    maximum = tl.load(maxima + place * SPLITS + splits)
    largest = tl.max(maximum, axis=0)
    shrink = tl.exp2(maximum - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(tl.load(sums + place * SPLITS + splits) * shrink, axis=0)
    at = parts + (place * SPLITS + splits)[:, None] * DV + channels[None, :]
    values = tl.sum(tl.load(at, mask=(channels < DV)[None, :], other=0) * shrink[:, None], axis=0)
    if IS_PART:
        tl.store(lse + place, _log(largest, total))
    merged = values / tl.where(total == 0, 1.0, total)
    tl.store(out + place * DV + channels, merged.to(out.dtype.element_ty), mask=channels < DV)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a step is divided. tokens: per tile. queries: rows of a tile's matrix, at least tokens
    times the heads per KV head. keys: read at a time. splits: parts that the keys of a row are
    computed in."""

    tokens: int
    queries: int
    keys: int
    splits: int
    warps: int


def precision_of(dtype: torch.dtype) -> str:
    """Return how a kernel multiplies numbers of this type: float32 is not rounded."""
    return "ieee" if dtype == torch.float32 else "tf32"


def choose_splits(
    num_tokens: int, num_rows: int, num_tiles: int, most_keys: int, processors: int
) -> int:
    """Return into how many parts the keys of a row are divided. num_tiles: programs of the step
    without splits. See `choose_tiles`."""
    if num_tokens > MOST_SPLIT_TOKENS * num_rows:
        return 1
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, num_tiles)
    most = min(MOST_SPLITS, triton.cdiv(most_keys, KEYS_PER_SPLIT))
    splits: int = triton.next_power_of_2(max(1, min(wanted, most)))
    return splits


def choose_tiles(
    num_tokens: int,
    num_rows: int,
    num_kv_heads: int,
    group: int,
    width: int,
    itemsize: int,
    most_keys: int,
    processors: int,
) -> Tiles:
    """Choose by shapes only. width: the larger of head_dim and value_dim. most_keys: of the longest
    row that the block table has room for. processors: of the device."""
    fewest = max(16, triton.next_power_of_2(group))  # a matrix product has at least 16 rows
    keys = 64 if width * itemsize <= 256 else 32
    largest = 128 if width * itemsize <= 256 else 64
    queries = max(
        fewest, min(largest, triton.next_power_of_2(triton.cdiv(num_tokens * group, num_rows)))
    )
    tokens = 1 if num_tokens == num_rows else queries // group
    num_tiles = max(num_rows, triton.cdiv(num_tokens, tokens)) * num_kv_heads
    splits = choose_splits(num_tokens, num_rows, num_tiles, most_keys, processors)
    return Tiles(tokens, queries, keys, splits, 8 if queries >= 128 and tokens > 1 else 4)


def invariant_tiles(group: int, width: int, itemsize: int) -> Tiles:
    """Return the tiles of every step, for batch invariance. See `choose_tiles`."""
    queries = max(INVARIANT_QUERIES, triton.next_power_of_2(group))
    return Tiles(queries // group, queries, 64 if width * itemsize <= 256 else 32, 1, 4)


@cache
def device_facts(device: torch.device) -> tuple[int, bool]:
    """Return the number of multiprocessors, and whether the device itself converts 8-bit floats of
    the type e4m3fn (NVIDIA, from compute capability 8.9). Without a GPU, the kernels are
    interpreted."""
    if device.type != "cuda":
        return 4, False
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, torch.version.hip is None and (
        facts.major,
        facts.minor,
    ) >= (8, 9)


def stored_as(dtype: torch.dtype, converts: bool) -> str:
    """Return how kernels read a cache of this type. converts: the device itself converts e4m3fn."""
    if dtype == torch.float8_e4m3fn:
        return "e4m3 native" if converts else "e4m3"
    return "e5m2" if dtype == torch.float8_e5m2 else ""


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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_keys: Tensor | None = None,
    lse: Tensor | None = None,
    is_invariant: bool = False,
) -> Tensor:
    """Compute causal attention of each row's newest tokens over its whole history, with sums in
    float32.

    q: [T, H, D], with the rows one after another, as `query_start_loc` [B+1] says. k_cache,
    v_cache: [blocks, block_size, K, D or Dv], of q's or another float type. block_table: [B,
    max_blocks]. seq_lens: [B], including the new tokens, whose keys and values are already in the
    cache. Query token i of a row with n new tokens is at position seq_len − n + i. window,
    soft_cap, chunk, sinks: see `AttentionLayer`. k_scale, v_scale: float32 [K], if the caches hold
    8-bit floats. H is a multiple of K. The last dimension of all but the table is contiguous.
    Returns [T, H, Dv].

    num_keys: int32 [T], how many of the row's keys each token attends to; None = those up to
    itself. lse: float32 [T, H], which gets the logarithms of the sums of exp(score), if the cache
    has a part of the keys. is_invariant: a token has the same bits in every step.

    Tokens after those of the last row (padding) give zeros.
    """
    (num_tokens, num_heads, width) = q.shape
    (_, block_size, num_kv_heads, value_width) = v_cache.shape
    num_rows = len(seq_lens)
    group = num_heads // num_kv_heads
    out = torch.empty(num_tokens, num_heads, value_width, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    processors, converts = device_facts(q.device)
    stored = stored_as(k_cache.dtype, converts)
    if stored:
        k_cache = k_cache.view(torch.uint8)
        v_cache = v_cache.view(torch.uint8)
    widest = max(width, value_width)
    if is_invariant:
        tiles = invariant_tiles(group, widest, q.element_size())
    else:
        tiles = choose_tiles(
            num_tokens,
            num_rows,
            num_kv_heads,
            group,
            widest,
            q.element_size(),
            block_table.shape[1] * block_size,
            processors,
        )
    num_tiles = num_tokens if tiles.tokens == 1 else num_tokens // tiles.tokens + num_rows
    splits = tiles.splits
    parts = out
    maxima = out
    sums = out
    if splits > 1:
        parts = torch.empty(
            num_tokens, num_heads, splits, value_width, dtype=torch.float32, device=q.device
        )
        maxima, sums = torch.empty(
            2, num_tokens, num_heads, splits, dtype=torch.float32, device=q.device
        )
    pad_value = max(16, triton.next_power_of_2(value_width))
    _attend[(num_tiles, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        sinks,
        block_table,
        query_start_loc,
        seq_lens,
        num_keys,
        parts,
        maxima,
        sums,
        lse,
        num_rows,
        num_tokens,
        scale,
        soft_cap or 0.0,
        chunk or window or 0,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        GROUP=group,
        D=width,
        DV=value_width,
        TOKENS=tiles.tokens,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        PAD_D=max(16, triton.next_power_of_2(width)),
        PAD_DV=pad_value,
        RULE="chunk" if chunk is not None else "" if window is None else "window",
        HAS_SINKS=sinks is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_NUM_KEYS=num_keys is not None,
        IS_PART=lse is not None,
        IS_INVARIANT=is_invariant,
        SPLITS=splits,
        PRECISION=precision_of(q.dtype),
        STORED=stored,
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
            DV=value_width,
            PAD_DV=pad_value,
            IS_PART=lse is not None,
            SPLITS=splits,
        )
    return out
