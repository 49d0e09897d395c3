"""The backend `triton_encoder`: attention among the tokens of each prompt, in both directions. A
step has whole prompts, so nothing is stored and no key comes from a cache.

A program computes the attention of a few consecutive tokens of one prompt (a tile), for the query
heads that share one KV head, as in `attention`. It finds its prompt on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard.interfaces.attention import (
    AttentionInputs,
    AttentionLayer,
    AttentionSetup,
    KVCacheSpec,
    KVView,
)
from pegboard_attention_triton.attention import (
    LOG2_E,
    Tiles,
    _place,
    _weigh,
    choose_tiles,
    precision_of,
)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _attend_both_ways(
    q,
    k,
    v,
    query_start_loc,
    bias,
    out,
    num_rows,
    num_tokens,
    scale,
    reach,
    bias_reach,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The attention of one tile and one KV head. HAS_WINDOW: a token attends to `reach` tokens to
    each side. HAS_BIAS: `bias` has a number for each head and distance, up to `bias_reach` to each
    side."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row, stop, first_token = _place(tile, query_start_loc, num_rows, TOKENS)
    start = tl.load(query_start_loc + row)
    if TOKENS > 1 and (first_token >= stop) & (row < num_rows - 1):
        return

    queries = tl.arange(0, QUERIES)
    channels = tl.arange(0, PAD_D)
    value_channels = tl.arange(0, PAD_DV)
    tokens = first_token + queries // GROUP
    heads = kv_head * GROUP + queries % GROUP
    is_query = (queries < TOKENS * GROUP) & (tokens < stop)
    q_at = q + tokens.to(tl.int64)[:, None] * q_token + heads[:, None] * q_head + channels[None, :]
    query = tl.load(q_at, mask=is_query[:, None] & (channels < D)[None, :], other=0)

    first = start
    last = stop
    if HAS_WINDOW:
        first = tl.maximum(start, first_token - reach)
        last = tl.minimum(stop, first_token + TOKENS + reach)
    last = tl.where(first_token < stop, last, first)  # padding has no keys
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.full([QUERIES], 0, tl.float32)
    values = tl.full([QUERIES, PAD_DV], 0, tl.float32)
    for at in range(first, last, KEYS):
        keys = at + tl.arange(0, KEYS)
        is_key = keys < last
        k_at = k + keys.to(tl.int64) * k_token + kv_head * k_head
        key = tl.load(
            k_at[None, :] + channels[:, None],
            mask=is_key[None, :] & (channels < D)[:, None],
            other=0,
        )
        scores = tl.dot(query, key, input_precision=PRECISION) * (scale * LOG2_E)
        is_visible = is_key[None, :] & is_query[:, None]
        if HAS_WINDOW:
            is_visible &= tl.abs(tokens[:, None] - keys[None, :]) <= reach
        if HAS_BIAS:
            distances = keys[None, :] - tokens[:, None]
            distances = tl.minimum(tl.maximum(distances, -bias_reach), bias_reach)
            bias_at = bias + heads[:, None] * (2 * bias_reach + 1) + bias_reach + distances
            scores += tl.load(bias_at, mask=is_visible, other=0) * LOG2_E
        scores = tl.where(is_visible, scores, float("-inf"))
        weights, shrink, maximum, total = _weigh(scores, maximum, total)
        v_at = v + keys.to(tl.int64) * v_token + kv_head * v_head
        value = tl.load(
            v_at[:, None] + value_channels[None, :],
            mask=is_key[:, None] & (value_channels < DV)[None, :],
            other=0,
        )
        products = tl.dot(weights.to(query.dtype), value, input_precision=PRECISION)
        values = values * shrink[:, None] + products

    # Tokens that belong to no row (padding) come after the last row, and become zero.
    end_written = tl.where(row == num_rows - 1, num_tokens, stop)
    is_written = (queries < TOKENS * GROUP) & (tokens < end_written)
    places = tokens.to(tl.int64) * GROUP * tl.num_programs(1) + heads
    values = values / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(
        out + places[:, None] * DV + value_channels[None, :],
        values.to(out.dtype.element_ty),
        mask=is_written[:, None] & (value_channels < DV)[None, :],
    )


def encoder_tiles(num_tokens: int, num_rows: int, group: int, width: int, itemsize: int) -> Tiles:
    """Choose by shapes only. group: query heads of a KV head. width: the larger of head_dim and
    value_dim. itemsize: bytes of a number."""
    return choose_tiles(num_tokens, num_rows, 1, group, width, itemsize, 1, 1)


def encoder_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the attention of every token to all tokens of its row, with sums in float32.

    q: [T, H, D], k: [T, K, D], v: [T, K, Dv], of one float type. The rows are one after another, as
    `query_start_loc` int32 [B+1] says. window: a token attends to the tokens at most window // 2
    away. bias: float32 [H, 2 R + 1], contiguous, what is added to scores by distance (see
    `AttentionLayer`). H is a multiple of K. The last dimension is contiguous. Returns [T, H, Dv].

    Tokens after those of the last row (padding) give zeros.
    """
    (num_tokens, num_heads, width) = q.shape
    (_, num_kv_heads, value_width) = v.shape
    num_rows = len(query_start_loc) - 1
    group = num_heads // num_kv_heads
    out = torch.empty(num_tokens, num_heads, value_width, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    tiles = encoder_tiles(num_tokens, num_rows, group, max(width, value_width), q.element_size())
    num_tiles = num_tokens if tiles.tokens == 1 else num_tokens // tiles.tokens + num_rows
    _attend_both_ways[(num_tiles, num_kv_heads)](
        q,
        k,
        v,
        query_start_loc,
        q if bias is None else bias,
        out,
        num_rows,
        num_tokens,
        scale,
        0 if window is None else window // 2,
        0 if bias is None else bias.shape[1] // 2,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        GROUP=group,
        D=width,
        DV=value_width,
        TOKENS=tiles.tokens,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        PAD_D=max(16, triton.next_power_of_2(width)),
        PAD_DV=max(16, triton.next_power_of_2(value_width)),
        HAS_WINDOW=window is not None,
        HAS_BIAS=bias is not None,
        PRECISION=precision_of(q.dtype),
        num_warps=tiles.warps,
        num_stages=2,
    )
    return out


class TritonEncoderAttention:
    """Attention among the tokens of each prompt. It keeps nothing between steps."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        self.inputs: AttentionInputs | None = None

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        return KVCacheSpec(tensors=())

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        pass

    def plan(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs

    def bind(self, layer: AttentionLayer) -> Callable[..., Tensor]:
        """See `AttentionBackend.bind`."""
        scale = layer.scale
        window = layer.window
        bias = layer.distance_bias

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            step = self.inputs
            assert step is not None, "call plan() before the forward"
            return encoder_attention(q, k, v, step.query_start_loc, scale, window, bias).flatten(1)

        return attend
