"""The op `sample_tokens` and its parts, in plain torch. They define how a token is chosen.

Kernels and sampler plugins may use faster versions, which are compared with these. All functions
return new tensors. Shape letters: N logits rows, V vocabulary. A row's parameters are given per
logits row, [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens that are less likely than min_p times the most likely one (Nguyen et al. 2024).
    min_p: float32 [N], 0 = off."""
    floor = logits.amax(-1, keepdim=True) + min_p.unsqueeze(-1).log()
    return logits.masked_fill(logits < floor, NEG_INF)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Keep the k most likely tokens, and of those the smallest set with a probability of at least p
    (Holtzman et al. 2020).

    top_k: int64 [N], V = off. top_p: float32 [N], 1 = off. From the least likely token up, tokens
    are dropped while their cumulative probability is ≤ 1 − p. The most likely token always stays.
    Both cut at a value: tokens that are equal to the last one kept are also kept, so the result
    does not depend on how equal logits are sorted.
    """
    if top_k is not None:
        order = logits.sort(-1, descending=True).values
        logits = logits.masked_fill(logits < order.gather(-1, top_k.unsqueeze(-1) - 1), NEG_INF)
    if top_p is not None:
        order = logits.sort(-1, descending=True).values
        probs = order.double().softmax(-1)
        before = probs.cumsum(-1) - probs
        count = (before < top_p.double().unsqueeze(-1)).sum(-1, keepdim=True).clamp_(min=1)
        floor = torch.where(top_p.unsqueeze(-1) < 1, order.gather(-1, count - 1), NEG_INF)
        logits = logits.masked_fill(logits < floor, NEG_INF)
    return logits


def sample_inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution. weights: [N, V] ≥ 0, whose
    sum is positive but need not be
    1. uniforms: float64 [N] in [0, 1). → int64 [N]: the first token whose cumulative weight exceeds
      u · total."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1]
    # u · total may be rounded up to the total, which no cumulative weight exceeds.
    wanted = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return (
        torch.searchsorted(cumulative, wanted.unsqueeze(-1), right=True)
        .squeeze(-1)
        .clamp_(max=weights.shape[-1] - 1)
    )


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor | None = None,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """Return one token per row: the most likely one, or one drawn from the remaining tokens by
    inverting the cumulative distribution.

    logits: float32 [N, V], not changed. temperature: float32 [N], 0 = the most likely token; None =
    this for all rows. min_p: float32 [N], 0 = off. top_k: int64 [N], V = off. top_p: float32 [N], 1
    = off. These cut in this order, after the temperature, at values (see `apply_top_k_top_p`).
    uniforms: float64 [N] in [0, 1). → int64 [N].

    Of equal maxima, the first one is the most likely token. NaN is larger than any number. A row
    whose weights are not finite gets its most likely token.
    """
    best = logits.argmax(-1)
    if temperature is None or uniforms is None:
        return best
    drawn = temperature > 0
    x = logits / torch.where(drawn, temperature, 1).unsqueeze(-1)
    if min_p is not None:
        x = apply_min_p(x, min_p)
    x = apply_top_k_top_p(x, top_k, top_p)
    weights = (x - x.amax(-1, keepdim=True)).exp()
    drawn &= weights.sum(-1).isfinite()
    return torch.where(
        drawn, sample_inverse(torch.where(drawn.unsqueeze(-1), weights, 1), uniforms), best
    )
