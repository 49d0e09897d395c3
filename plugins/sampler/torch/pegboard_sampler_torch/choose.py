"""The dense arithmetic of sampling: argmax, weights cut by min_p, top_k and top_p, and the draw.

Rows are long (V is 10⁴ … 2·10⁵), so passes over [N, V] dominate the cost. This leads to three
choices. The times are for 32 rows of 49152 on one core (see the table in
docs/decisions/0102-sampler.md):

* The draw inverts the cumulative distribution with one uniform per row, in two levels: first over
  sums of 64 tokens, then within one block. It is exact and takes 2.0 ms, softmax included. An
  exponential race needs a random number per logit and takes 37 ms, and multinomial takes 44 ms.
* min_p, top_k and top_p each drop all tokens below some value, so a row has one threshold, and its
  logits need not be sorted with their ids. The threshold is found among the largest 1024 values
  (1.8 ms). Only rows with a wider nucleus look at more. A full sort takes 133 ms.
* Masks are float 0/1 tensors, because torch compares into float four times faster than into bool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK = 64
FLOOR_EXPONENT = -86.0
FLOOR_WEIGHT = 4.6e-38
"""Below this exponent, exp gives denormal numbers and takes ten times as long on a CPU. In a masked
row, that is most of the row."""
NEG_INF = float("-inf")
UNITS = 2.0**42
"""Units of a number that is added up as an integer, on a device. The largest weight is 1."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Which tokens may be drawn, per row of logits [n, V]. A field is None if no row uses it.
    top_k: int64 [n], V = off. max_k: the largest top_k in use. top_p: float32 [n], 1 = off. min_p:
    float32 [n], 0 = off. all_k, all_p: every row uses top_k, or top_p."""

    min_p: Tensor | None = None
    top_k: Tensor | None = None
    max_k: int = 0
    top_p: Tensor | None = None
    all_k: bool = False
    all_p: bool = False

    def __bool__(self) -> bool:
        return not (self.min_p is None and self.top_k is None and self.top_p is None)


def blockwise(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """[n, V] → [n, ceil(V / BLOCK)]: torch.amax or torch.sum of each run of BLOCK values. The last
    run may be shorter."""
    num_whole, rest = divmod(x.shape[-1], BLOCK)
    head = x[:, : num_whole * BLOCK]
    reduced = reduce(head.view(len(x), num_whole, BLOCK), -1)
    if not rest:
        return reduced
    return torch.cat([reduced, reduce(x[:, -rest:], -1, keepdim=True)], -1)


def block_sums(x: Tensor) -> Tensor:
    """[n, V] → float64 [n, ceil(V / BLOCK)]: the sums of blocks. A row has the same bits in every
    batch. On a device, see `running_sums`."""
    if x.device.type == "cpu":
        return blockwise(x, torch.sum).double()
    return blockwise(_fixed_point(x), torch.sum).double() / UNITS + _flaws(x)


def running_sums(x: Tensor) -> Tensor:
    """[n, V] → float64 [n, V]: the sum of all numbers up to each one. A row has the same bits in
    every batch. On a device, numbers are ≥ 0, those of a row have a sum below 2²¹, and they are
    rounded down to a fixed point; a row with one that is not finite becomes NaN."""
    if x.device.type == "cpu":
        return x.cumsum(-1, dtype=torch.float64)
    # a GPU cuts sums by the number of rows, but those of integers are exact
    return _fixed_point(x).cumsum(-1).double() / UNITS + _flaws(x)


def _fixed_point(x: Tensor) -> Tensor:
    return (x.double() * UNITS).long()


def _flaws(x: Tensor) -> Tensor:
    """Return 0 for each row [n, V] → float64 [n, 1], or NaN if not all its numbers are finite."""
    return x.amax(-1, keepdim=True).double() * 0


def _block_ids(blocks: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the token ids of the blocks [...]: int64 [..., BLOCK], clamped to the vocabulary, and
    bool that says whether they are in it."""
    ids = blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=blocks.device)
    return ids.clamp(max=vocab_size - 1), ids < vocab_size


def argmax(x: Tensor) -> Tensor:
    """[n, V] → int64 [n], the first of equal maxima. NaN counts as the largest value, as in
    torch.argmax, which is slower."""
    best = blockwise(x, torch.amax).argmax(-1)
    ids, _ = _block_ids(best, x.shape[-1])
    return ids.gather(-1, x.gather(-1, ids).argmax(-1, keepdim=True)).squeeze(-1)


def draw(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token per row: weights float32 [n, V] ≥ 0, uniforms float64 [n] → (ids int64 [n],
    failed bool [n]). A row fails if its weights are all zero or not finite. Its id is then
    arbitrary, but within the vocabulary."""
    sums = block_sums(weights)
    cumulative = running_sums(sums)
    total = cumulative[:, -1:]
    wanted = torch.minimum(
        uniforms.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    block = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=cumulative.shape[-1] - 1)
    size = sums.gather(-1, block)
    share = (wanted - cumulative.gather(-1, block) + size) / size
    ids, inside = _block_ids(block.squeeze(-1), weights.shape[-1])
    within = running_sums(weights.gather(-1, ids).double().mul_(inside))
    end = within[:, -1:]
    # The two levels round differently, so the second one is scaled to its own total. A token with
    # weight is then always found.
    wanted = torch.minimum(share.clamp_(min=0) * end, torch.nextafter(end, torch.zeros_like(end)))
    place = torch.searchsorted(within, wanted, right=True).clamp_(max=BLOCK - 1)
    return ids.gather(-1, place).squeeze(-1), ~((total > 0) & torch.isfinite(total)).squeeze(-1)


def weigh(
    x: Tensor, peak: Tensor, cuts: Cuts, *, has_holes: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the weights exp(x − peak) [n, V], which are 0 where x was cut, and the threshold [n,
    1] below which x was cut, or None without cuts. x: [n, V] logits after temperature. peak: [n, 1]
    their maxima. has_holes: many logits are −inf."""
    weights = torch.sub(x, peak)
    if has_holes:
        weights.clamp_(min=FLOOR_EXPONENT)
        torch.threshold_(weights.exp_(), FLOOR_WEIGHT, 0.0)
    else:
        weights.exp_()
    if not cuts:
        return weights, None
    floor = torch.full_like(peak, NEG_INF)
    largest = None
    if cuts.min_p is not None:
        floor = peak + cuts.min_p.unsqueeze(-1).log()
    if cuts.top_k is not None:
        used = cuts.top_k < x.shape[-1]
        largest = largest_values(x, cuts.max_k)
        kth = largest.gather(-1, cuts.top_k.clamp(max=cuts.max_k).unsqueeze(-1) - 1)
        floor = torch.where(used.unsqueeze(-1), torch.maximum(floor, kth), floor)
        largest = largest if cuts.all_k else None
    if cuts.top_p is not None:
        if cuts.min_p is not None or cuts.top_k is not None:
            _cut(weights, x, floor)
        used = cuts.top_p < 1
        if x.device.type != "cpu":  # nothing may wait for the device
            nucleus = _sorted_nucleus(x, weights, peak, floor, cuts.top_p)
            floor = torch.where(used.unsqueeze(-1), torch.maximum(floor, nucleus), floor)
        elif cuts.all_p:
            floor = torch.maximum(floor, _nucleus(x, weights, peak, floor, cuts.top_p, largest))
        else:
            largest = None if largest is None else largest[used]
            wider = _nucleus(
                x[used], weights[used], peak[used], floor[used], cuts.top_p[used], largest
            )
            floor[used] = torch.maximum(floor[used], wider)
    _cut(weights, x, floor)
    return weights, floor


def largest_values(x: Tensor, k: int) -> Tensor:
    """Return the k largest values of each row [n, V], descending. This is cheap on a CPU, because
    no ids are returned."""
    if x.device.type != "cpu":
        return x.topk(k).values
    values = x.numpy()
    if k < x.shape[-1]:
        values = np.partition(values, x.shape[-1] - k, -1)[:, -k:]
    return torch.from_numpy(np.sort(values, -1)[:, ::-1].copy())


def _cut(weights: Tensor, x: Tensor, floor: Tensor) -> None:
    keep = torch.empty_like(weights)
    weights.mul_(torch.ge(x, floor, out=keep))


def _nucleus(
    x: Tensor, weights: Tensor, peak: Tensor, floor: Tensor, top_p: Tensor, largest: Tensor | None
) -> Tensor:
    """Return the value [n, 1] of the least likely token that top_p keeps. weights: already cut at
    `floor`. largest: known values of x in descending order, which are tried first."""
    vocab_size = x.shape[-1]
    wanted = _wanted(weights, top_p)
    result = torch.empty_like(peak)
    todo = torch.arange(len(x), device=x.device)
    widths = [k for k in (1024, 8192) if k < vocab_size]
    for k in [0, *widths, vocab_size] if largest is not None else [*widths, vocab_size]:
        order = (
            largest
            if k == 0 and largest is not None
            else largest_values(x if len(todo) == len(x) else x[todo], k)
        )
        mass = (order - peak[todo]).exp_()
        _cut(mass, order, floor[todo])
        cumulative = mass.cumsum(-1, dtype=torch.float64)
        target = wanted[todo]
        last = torch.searchsorted(cumulative, target).clamp_(max=order.shape[-1] - 1)
        result[todo] = order.gather(-1, last)
        todo = todo[(cumulative[:, -1:] < target).squeeze(-1)]
        if not len(todo):
            break
    return result


def _wanted(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return the weight [n, 1] that top_p keeps, float64. torch cuts the sum of a long row by its
    threads, if there are few rows; sums of blocks have the same bits in every batch."""
    total = running_sums(block_sums(weights))[:, -1:]
    return top_p.double().unsqueeze(-1) * total


def _sorted_nucleus(
    x: Tensor, weights: Tensor, peak: Tensor, floor: Tensor, top_p: Tensor
) -> Tensor:
    """Do the same as `_nucleus`, with all values sorted."""
    wanted = _wanted(weights, top_p)
    order = x.sort(-1, descending=True).values
    mass = (order - peak).exp_()
    _cut(mass, order, floor)
    cumulative = running_sums(mass)
    last = torch.searchsorted(cumulative, wanted).clamp_(max=order.shape[-1] - 1)
    return order.gather(-1, last)


def apply_token_mask(logits: Tensor, bits: Tensor) -> Tensor:
    """Set the logits of tokens that are not allowed to −inf. bits: uint32 [N, ceil(V / 32)] (or the
    same bits as int32). Bit t % 32 of word t // 32 allows token t."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (
        (bits.view(torch.int32).unsqueeze(-1) >> shifts)
        .bitwise_and_(1)
        .flatten(1)[:, : logits.shape[-1]]
    )
    return logits.masked_fill(allowed == 0, NEG_INF)


def accept_equal(tokens: Tensor, drafts: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Verify speculative tokens without loss: the results are distributed as if the target model
    had sampled token by token.

    A token is drawn at every logits row, and drafts are accepted as long as they are equal to it.
    For a deterministic proposal this is the method of Leviathan, Kalman, Matias 2023 ("Fast
    inference from transformers via speculative decoding"), and the tokens are those of plain
    sampling with the same random numbers. tokens: int64 [N], drawn. drafts: int64 [B, D] and
    offsets: int64 [B + 1], as in `StepLayout`. → token_ids int64 [B, 1 + D], −1 after the end, and
    counts int64 [B] ≥ 1.
    """
    column = torch.arange(drafts.shape[1] + 1, device=tokens.device)
    places = torch.minimum(offsets[:-1, None] + column, offsets[1:, None] - 1)
    drawn = tokens[places]
    num_accepted = (drawn[:, :-1] == drafts).long().cumprod(-1).sum(-1, keepdim=True)
    token_ids = torch.nn.functional.pad(drafts, (0, 1), value=-1).masked_fill(
        column >= num_accepted, -1
    )
    return token_ids.scatter(
        -1, num_accepted, drawn.gather(-1, num_accepted)
    ), num_accepted.squeeze(-1) + 1


def accept_on_host(tokens: Tensor, drafts: Tensor, offsets: np.ndarray) -> tuple[Tensor, Tensor]:
    """Do the same as `accept_equal`, in less time, for tensors on the CPU. drafts: int64 [N − B],
    without padding. offsets: [B + 1]."""
    drawn = tokens.numpy()
    starts = offsets[:-1]
    ends = offsets[1:]
    is_last = np.zeros(len(drawn), bool)
    is_last[ends - 1] = True
    is_right = np.zeros(len(drawn), bool)
    is_right[~is_last] = drawn[~is_last] == drafts.numpy()
    wrong = np.flatnonzero(~is_right)
    counts = wrong[np.searchsorted(wrong, starts)] - starts + 1
    columns = np.arange((ends - starts).max())
    is_kept = columns < counts[:, None]
    token_ids = np.full(is_kept.shape, -1, np.int64)
    token_ids[is_kept] = drawn[(starts[:, None] + columns)[is_kept]]
    return torch.from_numpy(token_ids), torch.from_numpy(counts.astype(np.int64))
