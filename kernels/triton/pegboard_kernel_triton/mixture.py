"""Which experts compute a token, and the sum of what they return: the ops `route` and
`sum_experts`. A program computes one token, or some columns of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard.ops.experts import RouterRule

COLUMNS = 1024
"""Columns that one program adds up."""


@triton.jit
def _first_best(values, is_free, numbers):
    """Return the largest of the free values, and its number, the smallest one if several are
    equal."""
    largest = tl.max(tl.ravel(tl.where(is_free, values, float("-inf"))), 0)
    is_best = is_free & (values == largest)
    return largest, tl.min(tl.ravel(tl.where(is_best, numbers, 2147483647)), 0)


@triton.jit
def _open_experts(choice, is_expert, groups, GROUPS, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr):
    """Return whether an expert is in one of the best groups, [groups, experts]. A group is as good
    as the sum of its BEST best experts."""
    members = tl.arange(0, choice.shape[1])[None, :]
    is_free = is_expert
    worth = tl.zeros([choice.shape[0], 1], tl.float32)
    for _ in tl.static_range(BEST):
        left = tl.where(is_free, choice, float("-inf"))
        best = tl.max(left, 1, keep_dims=True)
        first = tl.min(tl.where(is_free & (left == best), members, 2147483647), 1, keep_dims=True)
        is_free &= members != first
        worth += best
    is_closed = groups < GROUPS
    for _ in tl.static_range(TOP_GROUPS):
        _, group = _first_best(worth, is_closed, groups)
        is_closed &= groups != group
    return is_expert & (is_closed == 0)


@triton.jit
def _route(
    logits,
    correction,
    weights,
    ids,
    stride,
    scale,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    PAD_GROUPS: tl.constexpr,
    PAD_SIZE: tl.constexpr,
    PAD_K: tl.constexpr,
):
    """One program for each token. The experts are in GROUPS groups of SIZE."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, PAD_GROUPS)[:, None]
    members = tl.arange(0, PAD_SIZE)[None, :]
    experts = groups * SIZE + members
    is_expert = (groups < GROUPS) & (members < SIZE)
    x = tl.load(logits + token * stride + experts, mask=is_expert, other=float("-inf"))
    x = x.to(tl.float32)
    if IS_SOFTMAX:
        peak = tl.max(tl.ravel(tl.where(x != x, float("-inf"), x)), 0)
        scores = tl.where(is_expert, tl.exp(x - peak), 0.0)
        scores = scores / tl.sum(tl.ravel(scores), 0)
    else:
        scores = tl.sigmoid(x)
    choice = scores
    if HAS_CORRECTION:
        choice += tl.load(correction + experts, mask=is_expert, other=0).to(tl.float32)
    choice = tl.where(choice != choice, float("inf"), choice)  # NaN is larger than any number
    if GROUPS > 1:
        is_open = _open_experts(choice, is_expert, groups, GROUPS, TOP_GROUPS, BEST)
        choice = tl.where(is_open, choice, float("-inf"))
    places = tl.arange(0, PAD_K)
    numbers = tl.zeros([PAD_K], tl.int32)
    shares = tl.zeros([PAD_K], tl.float32)
    total = 0.0
    is_free = is_expert
    for place in tl.static_range(TOP_K):
        _, expert = _first_best(choice, is_free, experts)
        is_free &= experts != expert
        share = tl.sum(tl.ravel(tl.where(experts == expert, scores, 0.0)), 0)
        total += share
        numbers = tl.where(places == place, expert, numbers)
        shares = tl.where(places == place, share, shares)
    if RENORMALIZES:
        shares = shares / (total + 1e-20)
    tl.store(weights + token * TOP_K + places, shares * scale, mask=places < TOP_K)
    tl.store(ids + token * TOP_K + places, numbers, mask=places < TOP_K)


def route(
    logits: Tensor, rule: RouterRule, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `pegboard.ops.experts.route`. Of equal experts, the first one is the better one."""
    count, num_experts = logits.shape
    weights = torch.empty(count, rule.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, rule.top_k, dtype=torch.int32, device=logits.device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    size = num_experts // rule.num_groups
    if count:
        _route[(count,)](
            logits,
            correction,
            weights,
            ids,
            logits.stride(0),
            rule.scale,
            GROUPS=rule.num_groups,
            SIZE=size,
            TOP_GROUPS=rule.top_groups,
            BEST=rule.group_best,
            TOP_K=rule.top_k,
            IS_SOFTMAX=rule.score == "softmax",
            HAS_CORRECTION=correction is not None,
            RENORMALIZES=rule.renormalize,
            PAD_GROUPS=triton.next_power_of_2(rule.num_groups),
            PAD_SIZE=triton.next_power_of_2(size),
            PAD_K=triton.next_power_of_2(rule.top_k),
            num_warps=1 if num_experts <= 256 else 4,
        )
    return weights, ids


@triton.jit
def _sum_experts(
    rows,
    places,
    weights,
    shared,
    gate,
    out,
    width,
    row_stride,
    shared_stride,
    gate_stride,
    EACH: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program for each token and COLUMNS columns. The rows of a token are added in order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    total = tl.zeros([COLUMNS], tl.float32)
    for number in range(EACH):
        place = tl.load(places + token * EACH + number).to(tl.int64)
        stop = tl.where(place < 0, 0, width)
        row = tl.load(rows + place * row_stride + columns, mask=columns < stop, other=0)
        row = row.to(tl.float32)
        if HAS_WEIGHTS:
            row *= tl.load(weights + token * EACH + number).to(tl.float32)
        total += row
    if HAS_SHARED:
        more = tl.load(shared + token * shared_stride + columns, mask=is_column, other=0)
        more = more.to(tl.float32)
        if HAS_GATE:
            more *= tl.sigmoid(tl.load(gate + token * gate_stride).to(tl.float32))
        total += more
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=is_column)


def sum_experts(
    rows: Tensor,
    places: Tensor,
    weights: Tensor | None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """See `pegboard.ops.experts.sum_experts`."""
    count, each = places.shape
    width = rows.shape[1]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if shared is not None and shared.stride(1) != 1:
        shared = shared.contiguous()
    out = torch.empty(count, width, dtype=rows.dtype, device=rows.device)
    columns = min(COLUMNS, triton.next_power_of_2(width))
    if count:
        _sum_experts[(count, triton.cdiv(width, columns))](
            rows,
            places.contiguous(),
            None if weights is None else weights.contiguous(),
            shared,
            gate,
            out,
            width,
            rows.stride(0),
            0 if shared is None else shared.stride(0),
            0 if gate is None else gate.stride(0),
            EACH=each,
            HAS_WEIGHTS=weights is not None,
            HAS_SHARED=shared is not None,
            HAS_GATE=gate is not None,
            COLUMNS=columns,
        )
    return out
