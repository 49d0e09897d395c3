"""Where experts should be, so that the ranks compute nearly equally many rows.

The idea is that of DeepSeek's load balancer: the expert with the largest load for each of its
copies gets the next copy, unless there is one for each rank. Then the copies go to the ranks, the
largest first, each to the rank that has the least load so far.
"""

from __future__ import annotations

import numpy as np


def rank_loads(experts: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """Return the load of each rank. experts: [ranks, slots], the expert in each slot. loads: of
    each expert; its copies share it equally."""
    copies = np.bincount(experts.ravel(), minlength=len(loads))
    shares: np.ndarray = (loads / np.maximum(copies, 1))[experts].sum(1)
    return shares


def balanced(experts: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """Return which expert each slot should have [ranks, slots], or `experts`, those that they have
    now, if that is not better. Experts that stay on a rank keep their slot."""
    num_ranks, num_slots = experts.shape
    copies = np.ones(len(loads), np.int64)
    for _ in range(experts.size - len(loads)):
        copies[np.where(copies < num_ranks, loads / copies, -1).argmax()] += 1
    shares = loads / copies
    chosen: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    order = np.argsort(-shares, kind="stable")
    for expert in order.repeat(copies[order]).tolist():
        ranks = [rank for rank in range(num_ranks) if len(chosen[rank]) < num_slots]
        rank = min(ranks, key=lambda rank: (expert in chosen[rank], sums[rank]))
        chosen[rank].append(expert)
        sums[rank] += shares[expert]
    placement = np.array([_settled(*pair) for pair in zip(experts.tolist(), chosen, strict=True)])
    is_better = rank_loads(placement, loads).max() < rank_loads(experts, loads).max()
    return placement if is_better else experts


def _settled(before: list[int], after: list[int]) -> list[int]:
    """Return the experts `after` of a rank in the slots where they were `before`, and the new ones
    in the other slots."""
    new = list(after)
    slots: list[int | None] = []
    for expert in before:
        stays = expert in new
        slots.append(expert if stays else None)
        if stays:
            new.remove(expert)
    return [new.pop() if expert is None else expert for expert in slots]
