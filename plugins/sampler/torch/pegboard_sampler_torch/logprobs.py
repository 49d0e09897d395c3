"""Log-probabilities of chosen tokens and of the most likely ones, without sorting the
vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from pegboard.data.batch import Logprobs
from pegboard_sampler_torch.choose import BLOCK, blockwise

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


def top_tokens(x: Tensor, k: int) -> Tensor:
    """Return int64 [n, k]: the ids of the k largest values of x [n, V] float32, descending, with
    the lower id first among equal values.

    The k largest values are in the k blocks with the largest maxima, so two small selections
    suffice. Both order by (value, lower id), packed into one integer, so the result depends neither
    on k nor on how the library treats ties."""
    num_blocks = -(-x.shape[-1] // BLOCK)
    if k >= num_blocks // 2:
        return x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    blocks = _largest(
        blockwise(x, torch.amax), torch.arange(num_blocks, device=x.device).expand(len(x), -1), k
    )
    ids = (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=x.device)).flatten(1)
    inside = ids < x.shape[-1]
    values = x.gather(-1, ids.clamp(max=x.shape[-1] - 1)).masked_fill_(~inside, float("-inf"))
    return _largest(values, ids, k)


def _largest(values: Tensor, ids: Tensor, k: int) -> Tensor:
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns −0 into 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.long() << _ID_BITS) | (_ID_MASK - ids)
    return _ID_MASK - (key.topk(k, -1).values & _ID_MASK)


def gather_logprobs(x: Tensor, chosen: Tensor, k: int, *, normalize: bool) -> Logprobs:
    """Return what `find_logprobs` finds, on the host."""
    return on_host(*find_logprobs(x, chosen, k, normalize=normalize))


def on_host(ids: Tensor, values: Tensor, ranks: Tensor) -> Logprobs:
    return Logprobs(ids.cpu().numpy(), values.cpu().numpy(), ranks.cpu().numpy())


def find_logprobs(
    x: Tensor, chosen: Tensor, k: int, *, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chosen tokens and the k most likely ones (−1 = all), int32 [n, 1 + k], their
    log-probabilities, float32 [n, 1 + k], and the ranks of the chosen ones, int32 [n].

    x: float32 [n, V]. chosen: int64 [n]. normalize: False gives the logits themselves."""
    k = x.shape[-1] if k < 0 else min(k, x.shape[-1])
    ids = chosen.unsqueeze(-1)
    if k:
        ids = torch.cat([ids, top_tokens(x, k)], -1)
    values = x.gather(-1, ids)
    # Counting in float32 is exact below 2²⁴ and several times faster than counting in integers.
    ranks = 1 + torch.gt(x, values[:, :1], out=torch.empty_like(x)).sum(-1)
    if normalize:
        values = values - log_sums(x)
    return ids.int(), values.float(), ranks.int()


def log_sums(x: Tensor) -> Tensor:
    """Return log(sum(exp(x))) of each row [n, V] → [n, 1]. A row has the same bits in every
    batch."""
    if x.device.type == "cpu":
        # torch cuts the sum of a single row into a part per thread, which would give other bits
        rows = x.expand(2, -1) if len(x) == 1 else x
        return rows.logsumexp(-1, keepdim=True)[: len(x)]
    # a GPU cuts sums by the number of rows, but not what is computed number by number
    peak = x.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak.abs() == float("inf"), 0)
    sums = (x - peak).exp_()
    while (width := sums.shape[1]) > 1:
        half = width // 2
        pairs = sums[:, :half] + sums[:, half : 2 * half]
        sums = torch.cat([pairs, sums[:, -1:]], 1) if width % 2 else pairs
    return sums.log_().add_(peak)
