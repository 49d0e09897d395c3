"""Low-rank adapters: the products of csrc/lora.c."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from pegboard import ops
from pegboard.ops import AdapterExchange, AdapterRows
from pegboard_kernel_cpu.values import Call, Value, new, rows_of, submit

SPLITS = 4
RANKS = 16
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Adapters(Structure):
    _fields_ = (("order", c_void_p), ("starts", c_void_p), ("ranks", c_void_p), ("slots", c_int64))


class LoRAShrink(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("a", c_void_p),
        ("adapters", Adapters),
        ("columns", c_int64),
        ("parts", c_int64),
        ("width", c_int64),
        ("kind", c_int64),
        ("is_lookup", c_int64),
    )


class LoRAJoin(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("adapters", Adapters),
        ("width", c_int64),
    )


class LoRAExpand(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("b", c_void_p),
        ("adapters", Adapters),
        ("bounds", c_void_p),
        ("firsts", c_void_p),
        ("parts", c_int64),
        ("width", c_int64),
        ("turns", c_int64),
        ("max_rank", c_int64),
        ("kind", c_int64),
    )


class ExpertAdapterRows(Structure):
    _fields_ = (
        ("places", c_void_p),
        ("experts", c_void_p),
        ("order", c_void_p),
        ("starts", c_void_p),
        ("to_order", c_void_p),
        ("to_starts", c_void_p),
        ("slots", c_int64),
        ("num_experts", c_int64),
        ("top_k", c_int64),
    )


def expert_adapter_rows(rows: AdapterRows, places: Tensor, starts: Tensor) -> AdapterRows:
    """See `pegboard.ops.expert_adapter_rows`. When recorded, `rows` is read at every replay, and
    the results keep their addresses."""
    slots = len(rows.starts) - 2
    num_experts = starts.shape[0] - 1
    sorted_rows = AdapterRows(
        torch.zeros(places.shape[0] * places.shape[1], dtype=torch.int32),
        torch.zeros(slots * num_experts + 3, dtype=torch.int32),
    )
    arguments = ExpertAdapterRows(
        order=rows.order.data_ptr(),
        starts=rows.starts.data_ptr(),
        to_order=sorted_rows.order.data_ptr(),
        to_starts=sorted_rows.starts.data_ptr(),
        slots=slots,
        num_experts=num_experts,
        top_k=places.shape[1],
    )
    submit(
        places,
        Call(
            "expert_adapter_rows",
            arguments,
            {"places": places, "experts": starts},
            {},
            (rows, sorted_rows),
        ),
    )
    return sorted_rows._replace(starts=sorted_rows.starts[:-1])


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
    """See `pegboard.ops.lora_add`. When recorded, `rows` is read at every replay."""
    columns = a.shape[2]
    parts = len(bounds) - 1
    width = columns // parts
    if (
        (columns if exchange else width) % RANKS
        or a.dtype not in KINDS
        or (type(y) is not Value and (y.dtype != torch.float32 or y.stride(1) != 1))
    ):
        return ops.lora_add(y, x, a, b, ranks, bounds, rows, exchange)
    is_lookup = x.dim() == 1
    source = x if is_lookup else rows_of(x)
    starts = torch.tensor(bounds)
    firsts = torch.tensor(exchange.firsts if exchange else range(0, columns, width))
    kind = KINDS[a.dtype]
    adapters = adapters_of(rows, ranks)
    held = ranks if exchange is None else exchange.columns
    shrink = LoRAShrink(
        a=a.data_ptr(),
        adapters=adapters_of(rows, held),
        columns=a.shape[1],
        parts=parts if exchange is None else 1,
        width=width if exchange is None else columns,
        kind=kind,
        is_lookup=is_lookup,
    )
    expand = LoRAExpand(
        b=b.data_ptr(),
        adapters=adapters,
        bounds=starts.data_ptr(),
        firsts=firsts.data_ptr(),
        parts=parts,
        width=columns,
        turns=0 if exchange is None else exchange.turns,
        max_rank=b.shape[1],
        kind=kind,
    )
    holds = (a, b, ranks, held, rows, starts, firsts)
    shrunk = new(y, SPLITS * columns)
    calls = [Call("lora_shrink", shrink, {"x": source}, {"out": shrunk}, holds, can_join=True)]
    if exchange is not None:
        pieces = shrunk
        shrunk = new(y, columns)
        join = LoRAJoin(adapters=adapters_of(rows, held), width=columns)
        submit(y, *calls, Call("lora_join", join, {"x": pieces}, {"out": shrunk}, holds))
        calls = []
        shrunk = exchange.run(shrunk)
    submit(y, *calls, Call("lora_expand", expand, {"x": shrunk, "out": y}, {"out": y}, holds))
    return y


def adapters_of(rows: AdapterRows, ranks: Tensor) -> Adapters:
    """Return which rows use which slot, and how many columns of each slot are not zero."""
    return Adapters(rows.order.data_ptr(), rows.starts.data_ptr(), ranks.data_ptr(), len(ranks))
