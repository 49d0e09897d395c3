"""A mixture of experts (Shazeer et al. 2017): which experts compute a token, and the order of the
rows that they compute.

A token that goes to k experts becomes k rows. The rows are sorted by expert, so that each expert
multiplies consecutive rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How the logits of a router become experts and their weights.

    top_k: experts of a token. score: what a logit becomes, over all experts or by itself.
    renormalize: divide the weights of a token by their sum. (Softmax over the chosen experts only,
    as in gpt-oss and Granite, is the same.) scale: factor of the weights. num_groups, top_groups:
    the experts form groups of equal size; only those of the best groups can be chosen. A group is
    as good as the sum of its `group_best` best experts (DeepSeek-V2: 1, DeepSeek-V3: 2). op: what
    chooses: `route`, or an op of the same signature that a plugin declares.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    op: str = "route"


def route(
    logits: Tensor, rule: RouterRule, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts: logits [T, E] → their weights, float32 [T, k], and their numbers, int32 [T,
    k], the best first.

    correction: [E], added to the scores when experts are chosen, but not to their weights
    (DeepSeek-V3).
    """
    scores = logits.float().softmax(-1) if rule.score == "softmax" else logits.float().sigmoid()
    choice = scores if correction is None else scores + correction.float()
    if rule.num_groups > 1:
        groups = choice.unflatten(1, (rule.num_groups, -1))
        best = groups.topk(rule.group_best, -1).values.sum(-1).topk(rule.top_groups, -1).indices
        closed = torch.ones(groups.shape[:2], dtype=torch.bool, device=logits.device).scatter_(
            1, best, False
        )
        choice = groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
    ids = choice.topk(rule.top_k, -1).indices
    weights = scores.gather(1, ids)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * rule.scale, ids.int()


def starts_of(numbers: Tensor, num_groups: int) -> Tensor:
    """Return where each group starts among sorted rows: the group of each row [N] → int32 [groups +
    1]. Rows with larger numbers are after the last group."""
    groups = torch.arange(num_groups + 1, dtype=numbers.dtype, device=numbers.device)
    return torch.searchsorted(numbers, groups, out_int32=True)


def sort_by_expert(
    x: Tensor,
    ids: Tensor,
    num_experts: int,
    factors: Tensor | None = None,
    held: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once for each of its experts: x [T, in], ids [T, k] → rows [T·k, in], places
    int32 [T, k], where each copy is among the rows, and starts int32 [E + 1]: expert e has the rows
    starts[e] to starts[e + 1].

    factors: [T, k], multiplied with the copies. held: int32 [ids] or [turns, ids], the number of
    each expert here, or -1 if another rank has it. Of several turns, token t has the one at t %
    turns. The place of its tokens is then -1, and the last rows, as many as there are such places,
    have no meaning. counts: int32 [ids], to which the number of tokens of each expert is added.
    Nothing is read on the host.
    """
    numbers = ids.flatten()
    if counts is not None:
        counts.scatter_add_(0, numbers.long(), torch.ones_like(numbers, dtype=counts.dtype))
    if held is not None:
        tables = held.view(-1, held.shape[-1])
        turns = torch.arange(len(ids), device=ids.device) % len(tables)
        numbers = tables[turns.unsqueeze(1), ids.long()].flatten()
        numbers = numbers.where(numbers >= 0, num_experts)
    numbers_of_rows, order = numbers.sort(stable=True)
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    if held is not None:
        places.masked_fill_(numbers == num_experts, -1)
    rows = x[order // ids.shape[1]]
    if factors is not None:
        rows = rows * factors.flatten()[order].unsqueeze(1).to(x.dtype)
    return rows, places.view(ids.shape).int(), starts_of(numbers_of_rows, num_experts)


def sum_experts(
    rows: Tensor,
    places: Tensor,
    weights: Tensor | None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Add up the rows of each token: rows [T·k, out], places [T, k], weights [T, k] (None = 1) →
    [T, out]. A place of -1 counts as zeros, and there may be fewer rows then.

    shared: [T, out], added to the sum: the result of experts that compute every token. gate: [T,
    1], logits of its factor.
    """
    rows = rows if len(rows) else rows.new_zeros(1, rows.shape[1])
    total = rows[places].float().masked_fill_(places.unsqueeze(-1) < 0, 0)
    total = total.sum(1) if weights is None else (total * weights.unsqueeze(-1)).sum(1)
    if shared is not None:
        total = total + (
            shared.float() if gate is None else shared.float() * gate.float().sigmoid()
        )
    return total.to(rows.dtype)


def one_by_one(
    calls: Sequence[Callable[[Tensor], Tensor]], width: int, bias: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the product of sorted rows from the products of each expert: (x [N, in], starts [E +
    1]) → [N, width].

    bias: [E, width] or None. The callable reads `starts` on the host. Rows after the last start
    have no expert and become zeros.
    """

    def forward(x: Tensor, starts: Tensor) -> Tensor:
        bounds = starts.tolist()
        parts = [x.new_empty(0, width)]
        for expert, call in enumerate(calls):
            if bounds[expert] < bounds[expert + 1]:
                part = call(x[bounds[expert] : bounds[expert + 1]])
                parts.append(part if bias is None else part + bias[expert])
        parts.append(x.new_zeros(len(x) - bounds[-1], width))
        return torch.cat(parts)

    return forward
