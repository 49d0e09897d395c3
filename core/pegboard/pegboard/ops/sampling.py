"""What sampling computes, in plain torch. These functions define every step between logits and token ids.

A sampler plugin may use faster versions, which are compared with these. All functions return new tensors. Shape letters: N logits
rows, V vocabulary, B requests. A row's parameters are given per logits row, [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def apply_token_mask(logits: Tensor, bits: Tensor) -> Tensor:
    """Set the logits of tokens that are not allowed to −inf. bits: uint32 [N, ceil(V / 32)] (or the same bits as int32). Bit t %
    32 of word t // 32 allows token t."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bits.view(torch.int32).unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(1)[:, : logits.shape[-1]]
    return logits.masked_fill(allowed == 0, NEG_INF)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens that are less likely than min_p times the most likely one (Nguyen et al. 2024). min_p: float32 [N], 0 = off."""
    floor = logits.amax(-1, keepdim=True) + min_p.unsqueeze(-1).log()
    return logits.masked_fill(logits < floor, NEG_INF)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Keep the k most likely tokens, and of those the smallest set with a probability of at least p (Holtzman et al. 2020).

    top_k: int64 [N], V = off. top_p: float32 [N], 1 = off. From the least likely token up, tokens are dropped while their
    cumulative probability is ≤ 1 − p. The most likely token always stays. Both cut at a value: tokens that are equal to the last
    one kept are also kept, so the result does not depend on how equal logits are sorted.
    """
    if top_k is not None:
        order = logits.sort(-1, descending=True).values
        logits = logits.masked_fill(logits < order.gather(-1, top_k.unsqueeze(-1) - 1), NEG_INF)
    if top_p is not None:
        order = logits.sort(-1, descending=True).values
        probs = order.double().softmax(-1)
        before = probs.cumsum(-1) - probs
        kept = (before < top_p.double().unsqueeze(-1)).sum(-1, keepdim=True).clamp_(min=1)
        floor = torch.where(top_p.unsqueeze(-1) < 1, order.gather(-1, kept - 1), NEG_INF)
        logits = logits.masked_fill(logits < floor, NEG_INF)
    return logits


def sample_inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution. weights: [N, V] ≥ 0, whose sum is positive but need not be
    1. uniforms: float64 [N] in [0, 1). → int64 [N]: the first token whose cumulative weight exceeds u · total."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1]
    # u · total may be rounded up to the total, which no cumulative weight exceeds.
    wanted = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted.unsqueeze(-1), right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor | None = None,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """Return one token per row: the most likely one, or one drawn from the remaining tokens by inverting the cumulative
    distribution.

    logits: float32 [N, V], not changed. temperature: float32 [N], 0 = the most likely token; None = this for all rows. min_p:
    float32 [N], 0 = off. top_k: int64 [N], V = off. top_p: float32 [N], 1 = off. These cut in this order, after the temperature,
    at values (see `apply_top_k_top_p`). uniforms: float64 [N] in [0, 1). → int64 [N].

    Of equal maxima, the first one is the most likely token. NaN is larger than any number. A row whose weights are not finite
    gets its most likely token.
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
    return torch.where(drawn, sample_inverse(torch.where(drawn.unsqueeze(-1), weights, 1), uniforms), best)


def pad_drafts(draft_token_ids: Tensor, offsets: Tensor) -> Tensor:
    """Pad ragged drafts [N − B] to int64 [B, most drafts], with −1 after the end. Request i has the logits rows offsets[i] …
    offsets[i + 1] − 1 (offsets [B + 1]): one per draft, and a last one for the token after all drafts."""
    lengths = offsets.diff() - 1
    column = torch.arange(int(lengths.max()) if len(lengths) else 0, device=offsets.device)
    valid = column < lengths.unsqueeze(-1)
    padded = torch.full(valid.shape, -1, dtype=torch.int64, device=offsets.device)
    padded[valid] = draft_token_ids
    return padded


def accept_equal(tokens: Tensor, drafts: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Verify speculative tokens without loss: the results are distributed as if the target model had sampled token by token.

    A token is drawn at every logits row, and drafts are accepted as long as they are equal to it. For a deterministic proposal
    this is the method of Leviathan, Kalman, Matias 2023 ("Fast inference from transformers via speculative decoding"), and the
    tokens are those of plain sampling with the same random numbers. tokens: int64 [N], drawn. drafts: int64 [B, D] and offsets:
    int64 [B + 1], as in `pad_drafts`. → token_ids int64 [B, 1 + D], −1 after the end, and counts int64 [B] ≥ 1.
    """
    column = torch.arange(drafts.shape[1] + 1, device=tokens.device)
    places = torch.minimum(offsets[:-1, None] + column, offsets[1:, None] - 1)
    drawn = tokens[places]
    num_accepted = (drawn[:, :-1] == drafts).long().cumprod(-1).sum(-1, keepdim=True)
    token_ids = torch.nn.functional.pad(drafts, (0, 1), value=-1).masked_fill(column >= num_accepted, -1)
    return token_ids.scatter(-1, num_accepted, drawn.gather(-1, num_accepted)), num_accepted.squeeze(-1) + 1
