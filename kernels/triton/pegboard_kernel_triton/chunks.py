"""States of steps with prompts, a chunk of tokens at a time (Dao and Gu 2024, "Transformers are
SSMs": the state space dual). Within a chunk, tokens read each other by matrix products, and the
state is decayed and updated once. Steps of one token for each row are computed by `states`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard.ops import StateRows
from pegboard_kernel_triton import states
from pegboard_kernel_triton.experts import precision_of
from pegboard_kernel_triton.states import _pad, _row, _sigmoid, _softplus

TOKENS = 32
"""Tokens of a chunk."""
DELTA_TOKENS = 16
"""Tokens of a chunk of delta rules, where one token after another is solved for."""
NUMBERS = 8192
"""Numbers of a state that a program keeps in registers."""


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _scan_chunks(
    x,
    steps,
    bias,
    a_log,
    b,
    c,
    skip,
    state,
    table,
    seq_lens,
    starts,
    out,
    num_rows,
    num_tokens,
    heads,
    head_dim,
    size,
    repeats,
    least,
    most,
    x_token,
    x_head,
    steps_token,
    b_token,
    b_group,
    c_token,
    c_group,
    table_row,
    state_block,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program for each row, head, and BLOCK_P of its channels. repeats: heads of a group."""
    first, stop, block, before = _row(table, seq_lens, starts, table_row, num_rows, num_tokens)
    if first >= stop:
        return
    head = tl.program_id(1)
    channels = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_channel = channels < head_dim
    out += head * head_dim
    if tl.program_id(0) == num_rows:
        _pad(out, first, stop, heads * head_dim, channels, is_channel)
        return
    numbers = tl.arange(0, BLOCK_N)
    is_number = numbers < size
    mask = is_channel[:, None] & is_number[None, :]
    at = state + block * state_block
    at += (head * head_dim + channels)[:, None] * size + numbers[None, :]
    has_past = (numbers < tl.where(before > 0, size, 0))[None, :]
    h = tl.load(at, mask=mask & has_past, other=0)
    a = -tl.exp(tl.load(a_log + head))
    added = tl.load(bias + head)
    factor = tl.load(skip + head)
    group = head // repeats
    places = tl.arange(0, BLOCK_T)
    is_before = places[None, :] <= places[:, None]
    for index in range(first, stop, BLOCK_T):
        tokens = (index + places).to(tl.int64)
        is_token = tokens < stop
        value = tl.load(
            x + tokens[:, None] * x_token + head * x_head + channels[None, :],
            mask=is_token[:, None] & is_channel[None, :],
            other=0,
        ).to(tl.float32)
        step = tl.load(steps + tokens * steps_token + head, mask=is_token, other=0).to(tl.float32)
        step = tl.minimum(tl.maximum(_softplus(step + added), least), most)
        step = tl.where(is_token, step, 0.0)
        is_input = is_token[:, None] & is_number[None, :]
        inputs = tl.load(
            b + tokens[:, None] * b_token + group * b_group + numbers[None, :],
            mask=is_input,
            other=0,
        ).to(tl.float32)
        outputs = tl.load(
            c + tokens[:, None] * c_token + group * c_group + numbers[None, :],
            mask=is_input,
            other=0,
        ).to(tl.float32)
        # the logarithms of decays: since the chunk began, and in all of it
        decays = tl.cumsum(step * a, 0)
        whole = tl.sum(step * a, 0)
        scaled = value * step[:, None]
        between = tl.exp(tl.where(is_before, decays[:, None] - decays[None, :], float("-inf")))
        weights = tl.dot(outputs, tl.trans(inputs), input_precision=PRECISION) * between
        y = tl.dot(weights, scaled, input_precision=PRECISION)
        old = tl.dot(outputs, tl.trans(h), input_precision=PRECISION)
        y += tl.exp(decays)[:, None] * old + factor * value
        tl.store(
            out + tokens[:, None] * heads * head_dim + channels[None, :],
            y.to(out.dtype.element_ty),
            mask=is_token[:, None] & is_channel[None, :],
        )
        rest = scaled * tl.exp(whole - decays)[:, None]
        h = h * tl.exp(whole) + tl.dot(tl.trans(rest), inputs, input_precision=PRECISION)
    tl.debug_barrier()
    tl.store(at, h, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _delta_chunks(
    q,
    k,
    v,
    steps,
    bias,
    a_log,
    beta,
    state,
    table,
    seq_lens,
    starts,
    out,
    num_rows,
    num_tokens,
    heads,
    head_dim,
    size,
    repeats,
    scale,
    q_token,
    q_group,
    k_token,
    k_group,
    v_token,
    v_head,
    steps_token,
    beta_token,
    table_row,
    state_block,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for each row, head, and BLOCK_P channels of its values. repeats: heads of a
    group. The changes U of a chunk's tokens solve (I + A) U = R, where A is strictly triangular: a
    token's change depends on those before it. The inverse is found row by row (Yang et al. 2024,
    "Gated Delta Networks")."""
    first, stop, block, before = _row(table, seq_lens, starts, table_row, num_rows, num_tokens)
    if first >= stop:
        return
    head = tl.program_id(1)
    channels = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_channel = channels < head_dim
    out += head * head_dim
    if tl.program_id(0) == num_rows:
        _pad(out, first, stop, heads * head_dim, channels, is_channel)
        return
    numbers = tl.arange(0, BLOCK_K)
    is_number = numbers < size
    mask = is_channel[:, None] & is_number[None, :]
    at = state + block * state_block
    at += (head * head_dim + channels)[:, None] * size + numbers[None, :]
    has_past = (numbers < tl.where(before > 0, size, 0))[None, :]
    h = tl.load(at, mask=mask & has_past, other=0)
    rate = -tl.exp(tl.load(a_log + head))
    added = tl.load(bias + head)
    group = head // repeats
    places = tl.arange(0, BLOCK_T)
    is_before = places[None, :] < places[:, None]
    is_same = places[None, :] == places[:, None]
    for index in range(first, stop, BLOCK_T):
        tokens = (index + places).to(tl.int64)
        is_token = tokens < stop
        is_vector = is_token[:, None] & is_number[None, :]
        query = tl.load(
            q + tokens[:, None] * q_token + group * q_group + numbers[None, :],
            mask=is_vector,
            other=0,
        ).to(tl.float32)
        query *= (scale / tl.sqrt(tl.sum(query * query, 1) + 1e-6))[:, None]
        key = tl.load(
            k + tokens[:, None] * k_token + group * k_group + numbers[None, :],
            mask=is_vector,
            other=0,
        ).to(tl.float32)
        key *= (1 / tl.sqrt(tl.sum(key * key, 1) + 1e-6))[:, None]
        step = tl.load(steps + tokens * steps_token + head, mask=is_token, other=0).to(tl.float32)
        decay = tl.where(is_token, rate * _softplus(step + added), 0.0)
        decays = tl.cumsum(decay, 0)  # logarithms, since the chunk began
        whole = tl.sum(decay, 0)
        value = tl.load(
            v + tokens[:, None] * v_token + head * v_head + channels[None, :],
            mask=is_token[:, None] & is_channel[None, :],
            other=0,
        ).to(tl.float32)
        share = tl.load(beta + tokens * beta_token + head, mask=is_token, other=0).to(tl.float32)
        share = tl.where(is_token, _sigmoid(share), 0.0)

        between = decays[:, None] - decays[None, :]
        of_others = tl.exp(tl.where(is_before, between, float("-inf")))
        of_others *= tl.dot(key, tl.trans(key), input_precision=PRECISION) * share[:, None]
        inverse = -of_others
        for place in range(1, BLOCK_T):
            row = tl.sum(tl.where((places == place)[:, None], inverse, 0.0), 0)
            row += tl.sum(row[:, None] * inverse, 0)
            inverse = tl.where((places == place)[:, None], row[None, :], inverse)
        inverse += tl.where(is_same, 1.0, 0.0)

        old = tl.dot(key, tl.trans(h), input_precision=PRECISION)
        wanted = (value - tl.exp(decays)[:, None] * old) * share[:, None]
        change = tl.dot(inverse, wanted, input_precision=PRECISION)
        weights = tl.exp(tl.where(is_before | is_same, between, float("-inf")))
        weights *= tl.dot(query, tl.trans(key), input_precision=PRECISION)
        y = tl.dot(weights, change, input_precision=PRECISION)
        y += tl.exp(decays)[:, None] * tl.dot(query, tl.trans(h), input_precision=PRECISION)
        tl.store(
            out + tokens[:, None] * heads * head_dim + channels[None, :],
            y.to(out.dtype.element_ty),
            mask=is_token[:, None] & is_channel[None, :],
        )
        rest = change * tl.exp(whole - decays)[:, None]
        h = h * tl.exp(whole) + tl.dot(tl.trans(rest), key, input_precision=PRECISION)
    tl.debug_barrier()
    tl.store(at, h, mask=mask)


def chunked_scan(
    x: Tensor,
    steps: Tensor,
    bias: Tensor,
    limits: tuple[float, float],
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """See `pegboard_models.state_ops.chunked_scan`. The chunks of a row begin with its first token
    in the step."""
    if len(x) <= len(rows.seq_lens):
        return states.chunked_scan(x, steps, bias, limits, a_log, b, c, skip, state, rows)
    precision = precision_of(x.dtype)
    x, steps, b, c = (states._packed(each) for each in (x, steps, b, c))
    num_tokens, heads, head_dim = x.shape
    size = state.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    numbers = max(16, triton.next_power_of_2(size))
    block = max(16, min(triton.next_power_of_2(head_dim), NUMBERS // numbers))
    _scan_chunks[(len(rows.seq_lens) + 1, heads, triton.cdiv(head_dim, block))](
        x,
        steps,
        bias,
        a_log,
        b,
        c,
        skip,
        state,
        *states._places(rows),
        out,
        len(rows.seq_lens),
        num_tokens,
        heads,
        head_dim,
        size,
        heads // b.shape[1],
        *limits,
        *x.stride()[:2],
        steps.stride(0),
        *b.stride()[:2],
        *c.stride()[:2],
        rows.table.stride(0),
        state.stride(0),
        PRECISION=precision,
        BLOCK_T=TOKENS,
        BLOCK_P=block,
        BLOCK_N=numbers,
        num_warps=4,
        num_stages=2,
    )
    return out


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Tensor,
    bias: Tensor,
    a_log: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """See `pegboard_models.state_ops.gated_delta_rule`, and `chunked_scan` about chunks. Tokens are
    computed one after another if channels have decays of their own."""
    if len(v) <= len(rows.seq_lens) or steps.dim() == 3:
        return states.gated_delta_rule(q, k, v, steps, bias, a_log, beta, state, rows)
    precision = precision_of(v.dtype)
    q, k, v, steps, beta = (states._packed(each) for each in (q, k, v, steps, beta))
    num_tokens, heads, head_dim = v.shape
    size = state.shape[-1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    numbers = max(16, triton.next_power_of_2(size))
    block = max(16, min(triton.next_power_of_2(head_dim), NUMBERS // numbers))
    _delta_chunks[(len(rows.seq_lens) + 1, heads, triton.cdiv(head_dim, block))](
        q,
        k,
        v,
        steps,
        bias,
        a_log,
        beta,
        state,
        *states._places(rows),
        out,
        len(rows.seq_lens),
        num_tokens,
        heads,
        head_dim,
        size,
        heads // k.shape[1],
        size**-0.5,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        steps.stride(0),
        beta.stride(0),
        rows.table.stride(0),
        state.stride(0),
        PRECISION=precision,
        BLOCK_T=DELTA_TOKENS,
        BLOCK_P=block,
        BLOCK_K=numbers,
        num_warps=4,
        num_stages=2,
    )
    return out
