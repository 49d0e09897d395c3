"""SparseMixer outside training (Liu et al. 2024, arXiv 2409.12136), a way to choose experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pegboard.layers import RouterRule


@dataclass(frozen=True, slots=True)
class SparseMixer(RouterRule):
    """Experts are chosen one after the other, and the weight of each is its softmax among those
    that are left and near it. A logit l is near the best one b if b - l ≤ 2 · jitter · max(|l|, b).
    Groups, renormalizing and corrections do not apply."""

    op: str = "sparse_mixer"
    jitter: float = 0.01


def sparse_mixer(
    logits: Tensor, rule: SparseMixer, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts: logits [T, E] → their weights, float32 [T, k], and their numbers, int32 [T,
    k], the best first."""
    logits = left = logits.float()
    weights = []
    ids = []
    for _ in range(rule.top_k):
        best, chosen = left.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().maximum(best) > 2 * rule.jitter
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, chosen))
        ids.append(chosen)
        left = left.scatter(1, chosen, float("-inf"))
    return torch.cat(weights, 1) * rule.scale, torch.cat(ids, 1).int()
