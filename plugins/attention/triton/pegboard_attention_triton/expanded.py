"""Latent attention among the new tokens of prompts, with latents that are expanded to the keys and
values of every head (see `Latent`). A pair of tokens then takes N + R + V multiplications for each
head, and not 2 C + R as in `latent`, which reads what the cache has of earlier tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard_attention_triton.attention import LOG2_E, _log, _place, _weigh, precision_of


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _attend_expanded(
    q,
    q_rope,
    k,
    k_rope,
    v,
    query_start_loc,
    out,
    lse,
    num_rows,
    num_tokens,
    scale,
    q_token,
    q_head,
    rope_token,
    rope_head,
    k_token,
    k_head,
    turned_token,
    v_token,
    v_head,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PAD_N: tl.constexpr,
    PAD_R: tl.constexpr,
    PAD_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The attention of TOKENS tokens of a row and one head to the row's new tokens up to each of
    them. All heads share the rotated part of the keys."""
    head = tl.program_id(1)
    row, stop, first_token = _place(tl.program_id(0), query_start_loc, num_rows, TOKENS)
    if (first_token >= stop) & (row < num_rows - 1):
        return
    first = tl.load(query_start_loc + row)
    tokens = first_token + tl.arange(0, TOKENS)
    is_query = tokens < stop
    channels = tl.arange(0, PAD_N)
    turned = tl.arange(0, PAD_R)
    value_channels = tl.arange(0, PAD_V)
    q_at = q + tokens.to(tl.int64)[:, None] * q_token + head * q_head + channels[None, :]
    query = tl.load(q_at, mask=is_query[:, None] & (channels < N)[None, :], other=0)
    rope_at = q_rope + tokens.to(tl.int64)[:, None] * rope_token + head * rope_head
    query_rope = tl.load(
        rope_at + turned[None, :], mask=is_query[:, None] & (turned < R)[None, :], other=0
    )
    # padding has no keys
    last = tl.where(first_token < stop, tl.minimum(first_token + TOKENS, stop), first)
    maximum = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.full([TOKENS], 0, tl.float32)
    values = tl.full([TOKENS, PAD_V], 0, tl.float32)
    for at in range(first, last, KEYS):
        keys = at + tl.arange(0, KEYS)
        is_key = keys < last
        places = keys.to(tl.int64)
        key = tl.load(
            k + (places * k_token + head * k_head)[None, :] + channels[:, None],
            mask=is_key[None, :] & (channels < N)[:, None],
            other=0,
        )
        rope = tl.load(
            k_rope + (places * turned_token)[None, :] + turned[:, None],
            mask=is_key[None, :] & (turned < R)[:, None],
            other=0,
        )
        scores = tl.dot(query, key, input_precision=PRECISION)
        scores += tl.dot(query_rope, rope.to(query.dtype), input_precision=PRECISION)
        is_visible = is_key[None, :] & is_query[:, None] & (keys[None, :] <= tokens[:, None])
        scores = tl.where(is_visible, scores * (scale * LOG2_E), float("-inf"))
        weights, shrink, maximum, total = _weigh(scores, maximum, total)
        value = tl.load(
            v + (places * v_token + head * v_head)[:, None] + value_channels[None, :],
            mask=is_key[:, None] & (value_channels < V)[None, :],
            other=0,
        )
        products = tl.dot(weights.to(query.dtype), value, input_precision=PRECISION)
        values = values * shrink[:, None] + products

    # Tokens that belong to no row (padding) come after the last row, and become zero.
    is_written = tokens < tl.where(row == num_rows - 1, num_tokens, stop)
    place = tokens.to(tl.int64) * tl.num_programs(1) + head
    tl.store(lse + place, _log(maximum, total), mask=is_written)
    values = values / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(
        out + place[:, None] * V + value_channels[None, :],
        values.to(out.dtype.element_ty),
        mask=is_written[:, None] & (value_channels < V)[None, :],
    )


def tiles_of(dtype: torch.dtype) -> tuple[int, int]:
    """Return the tokens and the keys of a tile."""
    return (32, 32) if dtype == torch.float32 else (64, 64)


def expanded_attention(
    q: Tensor,
    q_rope: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention among the new tokens of each row, with sums in float32.

    q: [T, H, N], q_rope: [T, H, R], k: [T, H, N], k_rope: [T, R], v: [T, H, V], of one float type.
    The rows are one after another, as `query_start_loc` int32 [B+1] says. The last dimension is
    contiguous. Returns the results [T, H, V], and the logarithms of the sums of weights, float32
    [T, H].

    Tokens after those of the last row (padding) give zeros.
    """
    (num_tokens, num_heads, width) = q.shape
    rope = q_rope.shape[2]
    value_width = v.shape[2]
    num_rows = len(query_start_loc) - 1
    out = torch.empty(num_tokens, num_heads, value_width, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    tokens, keys = tiles_of(q.dtype)
    _attend_expanded[(num_tokens // tokens + num_rows, num_heads)](
        q,
        q_rope,
        k,
        k_rope,
        v,
        query_start_loc,
        out,
        lse,
        num_rows,
        num_tokens,
        scale,
        *q.stride()[:2],
        *q_rope.stride()[:2],
        *k.stride()[:2],
        k_rope.stride(0),
        *v.stride()[:2],
        N=width,
        R=rope,
        V=value_width,
        TOKENS=tokens,
        KEYS=keys,
        PAD_N=max(16, triton.next_power_of_2(width)),
        PAD_R=max(16, triton.next_power_of_2(rope)),
        PAD_V=max(16, triton.next_power_of_2(value_width)),
        PRECISION=precision_of(q.dtype),
        num_warps=4,
        num_stages=2,
    )
    return out, lse


def merged(new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> Tensor:
    """Return the attention to both sets of keys, from that to each: results [T, H, V] and
    logarithms [T, H]. Tokens without any key get zeros."""
    share = torch.exp(old[1] - torch.logaddexp(new[1], old[1])).nan_to_num()
    return torch.lerp(new[0], old[0], share.unsqueeze(-1).to(new[0].dtype))
