"""What a sampler plugin's penalties and logprobs must give, as plain torch. Shape letters: N logits
rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Penalize tokens that have occurred. logits: [N, V]. prompt_mask: bool [N, V], the token is in
    the prompt. output_counts: integer [N, V], how often it was generated. repetition, frequency,
    presence: float32 [N].

    The repetition penalty (Keskar et al. 2019, CTRL) applies to tokens of prompt and output:
    positive logits become logit / r, all others logit · r. Then logit −= frequency · count +
    presence · (count > 0), which applies to the output alone (OpenAI's definition).
    """
    seen = prompt_mask | (output_counts > 0)
    factor = torch.where(seen, repetition.unsqueeze(-1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return (
        logits
        - frequency.unsqueeze(-1) * output_counts
        - presence.unsqueeze(-1) * (output_counts > 0)
    )


def log_softmax_topk(
    logits: Tensor, token_ids: Tensor, k: int, *, normalize: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log-probabilities of chosen tokens and of the most likely ones.

    logits [N, V], token_ids int64 [N], k ≥ 0 (−1 = V) → (ids int64 [N, 1 + k], values float32 [N, 1
    + k], ranks int64 [N]). Column 0 is the chosen token. Columns 1…k are the most likely tokens in
    descending order, with the lower id first among equal ones. rank = 1 + number of tokens that are
    strictly more likely than the chosen one. With normalize=False, the values are the logits and
    not their log-softmax.
    """
    values = logits.float().log_softmax(-1) if normalize else logits.float()
    chosen = values.gather(-1, token_ids.unsqueeze(-1))
    best = values.sort(dim=-1, descending=True, stable=True)
    k = values.shape[-1] if k < 0 else min(k, values.shape[-1])
    ids = torch.cat([token_ids.unsqueeze(-1), best.indices[:, :k]], -1)
    return ids, torch.cat([chosen, best.values[:, :k]], -1), 1 + (values > chosen).sum(-1)
