"""Low-rank adapters (Hu et al. 2021): y += B A x, where each row has the A and B of its adapter, or
none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pegboard.ops.experts import starts_of


class AdapterRows(NamedTuple):
    """Which rows of a step use which adapter. order: int32, the rows sorted by slot. starts: int32
    [slots + 2]; the rows of slot s are order[starts[s] : starts[s + 1]]. The rows of slot 0 use the
    base model only. `order` may be longer than starts[-1]: what follows may be any number, and a
    row that is not before it uses no adapter."""

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
    `ops.sort_by_expert`). The order is T · k long. Nothing is read on the host.
    """
    num_experts = len(starts) - 1
    end = (len(rows.starts) - 2) * num_experts + 1
    order = rows.order[: len(places)].long()
    at = torch.arange(len(order), dtype=torch.int32, device=order.device)
    slots = torch.searchsorted(rows.starts[1:], at, right=True)
    order = order.masked_fill(at >= rows.starts[-1], len(places))
    slots = slots.new_zeros(len(places) + 1).scatter_(0, order, slots)[:-1].unsqueeze(1)
    slots = 1 + (slots - 1) * num_experts + torch.searchsorted(starts[1:], places, right=True)
    slots = slots.clamp_(min=0).masked_fill_(places < 0, end)
    slots, order = slots.flatten().sort(stable=True)
    return AdapterRows(places.flatten()[order], starts_of(slots, end))


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
