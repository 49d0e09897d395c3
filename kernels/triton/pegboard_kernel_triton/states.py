"""Layers with one state per request. A program has one row of the step and some of its channels. It
finds the row's tokens on the device, computes them one after another, and leaves the state after
them in the row's block.

There is one more row than the tables have: its tokens are those after the last row, which pad the
step. Their results are zeros. Rows without tokens write nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard.ops import StateRows

CHANNELS = 128
"""Channels of a convolution that a program computes."""
TOKENS = 16
"""Tokens that it computes at a time."""
NUMBERS = 2048
"""Numbers of a state that a program keeps in registers."""


@triton.jit
def _row(table, seq_lens, starts, table_row, num_rows, num_tokens):
    """Return the row's first token, the token after its last one, its block, and how many tokens
    there were before. The row after the last one has the tokens that pad the step."""
    row = tl.program_id(0)
    last = tl.minimum(row, num_rows - 1)
    first = tl.load(starts + row)
    stop = tl.where(row < num_rows, tl.load(starts + last + 1), num_tokens)
    block = tl.load(table + last.to(tl.int64) * table_row).to(tl.int64)
    return first, stop, block, tl.load(seq_lens + last) - (stop - first)


@triton.jit
def _pad(out, first, stop, out_token, places, mask):
    """Write zeros for tokens that pad the step."""
    zeros = tl.zeros(places.shape, out.dtype.element_ty)
    for index in range(stop - first):
        t = (first + index).to(tl.int64)
        tl.store(out + t * out_token + places, zeros, mask=mask)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)). The logarithm is 2 artanh(u / (2 + u)) of u = exp(-|x|), exact to float32
    also where u is small."""
    u = tl.exp(-tl.abs(x))
    s = u / (2 + u)
    z = s * s
    series = 1 / 9 + z * (1 / 11 + z * (1 / 13 + z / 15))
    series = 1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * series)))
    return tl.maximum(x, 0.0) + 2 * s * series


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _causal_conv(
    x,
    weight,
    bias,
    state,
    table,
    seq_lens,
    starts,
    out,
    num_rows,
    num_tokens,
    channels,
    x_token,
    table_row,
    state_block,
    WIDTH: tl.constexpr,
    PAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program for each row and BLOCK_C channels. PAST: WIDTH - 1, or the next power of two."""
    first, stop, block, before = _row(table, seq_lens, starts, table_row, num_rows, num_tokens)
    if first >= stop:
        return
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    if tl.program_id(0) == num_rows:
        _pad(out, first, stop, channels, columns, is_column)
        return
    past = state + block * state_block + columns * (WIDTH - 1)
    has_past = columns < tl.where(before > 0, channels, 0)
    for start in range(first, stop, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        is_token = (tokens < stop)[:, None] & is_column[None, :]
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for tap in tl.static_range(WIDTH):
            inputs = tokens + (tap + 1 - WIDTH)
            is_old = is_token & (inputs < first)[:, None]
            place = inputs.to(tl.int64)[:, None] * x_token + columns[None, :]
            values = tl.load(x + place, mask=is_token & ~is_old, other=0).to(tl.float32)
            old = past[None, :] + (inputs - first + WIDTH - 1)[:, None]
            values += tl.load(old, mask=is_old & has_past[None, :], other=0).to(tl.float32)
            factor = tl.load(weight + columns * WIDTH + tap, mask=is_column, other=0)
            total += values * factor.to(tl.float32)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=is_column, other=0).to(tl.float32)[None, :]
        if ACTIVATES:
            total *= _sigmoid(total)
        place = tokens.to(tl.int64)[:, None] * channels + columns[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=is_token)
    numbers = tl.arange(0, PAST)
    inputs = stop - (WIDTH - 1) + numbers
    is_number = (numbers < WIDTH - 1)[None, :] & is_column[:, None]
    is_old = is_number & (inputs < first)[None, :]
    place = inputs.to(tl.int64)[None, :] * x_token + columns[:, None]
    values = tl.load(x + place, mask=is_number & ~is_old, other=0).to(state.dtype.element_ty)
    old = past[:, None] + (inputs - first + WIDTH - 1)[None, :]
    old_values = tl.load(old, mask=is_old & has_past[:, None], other=0)
    values = tl.where(is_old, old_values, values)
    tl.debug_barrier()  # every thread has read the old inputs
    tl.store(past[:, None] + numbers[None, :], values, mask=is_number)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _selective_scan(
    x,
    steps,
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
    channels,
    size,
    x_token,
    steps_token,
    b_token,
    c_token,
    table_row,
    state_block,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program for each row and BLOCK_D channels."""
    first, stop, block, before = _row(table, seq_lens, starts, table_row, num_rows, num_tokens)
    if first >= stop:
        return
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_column = columns < channels
    if tl.program_id(0) == num_rows:
        _pad(out, first, stop, channels, columns, is_column)
        return
    numbers = tl.arange(0, BLOCK_N)
    is_number = numbers < size
    mask = is_column[:, None] & is_number[None, :]
    place = columns[:, None] * size + numbers[None, :]
    at = state + block * state_block + place
    has_past = (numbers < tl.where(before > 0, size, 0))[None, :]
    h = tl.load(at, mask=mask & has_past, other=0)
    a = -tl.exp(tl.load(a_log + place, mask=mask, other=0))
    factor = tl.load(skip + columns, mask=is_column, other=0)
    for index in range(stop - first):
        t = (first + index).to(tl.int64)
        value = tl.load(x + t * x_token + columns, mask=is_column, other=0).to(tl.float32)
        step = tl.load(steps + t * steps_token + columns, mask=is_column, other=0).to(tl.float32)
        step = _softplus(step)
        b_now = tl.load(b + t * b_token + numbers, mask=is_number, other=0).to(tl.float32)
        c_now = tl.load(c + t * c_token + numbers, mask=is_number, other=0).to(tl.float32)
        h = h * tl.exp(step[:, None] * a) + (step * value)[:, None] * b_now[None, :]
        y = tl.sum(h * c_now[None, :], 1) + factor * value
        tl.store(out + t * channels + columns, y.to(out.dtype.element_ty), mask=is_column)
    tl.debug_barrier()
    tl.store(at, h, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _chunked_scan(
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
    for index in range(stop - first):
        t = (first + index).to(tl.int64)
        value = tl.load(x + t * x_token + head * x_head + channels, mask=is_channel, other=0)
        value = value.to(tl.float32)
        step = _softplus(tl.load(steps + t * steps_token + head).to(tl.float32) + added)
        step = tl.minimum(tl.maximum(step, least), most)
        b_now = tl.load(b + t * b_token + group * b_group + numbers, mask=is_number, other=0)
        c_now = tl.load(c + t * c_token + group * c_group + numbers, mask=is_number, other=0)
        h = h * tl.exp(step * a) + (step * value)[:, None] * b_now.to(tl.float32)[None, :]
        y = tl.sum(h * c_now.to(tl.float32)[None, :], 1) + factor * value
        place = t * heads * head_dim + channels
        tl.store(out + place, y.to(out.dtype.element_ty), mask=is_channel)
    tl.debug_barrier()
    tl.store(at, h, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _delta_rule(
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
    steps_head,
    beta_token,
    table_row,
    state_block,
    PER_CHANNEL: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for each row, head, and BLOCK_P channels of its values. repeats: heads of a
    group. PER_CHANNEL: each channel of the key has a decay of its own."""
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
    group = head // repeats
    for index in range(stop - first):
        t = (first + index).to(tl.int64)
        query = tl.load(q + t * q_token + group * q_group + numbers, mask=is_number, other=0)
        query = query.to(tl.float32)
        query *= scale / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
        key = tl.load(k + t * k_token + group * k_group + numbers, mask=is_number, other=0)
        key = key.to(tl.float32)
        key *= 1 / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
        if PER_CHANNEL:
            step = tl.load(
                steps + t * steps_token + head * steps_head + numbers, mask=is_number, other=0
            ).to(tl.float32)
            step += tl.load(bias + head * size + numbers, mask=is_number, other=0)
            h *= tl.exp(rate * _softplus(step))[None, :]
        else:
            step = tl.load(steps + t * steps_token + head * steps_head).to(tl.float32)
            h *= tl.exp(rate * _softplus(step + tl.load(bias + head)))
        value = tl.load(v + t * v_token + head * v_head + channels, mask=is_channel, other=0)
        share = _sigmoid(tl.load(beta + t * beta_token + head).to(tl.float32))
        change = share * (value.to(tl.float32) - tl.sum(h * key[None, :], 1))
        h += change[:, None] * key[None, :]
        y = tl.sum(h * query[None, :], 1)
        place = t * heads * head_dim + channels
        tl.store(out + place, y.to(out.dtype.element_ty), mask=is_channel)
    tl.debug_barrier()
    tl.store(at, h, mask=mask)


@triton.jit
def _gated_norm(
    x,
    gate,
    weight,
    out,
    columns,
    size,
    eps,
    x_token,
    gate_token,
    weight_part,
    NORMALIZES: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token and `size` channels. weight_part: channels from the weights of one
    part to those of the next."""
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    mask = numbers < size
    place = tl.program_id(1) * size + numbers
    mask = mask & (place < columns)
    values = tl.load(x + token * x_token + place, mask=mask, other=0).to(tl.float32)
    factor = tl.load(gate + token * gate_token + place, mask=mask, other=0).to(tl.float32)
    factor *= _sigmoid(factor)
    if GATES_FIRST:
        values *= factor
    if NORMALIZES:
        values *= 1 / tl.sqrt(tl.sum(values * values, 0) / size + eps)
        scale = tl.load(weight + tl.program_id(1) * weight_part + numbers, mask=mask, other=0)
        values *= scale.to(tl.float32)
    if not GATES_FIRST:
        values *= factor
    tl.store(out + token * columns + place, values.to(out.dtype.element_ty), mask=mask)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, activates: bool
) -> Tensor:
    """See `pegboard_models.state_ops.causal_conv`. Products are added up in float32."""
    x = _packed(x)
    num_tokens, channels = x.shape
    width = weight.shape[1]
    out = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
    _causal_conv[(len(rows.seq_lens) + 1, triton.cdiv(channels, CHANNELS))](
        x,
        weight,
        weight if bias is None else bias,
        state,
        *_places(rows),
        out,
        len(rows.seq_lens),
        num_tokens,
        channels,
        x.stride(0),
        rows.table.stride(0),
        state.stride(0),
        WIDTH=width,
        PAST=triton.next_power_of_2(width - 1),
        HAS_BIAS=bias is not None,
        ACTIVATES=activates,
        BLOCK_T=TOKENS,
        BLOCK_C=CHANNELS,
    )
    return out


def selective_scan(
    x: Tensor,
    steps: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """See `pegboard_models.state_ops.selective_scan`."""
    x, steps, b, c = (_packed(each) for each in (x, steps, b, c))
    num_tokens, channels = x.shape
    size = a_log.shape[1]
    out = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
    numbers = triton.next_power_of_2(size)
    block = _channels(channels, numbers)
    _selective_scan[(len(rows.seq_lens) + 1, triton.cdiv(channels, block))](
        x,
        steps,
        a_log,
        b,
        c,
        skip,
        state,
        *_places(rows),
        out,
        len(rows.seq_lens),
        num_tokens,
        channels,
        size,
        x.stride(0),
        steps.stride(0),
        b.stride(0),
        c.stride(0),
        rows.table.stride(0),
        state.stride(0),
        BLOCK_D=block,
        BLOCK_N=numbers,
    )
    return out


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
    """See `pegboard_models.state_ops.chunked_scan`. Tokens are computed one after another."""
    x, steps, b, c = (_packed(each) for each in (x, steps, b, c))
    num_tokens, heads, head_dim = x.shape
    size = state.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    numbers = triton.next_power_of_2(size)
    block = _channels(head_dim, numbers)
    _chunked_scan[(len(rows.seq_lens) + 1, heads, triton.cdiv(head_dim, block))](
        x,
        steps,
        bias,
        a_log,
        b,
        c,
        skip,
        state,
        *_places(rows),
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
        BLOCK_P=block,
        BLOCK_N=numbers,
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
    """See `pegboard_models.state_ops.gated_delta_rule`. Tokens are computed one after another."""
    q, k, v, steps, beta = (_packed(each) for each in (q, k, v, steps, beta))
    num_tokens, heads, head_dim = v.shape
    size = state.shape[-1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    numbers = triton.next_power_of_2(size)
    block = _channels(head_dim, numbers)
    _delta_rule[(len(rows.seq_lens) + 1, heads, triton.cdiv(head_dim, block))](
        q,
        k,
        v,
        steps,
        bias,
        a_log,
        beta,
        state,
        *_places(rows),
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
        *steps.stride()[:2],
        beta.stride(0),
        rows.table.stride(0),
        state.stride(0),
        PER_CHANNEL=steps.dim() == 3,
        BLOCK_P=block,
        BLOCK_K=numbers,
    )
    return out


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, size: int, gates_first: bool
) -> Tensor:
    """See `pegboard_models.state_ops.gated_norm`."""
    x, gate = (_packed(each) for each in (x, gate))
    num_tokens, columns = x.shape
    part = min(columns, NUMBERS) if weight is None else size
    out = torch.empty(num_tokens, columns, dtype=x.dtype, device=x.device)
    if num_tokens:
        _gated_norm[(num_tokens, triton.cdiv(columns, part))](
            x,
            gate,
            x if weight is None else weight,
            out,
            columns,
            part,
            eps,
            x.stride(0),
            gate.stride(0),
            0 if weight is None or len(weight) == size else size,
            NORMALIZES=weight is not None,
            GATES_FIRST=gates_first,
            BLOCK=triton.next_power_of_2(part),
        )
    return out


def _packed(x: Tensor) -> Tensor:
    """Return x with its last channels next to each other."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _places(rows: StateRows) -> tuple[Tensor, Tensor, Tensor]:
    return rows.table, rows.seq_lens, rows.query_start_loc


def _channels(count: int, numbers: int) -> int:
    """Return for how many of so many channels a program keeps this many numbers each."""
    return max(1, min(triton.next_power_of_2(count), NUMBERS // numbers))
