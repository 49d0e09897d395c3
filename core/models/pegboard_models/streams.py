"""The ops of a token that has several vectors (streams) between layers. Each layer computes one of
them; the others are predicted from all, and corrected by what the layer found (Baykal et al. 2023,
"Alternating Updates for Efficient Transformers"). Kernel plugins may make them faster.

N streams of H channels are a row of N·H.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_MAGNITUDE = 1e-5
"""Of the mean square of a vector that gets the magnitude of another."""


def _gates(routed: Tensor, router: Tensor) -> Tensor:
    """[T, H], [N, H] → [T, N]."""
    mean = routed * (1.0 / routed.shape[1])
    return torch.tanh((mean @ router.T).float()).to(routed.dtype)


def predict_streams(streams: Tensor, routed: Tensor, router: Tensor, mixing: Tensor) -> Tensor:
    """Add to each stream a combination of all: streams [T, N·H] → [T, N·H].

    routed: [T, H], the vector that a token's gates g = tanh(router routed / H) are computed from.
    router: [N, H]. mixing: [N·N, N]; row i·N + j times g is how much of stream j comes to stream i.
    """
    count = len(router)
    rows = streams.unflatten(1, (count, -1))
    factors = (_gates(routed, router) @ mixing.T).view(-1, count, count)
    return torch.baddbmm(rows, factors, rows).flatten(1)


def correct_streams(
    streams: Tensor, computed: Tensor, routed: Tensor, router: Tensor, mixing: Tensor, active: int
) -> Tensor:
    """Add to each stream a part of what stream `active` was wrong by: streams [T, N·H], and what
    the layer computed instead of that stream [T, H] → [T, N·H].

    routed, router: as for `predict_streams`. mixing: [N, N]; row i times the gates, plus 1, is the
    part for stream i.
    """
    rows = streams.unflatten(1, (len(router), -1))
    parts = _gates(routed, router) @ mixing.T + 1.0
    wrong = (computed - rows[:, active]).unsqueeze(1)
    return (rows + wrong * parts.unsqueeze(2)).flatten(1)


def add_to_streams(streams: Tensor, x: Tensor) -> Tensor:
    """Add x [T, H] to every stream but the first: [T, N·H] → [T, N·H]."""
    rows = streams.unflatten(1, (-1, x.shape[1]))
    return torch.cat((rows[:, :1], rows[:, 1:] + x.unsqueeze(1)), 1).flatten(1)


def match_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """Return x [T, H] with the root mean square of `like` [T, H]."""
    magnitude = like.square().mean(-1, keepdim=True).sqrt()
    return x * magnitude / x.square().mean(-1, keepdim=True).clamp(min=LEAST_MAGNITUDE).sqrt()


def cut_gates(x: Tensor, cutoff: float) -> Tensor:
    """Close most gates: x [T, 2F] → the same, where a token's gates [F], the first half, count only
    as far as they are `cutoff` standard deviations above their mean."""
    gates, values = x.chunk(2, -1)
    least = gates.mean(-1, keepdim=True) + gates.std(-1, keepdim=True, correction=0) * cutoff
    return torch.cat((torch.relu(gates - least), values), -1)
