"""What sampling computes, as plain torch: the meaning of every step between logits and token ids.

A sampler plugin binds faster versions and is judged against these. All of them return new tensors. Shape letters: N logits
rows, V vocabulary, B requests; a row's parameters are given per logits row, [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def apply_token_mask(logits: Tensor, bits: Tensor) -> Tensor:
    """−inf where a token is not allowed. bits: uint32 [N, ceil(V / 32)] (or the same bits as int32); bit t % 32 of word
    t // 32 allows token t."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bits.view(torch.int32).unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(1)[:, : logits.shape[-1]]
    return logits.masked_fill(allowed == 0, NEG_INF)


def apply_penalties(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Discourage tokens that have occurred. logits [N, V]; prompt_mask bool [N, V]: the token is in the prompt;
    output_counts integer [N, V]: how often it was generated; repetition, frequency, presence: float32 [N].

    Repetition (Keskar et al. 2019, CTRL) looks at prompt and output: logit / r where positive, logit · r otherwise. Then
    logit −= frequency · count + presence · (count > 0), which look at the output alone (OpenAI's definition)."""
    seen = prompt_mask | (output_counts > 0)
    factor = torch.where(seen, repetition.unsqueeze(-1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency.unsqueeze(-1) * output_counts - presence.unsqueeze(-1) * (output_counts > 0)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than min_p times the most likely one (Nguyen et al. 2024). min_p: float32 [N], 0 = off."""
    floor = logits.amax(-1, keepdim=True) + min_p.unsqueeze(-1).log()
    return logits.masked_fill(logits < floor, NEG_INF)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Keep the k most likely tokens, then of those the smallest set with probability of at least p (Holtzman et al. 2020).

    top_k: int64 [N], V = off. top_p: float32 [N], 1 = off. From the least likely token up, tokens are dropped while their
    cumulative probability is ≤ 1 − p; the most likely one always stays. Both cut at a value: tokens equal to the last one
    kept are kept too, so the result does not depend on how equal logits are sorted."""
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


def log_softmax_topk(logits: Tensor, token_ids: Tensor, k: int, *, normalize: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of chosen tokens and of the most likely ones. logits [N, V], token_ids int64 [N], k ≥ 0, −1 = V.

    → (ids int64 [N, 1 + k], values float32 [N, 1 + k], ranks int64 [N]). Column 0 is the chosen token, columns 1…k the most
    likely ones, descending, the lower id first where equal. rank = 1 + number of tokens strictly more likely than the chosen
    one. normalize=False gives the logits themselves instead of their log-softmax."""
    values = logits.float().log_softmax(-1) if normalize else logits.float()
    chosen = values.gather(-1, token_ids.unsqueeze(-1))
    best = values.sort(dim=-1, descending=True, stable=True)
    k = values.shape[-1] if k < 0 else min(k, values.shape[-1])
    ids = torch.cat([token_ids.unsqueeze(-1), best.indices[:, :k]], -1)
    return ids, torch.cat([chosen, best.values[:, :k]], -1), 1 + (values > chosen).sum(-1)


def sample_inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution. weights: [N, V] ≥ 0, need not sum to 1, with a positive
    sum; uniforms: float64 [N] in [0, 1). → int64 [N]: the first token whose cumulative weight exceeds u · total."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1]
    # Rounding may lift u · total up to the total, which no cumulative weight exceeds.
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
    """One token per row: the most likely one, or one drawn from the remaining tokens by inverting the cumulative distribution.

    logits float32 [N, V], unchanged. temperature: float32 [N], 0 = the most likely token; None = that for all rows. min_p float32
    [N] (0 = off), top_k int64 [N] (V = off) and top_p float32 [N] (1 = off) cut in this order, after temperature, at values
    (see `apply_top_k_top_p`). uniforms: float64 [N] in [0, 1). → int64 [N]. Of equal maxima the first is the most likely one, and
    NaN is more than any number; a row whose weights are not finite gives its most likely token."""
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
    """Ragged drafts [N − B] → int64 [B, most drafts], −1 after the end. Request i of offsets [B + 1] has the logits rows
    offsets[i] … offsets[i + 1] − 1: one per draft, and a last one for the token after them all."""
    lengths = offsets.diff() - 1
    column = torch.arange(int(lengths.max()) if len(lengths) else 0, device=offsets.device)
    valid = column < lengths.unsqueeze(-1)
    padded = torch.full(valid.shape, -1, dtype=torch.int64, device=offsets.device)
    padded[valid] = draft_token_ids
    return padded


def accept_equal(tokens: Tensor, drafts: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Lossless verification of speculative tokens: what comes out is distributed as if the target model had sampled token by
    token. A token is drawn at every logits row, and drafts are accepted while they equal it. For a deterministic proposal
    this is the method of Leviathan, Kalman, Matias 2023 ("Fast inference from transformers via speculative decoding"), and
    the tokens are those of plain sampling with the same random numbers.

    tokens: int64 [N], drawn. drafts: int64 [B, D] and offsets: int64 [B + 1], as in `pad_drafts`.
    → token_ids int64 [B, 1 + D], −1 after the end, and counts int64 [B] ≥ 1."""
    column = torch.arange(drafts.shape[1] + 1, device=tokens.device)
    places = torch.minimum(offsets[:-1, None] + column, offsets[1:, None] - 1)
    drawn = tokens[places]
    num_accepted = (drawn[:, :-1] == drafts).long().cumprod(-1).sum(-1, keepdim=True)
    token_ids = torch.nn.functional.pad(drafts, (0, 1), value=-1).masked_fill(column >= num_accepted, -1)
    return token_ids.scatter(-1, num_accepted, drawn.gather(-1, num_accepted)), num_accepted.squeeze(-1) + 1
