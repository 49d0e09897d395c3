"""The products of latent attention with its up-projections, for batch invariance: all steps have
the same tiles, and one program adds up all channels of a tile, in their order. What torch's
products do is chosen by the number of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard_attention_triton.attention import precision_of

TOKENS = 64
CHANNELS = 64
BYTES = 128
"""Of a row of a tile that is read at a time."""


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_heads(
    x,
    matrices,
    out,
    num_tokens,
    in_channels,
    out_channels,
    x_token,
    x_head,
    of_head,
    of_input,
    of_output,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """One program for TOKENS tokens, one head and CHANNELS results. of_head, of_input, of_output:
    strides of the matrices."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    is_token = (tokens < num_tokens)[:, None]
    is_channel = (channels < out_channels)[None, :]
    x_at = x + tokens[:, None] * x_token + head * x_head
    part_at = matrices + head * of_head + channels[None, :] * of_output
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for start in range(0, in_channels, INPUTS):
        places = start + tl.arange(0, INPUTS)
        is_place = places < in_channels
        values = tl.load(x_at + places[None, :], mask=is_token & is_place[None, :], other=0)
        part = tl.load(
            part_at + places[:, None] * of_input, mask=is_place[:, None] & is_channel, other=0
        )
        total = tl.dot(values, part, total, input_precision=PRECISION)
    to = out + (tokens * tl.num_programs(1) + head)[:, None] * out_channels + channels[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_token & is_channel)


def constants_of(dtype: torch.dtype) -> dict[str, object]:
    """Return the constants of a launch. No card has measured the sizes of tiles."""
    return {
        "PRECISION": precision_of(dtype),
        "TOKENS": TOKENS,
        "CHANNELS": CHANNELS,
        "INPUTS": BYTES // dtype.itemsize,
    }


def multiply_heads(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply x [T, H, in] with a matrix of each head [H, in, out] of the same type → [T, H, out],
    with sums in float32. The last dimension of x is contiguous. A token has the same bits in every
    step."""
    num_tokens, num_heads, in_channels = x.shape
    out_channels = matrices.shape[2]
    out = torch.empty(num_tokens, num_heads, out_channels, dtype=x.dtype, device=x.device)
    if num_tokens:
        grid = triton.cdiv(num_tokens, TOKENS), num_heads, triton.cdiv(out_channels, CHANNELS)
        _multiply_heads[grid](
            x,
            matrices,
            out,
            num_tokens,
            in_channels,
            out_channels,
            *x.stride()[:2],
            *matrices.stride(),
            **constants_of(x.dtype),
            num_warps=4,
            num_stages=2,
        )
    return out
