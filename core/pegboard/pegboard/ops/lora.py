"""Low-rank adapters (Hu et al. 2021): y += B A x, where each row has the A and B of its adapter, or
none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AdapterRows(NamedTuple):
    """Which rows of a step use which adapter. order: int32 [T], the rows sorted by slot. starts:
    int32 [slots + 2]; the rows of slot s are order[starts[s] : starts[s + 1]]. The rows of slot 0
    use the base model only."""

    order: Tensor
    starts: Tensor


class AdapterExchange(NamedTuple):
    """How ranks that divide the adapters of a layer exchange the products with their parts of A.
    The rank i of an adapter is in column firsts[p] + i // turns of part p, on the member i % turns
    of the group.

    run: [T, W] → [T, turns · W], the products of all members. turns: the number of members that
    divide the ranks of adapters; 1 = each has all ranks and some columns of x, and `run` adds up.
    firsts: of each part. columns: int32 [slots]; only the first columns[slot] columns of A are not
    zero.
    """

    run: Callable[[Tensor], Tensor]
    turns: int
    firsts: Sequence[int]
    columns: Tensor


def expert_adapter_rows(rows: AdapterRows, places: Tensor, starts: Tensor) -> AdapterRows:
    """Return which of the rows sorted by expert use which adapter, where each adapter has a slot
    for each of the E experts: that of expert e and slot s is 1 + (s - 1) · E + e.

    rows: of the tokens. places: int32 [T, k], those of -1 have no row; starts: int32 [E + 1] (see
    `ops.sort_by_expert`).
    """
    num_experts = len(starts) - 1
    num_slots = len(rows.starts) - 2
    of_tokens = torch.arange(num_slots + 1).repeat_interleave(rows.starts.diff())
    of_tokens = torch.zeros(len(places), dtype=torch.int64).index_copy_(
        0, rows.order[: len(of_tokens)].long(), of_tokens
    )
    is_here = places.flatten() >= 0
    slots = torch.empty(int(starts[-1]), dtype=torch.int64)
    of_rows = of_tokens.repeat_interleave(places.shape[1])
    slots[places.flatten()[is_here].long()] = of_rows[is_here]
    experts = torch.arange(num_experts).repeat_interleave(starts.diff())
    slots = torch.where(slots > 0, 1 + (slots - 1) * num_experts + experts, 0)
    counts = torch.bincount(slots, minlength=num_slots * num_experts + 1)
    return AdapterRows(
        slots.argsort(stable=True).int(), torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    )


def lora_add(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    bounds: Sequence[int],
    rows: AdapterRows,
    exchange: AdapterExchange | None = None,
) -> Tensor:
    """Add the products of the adapters to y [T, out] in place, and return y.

    x: [T, in], or [T] integers i, which stand for rows that are 1 in column i and 0 elsewhere. a:
    [slots, in, P · R] and b: [slots, R', out] with R' ≤ R, of slots 1 …. Part p of the P parts has
    the columns p · R … of a, and writes the columns bounds[p] … bounds[p + 1] of y. ranks: int32
    [slots]; only the first ranks[slot] columns of each part, and rows of b, are not zero; 0 = the
    adapter does not change this layer. exchange: a is [slots, in, W], what this rank holds of all
    parts, and every rank of the group makes this call; None = this rank has all of A.
    """
    starts = rows.starts.tolist()
    places = {
        slot: rows.order[starts[slot + 1] : starts[slot + 2]].long()
        for slot in range(len(a))
        if starts[slot + 2] > starts[slot + 1] and ranks[slot]
    }
    width = a.shape[2] // (len(bounds) - 1)
    shrunk = y.new_zeros(len(y), a.shape[2])
    for slot, at in places.items():
        products = a[slot, x[at]] if x.dim() == 1 else x[at] @ a[slot].to(x.dtype)
        shrunk[at] = products.to(y.dtype)
    turns = 1
    firsts: Sequence[int] = range(0, a.shape[2], width)
    if exchange is not None:
        turns = exchange.turns
        firsts = exchange.firsts
        shrunk = exchange.run(shrunk)
    by_member = shrunk.unflatten(1, (turns, -1))
    for slot, at in places.items():
        rank = int(ranks[slot])
        held = -(-rank // turns)
        for first, start, stop in zip(firsts, bounds, bounds[1:], strict=False):
            products = by_member[at, :, first : first + held].transpose(1, 2).flatten(1)[:, :rank]
            y[at, start:stop] += products @ b[slot, :rank, start:stop].to(y.dtype)
    return y
