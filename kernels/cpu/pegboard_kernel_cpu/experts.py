"""Experts: routing, sorted rows and their sums, and the products of a weight that consists of the
matrices of all experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, addressof
from typing import Any

import torch
from torch import Tensor

from pegboard.ops.experts import RouterRule
from pegboard_kernel_cpu.structures import (
    ClampedSwiglu,
    Route,
    SortByExpert,
    SpreadRows,
    SumExperts,
    ZeroExperts,
)
from pegboard_kernel_cpu.values import Call, Value, new, rows_of, submit
from pegboard_models.sparse_mixer import SparseMixer

SCORES = ("softmax", "sigmoid", "sparse_mixer")
"""In the order of the enumeration in csrc/experts.c. The last one is an op of its own."""


def route(
    logits: Tensor, rule: RouterRule, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [T, E] → weights [T, k], experts int32 [T, k]."""
    return _route(logits, rule, rule.score, correction)


def sparse_mixer(
    logits: Tensor, rule: SparseMixer, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [T, E] → weights [T, k], experts int32 [T, k]."""
    return _route(logits, rule, rule.op, None, 2 * rule.jitter)


def _route(
    logits: Tensor, rule: RouterRule, score: str, correction: Tensor | None, spread: float = 0.0
) -> tuple[Tensor, Tensor]:
    rows = rows_of(logits)
    weights = new(rows, rule.top_k)
    ids = new(rows, rule.top_k, torch.int32)
    arguments = Route(
        correction=None if correction is None else correction.data_ptr(),
        num_experts=rows.shape[1],
        top_k=rule.top_k,
        num_groups=rule.num_groups,
        top_groups=rule.top_groups,
        group_best=rule.group_best,
        score=SCORES.index(score),
        renormalize=rule.renormalize,
        scale=rule.scale,
        spread=spread,
    )
    submit(
        rows,
        Call("route", arguments, {"logits": rows}, {"weights": weights, "ids": ids}, correction),
    )
    return weights, ids


def zero_experts(weights: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """weights [T, k], ids int32 [T, k] → the same without zero experts, and the weights of those
    together [T, 1]."""
    top_k = ids.shape[1]
    out = {
        "real_weights": new(weights, top_k),
        "real_ids": new(ids, top_k, torch.int32),
        "kept": new(weights, 1),
    }
    arguments = ZeroExperts(num_experts=num_experts, top_k=top_k)
    submit(weights, Call("zero_experts", arguments, {"weights": weights, "ids": ids}, out))
    return out["real_weights"], out["real_ids"], out["kept"]


def sort_by_expert(
    x: Tensor,
    ids: Tensor,
    num_experts: int,
    factors: Tensor | None = None,
    held: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, in], ids [T, k] → rows [T·k, in], places [T, k], starts [E + 1]. A recording keeps
    `starts` at one address."""
    x = rows_of(x)
    top_k = ids.shape[1]
    starts = torch.zeros(num_experts + 1, dtype=torch.int32)
    if type(x) is Value:
        starts = x.recorder.input(starts)
    places = new(ids, top_k, torch.int32)
    rows = new(x, x.shape[1], copies=top_k)
    sort = Call(
        "sort_by_expert",
        SortByExpert(
            held=None if held is None else held.data_ptr(),
            counts=None if counts is None else counts.data_ptr(),
            num_ids=0 if held is None else held.shape[-1],
            turns=len(held) if held is not None and held.dim() == 2 else 1,
            num_experts=num_experts,
            top_k=top_k,
        ),
        {"ids": ids},
        {"places": places, "starts": starts},
        (held, counts),
    )
    reads = (
        {"x": x, "places": places}
        if factors is None
        else {"x": x, "places": places, "factors": factors}
    )
    spread = Call("spread_rows", SpreadRows(columns=x.shape[1], top_k=top_k), reads, {"out": rows})
    submit(x, sort, spread)
    return rows, places, starts


def sum_experts(
    rows: Tensor,
    places: Tensor,
    weights: Tensor | None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """rows [T·k, out] → [T, out]."""
    out = new(places, rows.shape[1])
    given = {"rows": rows, "places": places, "weights": weights, "shared": shared, "gate": gate}
    reads = {name: rows_of(value) for name, value in given.items() if value is not None}
    submit(
        places,
        Call(
            "sum_experts",
            SumExperts(columns=rows.shape[1], top_k=places.shape[1]),
            reads,
            {"out": out},
        ),
    )
    return out


def clamped_swiglu(x: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    """[T, 2F] → [T, F]."""
    rows = rows_of(x)
    out = new(rows, rows.shape[1] // 2)
    arguments = ClampedSwiglu(
        columns=out.shape[1], interleaved=interleaved, alpha=alpha, limit=limit
    )
    submit(rows, Call("clamped_swiglu", arguments, {"x": rows}, {"out": out}))
    return out


class NativeExperts:
    """(x [N, in], starts [E + 1]) → [N, out / E]. Only the matrices of experts that have rows are
    read.

    kernel: C name of the product. structure: of its arguments. slices: the rows of an expert's
    matrix in one format each: their number, and the arguments of every expert's product. inputs:
    returns what a product reads of x, and calls to run before it.
    """

    def __init__(
        self,
        kernel: str,
        structure: type[Structure],
        slices: Sequence[tuple[int, Sequence[Structure]]],
        inputs: Callable[[Tensor], tuple[dict[str, Tensor], list[Call]]],
        holds: Any,
    ) -> None:
        self.kernel = kernel
        self.structure = structure
        self.inputs = inputs
        self.holds = holds
        self.slices = [
            (rows, (type(products[0]) * len(products))(*products)) for rows, products in slices
        ]

    def __call__(self, x: Tensor, starts: Tensor) -> Tensor:
        x = rows_of(x)
        reads, calls = self.inputs(x)
        reads = {f"common.{name}": value for name, value in reads.items()} | {"starts": starts}
        out = new(x, sum(rows for rows, _ in self.slices))
        first = 0
        for rows, products in self.slices:
            arguments: Any = self.structure(
                common=products[0], experts=addressof(products), num_experts=len(products)
            )
            calls.append(
                Call(
                    self.kernel,
                    arguments,
                    reads,
                    {"common.out": out[:, first : first + rows]},
                    self,
                )
            )
            first += rows
        submit(x, *calls)
        return out
